"""What models there are, and which of them serve: `/v1/models` and llama-swap's `/running`.

Invariant: only looks; nothing is loaded or kept on its card by it.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from swapper.gateway.context import GatewayContext, ModelInfo

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def model_routes(ctx: GatewayContext) -> list[web.RouteDef]:
    """The routes that list models."""
    listed = _listed(ctx)
    return [web.get("/v1/models", listed), web.get("/models", listed), web.get("/running", _running(ctx))]


def _listed(ctx: GatewayContext) -> Handler:
    created = int(time.time())

    async def handle(request: web.Request) -> web.StreamResponse:
        models = sorted(ctx.models, key=lambda model: model.id)
        return _json({"object": "list", "data": [_line(ctx, model, created) for model in models]})

    return handle


def _line(ctx: GatewayContext, model: ModelInfo, created: int) -> dict[str, object]:
    loaded = ctx.admission.gate(model.tenant).open
    line: dict[str, object] = {
        "id": model.id,
        "object": "model",
        "created": created,
        "owned_by": "swapper",
        "aliases": list(model.aliases),
        "status": {"value": "loaded" if loaded else "unloaded"},
    }
    tokens = model.context_length or ctx.contexts.get(model.tenant, {}).get(model.id)
    if tokens is not None:
        line["context_length"] = tokens
        line["meta"] = {"n_ctx": tokens}
    return line


def _running(ctx: GatewayContext) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        lines: list[dict[str, object]] = []
        for model in sorted(ctx.models, key=lambda model: model.id):
            state = _state(ctx, model.tenant)
            if state is not None:
                proxy = ctx.targets[model.tenant].url
                told = {"cmd": "", "proxy": proxy, "ttl": model.ttl_s, "name": model.id, "description": ""}
                lines.append({"model": model.id, "state": state, **told})
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
