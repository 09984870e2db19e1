"""One simulation from its seed to its verdict.

Invariant: the same seed and mutant give the same history, byte for byte. What the run changes of the product to watch
it, or to break it, is put back when it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import shutil
import tempfile
import traceback
from collections.abc import Callable, Generator, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import structlog

from swapper.gateway.admission import Call
from tests.sim import ending, others
from tests.sim.jobs import doubled
from tests.sim.more import more
from tests.sim.mutants import mutated
from tests.sim.owners import People
from tests.sim.physical import finder, gone
from tests.sim.plan import draw
from tests.sim.process import HOME, Endless, SimLoop
from tests.sim.serve import AGAIN_S, Serving
from tests.sim.trouble import Troubles
from tests.sim.whose import whose
from tests.sim.world import World
from tests.support import fake_calls, fake_child
from tests.support.fake_session import FakeSession
from tests.support.virtual_time import Stuck
from workers.llama import lifecycle, router
from workers.llama.http import RouterHttp

OWNERS_END_S, STOP_S = 200.0, 60.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """`broken` is the promise that did not hold, None where all did. `took_s` is virtual."""

    seed: int
    broken: str | None
    history: tuple[str, ...]
    took_s: float
    events: int

    def story(self, lines: int = 100) -> str:
        """The end of the history, and how to see it again."""
        cut = [f"... {len(self.history) - lines} lines before"] if len(self.history) > lines else []
        told = [*cut, *self.history[-lines:], "", f"seed {self.seed}: {self.broken}"]
        return "\n".join([*told, f"again: python -m tests.sim --seed {self.seed} --verbose"])


def simulate(seed: int, *, mutant: str | None = None, tell: Callable[[str], None] | None = None) -> Verdict:
    """Run one seed. `mutant`: break the product so, see mutants.py."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="sim", dir=memory if os.access(memory, os.W_OK) else None))
    before = random.getstate()
    random.seed(seed)  # what pauses between attempts is drawn from there
    run = _Run(seed, folder, tell)
    try:
        with mutated(mutant), asyncio.Runner(loop_factory=SimLoop) as loop:
            return loop.run(run.verdict())
    except (Endless, Stuck) as error:
        history = tuple(run.world.history) if run.world is not None else ()
        return Verdict(seed, f"{type(error).__name__}: {error}", history, 0.0, 0)
    finally:
        random.setstate(before)
        shutil.rmtree(folder)


class _Run:
    def __init__(self, seed: int, folder: Path, tell: Callable[[str], None] | None) -> None:
        self._seed = seed
        self._folder = folder
        self._tell = tell
        self._serving: dict[str, Serving] = {}
        self.world: World | None = None

    async def verdict(self) -> Verdict:
        plan = more(draw(self._seed))
        world = self.world = self._world = World(plan, self._folder, self._tell)
        world.say(
            f"seed {plan.seed}: {plan.layout}, {'measured' if plan.measured else 'declared'}, {len(plan.cards)} cards"
        )
        with _watched(world):
            try:
                await self._live()
            except AssertionError as error:
                world.say(traceback.format_exc())
                world.check.fail(f"{type(error).__name__}: {error}")
        return Verdict(self._seed, world.check.broken, tuple(world.history), world.now, world.check.events)

    def _alive(self) -> list[Serving]:
        return [serving for serving in self._serving.values() if serving.process.alive]

    def _start(self, name: str) -> None:
        serving = self._serving[name] = Serving(self._world, name)
        self._world.say(f"{name} starts")
        serving.process.on_death.append(lambda: self._supervise(serving))
        serving.process.spawn(serving.run())

    def _supervise(self, serving: Serving) -> None:
        """Who could not start is started again after a moment; who was killed, by whoever killed it."""
        if not serving.doomed:
            asyncio.get_running_loop().call_later(AGAIN_S, self._again, serving.process.name)

    def _again(self, name: str) -> None:
        if not self._serving[name].process.alive:
            self._start(name)

    async def _live(self) -> None:
        world, plan = self._world, self._world.plan
        for place in world.places.values():
            place.router.start()
        for party in plan.parties:
            self._start(party)
        people = People(world, self._alive)
        troubles = Troubles(world, self._serving.get, self._again)
        async with asyncio.TaskGroup() as group:
            work = [group.create_task(people.own(owner)) for owner in plan.owners]
            work += [group.create_task(people.call(call)) for call in plan.calls]
            work += [group.create_task(troubles.run(trouble)) for trouble in plan.troubles]
            work += [group.create_task(people.submit(job)) for job in plan.jobs]
            work += [group.create_task(people.by_hand(hand)) for hand in plan.hands]
            work += [
                group.create_task(people.send(place, box))
                for place in world.places.values()
                for box in place.plan.boxes
                if box.by_lease
            ]
            watch = group.create_task(self._until_broken(work))
            _, late = await asyncio.wait(work, timeout=OWNERS_END_S)
            if late and world.check.broken is None:
                world.check.fail(f"{len(late)} of the people, or of the troubles, come to no end")
            for task in late:
                task.cancel()
            watch.cancel()
        for place in world.places.values():
            place.router.faults.clear()
        if world.check.broken is None:
            await ending.settled(world, people)
            await ending.served(world, people)
            ending.leases_ended(world, people)
            ending.jobs_ended(world, people)
            ending.errands_ended(world, people)
            world.check.compare(world.store.library)
        await self._stop()

    async def _until_broken(self, work: list[asyncio.Task[None]]) -> None:
        await self._world.check.breaking.wait()
        for task in work:
            task.cancel()

    async def _stop(self) -> None:
        world = self._world
        for serving in self._alive():
            stopping = serving.process.spawn(serving.stop())
            await asyncio.wait({stopping}, timeout=STOP_S)
            if not stopping.done():
                world.check.fail(f"{serving.process.name} does not stop: {[str(t) for t in serving.process.tasks]}")
            serving.process.alive = False
            for tell in serving.process.on_death[:1]:
                tell()
            await serving.process.buried()
        for place in world.places.values():
            await place.router.close()
        await asyncio.sleep(1)
        me = asyncio.current_task()
        if world.check.broken is None:
            ending.nothing_left(world, (task for task in asyncio.all_tasks() if task is not me), lambda _: False)


@contextlib.contextmanager
def _watched(world: World) -> Generator[None]:
    """The backends talk to the fake routers, find their children among the fakes, and bugs in the log are told."""
    find = finder([place.router for place in world.places.values()])

    def opened(self: RouterHttp, connector: object) -> FakeSession:
        del self, connector
        home = HOME.get()
        assert home is not None
        return sessions[home.name]

    sessions: dict[str, FakeSession] = world.sessions

    async def run(self: Any, tell: Callable[[str], None] = lambda _: None) -> None:  # noqa: ANN401
        await answered(self, tell)
        world.check.answered(self.child.model.name, self.slot, self.cached, whose(self.prompt))

    answered: Any = fake_calls._Call.run  # pyright: ignore[reportPrivateUsage]
    config = structlog.get_config()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RouterHttp, "_opened", opened)
        patch.setattr(router, "find_child", find)
        patch.setattr(router, "gone", gone)
        patch.setattr(lifecycle, "gone", gone)
        doubled(patch, world)
        others.doubled(patch, world)
        patch.setattr(fake_calls._Call, "run", run)  # pyright: ignore[reportPrivateUsage]
        patch.setattr(fake_child, "_ports", itertools.count(40_000))
        patch.setattr(Call, "__hash__", _place)  # so that a set of them has the same order each time
        structlog.configure(
            processors=[_listener(world)], logger_factory=lambda *_: None, cache_logger_on_first_use=False
        )
        try:
            yield
        finally:
            structlog.configure(**config)


def _place(call: Call) -> int:
    return call.seq


def _listener(world: World) -> Callable[[Any, str, MutableMapping[str, Any]], MutableMapping[str, Any]]:
    def hear(_: object, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        home = HOME.get()
        if (method == "exception" or event.get("exc_info")) and home is not None and home.alive:
            world.say(traceback.format_exc())
            world.check.fail(f"{home.name} logs a bug: {event.get('event')} {event.get('what', '')}")
        raise structlog.DropEvent

    return hear
