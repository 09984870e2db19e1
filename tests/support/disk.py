"""A disk that a test fills and empties: a small tmpfs where we may mount one, else a limit on the size of files.

Invariant: what lies on it stays as it is; only the room beside it grows and shrinks.
"""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

PAGE = os.sysconf("SC_PAGE_SIZE")
_TRIES = 100


class SmallDisk:
    """`folder` on a disk of its own. Without the right to mount, `writers` get no more room for the files they have."""

    def __init__(self, folder: Path, mib: int, writers: Callable[[], Sequence[psutil.Process]]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._bytes = mib << 20
        self._writers = writers
        options = f"size={self._bytes},mode=700"
        self.mounted = _done("mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder))

    def fill(self) -> None:
        """Leave no byte."""
        self.leave(0)

    def leave(self, room: int) -> None:
        """Leave so many bytes and no more, in whole pages. Where it could not be mounted: to each file from now on."""
        if not self.mounted:
            return self._limit(max(room, 1))
        for _ in range(_TRIES):  # more may have been written since it was measured, and no disk is smaller than that
            if self._resize(max(self._used() + room // PAGE * PAGE, PAGE)):
                return None
        raise AssertionError(f"{self._folder} is written to faster than it is filled")

    def empty(self) -> None:
        """Give the room back."""
        if self.mounted:
            assert self._resize(self._bytes)
        else:
            self._limit(resource.RLIM_INFINITY)

    def close(self) -> None:
        """Take the disk away, also from under what is still open on it."""
        if self.mounted:
            subprocess.run(["umount", "--lazy", str(self._folder)], check=True)

    def _used(self) -> int:
        disk = os.statvfs(self._folder)
        return (disk.f_blocks - disk.f_bfree) * disk.f_frsize

    def _resize(self, size: int) -> bool:
        return _done("mount", "-o", f"remount,size={size}", str(self._folder))

    def _limit(self, size: int) -> None:
        for process in self._writers():
            _limit_files(process, size)


def _done(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _limit_files(process: psutil.Process, size: int) -> None:
    """The process may write no file beyond `size` bytes from now on; what it starts may not either."""
    _, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, hard))
