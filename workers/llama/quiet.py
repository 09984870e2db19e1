"""Waiting until nothing runs in a model: its own counters are looked at until they say so.

Invariant: only an answer of the model itself says that it is idle. No answer proves nothing (a long batch of a prompt
keeps the child from answering): it is looked on for as long as the router calls it loaded. Nothing is changed or woken.
A call whose client left is ended by llama-server only after a second in which it answered nobody (seen on b10434): who
looks more often than that keeps alive what it waits for.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

from swapper.errors import BackendDown, BackendError
from workers.backend import TenantState
from workers.llama.http import Counters, Model, RouterHttp, Slot
from workers.llama.known import state_of

_PAUSE_S = 0.02
_BRISK_S = 0.5
_REST_S = 1.25
"""Between two looks passes `_PAUSE_S`, and once `_BRISK_S` have passed, long enough for an abandoned call to end."""


class Models(Protocol):
    """Which models of a server are loaded, by the names they are called by (`known.Known` is one)."""

    async def look(self, name: str) -> Model | None:
        """Ask the server now; None where it does not have the model. Raises BackendError."""
        ...

    def loaded(self, name: str) -> Model | None:
        """A model that was seen loaded, if it is known that nothing happened since."""
        ...

    def forget(self, name: str) -> None:
        """The next verb looks again."""
        ...


@dataclass(slots=True)
class _Last:
    """What the last look showed, in words."""

    look: str = "it has not answered yet"


@dataclass(frozen=True, slots=True)
class Idle:
    """A model in which nothing runs and nothing waits: its slots, and its counters where it has any."""

    slots: list[Slot]
    counters: Counters | None


async def idle(http: RouterHttp, known: Models, name: str, limit_ms: int | None) -> Idle | None:
    """The model once nothing runs and nothing waits in it; None when it is not loaded (any more).

    Raises BackendDown when the router does not answer, BackendError with what still runs once `limit_ms` have passed.
    """
    last = _Last()
    try:
        async with asyncio.timeout(None if limit_ms is None else limit_ms / 1000):
            return await _look_on(http, known, name, last)
    except TimeoutError:
        raise BackendError(f"{name} is not idle after {(limit_ms or 0) / 1000:g} s: {last.look}") from None


async def _look_on(http: RouterHttp, known: Models, name: str, last: _Last) -> Idle | None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    model = known.loaded(name) or await known.look(name)
    while model is not None and state_of(model) is TenantState.LOADED:
        try:
            slots, counters = await asyncio.gather(http.slots(name), http.counters(name))
        except BackendDown as down:
            last.look = str(down)
            model = await known.look(name)
        else:
            at_work = [slot.id for slot in slots if slot.is_processing]
            if not at_work and (counters is None or counters.processing + counters.deferred == 0):
                return Idle(slots, counters)
            last.look = _words(at_work, counters)
        await asyncio.sleep(_PAUSE_S if loop.time() - began < _BRISK_S else _REST_S)
    return None


def _words(at_work: list[int], counters: Counters | None) -> str:
    words = f"slots at work: {', '.join(map(str, at_work)) or 'none'}"
    return words if counters is None else f"{words}; calls running: {counters.processing}, waiting: {counters.deferred}"
