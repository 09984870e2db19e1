"""The model routes on aiohttp: read the body, find the model, admit the call, hand it to the pipe.

Invariant: nothing is sent to a client before an answer, a refusal or a due keepalive exists, and no body keeps the loop
from others: compressed ones are undone in threads, few at once, and large ones parsed one in a pass of the loop. The
server must run with `SERVER_OPTIONS`, so that a client that leaves ends its handler at once, also while it is queued,
and that a compressed body is undone here: aiohttp answers one it cannot undo by itself, in no envelope.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, cast

from aiohttp import web

from swapper.caller import Caller
from swapper.gateway import errors
from swapper.gateway.calls import LARGE_BYTES, Asked, answer, class_of, in_body, parsed
from swapper.gateway.context import GatewayContext, Held
from swapper.gateway.downstream import arrived
from swapper.gateway.form import form_with_model, is_form, parse_form
from swapper.gateway.models import model_routes
from swapper.gateway.parse import Ask, Decoding, decoding, parse_body, with_model
from swapper.gateway.pumped import Pumped
from swapper.gateway.routes import GET, POST, Route, Way, route_of
from swapper.gateway.sockets import wants_socket
from swapper.gateway.upgrade import socket
from swapper.gateway.upstream import METHODS, PREFIX, asked_for
from swapper.problem import Problem

SERVER_OPTIONS: dict[str, Any] = {"handler_cancellation": True, "auto_decompress": False}
"""Keyword arguments for `web.AppRunner` (or `web.run_app`)."""

Reader = Callable[[GatewayContext, web.Request, Held], Awaitable["Asked | Problem | web.Response"]]
"""What finds out what is asked for; it may answer itself."""


def routes(ctx: GatewayContext) -> list[web.RouteDef]:
    """The routes to add to an application. The api room's middleware sets `owner`, `default_class`, `classes`."""
    found = [web.post(path, _handler(ctx, _reads_body(route))) for path, route in POST.items()]
    found += [web.get(path, _handler(ctx, _reads_query(route)), allow_head=False) for path, route in GET.items()]
    found += [web.route(method, PREFIX + "{path:.+}", _handler(ctx, _reads_upstream)) for method in METHODS]
    return [*found, *model_routes(ctx)]


def _handler(ctx: GatewayContext, reads: Reader) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def handle(request: web.Request) -> web.StreamResponse:
        if reads is _reads_upstream and wants_socket(request):
            return await socket(ctx, request, arrived(request.raw_headers, caller_of(request)))
        held = Held(ctx.budget)
        try:
            return await _dispatch(ctx, request, reads, held)
        finally:
            held.release()

    return handle


async def _dispatch(ctx: GatewayContext, request: web.Request, reads: Reader, held: Held) -> web.StreamResponse:
    came = arrived(request.raw_headers, caller_of(request))
    klass = class_of(came)
    asked = klass if isinstance(klass, Problem) else await reads(ctx, request, held)
    if isinstance(asked, Problem):
        return asked.response()
    if isinstance(asked, web.Response) or isinstance(klass, Problem):
        assert isinstance(asked, web.Response)
        return asked
    down = Pumped(request)
    try:
        work = answer(ctx, came, klass, asked, held, down)
        del asked  # views of the body, which may go before the answer has passed
        await work
        return await down.response()
    finally:
        down.close()


def caller_of(request: web.Request) -> Caller:
    """Who calls, as the api room's middleware says; without one everybody may do everything."""
    default, allowed = request.get("default_class"), cast("object", request.get("classes"))
    return Caller(
        str(request.get("owner", "local")),
        None if default is None else str(default),
        frozenset(str(one) for one in cast("list[object]", allowed)) if allowed else None,
    )


def _reads_body(route: Route) -> Reader:
    async def read(ctx: GatewayContext, request: web.Request, held: Held) -> Asked | Problem:
        problem = await _read_body(ctx, request, held)
        if problem is not None:
            return problem
        return await in_body(ctx, request.headers.get("Content-Type", ""), held, _way(request, route))

    return read


def _reads_query(route: Route) -> Reader:
    async def read(ctx: GatewayContext, request: web.Request, held: Held) -> Asked | Problem:
        named = request.query.getall("model", [])
        if len(named) != 1 or not named[0]:
            return errors.no_model_in_query(request.path, len(named))
        return Asked(Ask(named[0], stream=False), replace(_way(request, route), by_query=True))

    return read


async def _reads_upstream(ctx: GatewayContext, request: web.Request, held: Held) -> Asked | Problem | web.Response:
    """Of the body only the prompt is looked at, where it is one that can be followed; it need be none."""
    found = asked_for(ctx, request)
    if not isinstance(found, tuple):
        return found
    model, path, target = found
    if (problem := await _read_body(ctx, request, held)) is not None:
        return problem
    way = Way(request.method, path, tuple(request.query.items()), route_of(request.method, path), own=True)
    kind = request.headers.get("Content-Type", "")
    if is_form(kind):
        ask = await parsed(ctx, held.body, partial(parse_form, content_type=kind))
        rename: Callable[[bytes, str], bytes] = partial(form_with_model, content_type=kind)
    else:
        ask, rename = await parsed(ctx, held.body, partial(parse_body, model=model)), with_model
    if not isinstance(ask, Ask):
        return Asked(Ask(model, stream=False), way)
    ask = replace(ask, model=model)
    return Asked(ask, replace(way, rename=rename) if target.slots or target.several else way)


def _way(request: web.Request, route: Route) -> Way:
    path = request.rel_url.raw_path if route.path is None else route.path
    return Way(request.method, path, tuple(request.query.items()), route)


async def _read_body(ctx: GatewayContext, request: web.Request, held: Held) -> Problem | None:
    """The whole body into `held`, within the limit of one body and the budget of all."""
    limit = ctx.limits.body_limit
    if (request.content_length or 0) > limit:
        return errors.too_large(limit)
    undo = decoding(request.headers.getall("Content-Encoding", ()))
    if isinstance(undo, Problem):
        return undo
    pieces: list[bytes] = []
    came = 0
    try:
        while chunk := await _more(request, ctx.limits.body_pause_ms):
            came += len(chunk)
            if came > limit:
                return errors.too_large(limit)  # also of what gives nothing when it is undone
            undone = undo.feed(chunk)
            while piece := await _next_piece(ctx, undo, undone):
                if held.size + len(piece) > limit:
                    return errors.too_large(limit)
                if not held.add(len(piece)):
                    return errors.body_budget(ctx.limits.body_budget)
                pieces.append(piece)
        undo.finish()
    except ValueError as error:
        encoding = request.headers["Content-Encoding"]
        return errors.bad_request(f"the body is not {encoding}: {error}", param="Content-Encoding")
    except TimeoutError:
        return errors.body_stopped(ctx.limits.body_pause_ms)
    except web.RequestPayloadError:
        return errors.bad_request("the body could not be read: it is not chunked as it says")
    large = len(pieces) > 1 and held.size > LARGE_BYTES
    held.body = await asyncio.to_thread(b"".join, pieces) if large else b"".join(pieces)
    return None


async def _next_piece(ctx: GatewayContext, undo: Decoding, pieces: Iterator[bytes]) -> bytes:
    """What comes next of a chunk, none at its end. Turns are by piece: a small body waits for no whole bomb."""
    if undo.plain:
        return next(pieces, b"")
    async with ctx.inflating:
        return await asyncio.to_thread(next, pieces, b"")


async def _more(request: web.Request, pause_ms: int) -> bytes:
    """The next bytes of the body, none at its end. After a broken chunk aiohttp's parser is silent for ever."""
    async with asyncio.timeout(pause_ms / 1000):
        return await request.content.readany()
