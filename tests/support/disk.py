"""A disk that a test fills and empties: a small tmpfs where we may mount one, else a limit on the size of files."""

from __future__ import annotations

import errno
import resource
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

FILLER = "filler"


class SmallDisk:
    """`folder` on a disk of its own. Without the right to mount, `writers` get no more room for the files they have."""

    def __init__(self, folder: Path, mib: int, writers: Callable[[], Sequence[psutil.Process]]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._writers = writers
        command = ["mount", "-t", "tmpfs", "-o", f"size={mib}m,mode=700", "tmpfs", str(folder)]
        self.mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0

    def fill(self) -> None:
        """Leave no byte."""
        if not self.mounted:
            return self._limit(1)
        with (self._folder / FILLER).open("wb", buffering=0) as filler:
            for size in (1 << 20, 1 << 12):
                try:
                    while filler.write(b"x" * size) == size:
                        pass
                except OSError as full:
                    if full.errno != errno.ENOSPC:
                        raise
        return None

    def empty(self) -> None:
        """Give the room back."""
        if not self.mounted:
            return self._limit(resource.RLIM_INFINITY)
        return (self._folder / FILLER).unlink(missing_ok=True)

    def close(self) -> None:
        """Take the disk away, also from under what is still open on it."""
        if self.mounted:
            subprocess.run(["umount", "--lazy", str(self._folder)], check=True)

    def _limit(self, size: int) -> None:
        for process in self._writers():
            limit_files(process, size)


def limit_files(process: psutil.Process, size: int) -> None:
    """The process may write no file beyond `size` bytes from now on; what it starts may not either."""
    _, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, hard))
