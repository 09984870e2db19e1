"""Which models are loaded, remembered for as long as the router says that nothing changed.

Invariant: an entry is used only while the event stream that stood when it was read still stands and has told no turn
since; everything else is a fresh look at `/models`. Forgetting costs a request, never more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from workers.backend import TenantState
from workers.llama.events import RouterEvents
from workers.llama.http import Model, RouterHttp


def state_of(model: Model | None) -> TenantState:
    """What /models says of a model; one that it does not list is FAILED, since nothing can be done with it."""
    if model is None:
        return TenantState.FAILED
    match model.status.value:
        case "loaded":
            return TenantState.LOADED
        case "loading":
            return TenantState.LOADING
        case "sleeping":
            return TenantState.SLEEPING
        case _:
            return TenantState.FAILED if model.status.failed else TenantState.UNLOADED


@dataclass(frozen=True, slots=True)
class _Entry:
    model: Model
    turn: int


class Known:
    """The loaded models of one router, by the name they are called by."""

    def __init__(self, http: RouterHttp, events: RouterEvents) -> None:
        self._http = http
        self._events = events
        self._entries: dict[str, _Entry] = {}

    async def look(self, name: str) -> Model | None:
        """Read `/models` now; None where the router does not list the model. Raises BackendError."""
        turn, standing = self._events.turns, self._events.standing
        model = (await self._http.models()).get(name)
        if model is not None and standing and state_of(model) is TenantState.LOADED:
            self._entries[name] = _Entry(model, turn)
        else:
            self.forget(name)
        return model

    def loaded(self, name: str) -> Model | None:
        """The entry of a model that was seen loaded, if nothing happened at the router since."""
        entry = self._entries.get(name)
        current = entry is not None and self._events.standing and entry.turn == self._events.turns
        return entry.model if entry is not None and current else None

    def forget(self, name: str) -> None:
        """The next verb looks again."""
        self._entries.pop(name, None)

    def compare(self, seen: Mapping[str, Model]) -> None:
        """Forget what a look that somebody else took shows otherwise (an event stream can be dead and not know it)."""
        for name, entry in list(self._entries.items()):
            model = seen.get(name)
            if model is None or model.status != entry.model.status:
                self.forget(name)
