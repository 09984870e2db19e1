"""How a call stands and what became of it: the words between admission and whoever carries a call.

Invariant: values only.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class Full:
    """`waiting` calls wait already; the call was not taken."""

    waiting: int


class Turn(StrEnum):
    """How a wait ended: it may run, the model could not be loaded, or it waited as long as it may."""

    RUN = "run"
    FAILED = "failed"
    TIMED_OUT = "timed_out"


class CallState(StrEnum):
    """`parked` waits too, but is passed over until `unpark` (a pause between two tries)."""

    WAITING = "waiting"
    PARKED = "parked"
    RUNNING = "running"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class Cut:
    """What a cut did: calls ended with a stated reason, and calls with no byte sent that wait again."""

    ended: int
    requeued: int
