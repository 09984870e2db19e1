"""Ways of starting and stopping a server: one module each, one small surface for all.

Invariant: a control knows processes (or containers, or units) and nothing of models, cards or leases.
"""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """How the last process ended: an exit code, or the signal that ended it."""

    code: int | None
    signal: int | None
    ended_ms: int

    @property
    def clean(self) -> bool:
        """Whether it ended of its own will and well."""
        return self.code == 0

    def __str__(self) -> str:
        if self.signal is None:
            return f"exit status {self.code}"
        named = self.signal in set(signal.Signals)  # most of the real-time ones have no name
        return f"ended by {signal.Signals(self.signal).name if named else f'signal {self.signal}'}"


class Phase(StrEnum):
    """Where what a control starts and stops is on its way.

    `missing`: there is nothing that could be started (a container that was removed). `stuck`: it is there and does not
    work (paused, unhealthy). `unreachable`: whoever runs it (an engine, an API) does not answer, so nothing is known.
    """

    MISSING = "missing"
    GONE = "gone"
    STARTING = "starting"
    UP = "up"
    STUCK = "stuck"
    STOPPING = "stopping"
    UNREACHABLE = "unreachable"


@dataclass(frozen=True, slots=True)
class Seen:
    """One look. `why`: a sentence on what is not as it should be, "" where nothing is to be said.

    `run` differs from one start to the next ("" while nothing runs). `pids` are processes of this machine and
    `containers` ids, as far as they are known from here. `came_back`: it runs although it was stopped here, and nobody
    asked for it: whoever runs it began anew.
    """

    phase: Phase
    why: str = ""
    run: str = ""
    pids: tuple[int, ...] = ()
    containers: tuple[str, ...] = ()
    came_back: bool = False


GRACE_MS = 10_000
"""The grace of a control that was given none."""


class Control(Protocol):
    """What starts and stops one configured server. Raises BackendError with a sentence where it cannot.

    Its maker gives it the server's own grace; a `grace_ms` of an order takes the place of that.
    """

    async def ensure(self) -> None:
        """Adopt the living process, else start one; with nothing to start, do nothing."""
        ...

    async def stop(self, grace_ms: int | None = None) -> None:
        """End it and all its children: TERM, after its grace KILL. Returns once they are gone."""
        ...

    async def restart(self, grace_ms: int | None = None) -> None:
        """End it, as `stop` does, and start it anew."""
        ...

    def alive(self) -> bool | None:
        """Whether its process lives; None where that cannot be known from here."""
        ...

    def pid(self) -> int | None:
        """The server's own process while it lives; None otherwise, and where it is not ours."""
        ...

    def exit_status(self) -> ExitStatus | None:
        """How its last process ended; None while it runs, and where nobody saw it."""
        ...

    def log_tail(self, n: int) -> list[str] | None:
        """The last `n` lines of its log, oldest first; None where the log is not ours."""
        ...

    def log_path(self) -> Path | None:
        """The file of its log; None where the log is not ours."""
        ...


@runtime_checkable
class Watched(Control, Protocol):
    """A control that can say how far what it starts has come. What a `Control` tells without asking is its last look.

    Only `ensure`, `stop` and `restart` change anything. `log_tail` may ask somebody else: call it in a thread.
    """

    async def look(self) -> Seen:
        """Ask now, within a few seconds. Never raises for what a process, an engine or an API does."""
        ...

    def changes(self) -> AsyncIterator[None]:
        """Yields at once, and then whenever a look would show something new, as far as that is told."""
        ...

    def notes(self) -> str | None:
        """What was remarkable about the last stop, in one sentence; None: nothing."""
        ...

    async def close(self) -> None:
        """Let go of connections and threads; what runs stays as it is."""
        ...


async def refreshed(control: object) -> None:
    """Have a control that tells only what it last saw look anew; nothing for one that always knows."""
    if isinstance(control, Watched):
        await control.look()
