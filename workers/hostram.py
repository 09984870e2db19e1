"""The machine's memory as a second resource: what can be had of it, and that a load or a sleep leaves enough of it.

Invariant: nothing here takes memory; whoever is to take some asks first, and is refused in one sentence where less than
the floor would stay. What may be had is what the kernel says (MemAvailable), or what the limit of our own cgroup leaves
(version 2; the parents' limits count, and the inactive file cache can be had), whichever is less: what we start runs in
that. A server that somebody else runs in a cgroup of its own is judged by the machine's memory. It reads /proc and
/sys/fs/cgroup. Sources: proc_meminfo(5), the kernel's cgroup-v2.rst.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from swapper.errors import BackendRefused
from workers.backend import Unread
from workers.vram.processes import PROC
from workers.vram.unified import HostMemory, host_memory

FLOOR_MIB = 1024
"""So much of the machine's memory stays available to others."""
WAIT_S = 20.0
"""What leaves meanwhile gives its memory back: so long it is waited for."""
LOOK_S = 0.5
LEAST_MIB = 64
"""Less than this is not asked for: every process takes that."""
CGROUP = Path("/sys/fs/cgroup")
_MIB = 1 << 20
_IN_MEMORY = frozenset({"tmpfs", "ramfs"})


def available(proc: Path = PROC, cgroup: Path = CGROUP) -> HostMemory | Unread:
    """See the module text. A limit that cannot be read is none."""
    memory = host_memory(proc)
    if isinstance(memory, Unread):
        return memory
    total, free = memory.total_mib, memory.free_mib
    for folder in _folders(proc, cgroup):
        limit, current = _number(folder / "memory.max"), _number(folder / "memory.current")
        if limit is None or current is None:
            continue
        found = re.search(r"^inactive_file (\d+)$", _text(folder / "memory.stat"), re.MULTILINE)
        total = min(total, limit // _MIB)
        free = min(free, max(0, limit - current + (int(found[1]) if found else 0)) // _MIB)
    return HostMemory(total, free)


def in_memory(path: Path, proc: Path = PROC) -> bool:
    """Whether what is written there is in the machine's memory (tmpfs)."""
    where, kind, longest = os.path.realpath(path), "", -1
    for line in _text(proc / "self" / "mountinfo").splitlines():
        fields, _, rest = line.partition(" - ")
        point = fields.split()[4].replace("\\040", " ") if len(fields.split()) > 4 else ""
        inside = where == point or where.startswith(point.rstrip("/") + "/")
        if point and inside and len(point) >= longest:  # of two on one place the later one is seen
            longest, kind = len(point), rest.split()[0] if rest.split() else ""
    return kind in _IN_MEMORY


class HostRam:
    """`needs`: tenant -> MiB of the machine's memory that its load takes; those that are not named take none."""

    def __init__(
        self,
        needs: Mapping[str, int],
        *,
        floor_mib: int = FLOOR_MIB,
        memory: Callable[[], HostMemory | Unread] = available,
        wait_s: float = WAIT_S,
    ) -> None:
        self._needs = {tenant: mib for tenant, mib in needs.items() if mib >= LEAST_MIB}
        self._floor_mib = floor_mib
        self._memory = memory
        self._wait_s = wait_s
        self._one = asyncio.Lock()

    def asks(self, tenant: str) -> bool:
        """Whether its load takes any."""
        return tenant in self._needs

    @asynccontextmanager
    async def room(self, tenant: str, *, there: bool = False) -> AsyncGenerator[None]:
        """A load of the tenant goes on inside; `there`: it has its memory already.

        One such load at a time, so that no two count on the same memory. Raises BackendRefused after a while.
        """
        mib = self._needs.get(tenant, 0)
        if there or not mib:
            yield
            return
        async with self._one:
            loop = asyncio.get_running_loop()
            deadline = loop.time() + self._wait_s
            while (why := self.short(mib, f"loading {tenant}")) is not None:
                if loop.time() >= deadline:
                    raise BackendRefused(why)
                await asyncio.sleep(LOOK_S)
            yield

    def short(self, mib: int, what: str) -> str | None:
        """Why so much cannot be taken now, in one sentence; None where it can."""
        memory = self._memory()
        if isinstance(memory, Unread):
            return (
                f"{what} takes {mib:,} MiB of the machine's memory, and what is left of it is not known: {memory.why}"
            )
        if memory.free_mib - mib >= self._floor_mib:
            return None
        left = f"{memory.free_mib:,} MiB of it can be had and {self._floor_mib:,} MiB have to stay (policy.ram_floor)"
        mend = "end what else uses it, or lower ram where that is too much"
        return f"{what} takes {mib:,} MiB of the machine's memory, {left}: {mend}"


def _folders(proc: Path, cgroup: Path) -> list[Path]:
    """Of our own cgroup and those it is in."""
    found = re.search(r"^0::/(.*)$", _text(proc / "self" / "cgroup"), re.MULTILINE)
    folder = cgroup / (found[1] if found else "")
    return [one for one in (folder, *folder.parents) if one.is_relative_to(cgroup)]


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
