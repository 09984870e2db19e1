"""By hand: load and unload a model, vacate a card, pin a tenant; and llama-swap's ways to unload.

Invariant: nothing is done here. What is asked for is written with one store call, and answered with the id of the swap
it becomes; from then on it is carried out whether or not anybody waits for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches

from aiohttp import web

from swapper.api import bodies
from swapper.api.auth import check_class
from swapper.api.bodies import bad_value
from swapper.api.context import ApiContext
from swapper.api.ids import new_id
from swapper.api.problem import Problem
from swapper.api.swaps import follow
from swapper.api.views import Json
from swapper.core.errand import Errand, Verb
from swapper.core.types import WorkClass
from swapper.errors import StoreDown
from swapper.store.protocol import QueueFull

MOST = 1_000
"""So many errands may wait: who asks without an end must not fill the store."""
_LONGEST_NAME = 512
_DAY_S = 86_400
_UNLOAD = "unload/"
_SUFFIXES = {"/load": Verb.LOAD, "/unload": Verb.UNLOAD}


class ByHandRoutes:
    """Handlers over one context."""

    def __init__(self, ctx: ApiContext) -> None:
        self._ctx = ctx

    def table(self) -> list[web.RouteDef]:
        """Route definitions, for `app.add_routes`. Names of models and tenants may contain slashes."""
        return [
            web.get("/unload", self.unload_all, allow_head=False),
            web.post("/api/models/unload", self.unload_all),
            web.post("/api/models/{path:.+}", self.model),
            web.post("/api/cards/{card}/vacate", self.vacate),
            web.post("/api/tenants/{tenant:.+}/pin", self.pin),
            web.post("/api/tenants/{tenant:.+}/unpin", self.unpin),
        ]

    async def model(self, request: web.Request) -> web.Response:
        """`POST /api/models/{m}/load`, `/unload[?drain=30]`, and llama-swap's `POST /api/models/unload/{m}`.

        A name may end or begin like one of these: what names something that exists is meant.
        """
        path = request.match_info["path"]
        if path.startswith(_UNLOAD) and self._tenants(name := path.removeprefix(_UNLOAD)):
            await self._all_gone(await self._ask(request, Verb.UNLOAD, self._tenants(name)))
            return web.Response(text="OK")
        for suffix, verb in _SUFFIXES.items():
            if path.endswith(suffix) and not path.startswith("/"):
                return await self._about_model(request, verb, path.removesuffix(suffix))
        if path.startswith(_UNLOAD):
            raise self._unknown("model", path.removeprefix(_UNLOAD))
        raise Problem(404, "not-found", f"There is nothing at {request.path}; a model has /load and /unload.")

    async def _about_model(self, request: web.Request, verb: Verb, name: str) -> web.Response:
        tenants = self._tenants(name)
        if not tenants:
            raise self._unknown("model", name)
        if verb is Verb.UNLOAD:
            return await self._answer(request, await self._ask(request, verb, tenants, drain_ms=_drain_ms(request)))
        if len(tenants) > 1:
            text = f"{name} is a server of {len(tenants)} models; name the one to load: {', '.join(tenants)}"
            raise Problem(422, "several-models", text)
        check_class(request, WorkClass.INTERACTIVE)  # that is what it weighs as, like a call that names no class
        return await self._answer(request, await self._ask(request, verb, tenants))

    async def unload_all(self, request: web.Request) -> web.Response:
        """llama-swap's `GET /unload` (`OK`) and `POST /api/models/unload`: answered once all models are gone."""
        models = [tenant for tenant in self._ctx.spec.tenants.values() if tenant.serves_models]
        cards = dict.fromkeys(tenant.card for tenant in models if not tenant.evict_never)
        asked = [
            await self._ask(request, Verb.UNLOAD, [t.id for t in models if t.card == card and not t.evict_never])
            for card in cards
        ]
        for swap_id in asked:
            await self._all_gone(swap_id)
        return web.Response(text="OK") if request.method == "GET" else web.json_response({"msg": "ok"})

    async def vacate(self, request: web.Request) -> web.Response:
        """`POST /api/cards/{c}/vacate[?force=1]`."""
        card, cards = request.match_info["card"], self._ctx.spec.cards
        if card not in cards:
            raise Problem(404, "no-such-card", f"There is no card {card!r}; {_near(card, cards)}")
        errand = Errand(new_id("sw"), card, Verb.VACATE, owner=request["owner"], force=_is_set(request, "force"))
        return await self._answer(request, await self._write(errand))

    async def pin(self, request: web.Request) -> web.Response:
        """`POST /api/tenants/{t}/pin`: from then on it leaves by hand and for maintenance only."""
        return await self._pin(request, Verb.PIN)

    async def unpin(self, request: web.Request) -> web.Response:
        """`POST /api/tenants/{t}/unpin`."""
        return await self._pin(request, Verb.UNPIN)

    async def _pin(self, request: web.Request, verb: Verb) -> web.Response:
        name = request.match_info["tenant"]
        tenants = self._tenants(name)
        if not tenants:
            raise self._unknown("tenant", name)
        return await self._answer(request, await self._ask(request, verb, tenants))

    def _tenants(self, name: str) -> list[str]:
        """Who is meant by a name of a model, a tenant's id, or a server's, which means all its models; none: nobody."""
        tenants = self._ctx.spec.tenants
        one = self._ctx.names.get(name, name)
        if one in tenants:
            return [one]
        return [tenant.id for tenant in tenants.values() if tenant.server == name]

    def _unknown(self, what: str, name: str) -> Problem:
        tenants = self._ctx.spec.tenants
        known = {*self._ctx.names, *tenants, *(tenant.server for tenant in tenants.values())}
        return Problem(404, f"no-such-{what}", f"{what} not found: {name[:_LONGEST_NAME]!r}; {_near(name, known)}")

    async def _ask(self, request: web.Request, verb: Verb, tenants: list[str], *, drain_ms: int | None = None) -> str:
        """The id of the swap that it becomes; all the tenants are on one card."""
        card = self._ctx.spec.tenants[tenants[0]].card
        return await self._write(Errand(new_id("sw"), card, verb, tuple(tenants), request["owner"], drain_ms))

    async def _write(self, errand: Errand) -> str:
        answer = await self._ctx.store.errand(errand, max_errands=MOST)
        if isinstance(answer, QueueFull):
            text = f"{answer.queued} loads, unloads and pins by hand wait already. Try again later."
            raise Problem(429, "queue-full", text, position=answer.queued + 1)
        return answer.id

    async def _answer(self, request: web.Request, swap_id: str) -> web.Response:
        """202 with the swap as it stands; with `?wait=` 200 once it has ended within that."""
        found = await self._followed(swap_id, bodies.wait_seconds(request.query) or 0.0)
        status = 202 if found["outcome"] is None else 200
        if "wait" not in request.query:
            status = 202
        location = {"Location": f"/api/swaps/{swap_id}"}
        return web.json_response({"swap_id": swap_id, **found}, status=status, headers=location)

    async def _followed(self, swap_id: str, wait_s: float | None) -> Json:
        try:
            return await follow(self._ctx, swap_id, wait_s)
        except StoreDown as down:
            text = f"{swap_id} is on record and will be carried out, but the store does not answer now: {down}"
            raise Problem(503, "store-down", text, retry_after_s=1, swap_id=swap_id) from down

    async def _all_gone(self, swap_id: str) -> None:
        """Wait for it however long it takes. Raises Problem 409 where somebody stayed, 503 where we stop meanwhile."""
        found = await self._followed(swap_id, None)
        if found["outcome"] is None:
            text = f"swapper stops; {swap_id} goes on once it is there again: {found['explain']}"
            raise Problem(503, "stopping", text, retry_after_s=5)
        if found["outcome"] != "done":
            raise Problem(409, "not-unloaded", f"{swap_id}: {found['reason']}")


def _drain_ms(request: web.Request) -> int | None:
    """`?drain=30`: seconds; None: as long as the class of the calls may take."""
    text = request.query.get("drain")
    if text is None:
        return None
    if re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,3})?", text) is None or float(text) > _DAY_S:
        raise bad_value("drain", f"{text!r} is not a number of seconds, {_DAY_S} at most")
    return round(float(text) * 1000)


def _is_set(request: web.Request, name: str) -> bool:
    value = request.query.get(name, "0")
    if value not in ("0", "1", "false", "true"):
        raise bad_value(name, f"{value!r} is neither 1 nor 0")
    return value in ("1", "true")


def _near(name: str, known: Iterable[str]) -> str:
    """The names that look like the one asked for, else some that there are."""
    names = sorted(known)
    near = get_close_matches(name, names, n=3, cutoff=0.5) if len(name) <= _LONGEST_NAME else []
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"there is {', '.join(names[:10]) or 'none'}"
