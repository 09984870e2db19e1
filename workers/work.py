"""What processes of this machine have done so far: how one that works is told from one that hangs, from outside.

Invariant: reads /proc and changes nothing; what cannot be seen (another host, another user's I/O) counts as nothing
done, never as an error.
"""

from __future__ import annotations

import resource
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

MUCH = 1 << 20
"""Bytes: who is only asked how it is reads and takes less than this in a while."""

_PROC = Path("/proc")
_PAGE = resource.getpagesize()
_READ = (b"rchar:", b"read_bytes:")


@dataclass(frozen=True, slots=True)
class Work:
    """Of some processes together: `bytes` read so far, `memory` they have or took from disk, and CPU `ticks`."""

    bytes: int = 0
    memory: int = 0
    ticks: int = 0


def work_of(pids: Iterable[int]) -> Work | None:
    """Of these processes and all below them; None where none of them can be seen. Blocking, some ms."""
    found = [work for pid in _with_children(pids) if (work := _work(pid)) is not None]
    if not found:
        return None
    return Work(sum(w.bytes for w in found), sum(w.memory for w in found), sum(w.ticks for w in found))


def _with_children(pids: Iterable[int]) -> set[int]:
    found = set[int]()
    for pid in pids:
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            found.update((pid, *(child.pid for child in process.children(recursive=True))))
    return found


def _work(pid: int) -> Work | None:
    """By proc_pid_stat(5): fields 12 (majflt), 14 and 15 (utime, stime), 24 (rss)."""
    try:
        fields = (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    if fields[0] in {"Z", "X"}:
        return None
    pages = int(fields[9]) + int(fields[21])
    return Work(_bytes(pid), pages * _PAGE, int(fields[11]) + int(fields[12]))


def _bytes(pid: int) -> int:
    try:
        lines = (_PROC / str(pid) / "io").read_bytes().splitlines()
    except OSError:  # another user's
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(_READ))
