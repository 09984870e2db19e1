"""Calls that wait for their conversation: to come back from disk, asked for once, or to have made room for another.

Invariant: a call waits for BRING_S at most, and no longer than its gate is open; who was asked and is in the way of
something short is asked again, for as long as somebody waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from swapper.core.orders import Report

BRING_S = 10.0
"""A call waits so long for its conversation to come back from disk; then the server reads the prompt."""
AGAIN_S = 0.1
"""Where something short is in the way of that, it is asked for again so much later."""


@dataclass(frozen=True, slots=True)
class _Going:
    """A conversation that is being recalled, and makes room for that snapshot then, if for one."""

    snapshot: object
    over: asyncio.Event = field(default_factory=asyncio.Event)


class Bringing:
    """`send` delivers a report, `aside` lets something run beside the calls. One is known by (tenant, snapshot)."""

    def __init__(self, send: Callable[[Report], Awaitable[None]], aside: Callable[[Awaitable[None]], None]) -> None:
        self._send = send
        self._aside = aside
        self._coming: dict[tuple[str, str], asyncio.Future[bool]] = {}
        self._wanted: dict[tuple[str, str], Report] = {}
        self._going: dict[tuple[str, str], _Going] = {}

    async def wait(self, tenant: str, snapshot: str, wanted: Callable[[], Awaitable[Report]]) -> None:
        """Return when it is there, or will not come. `wanted` makes the report by which it is asked for."""
        key = (tenant, snapshot)
        coming = self._coming.get(key)
        if coming is None:
            coming = self._coming[key] = asyncio.get_running_loop().create_future()
            try:
                report = await wanted()
            except asyncio.CancelledError:
                self.arrived(tenant, snapshot, came=False)  # nobody asked for it
                raise
            if not coming.done():
                self._wanted[key] = report
                self._aside(self._send(report))  # whoever asked may leave, and others wait for the same
        await asyncio.wait({coming}, timeout=BRING_S)
        if not coming.done():
            self._forget(key)

    async def stands(self, tenant: str, name: str) -> None:
        """Return when a conversation is nowhere on its way: its slot is at work else, or another's already."""
        if (going := self._going.get((tenant, name))) is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(BRING_S):
                    await going.over.wait()
            self._let_go((tenant, name), going)

    @contextmanager
    def recalling(self, tenant: str, name: str, snapshot: object) -> Generator[None]:
        """While it is recalled; where that goes well and it makes room for `snapshot`, until that came or did not."""
        going = self._going[tenant, name] = _Going(snapshot)
        stays = True
        try:
            yield
            stays = snapshot is None
        finally:
            if stays:
                self._let_go((tenant, name), going)

    def may_come(self, tenant: str, snapshot: str) -> None:
        """It is known what became of that snapshot, and with it of whatever was to make room for it."""
        for key, going in [*self._going.items()]:
            if (key[0], going.snapshot) == (tenant, snapshot):
                self._let_go(key, going)

    def ask_again(self, tenant: str, snapshot: str) -> None:
        """Something short is in the way: once more, for as long as a call waits for it."""
        self._aside(self._again((tenant, snapshot)))

    def arrived(self, tenant: str, snapshot: str, *, came: bool) -> None:
        """It is there, or nobody brings it."""
        self.may_come(tenant, snapshot)
        coming = self._coming.get((tenant, snapshot))
        self._forget((tenant, snapshot))
        if coming is not None and not coming.done():
            coming.set_result(came)

    def closed(self, tenant: str) -> None:
        """The tenant's gate closes: nothing is brought any more."""
        for of, snapshot in [key for key in self._coming if key[0] == tenant]:
            self.arrived(of, snapshot, came=False)
        for key, going in [*self._going.items()]:
            if key[0] == tenant:
                self._let_go(key, going)

    def close(self) -> None:
        """Give up whatever is waited for."""
        for coming in self._coming.values():
            coming.cancel()

    async def _again(self, key: tuple[str, str]) -> None:
        await asyncio.sleep(AGAIN_S)
        if (report := self._wanted.get(key)) is not None:
            await self._send(report)

    def _let_go(self, key: tuple[str, str], going: _Going) -> None:
        going.over.set()
        if self._going.get(key) is going:
            del self._going[key]

    def _forget(self, key: tuple[str, str]) -> None:
        self._coming.pop(key, None)
        self._wanted.pop(key, None)
