"""The router's event stream as a pulse: something changed, look again.

Invariant: an event is only ever a reason to read `/models`, never the truth itself (the stream has no initial
snapshot and may break at any time); every connection made counts as an event, after it stands. One reader task.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import aiohttp

from workers.llama.http import RouterHttp

_RETRY_S = 0.5


class RouterEvents:
    """Reads /models/sse for as long as it is open, connecting again after every break."""

    def __init__(self, http: RouterHttp) -> None:
        self._http = http
        self._task: asyncio.Task[None] | None = None
        self._moved = asyncio.Event()
        self.seq = 0

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

    async def after(self, seq: int, timeout_s: float) -> int:
        """Wait until an event later than `seq` was seen, at most `timeout_s`; returns the newest number."""
        with contextlib.suppress(asyncio.TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._next(seq)
        return self.seq

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

    def _pulse(self) -> None:
        self.seq += 1
        self._moved.set()
        self._moved = asyncio.Event()

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError):
                await self._read()  # ValueError: a line beyond aiohttp's limit
            self._pulse()  # the stream broke: what it did not say must be read
            await asyncio.sleep(_RETRY_S)

    async def _read(self) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5)
        url = self._http.url + "/models/sse"
        async with self._http.session.get(url, params={"autoload": "false"}, timeout=timeout) as response:
            response.raise_for_status()
            self._pulse()
            async for line in response.content:
                if line.startswith(b"data:"):
                    self._pulse()
