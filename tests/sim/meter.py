"""How a card's VRAM is read: by a probe that measures what is physically held, late at times, and at times not at all.

Invariant: a reading is of the moment in which it was begun, however late it comes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from tests.sim.physical import WatchedVram
from tests.sim.plan import CardPlan
from workers.backend import Owners, Reading, TenantState, Unread


@dataclass(slots=True)
class Meter:
    """A probe of one card. `late_s`: so long an answer takes. `unread_ms`: since when none comes, if none does."""

    plan: CardPlan
    vram: WatchedVram
    late_s: float = 0.0
    unread_ms: int | None = None

    async def read(
        self, states: Mapping[str, TenantState], holder_pids: tuple[int, ...], owners: Owners
    ) -> Reading | Unread:
        """What is held, whoever holds it."""
        del states, holder_pids, owners
        if self.unread_ms is not None:
            return Unread("the driver does not answer; load it again")
        used, holders = self.vram.used_mib, tuple(sorted(self.vram.held))
        if self.late_s:
            await asyncio.sleep(self.late_s)
        free = max(0, self.plan.total_mib - self.plan.reserve_mib - used)
        return Reading(self.plan.total_mib, used, free, holders)
