"""The double of a gateway's store link: a test writes the outbox, and reads demand and reports."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec

from swapper.core.orders import Command, Report
from swapper.core.types import Card, Demand, Failure, Gate, Swap, World
from swapper.errors import StoreDown
from swapper.store.protocol import StoredCommand, StoredEvent

ALPHA = "llama/alpha"


class FakeLink:
    """The store as a gateway sees it: the test writes the outbox and reads the reports."""

    def __init__(self) -> None:
        self.gates: dict[str, Gate] = {}
        self.failed: dict[str, Failure] = {}
        self.swap: Swap | None = None
        self.down = False
        self.member = True
        self.reports_down = False
        self.broken = False
        self.refused = asyncio.Event()
        self._beats = 0
        self._taken = 0
        self.reports: asyncio.Queue[Report] = asyncio.Queue()
        self.left: list[str] = []
        self._commands: list[StoredCommand] = []
        self._events: list[StoredEvent] = []
        self._demand: tuple[Demand, ...] | None = None
        self._moved = asyncio.Condition()

    def _check(self) -> None:
        if self.down:
            self.refused.set()
            raise StoreDown("the store is down")

    async def _notify(self) -> None:
        async with self._moved:
            self._moved.notify_all()

    async def send(self, command: Command) -> None:
        self._commands.append(StoredCommand(str(len(self._commands) + 1), command))
        await self._notify()

    async def tell_cards(self) -> None:
        image = msgspec.json.encode(self._card()).decode()
        self._events.append(StoredEvent(str(len(self._events) + 1), "card", "gpu0", 1, image))
        await self._notify()

    async def beaten(self, wanted: Callable[[tuple[Demand, ...]], bool]) -> tuple[Demand, ...]:
        """Wait for a beat whose demand is as wanted."""
        async with self._moved:
            await self._moved.wait_for(lambda: self._demand is not None and wanted(self._demand))
        assert self._demand is not None
        return self._demand

    async def next_beat(self) -> None:
        """Wait for one more beat."""
        async with self._moved:
            seen = self._beats
            await self._moved.wait_for(lambda: self._beats > seen)

    async def looked(self) -> None:
        """Wait until the gateway has looked at the cards after this moment's events, and acted on it."""
        async with self._moved:
            await self._moved.wait_for(lambda: self._taken == len(self._events))

    async def outbox(self, executor: str, *, after: str, block_ms: int) -> tuple[StoredCommand, ...]:
        self._check()
        async with self._moved:
            await self._moved.wait_for(lambda: len(self._commands) > int(after))
        if self.broken:
            raise ValueError("not a command")
        return tuple(self._commands[int(after) :])

    async def events(self, *, after: str, limit: int, block_ms: int) -> tuple[StoredEvent, ...]:
        self._check()
        start = len(self._events) if after == "$" else int(after)
        async with self._moved:
            self._taken = start
            self._moved.notify_all()
            await self._moved.wait_for(lambda: len(self._events) > start)
        return tuple(self._events[start:])

    async def report(self, report: Report) -> None:
        self._check()
        if self.reports_down:
            self.refused.set()
            raise StoreDown("the store is down")
        self.reports.put_nowait(report)

    async def beat(self, gateway: str, demand: tuple[Demand, ...], *, ttl_ms: int, now_ms: int | None = None) -> bool:
        self._check()
        self._demand = demand
        self._beats += 1
        await self._notify()
        return self.member

    async def leave(self, gateway: str) -> None:
        self._check()
        self.left.append(gateway)

    async def read(self, *, now_ms: int | None = None) -> World:
        self._check()
        return World(int(time.time() * 1000), {"gpu0": self._card()}, {}, gates=dict(self.gates))

    def _card(self) -> Card:
        return Card("gpu0", failed=dict(self.failed), swap=self.swap)


def command(verb: str, token: int, n: int, **args: object) -> Command:
    return Command("gateway:g1", "gpu0", ALPHA, token, n, verb, args)
