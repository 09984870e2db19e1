"""The router's event stream as a pulse: something changed, look again.

Invariant: an event is only ever a reason to read `/models`, never the truth itself (the stream has no initial
snapshot and may break at any time); every connection made counts as an event, after it stands, and so does every
break. A turn is an event that may end a wait: any but the steps of a load on its way. One reader task.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import aiohttp
import msgspec

from workers.llama.http import RouterHttp

_RETRY_S = 0.5
_POLL_S = 0.02
_BACKSTOP_S = 1.0  # while the stream stands, only a turn it swallowed could be waited for so long


class _Event(msgspec.Struct):
    class Data(msgspec.Struct):
        status: str = ""

    model: str = ""
    data: Data = msgspec.field(default_factory=Data)


class RouterEvents:
    """Reads /models/sse for as long as it is open, connecting again after every break."""

    def __init__(self, http: RouterHttp) -> None:
        self._http = http
        self._task: asyncio.Task[None] | None = None
        self._moved = asyncio.Event()
        self.seq = 0
        self.turns = 0
        self.steps: dict[str, int] = {}
        """How often each model was said to be a step further on its way."""
        self.standing = False

    def open(self) -> None:
        """Start reading (once)."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="llama-router events")

    async def close(self) -> None:
        """Stop reading."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    async def turn(self, seen: int, limit_s: float = _BACKSTOP_S) -> int:
        """Wait for a turn later than number `seen`; returns the newest number.

        It is time for a look in any case after `limit_s`, and after 20 ms while the stream does not stand.
        """
        with contextlib.suppress(asyncio.TimeoutError):
            async with asyncio.timeout(min(limit_s, _BACKSTOP_S if self.standing else _POLL_S)):
                while self.turns <= seen:
                    await self._moved.wait()
        return self.turns

    async def pulses(self) -> AsyncIterator[None]:
        """One item for each change or burst of changes, the first once connected."""
        self.open()
        seq = 0
        while True:
            await self._next(seq)
            seq = self.seq
            yield None

    async def _next(self, seq: int) -> None:
        while self.seq <= seq:
            await self._moved.wait()

    def _pulse(self, *, turn: bool = True) -> None:
        self.seq += 1
        self.turns += turn
        self._moved.set()
        self._moved = asyncio.Event()

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError):
                await self._read()  # ValueError: a line beyond aiohttp's limit
            self.standing = False
            self._pulse()  # the stream broke: what it did not say must be read
            await asyncio.sleep(_RETRY_S)

    async def _read(self) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5)
        url = self._http.url + "/models/sse"
        async with self._http.session.get(url, params={"autoload": "false"}, timeout=timeout) as response:
            response.raise_for_status()
            self.standing = True
            self._pulse()
            async for line in response.content:
                if line.startswith(b"data:"):
                    self._pulse(turn=not self._on_its_way(line[5:]))

    def _on_its_way(self, text: bytes) -> bool:
        try:
            event = msgspec.json.decode(text, type=_Event)
        except msgspec.DecodeError:
            return False
        if event.data.status != "loading":
            return False
        self.steps[event.model] = self.steps.get(event.model, 0) + 1
        return True
