"""A control whose phase the test sets: what an engine, a manager or an API would show, without one.

Invariant: it lies as they do: an order is taken at once and done when the test says so (`obeys` False: never;
`comes_up_as`: how far a start comes).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

from workers.control import ExitStatus, Phase, Seen
from workers.control.pulse import Pulse


class FakeControl:
    """Implements `Watched`. `orders` are what it was told, in order."""

    def __init__(self, phase: Phase = Phase.GONE) -> None:
        self.seen = Seen(phase)
        self.orders: list[str] = []
        self.obeys = True
        self.comes_up_as = Phase.UP
        self.note: str | None = None
        self.ended: ExitStatus | None = None
        self.log: list[str] | None = None
        self._pulse = Pulse()

    def show(self, seen: Seen) -> None:
        """From now on a look shows this, and whoever waits is told."""
        self.seen = seen
        self._pulse.beat()

    async def ensure(self) -> None:
        self.orders.append("ensure")
        if self.obeys:
            self.show(Seen(self.comes_up_as, run="1"))

    async def stop(self, grace_ms: int | None = None) -> None:
        self.orders.append(f"stop {grace_ms}")
        if self.obeys:
            self.show(Seen(Phase.GONE))

    async def restart(self, grace_ms: int | None = None) -> None:
        await self.stop(grace_ms)
        await self.ensure()

    async def look(self) -> Seen:
        return self.seen

    def changes(self) -> AsyncIterator[None]:
        return self._pulse.beats()

    def notes(self) -> str | None:
        return self.note

    async def close(self) -> None:
        self.orders.append("close")

    def alive(self) -> bool | None:
        if self.seen.phase is Phase.UNREACHABLE:
            return None
        return self.seen.phase not in (Phase.GONE, Phase.MISSING)

    def pid(self) -> int | None:
        return next(iter(self.seen.pids), None)

    def exit_status(self) -> ExitStatus | None:
        return self.ended

    def log_tail(self, n: int) -> list[str] | None:
        return self.log[-n:] if self.log is not None else None

    def log_path(self) -> Path | None:
        return None
