"""Swaps: those on record, the one a card is at, and one that was asked for by hand and has not begun.

Invariant: an id that was given out is found from that moment on, by whatever way, until the record forgets it; nothing
here changes anything. Waiting (`?wait=`) is woken by the event log, and a caller who hangs up changes nothing.
"""

from __future__ import annotations

import asyncio

from aiohttp import web

from swapper.api import bodies
from swapper.api.context import ApiContext
from swapper.api.problem import Problem
from swapper.api.views import Json, iso, swap_json
from swapper.core.byhand import QUEUED, at_work, queued_swap
from swapper.core.errand import Errand
from swapper.core.explain import explain_errand
from swapper.core.types import Card, Swap, World


class SwapRoutes:
    """Handlers over one context."""

    def __init__(self, ctx: ApiContext) -> None:
        self._ctx = ctx

    def table(self) -> list[web.RouteDef]:
        """Route definitions, for `app.add_routes`."""
        return [web.get("/api/swaps", self.index), web.get("/api/swaps/{id}", self.show)]

    async def index(self, request: web.Request) -> web.Response:
        """`GET /api/swaps?limit=&card=`: newest first."""
        limit = bodies.whole_number(request.query, "limit", low=1, high=1000) or 20
        found = await self._ctx.store.swaps(limit=limit, card=request.query.get("card"))
        return web.json_response({"items": [swap_json(swap) for swap in found], "next_cursor": None})

    async def show(self, request: web.Request) -> web.Response:
        """`GET /api/swaps/{id}[?wait=]`: as it stands, or once it has ended."""
        wait_s = bodies.wait_seconds(request.query)
        return web.json_response(await follow(self._ctx, request.match_info["id"], wait_s or 0.0))


async def follow(ctx: ApiContext, swap_id: str, wait_s: float | None) -> Json:
    """The swap once it has ended, or as it stands after `wait_s` seconds; None: however long that takes.

    Besides its fields `state` (its outcome, its stage, or `queued`) and `explain`. Raises Problem 404.
    """
    deadline = None if wait_s is None else asyncio.get_running_loop().time() + wait_s
    with ctx.tail.watch(swap_id) as changed:
        while True:
            changed.clear()
            found = await _find(ctx, swap_id)
            if found["outcome"] is not None or wait_s == 0 or ctx.tail.closed:
                return found
            try:
                async with asyncio.timeout_at(deadline):
                    await changed.wait()
            except TimeoutError:
                return found


async def _find(ctx: ApiContext, swap_id: str) -> Json:
    swap = await ctx.store.swap(swap_id)
    if swap is None or swap.outcome is None:
        world = await ctx.store.read()
        errand = next((one for one in world.errands if one.id == swap_id), None)
        if errand is not None:
            return _of_errand(ctx, world, errand)
        # it may have ended since; one that moved nobody is on no record, only on its card
        swap = await ctx.store.swap(swap_id) or _running(world, swap_id)
    if swap is None:
        kept = "one that moved no model is kept only while it runs"
        raise Problem(404, "no-such-swap", f"There is no swap {swap_id!r}; {kept}.")
    return {**swap_json(swap), "state": swap.outcome or swap.stage, "explain": swap.reason}


def _running(world: World, swap_id: str) -> Swap | None:
    cards = world.cards.values()
    return next((card.swap for card in cards if card.swap is not None and card.swap.id == swap_id), None)


def _of_errand(ctx: ApiContext, world: World, errand: Errand) -> Json:
    card = world.cards.get(errand.card, Card(errand.card))
    begun = card.swap if at_work(card, errand) else None
    said = swap_json(begun or queued_swap(errand))
    stage = None if begun is None else begun.stage
    return {**said, "stage": stage, "state": stage or QUEUED, "explain": explain_errand(world, ctx.spec, errand)}


def errands_json(ctx: ApiContext, world: World, card: str) -> list[Json]:
    """What was asked for by hand on a card and is not over, in the order it came."""
    return [
        {
            "swap_id": errand.id,
            "verb": errand.verb,
            "tenants": list(errand.tenants),
            "force": errand.force,
            "owner": errand.owner,
            "asked_at": iso(errand.asked_ms),
            "explain": explain_errand(world, ctx.spec, errand),
        }
        for errand in world.errands
        if errand.card == card
    ]
