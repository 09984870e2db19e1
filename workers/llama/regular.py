"""Opening what lies in a folder others can write to: regular files, and nothing else.

Invariant: no open blocks or has an effect of its own (a FIFO, a socket, a device), and no link is followed. Whatever
is there and is no regular file is an OSError whose `strerror` says so. All functions block: call them in threads.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

_PLAIN = os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC


class NotRegular(OSError):
    """Something else than a file has this name."""

    def __init__(self, path: Path) -> None:
        super().__init__(errno.EINVAL, f"{path.name} is no regular file", str(path))


def stat_regular(path: Path) -> os.stat_result:
    """Its `stat`; raises FileNotFoundError, NotRegular or another OSError."""
    return _regular(path.lstat(), path)


def open_regular(path: Path) -> BinaryIO:
    """Open for reading; raises FileNotFoundError, NotRegular or another OSError."""
    return os.fdopen(_open(path, os.O_RDONLY), "rb")


def rewrite_regular(path: Path, mode: int) -> BinaryIO:
    """Make or empty it for writing; raises NotRegular or another OSError."""
    return os.fdopen(_open(path, os.O_WRONLY | os.O_CREAT, mode), "wb")


def _open(path: Path, flags: int, mode: int = 0) -> int:
    try:
        stat_regular(path)  # some devices act on being opened
    except FileNotFoundError:
        if not flags & os.O_CREAT:
            raise
    fd = os.open(path, flags | _PLAIN, mode)
    try:
        _regular(os.fstat(fd), path)
        if flags & os.O_CREAT:
            os.ftruncate(fd, 0)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _regular(seen: os.stat_result, path: Path) -> os.stat_result:
    if not stat.S_ISREG(seen.st_mode):
        raise NotRegular(path)
    return seen
