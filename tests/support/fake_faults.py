"""Faults of the fake router: which verb, which kind, which model, once or for good; and the card its models fill.

Invariant: a fault strikes only where it was set, as often as was said, and every strike is noted in `struck`, so that
a test can tell that it tested something. Pure bookkeeping: no clock, no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Verb(StrEnum):
    """What is asked of a router. `answer` is every call of a model itself: completions, chat, embeddings, ranking."""

    HEALTH = "health"
    MODELS = "models"
    EVENTS = "events"
    LOAD = "load"
    UNLOAD = "unload"
    PROPS = "props"
    SLOTS = "slots"
    METRICS = "metrics"
    SAVE = "save"
    RESTORE = "restore"
    ERASE = "erase"
    ANSWER = "answer"


class Kind(StrEnum):
    """What goes wrong.

    With any verb, before the effect or (`Fault.after`) after it: `late` (by `seconds`), `error` (`status`), `hang`
    (no answer ever), `drop` (the connection ends without one), `restarts` (the router dies with all its children and
    is there again after `seconds`), `child_dies` (before: also in the midst of a load, save, restore or answer).
    `vram_held` (unload): ok, /models says unloaded, the VRAM stays held. `mute` (load): loaded, but answers nothing.
    `short_file` (save): `short` bytes less are on the disk than it says. `no_reuse` (restore): ok, but the next call
    reads everything again. `deaf` (events): a stream that stands and tells nothing.
    """

    LATE = "late"
    ERROR = "error"
    HANG = "hang"
    DROP = "drop"
    RESTARTS = "restarts"
    CHILD_DIES = "child_dies"
    VRAM_HELD = "vram_held"
    MUTE = "mute"
    SHORT_FILE = "short_file"
    NO_REUSE = "no_reuse"
    DEAF = "deaf"


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. `model` None: of whichever model; `times` None: for good."""

    verb: Verb
    kind: Kind
    model: str | None = None
    after: bool = False
    times: int | None = 1
    seconds: float = 1.0
    status: int = 503
    short: int = 1


class Faults:
    """Those that are set; the one set first strikes first."""

    def __init__(self) -> None:
        self._set: list[tuple[Fault, int | None]] = []
        self.struck: list[Fault] = []

    def set(self, *faults: Fault) -> None:
        """Let these strike from now on."""
        self._set += [(fault, fault.times) for fault in faults]

    def clear(self) -> None:
        """Let none strike any more."""
        self._set.clear()

    def take(self, verb: Verb, model: str | None, *kinds: Kind, after: bool = False) -> Fault | None:
        """The fault of one of these kinds that strikes here and now, if any; it counts as struck."""
        for nth, (fault, left) in enumerate(self._set):
            if fault.verb is verb and fault.kind in kinds and fault.after is after and fault.model in (None, model):
                if left is not None:
                    self._set[nth : nth + 1] = [(fault, left - 1)] if left > 1 else []
                self.struck.append(fault)
                return fault
        return None


class FakeVram:
    """One card's memory in MiB: who holds how much. A probe of a simulation reads `used_mib`.

    `room_mib`: what is loaded while more than that is held runs out of memory; None: nothing does.
    """

    def __init__(self, room_mib: int | None = None) -> None:
        self.room_mib = room_mib
        self.held: dict[str, int] = {}
        self._stuck: set[str] = set()

    @property
    def used_mib(self) -> int:
        """All that is held now."""
        return sum(self.held.values())

    @property
    def overfull(self) -> bool:
        """Whether more is held than there is."""
        return self.room_mib is not None and self.used_mib > self.room_mib

    def take(self, holder: str, mib: int) -> None:
        """Hold so much from now on (instead of what it held)."""
        self.held[holder] = mib

    def stick(self, holder: str) -> None:
        """What this one holds stays held when it ends, until `free`."""
        self._stuck.add(holder)

    def let_go(self, holder: str) -> None:
        """It ended."""
        if holder not in self._stuck:
            self.held.pop(holder, None)

    def free(self) -> None:
        """Free what ended long ago and was still held."""
        for holder in self._stuck:
            self.held.pop(holder, None)
        self._stuck.clear()
