"""Order among commands: one lane per (card, tenant); in (token, n) order inside a lane, side by side across lanes.

Invariant: at most one command of a lane runs at a time, but saves of one token that wait together run side by side,
and restores likewise, all of them marked before the first starts. A newer command ends an older one that only waits
(drain, vacate), has a load given up that it takes away again, and refuses an older one of an earlier token that has not
begun; anything else it waits for. It decides order only: what a command does and where its answer goes are functions it
is given.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from swapper.core.orders import Command, Report
from swapper.core.types import Step
from workers.marks import Lane as LaneKey
from workers.marks import Pair
from workers.patience import GIVEN_UP

WAITING = frozenset({str(Step.DRAIN), str(Step.VACATE)})
"""Verbs that change nothing and only wait: a newer command of the lane ends them."""
SIDE_BY_SIDE = frozenset({str(Step.SAVE), str(Step.RESTORE)})
"""Verbs on one slot each: those of one token do not touch each other."""
AT_ONCE = 4
"""So many of them: the server takes them in one after the other, and each occupies one of its few HTTP threads."""


class Stored(Protocol):
    """A command and its place in the outbox."""

    @property
    def id(self) -> str:
        """The outbox entry."""
        ...

    @property
    def command(self) -> Command:
        """The order itself."""
        ...


def pair(command: Command) -> Pair:
    """A command's identity and its place in the order."""
    return (command.token, command.n)


class Executor(Protocol):
    """What lanes need of their owner."""

    def recorded(self, command: Command) -> Report | None:
        """The answer on record, if the command was answered before."""
        ...

    async def begin(self, commands: Sequence[Command]) -> bool:
        """Mark commands of one token as begun, durably, before they are executed side by side. Never raises.

        False: they could not be marked together; then they are executed one after the other.
        """
        ...

    async def execute(self, command: Command) -> Report:
        """Carry out one command, marked first; an unexpected exception is already turned into a report."""
        ...

    async def refuse(self, command: Command, newer: Pair) -> Report:
        """The answer to a command that a newer one has overtaken."""
        ...

    async def settle(self, stored: Stored, report: Report) -> None:
        """Deliver the answer; afterwards the command is done with."""
        ...


@dataclass(slots=True)
class _Running:
    """A command that may be ended, or a load (no `task`), which ends itself once it is given up."""

    command: Command
    task: asyncio.Task[Report] | None = None
    overtaken_by: Pair | None = None
    given_up: asyncio.Event = field(default_factory=asyncio.Event)

    def meet(self, newer: Command) -> None:
        """A newer command of its lane has come."""
        if pair(newer) <= pair(self.command):
            return
        if self.task is not None:
            self.overtaken_by = pair(newer)
            self.task.cancel()
        elif newer.verb == Step.RELEASE:
            self.given_up.set()


@dataclass(slots=True)
class _Lane:
    """One lane: its queue by (token, n), what waits and may be ended, and the task that works it off."""

    executor: Executor
    queue: list[tuple[Pair, int, Stored]] = field(default_factory=list[tuple[Pair, int, Stored]])
    arrivals: int = 0
    running: _Running | None = None
    worker: asyncio.Task[None] | None = None

    def put(self, stored: Stored) -> None:
        self.arrivals += 1
        heapq.heappush(self.queue, (pair(stored.command), self.arrivals, stored))
        if self.running is not None:
            self.running.meet(stored.command)
        if self.worker is None:
            self.worker = asyncio.create_task(self._work(), name=f"lane {stored.command.tenant or stored.command.card}")

    async def _work(self) -> None:
        while self.queue:
            due = [stored for stored in self._take() if not await self._settled(stored)]
            if len(due) > 1 and await self.executor.begin([stored.command for stored in due]):
                await asyncio.gather(*map(self._carry_out, due))
                continue
            for stored in due:
                await self._carry_out(stored)
        self.worker = None

    def _take(self) -> Sequence[Stored]:
        """What is next, with all that may run beside it."""
        taken = [self._pop()]
        first = taken[0].command
        while first.verb in SIDE_BY_SIDE and self.queue and len(taken) < AT_ONCE:
            following = self.queue[0][2].command
            same = (following.verb, following.token) == (first.verb, first.token)
            if not same or following.n == taken[-1].command.n:
                break
            taken.append(self._pop())
        return taken

    def _pop(self) -> Stored:
        return heapq.heappop(self.queue)[2]

    async def _settled(self, stored: Stored) -> bool:
        """Answer what was answered before, and what was overtaken while it waited."""
        report = self.executor.recorded(stored.command)
        if report is None and (newer := self._overtaker(stored.command)):
            report = await self.executor.refuse(stored.command, newer)
        if report is None:
            return False
        await self.executor.settle(stored, report)
        return True

    async def _carry_out(self, stored: Stored) -> None:
        command = stored.command
        run = self.executor.execute
        if command.verb in WAITING:
            run = self._until_overtaken
        elif command.verb == Step.LOAD:
            run = self._until_given_up
        await self.executor.settle(stored, await run(command))

    def _overtaker(self, command: Command) -> Pair | None:
        newest = max((waiting for waiting, *_ in self.queue), default=(0, 0))
        away = command.verb == Step.LOAD and any(one.command.verb == Step.RELEASE for *_, one in self.queue)
        overtaken = newest[0] > command.token or (newest > pair(command) and (command.verb in WAITING or away))
        return newest if overtaken else None

    async def _until_given_up(self, command: Command) -> Report:
        self.running = running = _Running(command)
        before = GIVEN_UP.set(running.given_up)
        try:
            return await self.executor.execute(command)
        finally:
            GIVEN_UP.reset(before)
            self.running = None

    async def _until_overtaken(self, command: Command) -> Report:
        task = asyncio.create_task(self.executor.execute(command), name=f"{command.verb} {command.tenant}")
        self.running = running = _Running(command, task)
        try:
            return await task
        except asyncio.CancelledError:
            me = asyncio.current_task()
            if running.overtaken_by is None or (me is not None and me.cancelling()):
                task.cancel()
                await asyncio.wait({task})
                raise
            return await self.executor.refuse(command, running.overtaken_by)
        finally:
            self.running = None


class Lanes:
    """All lanes of one agent."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._lanes: dict[LaneKey, _Lane] = {}

    def put(self, stored: Stored) -> None:
        """Take a command in; returns at once."""
        key = (stored.command.card, stored.command.tenant)
        self._lanes.setdefault(key, _Lane(self._executor)).put(stored)

    async def close(self) -> None:
        """Stop everything where it is, unanswered: the next run executes it again."""
        workers = [lane.worker for lane in self._lanes.values() if lane.worker]
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
