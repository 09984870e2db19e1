"""The ports of the gates: each configured ComfyUI gets one, which is open for as long as swapper serves.

Invariant: a gate's own port is told in one sentence where it cannot be had; when serving ends who waits is answered
before the port is closed, and leases and prompts stay as they are for who comes next.
"""

from __future__ import annotations

import asyncio
import uuid
from contextlib import AsyncExitStack

from aiohttp import web

from swapper.api import ApiContext
from swapper.api.ids import lease_id
from swapper.comfyui.gate import Gate, Limits
from swapper.comfyui.holding import Holding, Wish
from swapper.comfyui.proxy import Proxy
from swapper.comfyui.renders import Renders
from swapper.comfyui.taken import Taken
from swapper.config import Config, TenantEntry
from swapper.config.comfyui import KIND, LINGER_MS
from swapper.errors import ConfigError
from swapper.gateway.context import GatewayContext
from swapper.gateway.http import SERVER_OPTIONS
from swapper.watches import background
from workers.comfyui.http import ComfyHttp

SHUTDOWN_S = 2.0


async def open_gates(
    config: Config, context: ApiContext, front: GatewayContext, stack: AsyncExitStack, failed: asyncio.Future[str]
) -> None:
    """Raises ConfigError where a port cannot be had."""
    for name, entry in config.tenants.items():
        if entry.kind == KIND and entry.gate is not None and entry.url is not None:
            gate = _gate(config, name, entry, entry.url, context, front, stack)
            await _listen(name, entry.gate, Proxy(entry.url, gate, front.session), stack)
            await background(stack, failed, gate.run(), f"gate of {name}")


def _gate(
    config: Config,
    name: str,
    entry: TenantEntry,
    url: str,
    context: ApiContext,
    front: GatewayContext,
    stack: AsyncExitStack,
) -> Gate:
    policy = context.spec.policy
    mib = entry.vram_mib if isinstance(entry.vram_mib, int) else None
    http = ComfyHttp(url)
    stack.push_async_callback(http.close)
    linger = LINGER_MS if entry.linger_ms is None else entry.linger_ms
    drains = policy.drain_ms if policy.on_drain_limit == "end" else None

    def failing() -> str | None:
        failure = front.member.resting(name)
        return None if failure is None else failure.reason

    return Gate(
        Holding(
            context.store, context.tail, Wish(name, entry.card, mib, policy.max_hold_ms, policy.max_queue), lease_id
        ),
        Renders(http, Taken(config.state_dir / "comfyui" / f"{name}.json")),
        Limits(linger, drains, max_waiting=policy.max_queue, max_bytes=config.gateway.body_budget_bytes),
        f"swapper-gate-{uuid.uuid4().hex}",
        failing,
    )


async def _listen(name: str, address: str, proxy: Proxy, stack: AsyncExitStack) -> None:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", proxy.handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_S, **SERVER_OPTIONS)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    host, _, port = address.rpartition(":")
    try:
        await web.TCPSite(runner, host.strip("[]"), int(port), reuse_address=True).start()
    except OSError as error:
        text = f"tenants.{name}.gate: {address} cannot be used: {error.strerror}; is another server there?"
        raise ConfigError([text]) from None
