"""Order among commands: one lane per (card, tenant); in (token, n) order inside a lane, side by side across lanes.

Invariant: at most one command of a lane runs at a time. A newer command ends an older one that only waits (drain,
vacate) and refuses an older one of an earlier token that has not begun; anything else it waits for. It decides order
only: what a command does and where its answer goes are two functions it is given.
"""

from __future__ import annotations

import asyncio
import heapq
from dataclasses import dataclass, field
from typing import Protocol

from swapper.core.types import Command, Report, Step
from workers.marks import Lane as LaneKey
from workers.marks import Pair

WAITING = frozenset({str(Step.DRAIN), str(Step.VACATE)})
"""Verbs that change nothing and only wait: a newer command of the lane ends them."""


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

    async def execute(self, command: Command) -> Report:
        """Carry out one command; an unexpected exception is already turned into a report."""
        ...

    async def refuse(self, command: Command, newer: Pair) -> Report:
        """The answer to a command that a newer one has overtaken."""
        ...

    async def settle(self, stored: Stored, report: Report) -> None:
        """Deliver the answer; afterwards the command is done with."""
        ...


@dataclass(slots=True)
class _Running:
    command: Command
    task: asyncio.Task[Report]
    overtaken_by: Pair | None = None


@dataclass(slots=True)
class _Lane:
    """One lane: its queue by (token, n), what runs now, and the task that works it off."""

    executor: Executor
    queue: list[tuple[Pair, int, Stored]] = field(default_factory=list[tuple[Pair, int, Stored]])
    arrivals: int = 0
    running: _Running | None = None
    worker: asyncio.Task[None] | None = None

    def put(self, stored: Stored) -> None:
        self.arrivals += 1
        newest = pair(stored.command)
        heapq.heappush(self.queue, (newest, self.arrivals, stored))
        running = self.running
        if running and running.command.verb in WAITING and newest > pair(running.command):
            running.overtaken_by = newest
            running.task.cancel()
        if self.worker is None:
            self.worker = asyncio.create_task(self._work(), name=f"lane {stored.command.tenant or stored.command.card}")

    async def _work(self) -> None:
        while self.queue:
            *_, stored = heapq.heappop(self.queue)
            command = stored.command
            report = self.executor.recorded(command)
            if report is None and (newer := self._overtaker(command)):
                report = await self.executor.refuse(command, newer)
            await self.executor.settle(stored, report or await self._run(command))
        self.worker = None

    def _overtaker(self, command: Command) -> Pair | None:
        newest = max((waiting for waiting, *_ in self.queue), default=(0, 0))
        overtaken = newest[0] > command.token or (newest > pair(command) and command.verb in WAITING)
        return newest if overtaken else None

    async def _run(self, command: Command) -> Report:
        task = asyncio.create_task(self.executor.execute(command), name=f"{command.verb} {command.tenant}")
        self.running = running = _Running(command, task)
        try:
            return await task
        except asyncio.CancelledError:
            me = asyncio.current_task()
            if running.overtaken_by is None or (me is not None and me.cancelling()):
                task.cancel()
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
