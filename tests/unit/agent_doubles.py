"""Doubles for the agent's tests: a link in memory, a backend that records what it was asked, an agent on them.

A test never sleeps: it waits for a report, or for the moment a verb begins, and lets a verb end when it wants.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from swapper.core.orders import Command, Report
from swapper.errors import StoreDown
from swapper.store import protocol
from swapper.store.codec import encode
from swapper.store.protocol import Claimed
from workers.agent import Agent
from workers.backend import (
    Displaced,
    Held,
    Loaded,
    Owners,
    Quiesced,
    Reading,
    Restored,
    Room,
    SaveArgs,
    Saved,
    SlotUse,
    TenantState,
    Unread,
)
from workers.marks import Marks

EXECUTOR = "agent:main"


@dataclass(frozen=True, slots=True)
class Entry:
    """One outbox entry."""

    id: str
    command: Command


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tenant lives."""

    card: str
    server: str


def command(
    verb: str, token: int, n: int, *, tenant: str | None = "llama/med", card: str = "gpu0", **args: object
) -> Command:
    """A command with the arguments given."""
    return Command(EXECUTOR, card, tenant, token, n, verb, args)


class MemoryLink:
    """Outbox and inputs of one store, which can be switched off."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.reports: list[Report] = []
        self.reads: list[str] = []
        self.down = False
        self.outages = 0
        self.crash: Exception | None = None
        self.claimed_by: protocol.Held | None = None
        self.floor = 0
        self.beats = 0
        self._news = asyncio.Condition()

    async def send(self, *commands: Command) -> None:
        """Append to the outbox in one go."""
        async with self._news:
            self.entries += [Entry(str(len(self.entries) + i + 1), c) for i, c in enumerate(commands)]
            self._news.notify_all()

    async def outbox(self, executor: str, *, after: str, block_ms: int) -> tuple[Entry, ...]:
        """Wait for entries after the id; raises StoreDown while the store is off."""
        assert executor == EXECUTOR
        assert block_ms > 0
        self.reads.append(after)
        if crash := self.crash:
            self.crash = None
            raise crash
        outages = self.outages
        async with self._news:
            await self._news.wait_for(lambda: self.outages > outages or self.down or len(self.entries) > int(after))
            if self.down or self.outages > outages:
                raise StoreDown("off")
            return tuple(self.entries[int(after) :])

    async def claim(self, executor: str, owner: str, *, who: str, ttl_ms: int) -> Claimed | protocol.Held:
        """The agent's, unless the test gives it to another; raises StoreDown while the store is off."""
        del owner, who, ttl_ms
        assert executor == EXECUTOR
        if self.down:
            raise StoreDown("off")
        self.beats += 1
        return self.claimed_by or Claimed(self.floor)

    async def unclaim(self, executor: str, owner: str) -> None:
        """Nobody else is here."""
        del executor, owner
        if self.down:
            raise StoreDown("off")

    async def report(self, *reports: Report) -> None:
        """Keep the reports; raises StoreDown while the store is off."""
        if self.down:
            raise StoreDown("off")
        encode(reports)  # as the real one does: what cannot be encoded cannot be told
        async with self._news:
            self.reports += reports
            self._news.notify_all()

    async def switch(self, *, down: bool) -> None:
        """Take the store away, or bring it back."""
        async with self._news:
            self.down = down
            self.outages += down
            self._news.notify_all()

    async def until(self, found: Callable[[list[Report]], bool]) -> None:
        """Wait until the reports satisfy `found`."""
        async with self._news:
            await self._news.wait_for(lambda: found(self.reports))

    async def answer(self, token: int, n: int, *, count: int = 1) -> Report:
        """Wait for the `count`-th answer to one command."""
        await self.until(lambda reports: len(_answers(reports, token, n)) >= count)
        return _answers(self.reports, token, n)[count - 1]

    async def volunteered(self, verb: str, *, count: int = 1) -> Report:
        """Wait for the `count`-th report of a kind nobody asked for."""
        await self.until(lambda reports: sum(r.verb == verb for r in reports) >= count)
        return [r for r in self.reports if r.verb == verb][count - 1]


def _answers(reports: list[Report], token: int, n: int) -> list[Report]:
    return [r for r in reports if (r.token, r.n) == (token, n)]


@dataclass
class Verb:
    """A call in progress: `begun` is set when it starts, it ends with `end`."""

    begun: asyncio.Event = field(default_factory=asyncio.Event)
    end: asyncio.Event = field(default_factory=asyncio.Event)


class RecordingBackend:
    """Answers every verb at once, unless the test holds it or gives it an error."""

    def __init__(self, *tenants: str) -> None:
        self.tenants = tenants or ("llama/med",)
        self.states = dict.fromkeys(self.tenants, TenantState.UNLOADED)
        self.calls: list[str] = []
        self.saves: list[SaveArgs] = []
        self.rooms: list[Room | None] = []
        self.cancelled: list[str] = []
        self.held: dict[str, Verb] = {}
        self.errors: dict[str, Exception] = {}
        self.change = asyncio.Event()
        self.heard = asyncio.Event()
        self.started = asyncio.Event()
        self.starts = 0
        self.hung = False
        self.ended: str | None = None
        self.observing = asyncio.Event()
        self.wake = asyncio.Event()
        self.stale: Mapping[str, TenantState] = {}

    def hold(self, call: str) -> Verb:
        """Make the call wait for the test."""
        return self.held.setdefault(call, Verb())

    async def _call(self, call: str) -> None:
        self.calls.append(call)
        if held := self.held.get(call):
            held.begun.set()
            try:
                await held.end.wait()
            except asyncio.CancelledError:
                self.cancelled.append(call)
                raise
        if error := self.errors.get(call):
            raise error

    async def start(self) -> None:
        self.starts += 1
        self.started.set()
        if error := self.errors.get("start"):
            raise error

    async def observe(self) -> Mapping[str, TenantState]:
        if self.hung:
            self.observing.set()
            await self.wake.wait()
            return self.stale
        return dict(self.states)

    async def quiesce(self, tenant: str, *, limit_ms: int | None = None) -> Quiesced:
        await self._call(f"drain {tenant}" + (f" {limit_ms}" if limit_ms is not None else ""))
        return Quiesced((SlotUse(0, 100),), strategies=("slots", "replay"), fingerprint="f1")

    async def save(self, tenant: str, args: SaveArgs) -> Saved:
        self.saves.append(args)
        await self._call(f"save {tenant} {args.slot}")
        return Saved(args.name, args.slot, 100, 2048, 1.5)

    async def release(self, tenant: str, *, limit_ms: int) -> None:
        await self._call(f"release {tenant} {limit_ms}")
        self.states[tenant] = TenantState.UNLOADED

    async def load(self, tenant: str) -> Loaded:
        await self._call(f"load {tenant}")
        self.states[tenant] = TenantState.LOADED
        return Loaded(2, 4096, strategies=("slots", "replay"), fingerprint="f1")

    async def restore(self, tenant: str, snapshot: str, slot: int, room: Room | None = None) -> Restored:
        self.rooms.append(room)
        await self._call(f"restore {tenant} {snapshot} {slot}")
        if room is None:
            return Restored(slot, 100, 2.5)
        return Restored(1, 100, 2.5, Displaced(room.name, 50, 1024, room.talks[0].id))

    async def end_hung(self) -> str | None:
        ended, self.ended = self.ended, None
        return ended

    def fenced(self, fence: Callable[[], Awaitable[None]]) -> None:
        self.fence = fence

    async def changes(self) -> AsyncIterator[None]:
        while True:
            await self.change.wait()
            self.change.clear()
            yield
            self.heard.set()

    async def close(self) -> None:
        self.calls.append("close")


class ScriptedProbe:
    """Gives the free MiB of its script one look after the other, the last one for ever."""

    def __init__(self, *free_mib: int) -> None:
        self.script = list(free_mib) or [24_000]
        self.looked = asyncio.Event()
        self.looks = 0
        self.asked: list[tuple[Mapping[str, TenantState], tuple[int, ...]]] = []
        self.owners = Owners()
        self.held: tuple[Held, ...] = ()
        self.unread: str | None = None

    async def read(
        self, states: Mapping[str, TenantState], holder_pids: tuple[int, ...], owners: Owners
    ) -> Reading | Unread:
        self.owners = owners
        self.asked.append((states, holder_pids))
        self.looks += 1
        self.looked.set()
        if self.unread is not None:
            return Unread(self.unread)
        free = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        return Reading(24_000, 24_000 - free, free, tuple(f"pid {pid} (test)" for pid in holder_pids), held=self.held)


Running = Callable[[], AbstractAsyncContextManager[Agent]]
"""Starts an agent on the folder and the link of the test; entered again, it is the next run."""


@asynccontextmanager
async def at_work(
    folder: Path,
    link: MemoryLink,
    backends: Mapping[str, RecordingBackend],
    probes: Mapping[str, ScriptedProbe] | None = None,
) -> AsyncGenerator[Agent]:
    """An agent on its marks in the folder. Its n-th server is on its n-th card (gpu0, where there is one)."""
    cards = probes or {"gpu0": ScriptedProbe()}
    marks = Marks.open(folder)
    homes = zip(backends, cards, strict=True)
    places = {tenant: Place(card, server) for server, card in homes for tenant in backends[server].tenants}
    agent = Agent("main", link, backends, places, cards, marks)
    task = asyncio.create_task(agent.run())
    try:
        yield agent
    finally:
        await agent.close()
        await task
        marks.close()
