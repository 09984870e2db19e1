"""The lease routes: ask, look, heartbeat, give back.

Invariant: nothing is decided here; a request is checked, written with one store call, and the answer is the lease as
the store has it. Waiting (`?wait=`) is woken by the event log, and a caller who hangs up changes nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from dataclasses import replace
from datetime import datetime

import psutil
from aiohttp import web
from yarl import URL

from swapper.api import bodies
from swapper.api.auth import class_or_default, may_act_for
from swapper.api.bodies import HeartbeatBody, LeaseBody, bad_value
from swapper.api.context import ApiContext
from swapper.api.ids import lease_id
from swapper.api.problem import Problem
from swapper.api.views import Json, lease_json, settled
from swapper.config.units import show_mib
from swapper.core.explain import explain_lease
from swapper.core.types import Lease, LeaseRequest, LeaseState, World
from swapper.store.protocol import Ended, Idempotency, KeyReused, LeaseFilter, NotFound, QueueFull, WrongToken
from workers.control import launcher

_KEY = re.compile(r"[\x21-\x7e][\x20-\x7e]{0,254}")
_CURSOR = re.compile(r"[0-9]{1,16}")
_UNDECIDED = frozenset({LeaseState.QUEUED, LeaseState.PREPARING})
_FIRST_YEAR, _LAST_YEAR = 2000, 2200


class LeaseRoutes:
    """Handlers over one context."""

    def __init__(self, ctx: ApiContext) -> None:
        self._ctx = ctx

    def table(self) -> list[web.RouteDef]:
        """Route definitions, for `app.add_routes`."""
        return [
            web.post("/api/leases", self.create),
            web.get("/api/leases", self.index),
            web.get("/api/leases/{id}", self.show),
            web.post("/api/leases/{id}/heartbeat", self.heartbeat),
            web.delete("/api/leases/{id}", self.end),
        ]

    async def create(self, request: web.Request) -> web.Response:
        """`POST /api/leases`: 201 with Location, 200 for a repeated Idempotency-Key."""
        wait_s = bodies.wait_seconds(request.query)
        key = request.headers.get("Idempotency-Key")
        if key is not None and _KEY.fullmatch(key) is None:
            raise bad_value("Idempotency-Key", "1 to 255 printable ASCII characters")
        body = await bodies.read_body(request, LeaseBody)
        wanted = self._request(request, body)
        if wanted.holder_pid is not None or wanted.holder_started is not None:
            wanted = replace(wanted, holder_started=await asyncio.to_thread(self._holder_started, body))
        digest = hashlib.sha256(body.model_dump_json(by_alias=True).encode()).hexdigest()
        answer = await self._ctx.store.enqueue(
            wanted,
            lease_id=lease_id(),
            max_queue=self._ctx.spec.policy.max_queue,
            idempotency=None if key is None else Idempotency(key, digest),
        )
        match answer:
            case QueueFull(queued=queued):
                text = f"The queue is full: {queued} leases wait already. Try again later."
                raise Problem(429, "queue-full", text, position=queued + 1)
            case KeyReused(lease_id=other):
                text = f"This Idempotency-Key came before with another body, for the lease {other}."
                raise Problem(422, "idempotency-key-reused", text, lease=other)
            case _:
                lease = answer.lease
        if wait_s is not None:
            lease = await self._settle(lease.id, wait_s)
        status = 201 if answer.created else 200
        location = {"Location": f"/api/leases/{lease.id}"}
        return web.json_response(await self._view(lease), status=status, headers=location)

    async def index(self, request: web.Request) -> web.Response:
        """`GET /api/leases`: a page, newest first."""
        query = request.query
        state = query.get("state")
        if state is not None and state not in set(LeaseState):
            raise bad_value("state", f"{state!r} is none of {', '.join(LeaseState)}")
        cursor = query.get("cursor")
        if cursor is not None and _CURSOR.fullmatch(cursor) is None:
            raise bad_value("cursor", f"{cursor!r} is not a next_cursor that was given")
        page = await self._ctx.store.leases(
            LeaseFilter(
                state=None if state is None else LeaseState(state),
                card=query.get("card"),
                owner=query.get("owner"),
                limit=bodies.whole_number(query, "limit", low=1, high=1000) or 100,
                cursor=cursor,
            )
        )
        waiting = any(lease.state in _UNDECIDED for lease in page.items)
        world = await self._ctx.store.read() if waiting else None
        items = [await self._view(lease, world) for lease in page.items]
        return web.json_response({"items": items, "next_cursor": page.next_cursor})

    async def show(self, request: web.Request) -> web.Response:
        """`GET /api/leases/{id}[?wait=]`."""
        wait_s = bodies.wait_seconds(request.query)
        lease = await self._find(request)
        if wait_s is not None:
            lease = await self._settle(lease.id, wait_s)
        return web.json_response(await self._view(lease))

    async def heartbeat(self, request: web.Request) -> web.Response:
        """`POST /api/leases/{id}/heartbeat`: the lease with its new `expires_at`, and `revoke_at` when asked to go."""
        body = await bodies.read_body(request, HeartbeatBody)
        lease = await self._find_own(request, "heartbeat")
        match await self._ctx.store.heartbeat(lease.id, body.token, progress=body.progress):
            case NotFound():
                raise _no_lease(lease.id)
            case WrongToken():
                raise _wrong_token(lease)
            case Ended(lease=ended):
                text = f"The lease {ended.id} has ended: {ended.state}{_because(ended)}."
                raise Problem(410, "lease-ended", text, state=ended.state)
            case Lease() as alive:
                return web.json_response(await self._view(alive))

    async def end(self, request: web.Request) -> web.Response:
        """`DELETE /api/leases/{id}[?token=]`: released, or cancelled while it waited; repeated: unchanged."""
        token = bodies.whole_number(request.query, "token", low=0, high=2**63 - 1)
        lease = await self._find_own(request, "end")
        match await self._ctx.store.end(lease.id, token):
            case NotFound():
                raise _no_lease(lease.id)
            case WrongToken() if token is None:
                text = f"The lease {lease.id} is granted: send the token that came with the grant, as ?token=N."
                raise Problem(409, "token-needed", text)
            case WrongToken():
                raise _wrong_token(lease)
            case Lease() as ended:
                return web.json_response(await self._view(ended))

    def _request(self, request: web.Request, body: LeaseBody) -> LeaseRequest:
        klass = class_or_default(request, body.klass)
        self._check_fit(body)
        self._check_times(body)
        if body.webhook is not None:
            self._check_webhook(body.webhook)
        return LeaseRequest(
            owner=request["owner"],
            card=body.card,
            vram_mib=body.vram_mib,
            label=body.label,
            klass=klass,
            ttl_ms=round(body.ttl_s * 1000),
            max_hold_ms=round(body.max_hold_s * 1000) if body.max_hold_s else self._ctx.spec.policy.max_hold_ms,
            expected_ms=None if body.expected_s is None else round(body.expected_s * 1000),
            not_before_ms=_epoch_ms(body.not_before),
            deadline_ms=_epoch_ms(body.deadline),
            preemptible=body.preemptible,
            holder_pid=body.holder_pid,
            holder_started=body.holder_started,
            webhook=body.webhook,
        )

    def _holder_started(self, body: LeaseBody) -> int:
        """When the process it names did, if one like that runs here and is not ours. Blocking, some ms."""
        pid, told = body.holder_pid, body.holder_started
        if pid is None:
            raise bad_value("holder_started", "it belongs to a holder_pid")
        stat = launcher.stat_of(pid) if psutil.pid_exists(pid) else None
        if stat is None or stat[0] in "ZX":
            raise bad_value("holder_pid", f"no process {pid} runs where swapper does")
        if told is not None and told != stat[3]:
            raise bad_value("holder_pid", f"the process {pid} that runs where swapper does is another one")
        ours = self._ctx.whose(pid)
        if ours is not None:
            raise bad_value("holder_pid", f"{pid} is {ours}: it would hold the card for as long as it serves")
        return stat[3]

    def _check_fit(self, body: LeaseBody) -> None:
        cards = self._ctx.spec.cards
        if body.card is not None and body.card not in cards:
            raise bad_value("card", f"{body.card!r} is not a card here; there is {', '.join(cards) or 'none'}")
        wanted = body.vram_mib
        if wanted is None:
            return
        names = [body.card] if body.card is not None else list(cards)
        rooms = {name: self._ctx.capacity_mib(name) for name in names}
        known = {name: room for name, room in rooms.items() if room is not None}
        if len(known) == len(rooms) and known and wanted > max(known.values()):
            best = max(known, key=lambda name: known[name])
            room = show_mib(max(known[best], 0))
            raise bad_value("vram", f"{body.vram} never fits: the most a lease can have is {room}, on {best}")

    def _check_times(self, body: LeaseBody) -> None:
        for name, moment in (("not_before", body.not_before), ("deadline", body.deadline)):
            if moment is not None and not _FIRST_YEAR <= moment.year <= _LAST_YEAR:
                raise bad_value(name, f"its year is not between {_FIRST_YEAR} and {_LAST_YEAR}")
        if body.deadline is None:
            return
        if body.deadline <= datetime.now(body.deadline.tzinfo):
            raise bad_value("deadline", "it has passed already")
        if body.not_before is not None and body.deadline <= body.not_before:
            raise bad_value("deadline", "it lies before not_before")

    def _check_webhook(self, text: str) -> None:
        try:
            url = URL(text)
        except ValueError:
            raise bad_value("webhook", f"{text!r} is not a URL") from None
        if url.scheme not in ("http", "https") or url.host not in self._ctx.webhook_hosts:
            allowed = ", ".join(sorted(self._ctx.webhook_hosts)) or "none"
            raise bad_value("webhook", f"only http(s) to a host the configuration allows ({allowed})")

    async def _find(self, request: web.Request) -> Lease:
        wanted = request.match_info["id"]
        lease = await self._ctx.store.lease(wanted)
        if lease is None:
            raise _no_lease(wanted)
        return lease

    async def _find_own(self, request: web.Request, verb: str) -> Lease:
        lease = await self._find(request)
        if not may_act_for(request, lease.request.owner):
            text = f"Only {lease.request.owner!r} or an admin may {verb} the lease {lease.id}."
            raise Problem(403, "not-the-owner", text)
        return lease

    async def _settle(self, wanted: str, wait_s: float) -> Lease:
        """The lease once it is granted or ended, or as it stands after `wait_s` seconds."""
        deadline = asyncio.get_running_loop().time() + wait_s
        with self._ctx.tail.watch(wanted) as changed:
            while True:
                changed.clear()
                lease = await self._ctx.store.lease(wanted)
                if lease is None:
                    raise _no_lease(wanted)
                if settled(lease) or self._ctx.tail.closed:
                    return lease
                try:
                    async with asyncio.timeout_at(deadline):
                        await changed.wait()
                except TimeoutError:
                    return lease

    async def _view(self, lease: Lease, world: World | None = None) -> Json:
        return await view_lease(self._ctx, lease, world)


async def view_lease(ctx: ApiContext, lease: Lease, world: World | None = None) -> Json:
    """The lease's JSON with its place in the queue and its one sentence; reads the world if it is needed."""
    position = None
    if lease.state == LeaseState.QUEUED:
        position = await ctx.store.position(lease.id)
    if world is None:
        world = await ctx.store.read() if lease.state in _UNDECIDED else World(0, {}, {})
    env = ctx.env.get(lease.card) if lease.card is not None else None
    return lease_json(lease, position=position, explain=explain_lease(world, ctx.spec, lease, position), env=env)


def _epoch_ms(moment: datetime | None) -> int | None:
    return None if moment is None else round(moment.timestamp() * 1000)


def _because(lease: Lease) -> str:
    return f" ({lease.reason})" if lease.reason else ""


def _no_lease(wanted: str) -> Problem:
    return Problem(404, "no-such-lease", f"There is no lease {wanted!r}.")


def _wrong_token(lease: Lease) -> Problem:
    if lease.token is None:
        return Problem(409, "wrong-token", f"The lease {lease.id} is {lease.state} and has no token yet.")
    return Problem(409, "wrong-token", f"That is not the token of the lease {lease.id}.")
