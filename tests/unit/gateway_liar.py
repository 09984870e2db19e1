"""A served gateway before a server that lies, as each kind of server it may be."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from swapper.gateway.context import Limits
from tests.support.liar import Liar, liar
from tests.support.wire import Got, request, wire
from tests.unit.gateway_doubles import ALPHA, CHAT, STREAM, Served, serve

KINDS = ("openai", "llama-server", "llama-router", "its child")
"""The last one: a router whose model is called where it listens itself."""
BOTH = ("openai", "its child")
"""One whose connections are kept, and one whose are not: enough where the kind decides nothing else."""
PLAIN_CALL = request(json.dumps(CHAT).encode())
STREAMED_CALL = request(json.dumps(STREAM).encode())


@dataclass(frozen=True, slots=True)
class Lied:
    """The gateway, and the server behind it."""

    gateway: Served
    liar: Liar

    async def call(self, data: bytes = PLAIN_CALL) -> Got:
        """One call on a connection of its own."""
        async with wire(self.gateway.url) as client:
            return await client.call(data)

    async def at_rest(self) -> None:
        """Nothing of any call is left, and the next one is served as if nothing had been."""
        await self.gateway.admission.drained(ALPHA)
        assert self.gateway.ctx.budget.used == 0
        assert self.liar.nonsense == []


@asynccontextmanager
async def lied_to(kind: str, limits: Limits | None = None) -> AsyncGenerator[Lied]:
    """A gateway before a liar of this kind; half of the kinds are called at its door, half past it."""
    async with liar() as server, serve(limits=limits, doored=kind in ("openai", "llama-router")) as gateway:
        server.child = kind == "its child"
        several = kind.startswith("llama-router") or server.child
        target = replace(
            gateway.ctx.targets[ALPHA],
            url=server.url,
            router=several,
            slots=kind != "openai",
            several=several,
        )
        gateway.ctx.targets = {ALPHA: target}
        yield Lied(gateway, server)
