"""The process of one model behind the fake router: it loads, answers, saves, sleeps, and ends in one way or another.

Invariant: it ends once, and with it everything that was asked of it; its VRAM is held from the beginning of the load
to that end. It waits for the loop's clock and for nothing else, so it lives in virtual time as well.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from tests.support.fake_faults import FakeVram, Fault, Faults, Kind, Verb
from tests.support.fake_slots import FakeModel, Slot
from tests.support.fake_wire import Json

T = TypeVar("T")

_NO_TIME = 1e-6  # less than that a clock of doubles may never reach
_FIRST_PORT = 70_000  # no port at all: nobody can take the fake's children for processes that run here


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds that things take. `orphan_s`: how long a child outlives its router."""

    load_s: float = 0.02
    stop_s: float = 0.01
    prompt_token_s: float = 0.00001
    token_s: float = 0.0005
    action_s: float = 0.001
    orphan_s: float = 1.5


@dataclass(frozen=True, slots=True)
class House:
    """What all children of a router have in common. `say`: an event of the router's; `log`: a line of its log."""

    pace: Pace
    faults: Faults
    vram: FakeVram
    slot_dir: Path | None
    metrics: bool
    say: Callable[[str, str, Json], None]
    log: Callable[[str], None]


class ChildGone(Exception):
    """It ended before it answered."""


_ports = itertools.count(_FIRST_PORT)


class FakeChild:
    """One run of a model. `value` is what `/models` says of it, `exit_code` is None until it ended."""

    def __init__(self, model: FakeModel, house: House, on_end: Callable[[FakeChild], None]) -> None:
        self.model = model
        self.house = house
        self.port = str(next(_ports))
        self.value = "loading"
        self.exit_code: int | None = None
        self.stopping = False
        self.mute = False
        self._up = asyncio.Event()
        self.slots = [Slot(nth) for nth in range(model.parallel)]
        self.last_used = self._now()
        self._on_end = on_end
        self._holder = f"{model.name} on {self.port}"
        self._over = asyncio.Event()
        self._working: set[asyncio.Task[Any]] = set()
        self._others: set[asyncio.Task[Any]] = set()
        self._deferred: list[asyncio.Future[None]] = []
        self._cache: list[Slot] = []
        self._tasks = itertools.count()
        self._waking = asyncio.Lock()
        house.vram.take(self._holder, model.vram_mib)

    @property
    def alive(self) -> bool:
        """False once it ended."""
        return self.exit_code is None

    @property
    def listening(self) -> bool:
        """Whether it came so far that it answers."""
        return self.alive and self._up.is_set()

    async def came_up(self) -> bool:
        """Wait until it answers; False when it ended instead."""
        await self._up.wait()
        return self.alive

    @property
    def calls(self) -> int:
        """Requests it is at work on, and those that wait."""
        return len(self._working)

    @property
    def processing(self) -> int:
        """Slots at work."""
        return sum(slot.busy for slot in self.slots)

    @property
    def deferred(self) -> int:
        """Requests that wait for a slot."""
        return len(self._deferred)

    def begin(self) -> None:
        """Start to load."""
        self.house.say(self.model.name, "model_status", {"status": "loading"})
        self._spawn(self._load(), self._others)

    async def ended(self) -> None:
        """Wait for its end."""
        await self._over.wait()

    async def stop(self) -> None:
        """End as the router asks it to: at once while it loads, else once no call is left, else by force."""
        if self.value == "loading":
            self.end(1)
        if self.stopping or not self.alive:
            await self.ended()
            return
        self.stopping = True
        limit = self._now() + self.model.stop_timeout_s
        while self._working and self.alive and (rest := limit - self._now()) > 0:
            await asyncio.wait(self._working, timeout=rest, return_when=asyncio.FIRST_COMPLETED)
        forced = bool(self._working)
        await asyncio.sleep(0 if forced else self.house.pace.stop_s)
        self.end(1 if forced else 0)

    def hold_vram(self) -> None:
        """Its VRAM stays held when it ends."""
        self.house.vram.stick(self._holder)

    async def serve(self, work: Coroutine[None, None, T], *, kept: bool = False) -> T:
        """Do it as one of its requests. Raises ChildGone when it ends meanwhile.

        `kept`: it is done even if whoever asked goes away.
        """
        if not self.alive:
            work.close()
            raise ChildGone
        if self.stopping or self.mute:
            work.close()
            await self.ended()
            raise ChildGone
        task = self._spawn(work, self._working)
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            if not kept:
                task.cancel()
            raise
        if task.cancelled():
            raise ChildGone
        return task.result()

    async def beat(self, seconds: float) -> None:
        """Work for so long; a process that is being stopped works no more."""
        await asyncio.sleep(seconds)
        if self.stopping:
            await self.ended()

    async def awake(self) -> None:
        """Wake if it sleeps; all slots are empty then. Counts as being used."""
        async with self._waking:
            if self.value == "sleeping":
                self.value = "loading"
                self.house.vram.take(self._holder, self.model.vram_mib)
                await self._read_weights()
                self.slots = [Slot(nth) for nth in range(self.model.parallel)]
                self.value = "loaded"
                self._status("loaded")
                self._doze_later()
        self.last_used = self._now()

    async def slot_for(self, pinned: int, prompt: list[int]) -> Slot:
        """A slot to work in, taken: the one that was named, else the one most like the prompt, else the oldest."""
        while (slot := self._free_slot(pinned, prompt)) is None:
            turn = asyncio.get_running_loop().create_future()
            self._deferred.append(turn)
            try:
                await turn
            finally:
                self._deferred.remove(turn)
        slot.busy = True
        if pinned < 0:
            self._from_cache(slot, prompt)
        return slot

    def _from_cache(self, slot: Slot, prompt: list[int]) -> None:
        """What is more like the prompt comes from the RAM cache; what it takes the place of goes there.

        With one cache for all slots, so do the conversations of all others that are idle.
        """
        room = self.model.cached
        if 2 * slot.common(prompt) < len(slot.tokens):
            slot.cache(self._cache, room)
        slot.fetch(prompt, self._cache)
        for other in self.slots if self.model.kv_unified else ():
            if other is not slot and not other.busy:
                other.cache(self._cache, room)

    def _free_slot(self, pinned: int, prompt: list[int]) -> Slot | None:
        if pinned >= 0:
            slot = self.slots[pinned % len(self.slots)]  # the real one wraps round in silence
            return None if slot.busy else slot
        free = [slot for slot in self.slots if not slot.busy]
        like = [slot for slot in free if slot.common(prompt) > self.model.similarity * len(prompt)]
        if like:
            return max(like, key=lambda slot: slot.common(prompt))
        return min(free, key=lambda slot: (slot.last_used, -slot.id), default=None)

    def leave(self, slot: Slot) -> None:
        """Give a slot back; all who wait look again, in their order."""
        slot.busy = False
        for turn in self._deferred:
            if not turn.done():
                turn.set_result(None)

    def next_task(self) -> int:
        """The number of the next task."""
        return next(self._tasks)

    def strikes(self, verb: Verb, kind: Kind) -> Fault | None:
        """Whether such a fault is to happen now."""
        return self.house.faults.take(verb, self.model.name, kind)

    def abort(self) -> NoReturn:
        """End in the midst of what it is doing."""
        self.end(1)
        raise ChildGone

    def end(self, exit_code: int) -> None:
        """End, once; everything that was asked of it ends too."""
        if not self.alive:
            return
        self.exit_code = exit_code
        for task in (*self._working, *self._others):
            task.cancel()
        self.house.vram.let_go(self._holder)
        self._over.set()
        self._up.set()
        self._on_end(self)

    def info(self) -> Json:
        """What the router tells of it once it is loaded."""
        meta = {"vocab_type": 1, "n_vocab": 354, "n_ctx": self.model.n_ctx_slot, "n_ctx_train": 65_536}
        return {"id": self.model.name, "object": "model", "owned_by": "llamacpp", "meta": meta}

    async def _load(self) -> None:
        await self._read_weights()
        if self.model.broken:
            why = "tensor 'token_embd.weight' data is not within the file bounds, model is corrupted or incomplete"
            self.house.log(f"[{self.port}] E llama_model_load: error loading model: {why}")
            self.house.log(f"[{self.port}] E srv    load_model: failed to load model, '{self.model.path}'")
        if overfull := self.house.vram.overfull:
            what = f"allocating {self.model.vram_mib}.00 MiB on device 0: cudaMalloc failed: out of memory"
            self.house.log(f"[{self.port}] E ggml_backend_cuda_buffer_type_alloc_buffer: {what}")
            self.house.log(f"[{self.port}] E srv    load_model: failed to load model, '{self.model.path}'")
        if self.model.broken or overfull or self.strikes(Verb.LOAD, Kind.CHILD_DIES):
            self.end(1)
            return
        self.mute = self.strikes(Verb.LOAD, Kind.MUTE) is not None
        self.value = "loaded"
        self._up.set()
        self.last_used = self._now()
        self._status("loaded", info=self.info())
        self._doze_later()

    async def _read_weights(self) -> None:
        for value in (0.0, 1.0):
            progress = {"stages": ["text_model"], "current": "text_model", "value": value}
            self._status("loading", progress=progress)
            await asyncio.sleep(self.house.pace.load_s / 2)

    def _doze_later(self) -> None:
        if self.model.sleep_idle_s is not None:
            self._spawn(self._doze(self.model.sleep_idle_s), self._others)

    async def _doze(self, idle_s: float) -> None:
        rest = idle_s
        while rest > _NO_TIME:
            await asyncio.sleep(rest)
            rest = idle_s if self._working else self.last_used + idle_s - self._now()
        if not self.stopping:
            self.value = "sleeping"
            self.house.vram.take(self._holder, min(self.model.asleep_mib, self.model.vram_mib))
            self._status("sleeping")

    def _status(self, status: str, **more: object) -> None:
        self.house.say(self.model.name, "status_change", {"status": status, **more})

    def _spawn(self, work: Coroutine[None, None, T], among: set[asyncio.Task[Any]]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        among.add(task)
        task.add_done_callback(among.discard)
        task.add_done_callback(_heard)
        return task

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _heard(task: asyncio.Task[Any]) -> None:
    """Whoever asked may have gone away; that its process ended is no surprise to anybody else."""
    if not task.cancelled() and not isinstance(task.exception(), ChildGone):
        task.result()
