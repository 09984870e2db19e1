"""Waiting for a model to come and to go: asked for once, then watched in `/models` and among the processes.

Invariant: an answer of 200 to a load or an unload means nothing; the end is what `/models` shows and, for an
unload, that the child's process is gone. Between two looks passes a turn of the router's events, and at most 20 ms
while their stream does not stand.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from swapper.errors import BackendDown, BackendError, BackendGone, BackendRefused
from workers.backend import TenantState
from workers.llama.child import Child, find_child, gone
from workers.llama.events import RouterEvents
from workers.llama.http import Model, RouterHttp
from workers.llama.known import Known, state_of
from workers.llama.why import complains, reasons
from workers.patience import STALL_S, Patience, Signs, signs_of, wanted

T = TypeVar("T")

_GONE_S = 0.25
ORPHAN_S = 2.0
"""Without its router a model's process ends within about 1.5 s."""
_AFTER_KILL_S = 15.0  # the router's own stop-timeout is 10 s by default
_PASSED_ON, _PASSED_ON_S = 20, 0.05
"""So often, and after so many seconds each, it is looked for what the router has not yet passed on."""
_LOG_READ = 1000
"""So many lines are looked through for a reason; a wrong option alone makes the server print thirty."""


class Control(Protocol):
    """What starts and stops the router's process, where we own it."""

    async def ensure(self) -> None:
        """Adopt or start the process."""
        ...

    def alive(self) -> bool | None:
        """Whether its process lives; None where it is not ours."""
        ...

    def pid(self) -> int | None:
        """Its process while it lives; None also where it is not ours."""
        ...

    def log_tail(self, n: int) -> list[str] | None:
        """The last `n` lines of its log; None where the log is not ours."""
        ...

    def log_path(self) -> Path | None:
        """The file of its log; None where the log is not ours."""
        ...

    async def restart(self, grace_ms: int | None = None) -> None:
        """End the process, after its grace by KILL, and start it again."""
        ...


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds without any sign of progress after which a verb gives up.

    `load_s`: where no process can be seen, else `stall_s`; `admit_s`: the router keeps saying `limit`; `start_s`: no
    router is there and one is being started.
    """

    load_s: float = 600.0
    stall_s: float = STALL_S
    save_s: float = 120.0
    restore_s: float = 300.0
    answer_s: float = 120.0
    admit_s: float = 60.0
    start_s: float = 30.0

    def patience(self, what: str, signs: Callable[[], Awaitable[Signs]], *, answers: bool) -> Patience:
        """With a load, or with a first answer."""
        blind_s = self.answer_s if answers else self.load_s
        return Patience(what, signs, blind_s=blind_s, stall_s=self.stall_s, answers=answers)


LONG_AGO = -1
"""A turn before all others."""


class Lifecycle:
    """Loads and unloads on one router."""

    def __init__(
        self, http: RouterHttp, events: RouterEvents, known: Known, control: Control | None, limits: Limits
    ) -> None:
        self._http = http
        self._events = events
        self._known = known
        self._control = control
        self._limits = limits

    async def unload(self, name: str, child: Child | None, limit_s: float) -> None:
        """Unload and wait until the child is gone; it is killed after `limit_s`. Raises BackendError if it stays."""
        self._events.open()
        turn = self._events.turns
        try:
            await self._http.unload(name)
        except BackendRefused as refused:
            if "not running" not in str(refused):
                raise
            turn = LONG_AGO
        except BackendDown:
            if child is None and self._control is None:
                raise
            turn = LONG_AGO
        loop = asyncio.get_running_loop()
        deadline, forced = loop.time() + limit_s, False
        while True:
            turn = await self._events.turn(turn, max(0.0, deadline - loop.time()))
            unloaded = await self._unloaded(name)
            # A router that is dead or hangs says nothing: then the child itself decides, where we see one.
            if unloaded if child is None else (unloaded is not False and await gone(child, timeout_s=_GONE_S)):
                return
            if loop.time() >= deadline:
                if forced:
                    raise BackendError(f"{name} is still there after its unload, and nothing here can end its process")
                await self._force(child, silent=unloaded is None)
                deadline, forced = deadline + _AFTER_KILL_S, True

    async def ended(self, name: str, child: Child, limit_s: float) -> None:
        """Wait for the end of a process that its router does not know (any more); it is killed after `limit_s`."""
        if not await gone(child, timeout_s=limit_s):
            child.kill()
            if not await gone(child, timeout_s=_AFTER_KILL_S):
                raise BackendError(f"the process of {name} is still there although it was killed")

    async def _unloaded(self, name: str) -> bool | None:
        """Whether /models shows it gone; None when the router does not answer."""
        try:
            return not state_of(await self._known.look(name)).holds_vram
        except BackendDown:
            return None

    async def _force(self, child: Child | None, *, silent: bool) -> None:
        if child is not None:
            child.kill()
        elif silent and self._control is not None:
            await self._control.restart()

    async def load(self, name: str) -> Model | None:
        """Load and wait for `loaded`, as long as there is progress; None when it was running or being loaded already.

        Raises BackendError with the server's reason.
        """
        self._events.open()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._limits.admit_s
        while True:
            wanted(name)
            turn = self._events.turns
            try:
                await self._http.load(name)
                break
            except BackendRefused as refused:
                if "already running" in str(refused):
                    return None
                if "limit reached" not in str(refused) or loop.time() >= deadline:
                    raise
            await self._events.turn(turn)
        try:
            return await self.loaded(name, turn)
        except BackendGone:
            await asyncio.sleep(ORPHAN_S)  # whoever asks again must not find the card taken by what was being loaded
            raise

    async def loaded(self, name: str, turn: int = LONG_AGO) -> Model:
        """Wait until a model that is being loaded is there; the first look waits for a turn after `turn`.

        Raises BackendStalled where it makes no progress.
        """
        patience = self.patience(name)
        while True:
            turn = await self._events.turn(turn)
            model = await self._known.look(name)
            match state_of(model):
                case TenantState.LOADED | TenantState.SLEEPING if model is not None:
                    return model
                case TenantState.LOADING:
                    await patience.look()
                case _:
                    raise BackendError(await self._why_not(name, model))

    def patience(self, name: str, *, answers: bool = False) -> Patience:
        """With a load of this model, or with its first answer: by what its router tells, and what its process does."""
        child: Child | None = None
        id_ = name

        async def signs() -> Signs:
            nonlocal child, id_
            if child is None or not child.alive():
                with suppress(BackendError):
                    model = await self._known.look(name)
                    id_ = name if model is None else model.id
                    child = None if model is None else await asyncio.to_thread(find_child, id_, model.run)
            return await signs_of(None, () if child is None else (child.pid,), self._events.steps.get(id_, 0))

        return self._limits.patience(name, signs, answers=answers)

    async def _why_not(self, name: str, model: Model | None) -> str:
        if model is None:
            return f"the router dropped {name} from its list while it was loading"
        if not model.status.failed:
            return f"{name} was unloaded by somebody else while it was loading"
        text = f"llama-server could not load {name} (exit code {model.status.exit_code})"
        port = model.run
        control = self._control
        tail = await self._last_lines(port)
        if control is None or tail is None:
            theirs = f"the log of the llama-server at {self._http.url}, which swapper did not start"
            return f"{text}; the reason is in {theirs}: see its lines that begin with [{port}]"
        why = "; ".join(reasons(tail, port)) or "it said nothing"
        path = control.log_path() or "that of its container or unit"
        return f"{text}: {why} (log: {path}, lines that begin with [{port}])"

    async def _last_lines(self, port: str) -> list[str] | None:
        """Of the router's log, with what the child at `port` complained of; None where the log is not ours."""
        if self._control is None:
            return None
        tail: list[str] | None = None
        for _ in range(_PASSED_ON):
            tail = await asyncio.to_thread(self._control.log_tail, _LOG_READ)
            if tail is None or complains(tail, port):
                break
            await asyncio.sleep(_PASSED_ON_S)
        return tail


async def patiently(
    call: Coroutine[None, None, T], what: str, limit_s: float, progress: Callable[[], object] = lambda: None
) -> T:
    """Await a call for as long as `progress` changes; raises BackendDown once it stood still for `limit_s`."""
    task = asyncio.create_task(call, name=what)
    before: object = None
    try:
        while not (await asyncio.wait({task}, timeout=limit_s))[0]:
            now = progress()
            if now == before:
                raise BackendDown(f"{what}: no answer from llama-server and no progress for {limit_s:.0f} s")
            before = now
        return task.result()
    finally:
        task.cancel()
