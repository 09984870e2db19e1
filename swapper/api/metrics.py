"""`GET /metrics`: what is so right now, gathered for each scrape, beside what was counted as it happened (meter.py).

Invariant: nothing is shown that is not known: a figure that cannot be had is absent, not zero. A scrape changes, loads
and wakes nothing, and is answered while the store or a slot folder is away, without their part.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from swapper.api.context import ApiContext
from swapper.api.holders import foreign_mib
from swapper.api.memory import used_mib
from swapper.api.places import Places, places
from swapper.core.types import Card, LeaseState, World
from swapper.errors import BackendError, StoreDown
from swapper.snapshots.manifest import Manifest
from swapper.store.protocol import LeaseFilter

READ_S = 2.0
"""So long a scrape waits for the store."""
STATES = ("unloaded", "loading", "loaded", "sleeping", "failed", "stopped", "unreachable")
_ACTIVE = (LeaseState.QUEUED, LeaseState.PREPARING, LeaseState.GRANTED)
_PAGE = 1000
_MIB = 1 << 20
_ANY = ""


class MetricsRoutes:
    """Handlers over one context."""

    def __init__(self, ctx: ApiContext) -> None:
        self._ctx = ctx

    def table(self) -> list[web.RouteDef]:
        """Route definitions, for `app.add_routes`."""
        return [web.get("/metrics", self.metrics)]

    async def metrics(self, _request: web.Request) -> web.Response:
        """In Prometheus' text format."""
        (stored, world), saved = await asyncio.gather(self._stored(), self._saved())
        registry = CollectorRegistry()
        registry.register(_Fixed([*stored, *saved, *self._prompts(), *self._seen(world)]))
        body = generate_latest(self._ctx.meter.registry) + generate_latest(registry)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _stored(self) -> tuple[list[Metric], World | None]:
        """What the store says, and that; whether it answers is a figure of its own."""
        up = GaugeMetricFamily("swapper_store_up", "1 while the store answers.")
        try:
            async with asyncio.timeout(READ_S):
                world = await self._ctx.store.read()
                leases = await self._leases()
        except (StoreDown, TimeoutError):
            up.add_metric([], 0)
            return [up], None
        up.add_metric([], 1)
        where = await places(self._ctx, world)
        return [up, leases, self._in_flight(world), self._conversations(where)], world

    async def _leases(self) -> Metric:
        """Leases that are not over, of each state and card; one that waits for any card has an empty `card`."""
        count: Counter[tuple[str, str]] = Counter()
        for state in _ACTIVE:
            cursor: str | None = None
            while True:
                page = await self._ctx.store.leases(LeaseFilter(state=state, limit=_PAGE, cursor=cursor))
                count.update((state, lease.card or lease.request.card or _ANY) for lease in page.items)
                cursor = page.next_cursor
                if cursor is None:
                    break
        family = GaugeMetricFamily("swapper_leases", "Leases that wait or hold.", labels=["state", "card"])
        cards = [*self._ctx.spec.cards]
        for key in sorted({*count, *((state, card) for state in _ACTIVE for card in cards)}):
            family.add_metric([*key], count[key])
        return family

    def _in_flight(self, world: World) -> Metric:
        running = Counter[str](dict.fromkeys(self._ctx.spec.tenants, 0))
        for demand in world.demand:
            running[demand.tenant] += demand.running
        family = GaugeMetricFamily("swapper_inflight", "Model calls at their server.", labels=["model"])
        for tenant, number in sorted(running.items()):
            family.add_metric([tenant], number)
        return family

    def _conversations(self, where: Mapping[str, Places]) -> Metric:
        family = GaugeMetricFamily(
            "swapper_conversations", "Conversations that are known, by where they are.", labels=["model", "place"]
        )
        for tenant, found in where.items():
            for place, number in found.items() if self._ctx.spec.tenants[tenant].serves_models else ():
                family.add_metric([tenant, place], number)
        return family

    async def _saved(self) -> list[Metric]:
        """Bytes of the snapshots by model; a folder that cannot be read has none to show."""
        shelves = {str(shelf.folder): shelf for shelf in self._ctx.shelves.values()}
        found: list[Manifest] = []
        unread = False
        for shelf in shelves.values():
            try:
                found += await shelf.manifests()
            except BackendError:
                unread = True
        if unread or not shelves:
            return []
        total = Counter[str](dict.fromkeys(self._ctx.spec.tenants, 0))
        for manifest in found:
            total[manifest.tenant] += manifest.bytes
        family = GaugeMetricFamily("swapper_snapshot_bytes", "Saved conversations on disk.", labels=["model"])
        for tenant, size in sorted(total.items()):
            family.add_metric([tenant], size)
        return [family]

    def _prompts(self) -> Iterator[Metric]:
        tokens = CounterMetricFamily(
            "swapper_prompt_tokens",
            "Prompt tokens of answered calls, as the answers count them: taken from the cache, or processed (all whose "
            "server says nothing of a cache); reread are those of the processed that had been read before.",
            labels=["model", "kind"],
        )
        for tenant, spec in self._ctx.spec.tenants.items():
            if not spec.serves_models:
                continue
            counts = self._ctx.index.counts(tenant)
            reread = sum(counts.reread.values())
            for kind, value in (("cached", counts.cached), ("processed", counts.processed), ("reread", reread)):
                tokens.add_metric([tenant, kind], value)
        yield tokens

    def _seen(self, world: World | None) -> Iterator[Metric]:
        """What the agents see: the cards' VRAM where it was read, each tenant's state where it was observed.

        What is foreign is known where processes are measured and the store says which of them leases name.
        """
        vram = GaugeMetricFamily("swapper_vram_bytes", "The cards' memory.", labels=["card", "kind"])
        for card, reading in self._ctx.live.readings().items():
            for kind, value in _sizes(reading):
                vram.add_metric([card, kind], value * _MIB)
            if world is not None and "held" in reading and reading.get("pool") not in (None, "declared"):
                foreign = foreign_mib(reading, world, world.cards.get(card, Card(card)))
                vram.add_metric([card, "foreign"], foreign * _MIB)
        states = GaugeMetricFamily("swapper_tenant_state", "1 for the state it is in.", labels=["tenant", "state"])
        for tenant, now in sorted(self._ctx.live.states().items()):
            for state in STATES:
                states.add_metric([tenant, state], int(state == now))
        yield vram
        yield states
        yield from self._tenants_memory()

    def _tenants_memory(self) -> Iterator[Metric]:
        """What each tenant needs, and what its processes have where that is measured."""
        family = GaugeMetricFamily("swapper_tenant_vram_bytes", "The tenants' memory.", labels=["tenant", "kind"])
        readings = self._ctx.live.readings()
        for tenant in self._ctx.spec.tenants.values():
            family.add_metric([tenant.id, "need"], tenant.need_mib * _MIB)
            used = used_mib(tenant.id, readings.get(tenant.card, {}))
            if used is not None:
                family.add_metric([tenant.id, "used"], used * _MIB)
        yield family


def _sizes(reading: Mapping[str, object]) -> Iterator[tuple[str, int]]:
    for kind in ("total", "used", "free"):
        value = reading.get(f"{kind}_mib")
        if isinstance(value, int):
            yield kind, value


class _Fixed(Collector):
    """Families that were gathered already."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterable[Metric]:
        """All of them."""
        return self._families
