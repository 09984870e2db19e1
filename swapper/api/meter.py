"""What is counted as it happens: swaps, their steps, conversations that came back, leases granted, calls answered.

Invariant: each thing counts once in the life of this process, however often the log tells of it, and what was over when
the process began does not count: a process that starts anew starts at zero, as Prometheus expects. Reads the store.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Hashable

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Histogram

from swapper.api.answered import Answered
from swapper.core.types import Lease, LeaseState, Swap
from swapper.errors import StoreDown
from swapper.store import codec
from swapper.store.protocol import Store, StoredEvent
from swapper.store.tail import Tail

_PAGE = 1000
_RETAINED_SWAPS = 1000
_REMEMBERED = 20_000
_RETRY_S = 0.5
_WAITS_S = (0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
_STORE_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
_STEPS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600)

prometheus_client.disable_created_metrics()  # they would double the series, and nobody asked when one began


class _Once:
    """Which things were counted already; the oldest are forgotten, long after anybody tells of them."""

    def __init__(self) -> None:
        self._seen: OrderedDict[Hashable, None] = OrderedDict()

    def first(self, thing: Hashable) -> bool:
        if thing in self._seen:
            return False
        self._seen[thing] = None
        if len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)
        return True


class Meter:
    """The counters of one process, in a registry of their own. `run` feeds them from the event log."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._of_cards()
        self._of_calls()
        self._once = _Once()
        self.counting = asyncio.Event()
        """Set once what happens counts."""

    def _of_cards(self) -> None:
        self._swaps = Counter("swapper_swaps", "Swaps that ended.", ["card", "outcome"], registry=self.registry)
        self._steps = Histogram(
            "swapper_swap_seconds",
            "How long a step of a swap took, for one tenant.",
            ["step", "card"],
            buckets=_STEPS_S,
            registry=self.registry,
        )
        self._restored = Counter(
            "swapper_restore_tokens",
            "Tokens of conversations that were to come back, by what is known: each counts as unproved once it is back "
            "in the server, and as warm or cold once that was seen.",
            ["model", "result"],
            registry=self.registry,
        )
        self._waits = Histogram(
            "swapper_lease_wait_seconds",
            "From the request of a lease (or its not_before) to its grant.",
            ["class", "card"],
            buckets=_WAITS_S,
            registry=self.registry,
        )

    def _of_calls(self) -> None:
        self._answered = Answered(_WAITS_S)
        self.registry.register(self._answered)
        self._store = Histogram(
            "swapper_store_seconds",
            "How long a call of the store took, also one that failed; reads that wait for news are left out.",
            ["op"],
            buckets=_STORE_S,
            registry=self.registry,
        )

    def answered(self, tenant: str, code: int, waited_ms: int) -> None:
        """A model call is over, for this process's gateway."""
        self._answered.count(tenant, code, waited_ms)

    def stored(self, operation: str, seconds: float) -> None:
        """A call of the store is over."""
        self._store.labels(operation).observe(seconds)

    async def run(self, store: Store, tail: Tail) -> None:
        """Count what happens from now on, until cancelled; while the store is away nothing happens."""
        with tail.watch_all() as more:
            after = await self._begin(store, tail)
            self.counting.set()
            while not tail.closed:
                more.clear()
                try:
                    page = tail.after(after)
                    if page is None:
                        page = await store.events(after=after, limit=_PAGE, block_ms=0)
                except StoreDown:
                    await asyncio.sleep(_RETRY_S)
                    continue
                if not page:
                    await more.wait()
                    continue
                after = page[-1].id
                for event in page:
                    self.observe(event)

    async def _begin(self, store: Store, tail: Tail) -> str:
        """Take note of what is over already; the id of the log after which everything is new."""
        while True:
            try:
                after = await tail.end()
                world = await store.read()
                ended = await store.swaps(limit=_RETAINED_SWAPS)
            except StoreDown:
                await asyncio.sleep(_RETRY_S)
                continue
            for swap in ended:
                self._is_over(swap)
            for lease in world.leases.values():
                if lease.state is LeaseState.GRANTED:
                    self._once.first(lease.id)
            return after

    def _is_over(self, swap: Swap) -> None:
        if swap.outcome is not None:
            self._once.first(swap.id)
        for talk in swap.conversations:
            self._once.first((swap.id, talk.snapshot, talk.result))

    def observe(self, event: StoredEvent) -> None:
        """Count what an event of the log tells for the first time."""
        if event.type == "swap":
            self._swap(codec.swap_of(event))
        elif event.type == "lease":
            self._lease(codec.lease_of(event))

    def _swap(self, swap: Swap) -> None:
        for talk in swap.conversations:
            if talk.result is not None and self._once.first((swap.id, talk.snapshot, talk.result)):
                self._restored.labels(talk.tenant, talk.result).inc(talk.tokens)
        if swap.outcome is None or not self._once.first(swap.id):
            return
        self._swaps.labels(swap.card, swap.outcome).inc()
        for step in swap.steps:
            if step.ms is not None:
                self._steps.labels(step.step, swap.card).observe(step.ms / 1000)

    def _lease(self, lease: Lease) -> None:
        if lease.state is not LeaseState.GRANTED or lease.granted_ms is None or not self._once.first(lease.id):
            return
        since = max(lease.created_ms, lease.request.not_before_ms or 0)
        self._waits.labels(lease.request.klass, lease.card or "").observe(max(lease.granted_ms - since, 0) / 1000)
