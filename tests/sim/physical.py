"""The fakes as the check watches them: the store that tells what was written, routers and VRAM that tell what happens.

Invariant: each behaves exactly as the fake it is made of; what it tells, it tells at the moment of the effect.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from swapper.core.commit import Commit, Committed, Conflict
from swapper.core.jobs import Job
from swapper.core.orders import Command, Report
from swapper.store.memory import MemoryStore
from swapper.store.memory_library import Library
from tests.sim.leaving import Unload
from tests.sim.whose import whose
from tests.support.fake_asked import Asked
from tests.support.fake_child import FakeChild, Pace
from tests.support.fake_faults import FakeVram, Fault, Faults, Kind, Verb
from tests.support.fake_router import FakeRouter
from tests.support.fake_slots import Aborted, FakeModel, Unfit, decode
from tests.support.fake_wire import Answer
from workers.llama.answer import only_trace
from workers.llama.http import Slot as Line
from workers.marks import Marks

if TYPE_CHECKING:
    from tests.sim.check import Check

T = TypeVar("T")


class WatchedStore(MemoryStore):
    """Tells the check after every write, before anybody else runs."""

    def __init__(self, clock: Callable[[], int], pause: Callable[[], Awaitable[None]], check: Check) -> None:
        super().__init__(clock, pause=pause)
        self._check = check

    async def _call(self, name: str, act: Callable[[Library], T]) -> T:
        def watched(library: Library) -> T:
            answer = act(library)
            self._check.wrote(library)
            return answer

        return await super()._call(name, watched)

    async def commit(self, commit: Commit, *, now_ms: int | None = None) -> Committed | Conflict:
        """Tell the tokens too."""

        def act(library: Library) -> Committed | Conflict:
            answer = library.commit(self._now(now_ms), commit)
            if isinstance(answer, Committed):
                self._check.gave_out(commit.tokens)
            return answer

        return await self._call("commit", act)

    async def put_job(self, job: Job) -> Job | None:
        """Tell what became of it."""

        def act(library: Library) -> Job | None:
            before = library.job(job.id)
            written = library.put_job(job)
            if written is not None:
                self._check.job(before, written)
            return written

        return await self._call("put_job", act)

    async def report(self, *reports: Report) -> None:
        """Tell what was refused."""
        for report in reports:
            if report.outcome == "refused":
                self._check.heard(report)
        await super().report(*reports)

    @property
    def library(self) -> Library:
        """What is stored, for looking at it."""
        return self._library


class WatchedVram(FakeVram):
    """Tells the check of everybody who takes VRAM."""

    def __init__(self, card: str, room_mib: int | None) -> None:
        super().__init__(room_mib)
        self.card = card
        self.check: Check | None = None

    def take(self, holder: str, mib: int) -> None:
        """Hold so much from now on."""
        super().take(holder, mib)
        if self.check is not None:
            self.check.took(self.card, holder)

    def intrude(self, holder: str, mib: int) -> None:
        """Hold so much from now on, though nobody of ours asked for it."""
        super().take(holder, mib)
        if self.check is not None:
            self.check.came(self.card, holder)

    def stick(self, holder: str) -> None:
        """It stays held when it ends."""
        super().stick(holder)
        if self.check is not None:
            self.check.stuck.add(holder)


class ToldFaults(Faults):
    """Tells what strikes."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__()
        self._tell = say

    def take(self, verb: Verb, model: str | None, *kinds: Kind, after: bool = False) -> Fault | None:
        fault = super().take(verb, model, *kinds, after=after)
        if fault is not None:
            self._tell(f"    fault strikes {verb} {model or ''}: {kinds and fault.kind}{' after' if after else ''}")
        return fault

    def drop(self, fault: Fault) -> None:
        """It strikes no more."""
        self._set = [(one, left) for one, left in self._set if one is not fault]


class WatchedRouter(FakeRouter):
    """The router of one card. `in_flight` counts a tenant's calls at each live gateway."""

    def __init__(
        self,
        card: str,
        models: Sequence[FakeModel],
        *,
        slot_dir: Path,
        pace: Pace,
        vram: WatchedVram,
        check: Check,
        say: Callable[[str], None],
        in_flight: Callable[[str], dict[str, int]],
    ) -> None:
        super().__init__(models, slot_dir=slot_dir, pace=pace, vram=vram)
        self.card = card
        self._tell = say
        self._checked = check
        self._in_flight = in_flight
        self.faults = self.told = ToldFaults(say)
        self._house = replace(self._house, faults=self.faults)

    def tenant(self, model: str) -> str:
        """Its tenant id."""
        return f"r{self.card.removeprefix('gpu')}/{model}"

    def _unload(self, name: str | None) -> Answer:
        child = self.child(name or "")
        if child is not None and child.value == "loaded":
            tenant = self.tenant(child.model.name)
            used = {  # what a restore put there is still in its file
                slot.id: len(slot.tokens)
                for slot in child.slots
                if slot.tokens and not slot.restored and not _ours(child, slot.id)
            }
            model = child.model
            unload = Unload(tenant, self._in_flight(tenant), used, lambda name: self._talk_in(model, name))
            self._checked.unloading(self.card, unload)
        self._tell(f"    router of {self.card} unloads {name}")
        return super()._unload(name)

    def _talk_in(self, model: FakeModel, name: str) -> str | None:
        """Whose conversation a snapshot is; None where there is no such file, empty where it is nobody's or damaged."""
        folder = self._house.slot_dir
        if folder is None or not (folder / name).is_file():
            return None
        try:
            tokens, _ = decode(model, folder / name)
        except (Unfit, Aborted):
            return ""
        return whose(tokens)

    async def _load(self, name: str | None) -> Answer:
        self._tell(f"    router of {self.card} loads {name}")
        return await super()._load(name)

    async def _of_child(self, child: FakeChild, asked: Asked, *, direct: bool = False) -> Answer:
        answered = await super()._of_child(child, asked, direct=direct)
        if asked.verb is Verb.RESTORE and answered.status == 200:
            self._checked.restored(child.model.name, int(asked.path.removeprefix("/slots/")))
        return answered

    def listens(self, port: str) -> bool:
        """Whether one of its children has this port."""
        return any(child.port == port for child in self._children)

    def clear_away(self) -> None:
        """End its children, as whoever starts it anew does."""
        for child in list(self._children):
            child.end(137)

    def die(self) -> None:
        """End as if killed."""
        if self.alive:
            self._tell(f"    router of {self.card} dies")
        super().die()


def _ours(child: FakeChild, nth: int) -> bool:
    shown = child.slots[nth].shown(child.model.n_ctx_slot)
    params = shown.get("params")
    line = Line(
        nth,
        0,
        is_processing=False,
        n_prompt_tokens=len(child.slots[nth].tokens),
        params=Line.Params(params.get("seed"), params.get("n_predict")) if params else None,
    )
    return only_trace(line)


_TICKS = itertools.count()


@dataclass(frozen=True, slots=True)
class ChildProcess:
    """A fake child as `workers.llama.child.Child` would show its process."""

    child: FakeChild

    @property
    def pid(self) -> int:
        """One that no other child has at the time: no two listen at one port."""
        return int(self.child.port)

    def alive(self) -> bool:
        """False once it ended."""
        return self.child.alive

    def ticks(self) -> int:
        """It is always at work: a model of this world ends, and does not hang."""
        return next(_TICKS)

    def environ(self) -> tuple[str, ...]:
        """Nothing of note."""
        return ()

    def kill(self) -> None:
        """End it."""
        self.child.end(1)


def finder(routers: Collection[WatchedRouter]) -> Callable[[str, str], Any]:
    """`find_child` among the children of these routers."""

    def find(model: str, port: str) -> ChildProcess | None:
        found = (router.child(model, port) for router in routers)
        child = next((one for one in found if one is not None), None)
        return None if child is None else ChildProcess(child)

    return find


async def gone(child: ChildProcess, *, timeout_s: float) -> bool:
    """As `workers.llama.child.gone`."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await child.child.ended()
    return not child.alive()


class SimMarks(Marks):
    """Marks of an agent that may die: with it the file is closed; by a power cut what was not synced is lost."""

    synced = 0

    def begin_all(self, commands: Sequence[Command]) -> Any:  # noqa: ANN401
        """See Marks."""
        verdicts = super().begin_all(commands)
        self.synced = self._size
        return verdicts

    def sever(self, *, power: bool) -> None:
        """The process is dead."""
        if self._fd < 0:
            return
        if power and self.synced:
            os.ftruncate(self._fd, max(self.synced, self._compacted))
        os.close(self._fd)
        os.close(self._lock_fd)
        self._fd = self._lock_fd = -1

    def close(self) -> None:
        """Give the file up, once."""
        if self._fd >= 0:
            super().close()
            self._fd = self._lock_fd = -1
