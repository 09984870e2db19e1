"""What models there are, and which of them serve: `/v1/models` and llama-swap's `/running`.

Invariant: only looks; nothing is loaded or kept on its card by it.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from urllib.parse import unquote

import msgspec
from aiohttp import web

from swapper.gateway import errors
from swapper.gateway.context import GatewayContext
from swapper.gateway.listed import ModelInfo

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
ONE = "/v1/models/"


def model_routes(ctx: GatewayContext) -> list[web.RouteDef]:
    """The routes that list models."""
    created = int(time.time())
    listed = _listed(ctx, created)
    return [
        *(web.get(path, listed) for path in ("/v1/models", "/models")),
        web.get(ONE + "{name:.+}", _one(ctx, created)),
        web.get("/running", _running(ctx)),
    ]


def _listed(ctx: GatewayContext, created: int) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        models = sorted((model for model in ctx.models if not model.unlisted), key=lambda model: model.id)
        return _json({"object": "list", "data": [_line(ctx, model, created) for model in models]})

    return handle


def _one(ctx: GatewayContext, created: int) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        name = unquote(request.rel_url.raw_path.removeprefix(ONE))
        tenant = ctx.names.get(name)
        if tenant is None:
            return errors.model_not_found(name, ctx.names).response()
        here = [model for model in ctx.models if model.tenant == tenant]
        model = next((one for one in here if name in (one.id, *one.aliases)), here[0])  # its server's name: the first
        return _json(_line(ctx, model, created, name))

    return handle


def _line(ctx: GatewayContext, model: ModelInfo, created: int, asked: str | None = None) -> dict[str, object]:
    return model.line(
        loaded=ctx.admission.gate(model.tenant).open,
        created=created,
        context=ctx.contexts.get(model.tenant, {}).get(model.id),
        inputs=ctx.inputs.get(model.tenant, {}).get(model.id),
        asked=asked,
    )


def _running(ctx: GatewayContext) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        lines: list[dict[str, object]] = []
        for model in sorted(ctx.models, key=lambda model: model.id):
            state = _state(ctx, model.tenant)
            if state is not None:
                line = {"model": model.id, "state": state, "cmd": model.command, "proxy": ctx.targets[model.tenant].url}
                told = {"ttl": model.ttl_s, "name": model.name or model.id, "description": model.description}
                lines.append({**line, **told})
        return _json({"running": lines})

    return handle


def _state(ctx: GatewayContext, tenant: str) -> str | None:
    """In llama-swap's words; None: it is not there."""
    if ctx.admission.gate(tenant).open:
        return "ready"
    if ctx.member.loading(tenant):
        return "starting"
    return "stopping" if ctx.admission.in_flight(tenant) else None


def _json(body: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")
