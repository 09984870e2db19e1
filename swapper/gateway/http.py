"""The model routes on aiohttp: read the body, find the model, admit the call, hand it to the pipe.

Invariant: nothing is sent to a client before an answer, a refusal or a due keepalive exists, and no body keeps the loop
from others: compressed ones are undone in threads, few at once, and large ones parsed one in a pass of the loop. The
server must run with `SERVER_OPTIONS`, so that a client that leaves ends its handler at once, also while it is queued,
and that a compressed body is undone here: aiohttp answers one it cannot undo by itself, in no envelope.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, cast

import msgspec
from aiohttp import web

from swapper.core.types import WorkClass
from swapper.gateway import errors, filler
from swapper.gateway.admission import Full
from swapper.gateway.context import LEFT, GatewayContext, Held
from swapper.gateway.filler import Api
from swapper.gateway.parse import Ask, Decoding, decoding, parse_body, parse_class
from swapper.gateway.pipe import Exchange
from swapper.problem import Problem

SERVER_OPTIONS: dict[str, Any] = {"handler_cancellation": True, "auto_decompress": False}
"""Keyword arguments for `web.AppRunner` (or `web.run_app`)."""

LARGE_BYTES = 1 << 20
"""From here on a body is parsed in a pass of its own: 64 MiB take up to a quarter of a second."""

ROUTES: dict[str, Api] = {
    "/v1/chat/completions": filler.CHAT,
    "/chat/completions": filler.CHAT,
    "/v1/completions": filler.TEXT,
    "/v1/messages": filler.MESSAGES,
    "/completion": filler.COMPLETION,
    "/completions": filler.COMPLETION,
}
"""Path -> its API; the same path goes upstream."""


def routes(ctx: GatewayContext) -> list[web.RouteDef]:
    """The routes to add to an application. The api room's middleware sets `owner`, `default_class`, `classes`."""
    found = [web.post(path, _model_route(ctx, api)) for path, api in ROUTES.items()]
    return [*found, web.get("/v1/models", _models_route(ctx)), web.get("/models", _models_route(ctx))]


def _model_route(ctx: GatewayContext, api: Api) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def handle(request: web.Request) -> web.StreamResponse:
        held = Held(ctx.budget)
        try:
            outcome = await _dispatch(ctx, request, api, held)
        finally:
            held.release()
        return outcome.response() if isinstance(outcome, Problem) else outcome

    return handle


async def _dispatch(ctx: GatewayContext, request: web.Request, api: Api, held: Held) -> web.StreamResponse | Problem:
    klass = _call_class(request)
    if isinstance(klass, Problem):
        return klass
    problem = await _read_body(ctx, request, held)
    if problem is not None:
        return problem
    ask = await _parsed(ctx, held.body)
    if isinstance(ask, Problem):
        return ask
    tenant = ctx.names.get(ask.model)
    if tenant is None:
        return errors.model_not_found(ask.model, ctx.names)
    if (failure := ctx.member.resting(tenant)) is not None:
        return errors.load_failed(ask.model, failure.reason)
    owner = str(request.get("owner", "local"))
    call = ctx.admission.admit(tenant, klass, owner, ctx.limits.max_wait_ms)
    if isinstance(call, Full):
        ctx.told(tenant, 429, 0)
        return errors.queue_full(call.waiting)
    code = LEFT
    try:
        exchange = Exchange(ctx, request, ctx.targets[tenant], ask, api, held, call)
        del ask  # views of the body, which may go before the answer has passed
        outcome = await exchange.run()
        code = outcome.status
        return outcome
    finally:
        call.finish()
        ctx.told(tenant, code, call.waited_ms)


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


async def _parsed(ctx: GatewayContext, body: bytes) -> Ask | Problem:
    if len(body) <= LARGE_BYTES:
        return parse_body(body)
    async with ctx.parsing:
        await asyncio.sleep(0)  # a pass for everybody else; in a thread the parser would keep the interpreter, too
        return parse_body(body)


async def _more(request: web.Request, pause_ms: int) -> bytes:
    """The next bytes of the body, none at its end. After a broken chunk aiohttp's parser is silent for ever."""
    async with asyncio.timeout(pause_ms / 1000):
        return await request.content.readany()


def _models_route(ctx: GatewayContext) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    created = int(time.time())

    async def handle(request: web.Request) -> web.StreamResponse:
        lines: list[dict[str, object]] = []
        for model in sorted(ctx.models, key=lambda model: model.id):
            loaded = ctx.admission.gate(model.tenant).open
            line: dict[str, object] = {
                "id": model.id,
                "object": "model",
                "created": created,
                "owned_by": "swapper",
                "aliases": list(model.aliases),
                "status": {"value": "loaded" if loaded else "unloaded"},
            }
            if model.context_length is not None:
                line["context_length"] = model.context_length
                line["meta"] = {"n_ctx": model.context_length}
            lines.append(line)
        body = msgspec.json.encode({"object": "list", "data": lines})
        return web.Response(body=body, content_type="application/json")

    return handle
