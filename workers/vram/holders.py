"""Lease holders as processes: are they gone, and wake me when they go.

Invariant: a process is known by its pid and its start, so that a pid reused after we began to look is never taken for
the holder, and one reused before neither, where the caller knows when the holder started. A zombie counts as gone (it
holds no VRAM). It only looks: nothing here sends a signal.
"""

from __future__ import annotations

import asyncio
import os

import psutil

from workers.control import launcher


class Holder:
    """One process, `started` at that moment (clock ticks since boot, which no clock moves); None: whoever has the pid.

    Use `close` when it is of no more interest.
    """

    def __init__(self, pid: int, started: int | None = None) -> None:
        self.pid = pid
        self._process = _find(pid, started)
        stat = launcher.stat_of(pid) if started is None and self._process else None
        self.started = stat[3] if stat is not None else started
        self._pidfd = _open_pidfd(pid) if self._process else -1

    @property
    def alive(self) -> bool:
        """True while that very process runs."""
        if self._process is None:
            return False
        try:
            return self._process.is_running() and self._process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def wake_on_exit(self, event: asyncio.Event) -> None:
        """Set `event` when it ends, where the kernel can tell (pidfd); elsewhere the caller's own looks must do."""
        if self._pidfd >= 0:
            asyncio.get_running_loop().add_reader(self._pidfd, self._exited, event)

    def close(self) -> None:
        """Stop watching."""
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    def _exited(self, event: asyncio.Event) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        event.set()


def _find(pid: int, started: int | None) -> psutil.Process | None:
    try:
        process = psutil.Process(pid)
    except (psutil.NoSuchProcess, ValueError):
        return None
    return process if started is None or launcher.lives(pid, started) else None


def _open_pidfd(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):
        return -1
