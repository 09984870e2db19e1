"""Jobs of a simulation: their processes as they physically are, and the double by which the shipped runner has them.

Invariant: a process, once started, outlives whoever started it, holds the VRAM of its lease until it ends, and is on
record from its start for ever; a second start is a broken promise. Nothing here knows leases or the runner.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from swapper.errors import BackendError
from swapper.jobs.recipes import Recipe
from tests.sim.plan import JobPlan, Plan
from tests.sim.process import HOME
from workers.control import ExitStatus
from workers.jobs import Named, Place

if TYPE_CHECKING:
    from tests.sim.world import World

GRACE_MS = 700
_FIRST_PID = 500_000


@dataclass(slots=True)
class Work:
    """The process of a job. `status` None once it is over: nobody saw how it ended."""

    pid: int
    lease: str
    card: str
    let_go: Callable[[], None]
    over: asyncio.Event = field(default_factory=asyncio.Event)
    status: ExitStatus | None = None
    wakes: list[asyncio.Event] = field(default_factory=list[asyncio.Event])

    @property
    def runs(self) -> bool:
        """Until it has ended."""
        return not self.over.is_set()

    def end(self, status: ExitStatus | None) -> None:
        """It ends, once."""
        if not self.over.is_set():
            self.status = status
            self.over.set()
            self.let_go()
            for event in self.wakes:
                event.set()


class Works:
    """All processes of jobs, by job."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._pids = itertools.count(_FIRST_PID)
        self.plans: dict[str, JobPlan] = {plan.name: plan for plan in world.plan.jobs}
        self.of: dict[str, Work] = {}
        self._waiting: set[int] = set()

    def alive(self, pid: int) -> bool:
        """Whether a process with that pid runs, or waits to."""
        return pid in self._waiting or any(work.pid == pid and work.runs for work in self.of.values())

    def remaining(self, card: str, stays: Collection[str]) -> tuple[str, ...]:
        """As `workers.jobs.still_running`."""
        running = ((name, work) for name, work in self.of.items() if work.runs and work.card == card)
        return tuple(f"pid {work.pid} (job {name})" for name, work in running if work.lease not in stays)

    @contextmanager
    def waiting(self) -> Generator[int]:
        """A process that has not begun, while whoever holds it lives."""
        pid = next(self._pids)
        self._waiting.add(pid)
        try:
            yield pid
        finally:
            self._waiting.discard(pid)

    def start(self, job: str, recipe: str, lease: str, pid: int) -> None:
        """Start it. Raises BackendError where its program is not there."""
        world, plan = self._world, self.plans[recipe]
        if job in self.of:
            world.check.fail(f"{job} is started a second time (N1)")
            return
        if plan.missing:
            raise BackendError(f"{recipe}: there is no such program; install it")
        card = str(world.check.fold.leases[lease].card)
        place = world.places[card]
        holder, mib = f"lease {lease}", plan.vram_mib or place.plan.capacity

        def let_go() -> None:
            place.vram.let_go(holder)
            world.say(f"    {job} ends")
            world.disturbed()

        work = self.of[job] = Work(pid, lease, card, let_go)
        world.say(f"    {job} ({recipe}) runs under {lease}, {mib} MiB of {card}")
        place.vram.take(holder, mib)
        status = ExitStatus(plan.code, None, 0) if plan.seen else None
        asyncio.get_running_loop().call_later(plan.takes_s, work.end, status)


class JobDouble:
    """As `workers.jobs.JobProcess`, on what is physically there."""

    def __init__(self, world: World, name: str, outputs: Mapping[str, str]) -> None:
        del outputs
        home = HOME.get()
        assert home is not None
        self._process = home
        self._works = world.works
        self._name = name

    @property
    def begun(self) -> bool:
        """Whether it was started."""
        return self._name in self._works.of

    def recorded(self) -> tuple[int, int] | None:
        """Its process and when that was started."""
        work = self._works.of.get(self._name)
        return None if work is None else (work.pid, 1)

    async def start(
        self, argv: Sequence[str], env: Mapping[str, str], place: Place, named: Named, *, follows: bool
    ) -> bool:
        """Start it, once it is named."""
        del env, follows
        await self._process.cross()
        with self._works.waiting() as pid:
            if not await named(pid, 1):
                return False
            await self._process.cross()
            self._works.start(self._name, argv[0], place.lease, pid)
        await self._process.cross()
        return True

    async def ended(self) -> ExitStatus | None:
        """Wait for its end."""
        work = self._works.of[self._name]
        await work.over.wait()
        await self._process.cross()
        return work.status

    async def end(self, grace_ms: int) -> None:
        """Have it end; returns once it has."""
        await self._process.cross()
        work = self._works.of[self._name]
        asyncio.get_running_loop().call_later(grace_ms / 2000, work.end, ExitStatus(None, 15, 0))
        await work.over.wait()
        await self._process.cross()

    def publish(self) -> str | None:
        """It has no outputs."""
        return None

    def discard(self) -> None:
        """It has no outputs."""

    def progress(self) -> float | None:
        """It tells none."""
        return None

    def log_tail(self, n: int) -> list[str]:
        """It says nothing."""
        del n
        return []


@dataclass(slots=True)
class SimHolder:
    """As `workers.vram.holders.Holder`, of the processes of jobs."""

    works: Works
    pid: int
    started: int | None = None

    @property
    def alive(self) -> bool:
        """While it runs."""
        return self.works.alive(self.pid)

    def wake_on_exit(self, event: asyncio.Event) -> None:
        """Set it when it ends."""
        for work in self.works.of.values():
            if work.pid == self.pid:
                work.wakes.append(event)

    def close(self) -> None:
        """Nothing is held."""


def doubled(patch: pytest.MonkeyPatch, world: World) -> None:
    """The runner, the proof and the probe have these processes, and no others."""

    def process(name: str, folder: Path, outputs: Mapping[str, str]) -> JobDouble:
        del folder
        return JobDouble(world, name, outputs)

    def holder(pid: int, started: int | None = None) -> SimHolder:
        return SimHolder(world.works, pid, started)

    def named(pid: int) -> str | None:
        return f"pid {pid}" if world.works.alive(pid) else None

    patch.setattr("swapper.jobs.runner.JobProcess", process)
    patch.setattr("workers.vacate.Holder", holder)
    patch.setattr("workers.vram.declared.named_process", named)


def recipes(plan: Plan) -> dict[str, Recipe]:
    """One for each job that is planned."""
    return {
        one.name: Recipe(one.name, (one.name,), {}, (Path("/"),), one.card, one.vram_mib, one.max_hold_ms, GRACE_MS)
        for one in plan.jobs
    }
