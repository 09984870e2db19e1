"""What a job says, read from any place on though the middle of its log may have been taken out meanwhile.

Invariant: a place is counted in what was written, not in what is kept, so that who follows a log gets each part that is
there once, and where parts are missing the line that says so. Only reads.
"""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import BinaryIO

from workers.control import launcher
from workers.jobs import LOG_BYTES

_HEAD, _ = launcher.log_parts(LOG_BYTES)


def read(path: Path, at: int, *, most: int) -> tuple[bytes, int]:
    """At most `most` bytes from the place `at` (0: the beginning) on, and the place after them. Blocking."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            return _read(file, at, most)
    except FileNotFoundError:
        return b"", at


def _read(file: BinaryIO, at: int, most: int) -> tuple[bytes, int]:
    gone, marked = launcher.left_out(file, _HEAD)
    if gone and at < _HEAD + gone:
        if at < _HEAD:
            most = min(most, _HEAD - at)
        else:
            file.seek(_HEAD)
            return file.read(marked), _HEAD + gone
    file.seek(at - gone + marked if at >= _HEAD + gone else at)
    chunk = file.read(most)
    return chunk, at + len(chunk)
