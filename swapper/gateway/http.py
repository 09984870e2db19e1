"""The model routes on aiohttp: read the body, find the model, admit the call, hand it to the pipe.

Invariant: nothing is sent to a client before an answer, a refusal or a due keepalive exists, and no body keeps the loop
from others: compressed ones are undone in threads, few at once, and large ones parsed one in a pass of the loop. The
server must run with `SERVER_OPTIONS`, so that a client that leaves ends its handler at once, also while it is queued,
and that a compressed body is undone here: aiohttp answers one it cannot undo by itself, in no envelope.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar, cast
from urllib.parse import unquote

from aiohttp import web

from swapper.core.types import WorkClass
from swapper.gateway import errors
from swapper.gateway.admission import Full
from swapper.gateway.context import LEFT, GatewayContext, Held
from swapper.gateway.filters import Filter
from swapper.gateway.form import form_with, form_with_model, is_form, parse_form
from swapper.gateway.models import model_routes
from swapper.gateway.parse import Ask, Decoding, decoding, parse_body, parse_class, with_model
from swapper.gateway.pipe import Exchange
from swapper.gateway.routes import GET, POST, Route, Way, route_of
from swapper.gateway.upstream import METHODS, PREFIX, model_and_path, refused, to_slash
from swapper.problem import Problem

SERVER_OPTIONS: dict[str, Any] = {"handler_cancellation": True, "auto_decompress": False}
"""Keyword arguments for `web.AppRunner` (or `web.run_app`)."""

LARGE_BYTES = 1 << 20
"""From here on a body is parsed in a pass of its own: 64 MiB take up to a quarter of a second."""

_T = TypeVar("_T")
Reader = Callable[[GatewayContext, web.Request, Held], Awaitable["Asked | Problem | web.Response"]]
"""What finds out what is asked for; it may answer itself."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asks for, and how that goes upstream."""

    ask: Ask
    way: Way


def routes(ctx: GatewayContext) -> list[web.RouteDef]:
    """The routes to add to an application. The api room's middleware sets `owner`, `default_class`, `classes`."""
    found = [web.post(path, _handler(ctx, _reads_body(route))) for path, route in POST.items()]
    found += [web.get(path, _handler(ctx, _reads_query(route)), allow_head=False) for path, route in GET.items()]
    found += [web.route(method, PREFIX + "{path:.+}", _handler(ctx, _reads_upstream)) for method in METHODS]
    return [*found, *model_routes(ctx)]


def _handler(ctx: GatewayContext, reads: Reader) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def handle(request: web.Request) -> web.StreamResponse:
        held = Held(ctx.budget)
        try:
            outcome = await _dispatch(ctx, request, reads, held)
        finally:
            held.release()
        return outcome.response() if isinstance(outcome, Problem) else outcome

    return handle


async def _dispatch(
    ctx: GatewayContext, request: web.Request, reads: Reader, held: Held
) -> web.StreamResponse | Problem:
    klass = _call_class(request)
    if isinstance(klass, Problem):
        return klass
    asked = await reads(ctx, request, held)
    if not isinstance(asked, Asked):
        return asked
    model, way = asked.ask.model, asked.way
    tenant = ctx.names.get(model)
    if tenant is None:
        return errors.model_not_found(model, ctx.names)
    if (failure := ctx.member.resting(tenant)) is not None:
        return errors.load_failed(model, failure.reason)
    owner = str(request.get("owner", "local"))
    call = ctx.admission.admit(tenant, klass, owner, ctx.limits.max_wait_ms)
    if isinstance(call, Full):
        ctx.told(tenant, 429, 0)
        return errors.queue_full(call.waiting)
    code = LEFT
    try:
        exchange = Exchange(ctx, request, ctx.targets[tenant], asked.ask, way, held, call)
        del asked  # views of the body, which may go before the answer has passed
        outcome = await exchange.run()
        code = outcome.status
        return outcome
    finally:
        call.finish()
        ctx.told(tenant, code, call.waited_ms)


def _reads_body(route: Route) -> Reader:
    async def read(ctx: GatewayContext, request: web.Request, held: Held) -> Asked | Problem:
        problem = await _read_body(ctx, request, held)
        if problem is not None:
            return problem
        kind = request.headers.get("Content-Type", "")
        form = is_form(kind)
        parse = partial(parse_form, content_type=kind) if form else parse_body
        ask = await _parsed(ctx, held.body, parse)
        if isinstance(ask, Ask) and (found := ctx.filters.get(ask.model)) is not None:
            ask = await _filtered(ctx, held, ask, found, kind if form else None)
        if isinstance(ask, Problem):
            return ask
        rename = partial(form_with_model, content_type=kind) if form else with_model
        return Asked(ask, replace(_way(request, route), rename=rename))

    return read


async def _filtered(ctx: GatewayContext, held: Held, ask: Ask, found: Filter, form: str | None) -> Ask | Problem:
    """The body as its model's entry has it, and what it asks for then: what is followed is what the server reads.

    `form`: the Content-Type, where it is one.
    """
    change = found.body if form is None else partial(form_with, values=found.form(), content_type=form)
    body = await _parsed(ctx, held.body, change)
    if body is held.body:
        return ask
    if not held.add(max(len(body) - held.size, 0)):
        return errors.body_budget(ctx.limits.body_budget)
    held.body = body
    return await _parsed(ctx, body, parse_body if form is None else partial(parse_form, content_type=form))


def _reads_query(route: Route) -> Reader:
    async def read(ctx: GatewayContext, request: web.Request, held: Held) -> Asked | Problem:
        named = request.query.getall("model", [])
        if len(named) != 1 or not named[0]:
            return errors.no_model_in_query(request.path, len(named))
        return Asked(Ask(named[0], stream=False), replace(_way(request, route), by_query=True))

    return read


async def _reads_upstream(ctx: GatewayContext, request: web.Request, held: Held) -> Asked | Problem | web.Response:
    """Of the body only the prompt is looked at, where it is one that can be followed; it need be none."""
    raw = request.rel_url.raw_path
    found = model_and_path(raw, ctx.names)
    if found is None:
        return errors.model_not_found(unquote(raw.removeprefix(PREFIX)), ctx.names)
    model, path = found
    if not path:
        return to_slash(request)
    target = ctx.targets[ctx.names[model]]
    problem = refused(request, path, target) or await _read_body(ctx, request, held)
    if problem is not None:
        return problem
    way = Way(request.method, path, tuple(request.query.items()), route_of(request.method, path), own=True)
    kind = request.headers.get("Content-Type", "")
    if is_form(kind):
        ask = await _parsed(ctx, held.body, partial(parse_form, content_type=kind))
        rename: Callable[[bytes, str], bytes] = partial(form_with_model, content_type=kind)
    else:
        ask, rename = await _parsed(ctx, held.body, partial(parse_body, model=model)), with_model
    if not isinstance(ask, Ask):
        return Asked(Ask(model, stream=False), way)
    ask = replace(ask, model=model)
    return Asked(ask, replace(way, rename=rename) if target.slots or target.several else way)


def _way(request: web.Request, route: Route) -> Way:
    path = request.rel_url.raw_path if route.path is None else route.path
    return Way(request.method, path, tuple(request.query.items()), route)


def _call_class(request: web.Request) -> WorkClass | Problem:
    default = request.get("default_class")
    allowed = cast("object", request.get("classes"))
    return parse_class(
        request.headers.get("X-Swapper-Class"),
        None if default is None else str(default),
        frozenset(str(one) for one in cast("list[object]", allowed)) if allowed else None,
    )


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


async def _parsed(ctx: GatewayContext, body: bytes, parse: Callable[[bytes], _T]) -> _T:
    if len(body) <= LARGE_BYTES:
        return parse(body)
    async with ctx.parsing:
        await asyncio.sleep(0)  # a pass for everybody else; in a thread the parser would keep the interpreter, too
        return parse(body)


async def _more(request: web.Request, pause_ms: int) -> bytes:
    """The next bytes of the body, none at its end. After a broken chunk aiohttp's parser is silent for ever."""
    async with asyncio.timeout(pause_ms / 1000):
        return await request.content.readany()
