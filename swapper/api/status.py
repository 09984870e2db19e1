"""What is on which card, and is this process healthy: the routes that only look.

Invariant: one reading of the world per answer, so that its parts agree; nothing here changes anything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from aiohttp import web

from swapper import __version__
from swapper.api.context import ApiContext
from swapper.api.holders import holders_json
from swapper.api.leases import view_lease
from swapper.api.memory import intruder_json, need_json, troubles
from swapper.api.places import Places, places
from swapper.api.problem import Problem
from swapper.api.swaps import errands_json
from swapper.api.views import (
    Json,
    card_json,
    conversation_json,
    index_json,
    iso,
    keeping_json,
)
from swapper.core.conversations import Conversation, Keeping
from swapper.core.explain import explain_demand
from swapper.core.spec import TenantSpec
from swapper.core.types import Card, Demand, Swap, World
from swapper.errors import StoreDown

READY_S = 1.0
"""So long `/ready` waits for the store: who asks often must not wait as long as a call that wants something of it."""
_RECENT_SWAPS = 50
OFF = Keeping(strategies=())


class StatusRoutes:
    """Handlers over one context."""

    def __init__(self, ctx: ApiContext) -> None:
        self._ctx = ctx

    def table(self) -> list[web.RouteDef]:
        """Route definitions, for `app.add_routes`."""
        return [
            web.get("/health", self.health),
            web.get("/ready", self.ready),
            web.get("/api/status", self.status),
            web.get("/api/cards/{card}", self.card),
        ]

    async def health(self, _request: web.Request) -> web.Response:
        """`OK` as long as this process answers."""
        return web.Response(text="OK")

    async def ready(self, request: web.Request) -> web.Response:
        """200, or 503 with the reasons; `?model=m` also asks that the model is loaded and its gate open.

        A store that does not answer is a reason, and so are the faults once every card has one: beside a card at fault
        others serve. So is who should be on its card and cannot be loaded. `problems` of the status names every fault,
        and who else cannot be loaded.
        """
        tenant = self._tenant_of(request.query.get("model"))
        reasons = self._ctx.live.problems()
        world: World | None = None
        try:
            async with asyncio.timeout(READY_S):
                world = await self._ctx.store.read()
        except TimeoutError:
            reasons.append(f"the store did not answer within {READY_S:g} s")
        except StoreDown as down:
            reasons.append(f"the store does not answer: {down}")
        faults = [] if world is None else self._faults(world)
        if len(faults) == len(self._ctx.spec.cards):
            reasons += faults
        if world is not None:
            reasons += self._failing(world, expected=True)
        if tenant is not None:
            reasons += self._model_reasons(tenant, world)
        return web.json_response({"ready": not reasons, "reasons": reasons}, status=503 if reasons else 200)

    async def status(self, _request: web.Request) -> web.Response:
        """`GET /api/status`: cards, leases that wait or hold, demand, tenants."""
        world = await self._ctx.store.read()
        swaps = await self._ctx.store.swaps(limit=_RECENT_SWAPS)
        leases = sorted(world.leases.values(), key=lambda lease: lease.seq)
        where = await places(self._ctx, world)
        tenants = self._ctx.spec.tenants.values()
        body: Json = {
            "version": __version__,
            "now": iso(world.now_ms),
            "cards": [self._card_view(world, name) for name in self._ctx.spec.cards],
            "leases": [await view_lease(self._ctx, lease, world) for lease in leases],
            "queued": world.queued,
            "demand": [self._demand_view(world, one) for one in world.demand if one.waiting or one.running],
            "tenants": [self._tenant_view(world, one, swaps, where[one.id]) for one in tenants],
            "gateways": list(world.gateways),
            "problems": [
                *self._ctx.live.problems(),
                *self._faults(world),
                *self._failing(world),
                *troubles(self._ctx.spec, world),
            ],
        }
        return web.json_response(body)

    async def card(self, request: web.Request) -> web.Response:
        """`GET /api/cards/{c}`: one card as in the status, with its tenants."""
        name = request.match_info["card"]
        if name not in self._ctx.spec.cards:
            there = ", ".join(self._ctx.spec.cards) or "none"
            raise Problem(404, "no-such-card", f"There is no card {name!r}; there is {there}.")
        world = await self._ctx.store.read()
        swaps = await self._ctx.store.swaps(limit=_RECENT_SWAPS, card=name)
        mine = [tenant for tenant in self._ctx.spec.tenants.values() if tenant.card == name]
        where = await places(self._ctx, world, [tenant.id for tenant in mine])
        tenants = [self._tenant_view(world, tenant, swaps, where[tenant.id]) for tenant in mine]
        return web.json_response({**self._card_view(world, name), "tenants": tenants})

    def _model_reasons(self, tenant: TenantSpec, world: World | None) -> list[str]:
        state = self._ctx.live.states().get(tenant.id, "not observed yet")
        if state != "loaded":
            return [f"{tenant.id} is {state}"]
        gate = None if world is None else world.gates.get(tenant.id)
        shut = world is not None and (gate is None or not gate.open)
        return [f"{tenant.id} is loaded, but its gate is closed"] if shut else []

    def _tenant_of(self, model: str | None) -> TenantSpec | None:
        """None when none is asked for. Raises Problem 404."""
        if model is None:
            return None
        tenant = self._ctx.spec.tenants.get(self._ctx.names.get(model, model))
        if tenant is None:
            raise Problem(404, "no-such-model", f"There is no model {model!r}.")
        return tenant

    def _faults(self, world: World) -> list[str]:
        """Each card that is not given on because somebody keeps its VRAM, and who."""
        cards = (world.cards.get(name) for name in self._ctx.spec.cards)
        return [f"{card.name} is at fault: {card.fault.reason}" for card in cards if card is not None and card.fault]

    def _failing(self, world: World, *, expected: bool = False) -> list[str]:
        """Who cannot be loaded, why, and when it is tried again; `expected`: only those that should be on their card.

        One that was only asked for once is told of until its rest is over: then nobody tries it before it is asked for.
        """
        told: list[str] = []
        for name in self._ctx.spec.cards:
            card = world.cards.get(name, Card(name))
            for tenant, failure in card.failed.items():
                spec = self._ctx.spec.tenants.get(tenant)
                awaited = spec is not None and (spec.default or tenant in (card.return_to or ()))
                if awaited or (not expected and failure.retry_ms > world.now_ms):
                    when = f" (tried {failure.count} times, again from {iso(failure.retry_ms)} on)"
                    told.append(f"{tenant} cannot be loaded: {failure.reason}{when}")
        return told

    def _card_view(self, world: World, name: str) -> Json:
        spec = self._ctx.spec.cards[name]
        card = world.cards.get(name, Card(name))
        reading = self._ctx.live.readings().get(name, {})
        body = card_json(
            card,
            reading=reading,
            capacity_mib=self._ctx.capacity_mib(name),
            total_mib=self._ctx.total_mib(spec),
            holders=holders_json(reading, self._ctx.spec.tenants, world, card),
            foreign=[intruder_json(card, one) for one in card.intruders],
        )
        return {**body, "by_hand": errands_json(self._ctx, world, name)}

    def _tenant_view(self, world: World, tenant: TenantSpec, swaps: tuple[Swap, ...], where: Places) -> Json:
        card = world.cards.get(tenant.card, Card(tenant.card))
        gate = world.gates.get(tenant.id)
        failure = card.failed.get(tenant.id)
        trouble = self._ctx.live.why_not_started().get(tenant.server)
        return {
            "id": tenant.id,
            "card": tenant.card,
            "kind": tenant.kind,
            "state": self._ctx.live.states().get(tenant.id),
            "resident": tenant.id in card.residents,
            "open": gate is not None and gate.open,
            **need_json(tenant, card, self._ctx.live.readings().get(tenant.card, {})),
            **keeping_json(card.keeping.get(tenant.id) if tenant.save else OFF),
            "default": tenant.default,
            "pinned": tenant.id in card.pinned,
            "kept_off": tenant.id in card.unused,
            "evict": "never" if tenant.evict_never else "by-policy",
            "failure": trouble if failure is None else failure.reason,
            "conversations": [conversation_json(found) for found in _conversations(tenant.id, swaps)],
            "places": dict(where),
            **index_json(self._ctx.index, tenant.id, self._ctx.n_slots.get(tenant.id)),
        }

    def _demand_view(self, world: World, demand: Demand) -> Json:
        known = demand.waiting and demand.tenant in self._ctx.spec.tenants
        return {
            "tenant": demand.tenant,
            "class": demand.klass,
            "gateway": demand.gateway,
            "waiting": demand.waiting,
            "running": demand.running,
            "oldest_at": iso(demand.oldest_ms),
            "explain": explain_demand(world, self._ctx.spec, demand.tenant) if known else None,
        }


def _conversations(tenant: str, swaps: Iterable[Swap]) -> tuple[Conversation, ...]:
    """What the newest swap that concerned the tenant's conversations says of them."""
    for swap in swaps:
        mine = tuple(conversation for conversation in swap.conversations if conversation.tenant == tenant)
        if mine:
            return mine
    return ()
