"""What the handlers are given: the store, the configuration's values, the keys, and the live observations.

Invariant: the API knows the store and the core, never the coordinator; what the coordinator observes comes through
`Live`. One context per served application.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from swapper.api.meter import Meter
from swapper.config import ApiKey
from swapper.core import plan
from swapper.core.spec import CardSpec, Spec
from swapper.snapshots.index import Index
from swapper.snapshots.shelf import Shelf
from swapper.store.protocol import Store
from swapper.store.tail import Tail

if TYPE_CHECKING:
    from swapper.jobs.runner import Jobs


class Live(Protocol):
    """What is observed right now and stands in no store."""

    def readings(self) -> Mapping[str, dict[str, object]]:
        """Card -> `{total_mib, used_mib, free_mib, holders}`; a card never read is absent."""
        ...

    def states(self) -> Mapping[str, str]:
        """Tenant id -> `unloaded|loading|loaded|sleeping|failed|stopped|unreachable`; one never observed is absent."""
        ...

    def why_not_started(self) -> Mapping[str, str]:
        """Server -> why it could not be started, for those that could not."""
        ...

    def problems(self) -> list[str]:
        """Why this process is not ready, one sentence each; empty when it is."""
        ...


@dataclass(slots=True)
class ApiContext:
    """See the module text. `spec` may be replaced when the configuration was read again.

    `env` gives a card's device variables (absent: null for both), `names` every name of a model -> its tenant id
    (`Config.models()`), `webhook_hosts` the hosts a lease may name in `webhook`. `shelves`: the saved conversations of
    each server that keeps any; `index`: what this process's gateway knows of conversations, `drop_requests` makes it
    forget the texts of a tenant's; `n_slots`: slots of a tenant where its preset tells; `whose`: what of swapper's own
    a process is (blocking), None for anybody else's. `jobs`: who runs them, None before it does.
    """

    store: Store
    spec: Spec
    keys: tuple[ApiKey, ...]
    live: Live
    env: Mapping[str, Mapping[str, str | None]] = field(default_factory=dict[str, Mapping[str, str | None]])
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    webhook_hosts: frozenset[str] = frozenset()
    shelves: Mapping[str, Shelf] = field(default_factory=dict[str, Shelf])
    index: Index = field(default_factory=Index)
    drop_requests: Callable[[str], None] = lambda _: None
    n_slots: Mapping[str, int] = field(default_factory=dict[str, int])
    whose: Callable[[int], str | None] = lambda _: None
    keepalive_s: float = 15.0
    meter: Meter = field(default_factory=Meter)
    jobs: Jobs | None = None
    tail: Tail = field(init=False)

    def __post_init__(self) -> None:
        self.tail = Tail(self.store)

    async def count(self) -> None:
        """Feed the counters of `/metrics` until cancelled."""
        await self.meter.run(self.store, self.tail)

    async def close(self) -> None:
        """End every wait and every event stream; call it when the server begins to shut down."""
        await self.tail.close()

    def total_mib(self, card: CardSpec) -> int | None:
        """The card's VRAM as configured, else as read; None while nobody knows."""
        read = self.live.readings().get(card.name, {}).get("total_mib")
        return card.total_mib or (read if isinstance(read, int) and read > 0 else None)

    def capacity_mib(self, name: str) -> int | None:
        """What a lease can have at most: total - reserve - needs of `evict: never` tenants; None while unknown."""
        card = self.spec.cards[name]
        total = self.total_mib(card)
        if total is None:
            return None
        return total - card.total_mib + plan.capacity(self.spec, name)
