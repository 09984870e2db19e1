"""The process that really holds a model: the router's child, found by its command line.

Invariant: a process is named by pid and start time together, so that a reused pid is never mistaken for it or
killed. Touches /proc only; where the server runs in a container or on another host nothing is found, which is fine.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import signal
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Child:
    """A process at one moment; `started` is in clock ticks since boot."""

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> Child | None:
        """The process that has this pid now."""
        started = _start_time(pid)
        return cls(pid, started) if started is not None else None

    def alive(self) -> bool:
        """False once it is gone or a zombie (which holds no memory)."""
        return _start_time(self.pid) == self.started

    def ticks(self) -> int:
        """The CPU time it has used, in clock ticks; -1 once it is gone."""
        fields = _stat(self.pid)
        return -1 if fields is None else int(fields[11]) + int(fields[12])

    def below(self, pid: int) -> bool:
        """Whether it was started by the process `pid`, or by one that was. Blocking."""
        seen, parent = {self.pid}, self.pid
        while parent > 1:
            fields = _stat(parent)
            parent = 0 if fields is None else int(fields[1])
            if parent == pid:
                return True
            if parent in seen:
                return False
            seen.add(parent)
        return False

    def environ(self) -> tuple[str, ...]:
        """Its `LLAMA_ARG_*` settings, as `NAME=value`; empty where they may not be read."""
        try:
            raw = (_PROC / str(self.pid) / "environ").read_bytes()
        except OSError:
            return ()
        return tuple(
            sorted(part.decode(errors="replace") for part in raw.split(b"\0") if part.startswith(b"LLAMA_ARG_"))
        )

    def kill(self) -> None:
        """SIGKILL, if it is still the same process."""
        if self.alive():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGKILL)


def find_child(model: str, port: str) -> Child | None:
    """The process with `--alias MODEL` and `--port PORT` in its arguments, if it is visible here. Blocking."""
    if not port or port == "0":
        return None
    pids = (entry for entry in _PROC.iterdir() if entry.name.isdigit())
    for entry in sorted(pids, key=lambda entry: int(entry.name), reverse=True):  # it is mostly a young one
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if _follows(words, b"--alias", model.encode()) and _follows(words, b"--port", port.encode()):
            return Child.of(int(entry.name))
    return None


async def gone(child: Child, *, timeout_s: float) -> bool:
    """Wait until the process is gone; False when it is still there at the end."""
    try:
        fd = os.pidfd_open(child.pid)
    except OSError:
        return not child.alive()
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(fd, ended.set)
    try:
        if child.alive():
            with contextlib.suppress(asyncio.TimeoutError):
                async with asyncio.timeout(timeout_s if math.isfinite(timeout_s) else None):
                    await ended.wait()
        return not child.alive()
    finally:
        loop.remove_reader(fd)
        os.close(fd)


def _follows(words: list[bytes], name: bytes, value: bytes) -> bool:
    return any(a == name and b == value for a, b in itertools.pairwise(words))


def _start_time(pid: int) -> int | None:
    fields = _stat(pid)
    return None if fields is None or fields[0] in {"Z", "X"} else int(fields[19])


def _stat(pid: int) -> list[str] | None:
    """proc_pid_stat(5) from field 3 on (the name before it may contain anything); None without such a process."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()
