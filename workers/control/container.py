"""What an engine's `inspect` of a container says: how far it has come, how it ended, and its process.

Invariant: pure over the document but for looking at /proc for the process it names, which counts as the container's
only where that container's id is in its cgroup (an engine on another machine has numbers of its own).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from workers.control import ExitStatus, Phase, Seen, launcher

_SIGNAL_BASE = 128
_KILLED = 137


@dataclass(frozen=True, slots=True)
class Container:
    """One look at a container. `process`: (pid, start in clock ticks since boot) of its first process, seen here."""

    document: Mapping[str, Any]
    process: tuple[int, int] | None = None

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Container:
        """With its process, where that is one of this machine's."""
        return cls(document, _process(document["State"].get("Pid") or 0, document["Id"]))

    @property
    def id(self) -> str:
        """All its digits."""
        return self.document["Id"]

    @property
    def name(self) -> str:
        """Without the slash that the engine puts before it."""
        return self.document["Name"].lstrip("/")

    @property
    def _state(self) -> Mapping[str, Any]:
        return self.document["State"]

    @property
    def running(self) -> bool:
        """Whether something of it is there, or will be again in a moment (a paused one, one between two attempts)."""
        return bool(self._state.get("Running") or self._state.get("Restarting") or self._state.get("Paused"))

    @property
    def paused(self) -> bool:
        """It holds all it held, VRAM too, and does nothing."""
        return bool(self._state.get("Paused"))

    @property
    def always_back(self) -> bool:
        """Whether it comes back when its engine begins anew, although it was stopped."""
        return self.document["HostConfig"].get("RestartPolicy", {}).get("Name") == "always"

    @property
    def stop_timeout_s(self) -> int:
        """Its own time to stop, s; 0 where it has none."""
        return self.document["Config"].get("StopTimeout") or 0

    @property
    def stop_signal(self) -> str:
        """What it is told to stop with."""
        signal: str = self.document["Config"].get("StopSignal") or "SIGTERM"
        return signal if signal.startswith("SIG") or signal.isdigit() else f"SIG{signal}"

    @property
    def was_killed(self) -> bool:
        """Whether the signal that ended it was KILL."""
        return self._state.get("ExitCode") == _KILLED

    @property
    def started_s(self) -> float:
        """When it last started, s since the epoch; 0 when it never did."""
        return time_s(self._state.get("StartedAt", ""))

    @property
    def ended_s(self) -> float:
        """When its last run that is over ended, s since the epoch; 0 when none is."""
        return time_s(self._state.get("FinishedAt", ""))

    def alive(self) -> bool:
        """Whether it runs; by its process, where that can be seen, else as of this look."""
        if self.process is not None:
            return launcher.lives(*self.process)
        return self.running

    def exit_status(self) -> ExitStatus | None:
        """How its last run ended; None while it runs, and before its first."""
        if self.running or not self.started_s:
            return None
        code, ended = int(self._state.get("ExitCode", 0)), round(self.ended_s * 1000)
        if _SIGNAL_BASE < code < _SIGNAL_BASE + 65:
            return ExitStatus(None, code - _SIGNAL_BASE, ended)
        return ExitStatus(code, None, ended)

    def seen(self) -> Seen:
        """How far it has come."""
        phase, why = self._phase()
        if not self.running:
            return Seen(phase, why)
        pids = () if self.process is None else (self.process[0],)
        return Seen(phase, why, f"{self.id}@{self._state.get('StartedAt')}", pids, (self.id,))

    def _phase(self) -> tuple[Phase, str]:
        state = self._state
        if not self.running:
            return Phase.GONE, state.get("Error") or ("it was killed for want of memory" if _oom(state) else "")
        if self.paused:
            return Phase.STUCK, f"the container {self.name} is paused, and holds what it held"
        if state.get("Restarting"):
            return Phase.STARTING, f"the container {self.name} ended ({state.get('ExitCode')}) and is started again"
        health: Mapping[str, Any] = state.get("Health") or {}
        match health.get("Status", "none"):
            case "starting":
                return Phase.STARTING, f"the health check of the container {self.name} has not passed yet"
            case "unhealthy":
                said = _last_check(health)
                return Phase.STUCK, f"the health check of the container {self.name} fails{f': {said}' if said else ''}"
            case _:
                return Phase.UP, ""


def _oom(state: Mapping[str, Any]) -> bool:
    return bool(state.get("OOMKilled"))


def _last_check(health: Mapping[str, Any]) -> str:
    log: Sequence[Mapping[str, Any]] = health.get("Log") or [{}]
    return " ".join(str(log[-1].get("Output", "")).split())[:300]


def time_s(text: str) -> float:
    """Seconds since the epoch of RFC 3339 with nanoseconds; 0 of `0001-01-01T00:00:00Z`, which says never."""
    text = re.sub(r"(\.\d{6})\d+", r"\1", text)
    try:
        return max(0.0, datetime.fromisoformat(text).timestamp())
    except (ValueError, OverflowError):
        return 0.0


def _process(pid: int, container: str) -> tuple[int, int] | None:
    stat = launcher.stat_of(pid) if pid else None
    if stat is None:
        return None
    try:
        inside = container in Path(f"/proc/{pid}/cgroup").read_text()
    except OSError:
        return None
    return (pid, stat[3]) if inside else None
