"""The `unified` probe: machines on which the GPU's memory is the machine's own (Jetson, Spark, APUs).

Invariant: what is told as free is what the kernel says can be had without swapping (MemAvailable), which the file cache
does not count against. Which process holds how much of it for the GPU nobody tells, so holders are those we know of.
Reads /proc/meminfo and nothing else of the machine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from workers.backend import Owners, Reading, TenantState, Unread
from workers.vram.bounded import LIMIT_S, Bounded
from workers.vram.processes import PROC, named_process

NOTE = "the GPU shares the machine's memory, and which process holds how much of it for the GPU is not told"


@dataclass(frozen=True, slots=True)
class HostMemory:
    """MiB; `free_mib` is what can be had without swapping."""

    total_mib: int
    free_mib: int


def host_memory(proc: Path = PROC) -> HostMemory | Unread:
    """The machine's memory by /proc/meminfo (proc_meminfo(5); its kB are KiB)."""
    try:
        text = (proc / "meminfo").read_text()
    except OSError as error:
        return Unread(f"{proc}/meminfo cannot be read: {error.strerror}; swapper needs /proc")
    sizes = {name: int(kib) for name, kib in re.findall(r"^(\w+): +(\d+) kB$", text, re.MULTILINE)}
    if not sizes.get("MemTotal") or "MemAvailable" not in sizes:
        return Unread(f"{proc}/meminfo does not tell MemTotal and MemAvailable; this needs Linux 3.14 or later")
    return HostMemory(sizes["MemTotal"] // 1024, sizes["MemAvailable"] // 1024)


class Unified:
    """See the module text."""

    def __init__(self, proc: Path = PROC, limit_s: float = LIMIT_S) -> None:
        self._proc = proc
        self._bounded = Bounded[HostMemory | Unread]("/proc/meminfo", limit_s)

    async def read(
        self, states: Mapping[str, TenantState], holder_pids: tuple[int, ...], owners: Owners
    ) -> Reading | Unread:
        """Used is total - available: all of the machine's processes, not only the GPU's."""
        del owners
        memory = await self._bounded.call(lambda: host_memory(self._proc))
        if isinstance(memory, Unread):
            return memory
        tenants = tuple(tenant for tenant, state in states.items() if state.holds_vram)
        alive = tuple(named for pid in holder_pids if (named := named_process(pid)))
        used = memory.total_mib - memory.free_mib
        return Reading(memory.total_mib, used, memory.free_mib, (*tenants, *alive), pool="host", note=NOTE)
