"""Control `attach`: somebody else starts and stops the server; we only talk to it.

Invariant: nothing here touches a process.
"""

from __future__ import annotations

from pathlib import Path

from swapper.errors import BackendRefused
from workers.control import ExitStatus


class AttachControl:
    """The control of the server `name`, which is not ours to start or stop."""

    def __init__(self, name: str) -> None:
        self._name = name

    async def ensure(self) -> None:
        """Nothing to start."""

    async def stop(self, grace_ms: int | None = None) -> None:
        """Raises BackendRefused: it is not ours to stop."""
        del grace_ms
        raise BackendRefused(f"{self._name} is attached: stop it where it was started")

    async def restart(self, grace_ms: int | None = None) -> None:
        """Raises BackendRefused: it is not ours to stop."""
        del grace_ms
        raise BackendRefused(f"{self._name} is attached: restart it where it was started")

    def alive(self) -> bool | None:
        """Not known from here."""
        return None

    def pid(self) -> int | None:
        """Not known from here."""
        return None

    def exit_status(self) -> ExitStatus | None:
        """Not known from here."""
        return None

    def log_tail(self, n: int) -> list[str] | None:
        """The log is not ours."""
        del n
        return None

    def log_path(self) -> Path | None:
        """The log is not ours."""
        return None
