"""Ways of starting and stopping a server: one module each, one small surface for all.

Invariant: a control knows processes (or containers, or units) and nothing of models, cards or leases.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


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
        return f"exit status {self.code}" if self.signal is None else f"ended by {signal.Signals(self.signal).name}"


class Control(Protocol):
    """What starts and stops one configured server. Raises BackendError with a sentence where it cannot."""

    async def ensure(self) -> None:
        """Adopt the living process, else start one; with nothing to start, do nothing."""
        ...

    async def stop(self, grace_ms: int = 10_000) -> None:
        """End it and all its children: TERM, after `grace_ms` KILL. Returns once they are gone."""
        ...

    async def restart(self, grace_ms: int = 10_000) -> None:
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
