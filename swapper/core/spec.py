"""What the configuration says and the core needs: cards, tenants and the policy's numbers, as frozen values.

Invariant: made once from a valid configuration; nothing here changes while swapper runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from swapper.core.types import WorkClass


@dataclass(frozen=True, slots=True)
class CardSpec:
    """A card as configured. `total_mib` is known for `declared` cards; probes report it for others."""

    name: str
    total_mib: int
    reserve_mib: int = 0
    host: str = "main"


@dataclass(frozen=True, slots=True)
class TenantSpec:
    """A tenant as configured. `server` is the config entry that has its control (`llama` of `llama/med`).

    `by_lease`: it is on the card only inside a lease of its own, whose holder it is. `sweep`: conversations that lie in
    no slot are saved as well. `every_ms`: so often idle slots are saved while it serves.
    """

    id: str
    server: str
    card: str
    host: str
    need_mib: int
    kind: str = "llama-router"
    evict_never: bool = False
    default: bool = False
    pinned: bool = False
    by_lease: bool = False
    save: bool = True
    save_required: bool = False
    sweep: bool = True
    every_ms: int | None = None
    serves_models: bool = True


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """The numbers of the policy, in milliseconds; `drain_ms` and the rest as in the configuration."""

    drain_ms: Mapping[WorkClass, int]
    on_drain_limit: str = "end"
    grace_ms: int = 30_000
    vacate_ms: int = 60_000
    idle_restore_ms: int = 120_000
    max_hold_ms: int = 3_600_000
    max_queue: int = 10_000


@dataclass(frozen=True, slots=True)
class Spec:
    """All that the configuration says and the core needs."""

    cards: Mapping[str, CardSpec]
    tenants: Mapping[str, TenantSpec]
    policy: PolicySpec
