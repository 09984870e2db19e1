"""The `declared` probe: no driver to ask, so VRAM is what the configuration says of whom we see alive.

Invariant: it counts what was observed, never what we believe should be there. A living lease holder, or a tenant
whose need nobody declared, may hold anything, so it is counted as the whole rest of the card.
"""

from __future__ import annotations

from collections.abc import Mapping

from workers.backend import Owners, Reading, TenantState
from workers.vram.processes import named_process


class Declared:
    """A card of `total_mib`, of which `reserve_mib` is never given away; `needs` are its tenants' MiB."""

    def __init__(self, total_mib: int, reserve_mib: int, needs: Mapping[str, int]) -> None:
        self._total = total_mib
        self._reserve = reserve_mib
        self._needs = dict(needs)

    async def read(self, states: Mapping[str, TenantState], holder_pids: tuple[int, ...], owners: Owners) -> Reading:
        """Free = total - reserve - needs of the tenants seen holding VRAM; 0 while a holder lives. Never negative."""
        del owners
        tenants = [tenant for tenant, state in states.items() if state.holds_vram]
        holders = [named for pid in holder_pids if (named := named_process(pid))]
        capacity = max(0, self._total - self._reserve)
        used = sum(self._needs.get(tenant, 0) for tenant in tenants)
        if holders or not self._needs.keys() >= set(tenants):
            used = max(used, capacity)
        return Reading(
            total_mib=self._total,
            used_mib=used,
            free_mib=max(0, capacity - used),
            holders=(*tenants, *holders),
        )
