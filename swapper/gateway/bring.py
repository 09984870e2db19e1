"""Calls that wait for their conversation to come back from disk: asked for once, however many of them wait.

Invariant: a call waits for BRING_S at most, and no longer than its gate is open; who was asked and is in the way of
something short is asked again, for as long as somebody waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from swapper.core.types import Report

BRING_S = 10.0
"""A call waits so long for its conversation to come back from disk; then the server reads the prompt."""
AGAIN_S = 0.1
"""Where something short is in the way of that, it is asked for again so much later."""


class Bringing:
    """`send` delivers a report, `aside` lets something run beside the calls. One is known by (tenant, snapshot)."""

    def __init__(self, send: Callable[[Report], Awaitable[None]], aside: Callable[[Awaitable[None]], None]) -> None:
        self._send = send
        self._aside = aside
        self._coming: dict[tuple[str, str], asyncio.Future[bool]] = {}
        self._wanted: dict[tuple[str, str], Report] = {}

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

    def ask_again(self, tenant: str, snapshot: str) -> None:
        """Something short is in the way: once more, for as long as a call waits for it."""
        self._aside(self._again((tenant, snapshot)))

    def arrived(self, tenant: str, snapshot: str, *, came: bool) -> None:
        """It is there, or nobody brings it."""
        coming = self._coming.get((tenant, snapshot))
        self._forget((tenant, snapshot))
        if coming is not None and not coming.done():
            coming.set_result(came)

    def closed(self, tenant: str) -> None:
        """The tenant's gate closes: nothing is brought any more."""
        for of, snapshot in [key for key in self._coming if key[0] == tenant]:
            self.arrived(of, snapshot, came=False)

    def close(self) -> None:
        """Give up whatever is waited for."""
        for coming in self._coming.values():
            coming.cancel()

    async def _again(self, key: tuple[str, str]) -> None:
        await asyncio.sleep(AGAIN_S)
        if (report := self._wanted.get(key)) is not None:
            await self._send(report)

    def _forget(self, key: tuple[str, str]) -> None:
        self._coming.pop(key, None)
        self._wanted.pop(key, None)
