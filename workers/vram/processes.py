"""Who holds VRAM: what /proc tells of a process that a driver named, and whom it belongs to.

Invariant: only looks, under the /proc it is given; a process that ended meanwhile, or that cannot be seen from here
(the driver names processes of the machine, a container has its own numbers), is told of by its pid alone. Whose a
process is comes from the `Owners` of the caller; nothing here knows tenants, leases or policy.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import psutil

from workers.backend import Held, Owners

PROC = Path("/proc")
SHORT = 12
"""So many digits of a container's id are shown, as the tools do."""

_ID = re.compile(r"(?:^|[-/:])([0-9a-f]{64})(?:\.scope)?(?=/|$)")
"""A container's id in a cgroup path: /docker/ID, docker-ID.scope, libpod-ID.scope, cri-containerd-ID.scope,
crio-ID.scope, /kubepods/.../ID, kubepods-...slice:cri-containerd:ID."""
_MONITOR = re.compile(r"/(?:libpod|crio)-conmon-[0-9a-f]{64}\.scope")
"""The process beside a container that watches over it is not in it."""


def held_by(uses: Mapping[int, int | None], owners: Owners, proc: Path = PROC) -> tuple[Held, ...]:
    """What is known of each process, by pid; `uses` are their MiB (None: not told). Blocking, well under 1 ms each."""
    return tuple(_held(pid, mib, owners, proc) for pid, mib in sorted(uses.items()))


def words(held: Iterable[Held]) -> tuple[str, ...]:
    """For people, each once: whose it is, or else `pid 12 (python in container 0f3c...)`."""
    return tuple(dict.fromkeys(one.owner or _word(one) for one in held))


def containers_of(pid: int, proc: Path = PROC) -> tuple[str, ...]:
    """Ids of the containers a process runs in, the outermost first; none where it runs in none that shows."""
    found: dict[str, None] = {}
    for line in _text(proc / str(pid) / "cgroup").splitlines():
        _, _, path = [*line.split(":", 2), "", ""][:3]
        if not _MONITOR.search(path):
            found |= dict.fromkeys(_ID.findall(path))
    return tuple(found)


def line_of(pid: int, proc: Path = PROC) -> tuple[tuple[int, int], ...]:
    """(pid, start in clock ticks since boot) of a process, its parent, and so on up to the first that is seen."""
    line: dict[int, int] = {}
    while pid > 0 and pid not in line:
        fields = _text(proc / str(pid) / "stat").rpartition(")")[2].split()
        if len(fields) < 20:
            break
        line[pid] = int(fields[19])
        pid = int(fields[1])
    return tuple(line.items())


def named_process(pid: int) -> str | None:
    """`pid 1234 (ffmpeg)`; None when no such process runs (a zombie holds no memory)."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else f"pid {pid} ({process.name()})"
    except psutil.NoSuchProcess:
        return None
    except psutil.AccessDenied:
        return f"pid {pid}"


def _held(pid: int, mib: int | None, owners: Owners, proc: Path) -> Held:
    line, containers = line_of(pid, proc), containers_of(pid, proc)
    name = _text(proc / str(pid) / "comm").strip() or None
    return Held(pid, mib, name, line, containers, _owner(pid, line, containers, owners))


def _owner(pid: int, line: Iterable[tuple[int, int]], containers: tuple[str, ...], owners: Owners) -> str | None:
    for one in (pid, *(known for known, _ in line)):
        if one in owners.pids:
            return owners.pids[one]
    for inner in reversed(containers):
        for known, owner in owners.containers.items():
            if len(known) >= SHORT and inner.startswith(known):
                return owner
    return None


def _word(held: Held) -> str:
    inside = f"in container {held.containers[-1][:SHORT]}" if held.containers else ""
    said = " ".join(filter(None, (held.name, inside)))
    return f"pid {held.pid} ({said})" if said else f"pid {held.pid}"


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
