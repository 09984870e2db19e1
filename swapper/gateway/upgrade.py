"""`/upstream/{model}/...` as a WebSocket: the handshake is a call of the model, what follows is as work.py says.

Invariant: a client's handshake is answered only once the server's side stands, with the server's own refusal where it
refuses. A page's handshake brings no model onto its card: pages whose socket was closed come back by themselves, for as
long as they are open, and an open page is no work.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from swapper.core.types import WorkClass
from swapper.gateway import errors, heads
from swapper.gateway.admission import Call
from swapper.gateway.calls import class_of
from swapper.gateway.child import Child
from swapper.gateway.context import LEFT, GatewayContext, Target
from swapper.gateway.downstream import Arrived
from swapper.gateway.routes import Route, Way
from swapper.gateway.sockets import HANDSHAKE, accept, join, protocols_of
from swapper.gateway.turns import CallState, Full, Turn
from swapper.gateway.upstream import asked_for
from swapper.gateway.vain import max_wait, rests, waited
from swapper.problem import Problem

SWITCHED = 101
_MADE_ANEW = HANDSHAKE | {"host", "connection", "accept-encoding"}
RETRY_S = 5
"""A page may ask again after so long."""


_Reached = aiohttp.ClientWebSocketResponse | Problem | web.Response


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A handshake that may go on: to which model's server, and how."""

    model: str
    target: Target
    way: Way
    klass: WorkClass
    arrived: Arrived


async def socket(ctx: GatewayContext, request: web.Request, arrived: Arrived) -> web.StreamResponse:
    """From the handshake to the end of both sides."""
    klass = class_of(arrived)
    wanted = klass if isinstance(klass, Problem) else _wanted(ctx, request, arrived, klass)
    if isinstance(wanted, Problem):
        return wanted.response()
    if isinstance(wanted, web.Response):
        return wanted
    tenant, may_wait = wanted.target.tenant, max_wait(ctx, arrived)
    if isinstance(may_wait, Problem):
        return may_wait.response()
    call = ctx.admission.admit(tenant, wanted.klass, wanted.arrived.caller.owner, may_wait, looks=True)
    if isinstance(call, Full):
        ctx.told(tenant, 429, 0)
        return errors.queue_full(call.waiting).response()
    code = LEFT
    try:
        upstream = await _reach(ctx, request, wanted, call)
        code = upstream.status if isinstance(upstream, Problem | web.Response) else SWITCHED
    finally:
        call.finish()
        ctx.told(tenant, code, call.waited_ms)
    if isinstance(upstream, aiohttp.ClientWebSocketResponse):
        return await _both(ctx, request, wanted, upstream)
    return upstream.response() if isinstance(upstream, Problem) else upstream


def _wanted(
    ctx: GatewayContext, request: web.Request, arrived: Arrived, klass: WorkClass
) -> _Wanted | Problem | web.Response:
    found = asked_for(ctx, request)
    if not isinstance(found, tuple):
        return found
    model, path, target = found
    problem = rests(ctx, model, target.tenant)
    if problem is None and "Origin" in request.headers and not ctx.admission.gate(target.tenant).open:
        problem = errors.page_waits(model, RETRY_S)
    if problem is not None:
        ctx.told(target.tenant, problem.status, 0)
        return problem
    way = Way("GET", path, tuple(request.query.items()), Route(runs=False), own=True)
    return _Wanted(model, target, way, klass, arrived)


async def _reach(ctx: GatewayContext, request: web.Request, wanted: _Wanted, call: Call) -> _Reached:
    """The server's side; a handshake that was cut over a swap waits again."""
    while True:
        turn = Turn.RUN if call.state is CallState.RUNNING else await call.turn()
        if turn is not Turn.RUN:
            return await waited(ctx, wanted.model, call, turn)
        found = await _unless_cut(call, asyncio.create_task(_connect(ctx, request, wanted)))
        if found is not None:
            return found
        call.requeue()


async def _unless_cut(call: Call, connecting: asyncio.Task[_Reached]) -> _Reached | None:
    """What the handshake came to; None where it was cut. Nothing stays open that nobody has."""

    def stop() -> None:
        connecting.cancel()

    call.on_cut = stop
    if call.cut_reason is not None:
        connecting.cancel()
    try:
        await asyncio.wait({connecting})
    except asyncio.CancelledError:
        connecting.cancel()
        [left] = await asyncio.gather(connecting, return_exceptions=True)
        if isinstance(left, aiohttp.ClientWebSocketResponse):
            await left.close()
        raise
    finally:
        call.on_cut = None
    return None if connecting.cancelled() else connecting.result()


async def _connect(ctx: GatewayContext, request: web.Request, wanted: _Wanted) -> _Reached:
    target, way = wanted.target, wanted.way
    child = await ctx.children.locate(target, ctx.admission.gate(target.tenant).epoch)
    url, headers = _as_sent(wanted, child)
    try:
        return await ctx.session.ws_connect(
            url,
            headers=headers,
            protocols=protocols_of(request),
            max_msg_size=ctx.limits.body_limit,
            autoclose=False,
        )
    except aiohttp.WSServerHandshakeError as error:
        if error.status == SWITCHED or error.status < 400:
            return errors.upstream_failed(wanted.model, f"it does not speak WebSocket at {way.path}")
        return web.Response(status=error.status)
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        if child is not None:
            ctx.children.forget(target.tenant, child)
        return errors.upstream_failed(wanted.model, str(error) or type(error).__name__)


def _as_sent(wanted: _Wanted, child: Child | None) -> tuple[URL, CIMultiDict[str]]:
    """Where it goes, and with which headers: those of any call to that server, but for what a handshake makes anew."""
    target = wanted.target
    called = target.called(wanted.model)
    head = heads.request_head(wanted.arrived, target, child, wanted.way, called, None)
    line, *lines = head.decode("utf-8", "surrogateescape").split("\r\n")
    headers = CIMultiDict[str]()
    for name, sign, value in (one.partition(": ") for one in lines):
        if sign and name.lower() not in _MADE_ANEW:
            headers.add(name, value)
    origin = URL(target.url if child is None else child.url).origin()
    return URL(f"{origin}{line.split(' ')[1]}", encoded=True), headers


async def _both(
    ctx: GatewayContext, request: web.Request, wanted: _Wanted, upstream: aiohttp.ClientWebSocketResponse
) -> web.StreamResponse:
    work = ctx.sockets.opened(wanted.target.tenant, wanted.klass, wanted.arrived.caller.owner, ctx.limits.max_wait_ms)
    try:
        client = await accept(request, upstream, most=ctx.limits.body_limit)
        if not ctx.admission.gate(work.tenant).open:
            work.shut()
        await join(client, upstream, asked=work.asked, answered=work.answered, ends=work.ends)
        return client
    finally:
        ctx.sockets.closed(work)
        await upstream.close()
