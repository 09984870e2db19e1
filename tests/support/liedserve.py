"""A real `swapper serve` process before a liar, as a server with OpenAI's routes that somebody else started."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.liar import Liar, echo, liar
from tests.support.router import RealRouter
from tests.support.server import Server
from tests.support.wire import Got, request, wire

GOOD = request(json.dumps({"model": "alpha", "prompt": "a good one"}).encode(), "/completion")
NAMES = ("alpha", "org/big:Q4", "größe")


class LiedServe(Server):
    """Its models are the liar's; `more` is added to its configuration, `env` to its environment."""

    def __init__(self, folder: Path, server: Liar, more: str = "", env: Mapping[str, str] | None = None) -> None:
        super().__init__(folder, RealRouter(folder / "no-router", {}), {})
        first, *others = server.names
        models = {first: {"vram": "4GiB", "default": True, "aliases": ["gpt-4o", *others]}}
        self.config.write_text(
            f"""
listen: 127.0.0.1:{self.port}
state_dir: {self.state_dir}
cards: {{gpu0: {{probe: declared, vram: 24GiB}}}}
tenants:
  other: {{kind: openai, control: attach, card: gpu0, url: "{server.url}", models: {json.dumps(models)}}}
{more}"""
        )
        self.env = env or {}


@dataclass(frozen=True, slots=True)
class Attacked:
    """The serve, and the server behind it, which keeps what it heard."""

    serve: LiedServe
    liar: Liar

    async def call(self, data: bytes = GOOD, method: str = "POST") -> Got:
        """One request on a connection of its own, and its answer."""
        async with wire(self.serve.url) as client:
            return await client.call(data, method)

    async def lives(self) -> None:
        """A good request is answered as if nothing had been, and nothing has reached the server that is no request."""
        before = len(self.liar.heard)
        got = await self.call()
        assert (got.status, json.loads(got.body)["body"]) == (200, GOOD.partition(b"\r\n\r\n")[2].decode())
        assert len(self.liar.heard) == before + 1
        assert self.liar.nonsense == []


@asynccontextmanager
async def attacked(
    folder: Path, more: str = "", env: Mapping[str, str] | None = None, *, until: str = "/ready"
) -> AsyncGenerator[Attacked]:
    """It is ready. At its end no traceback may stand in its log."""
    async with liar() as server:
        server.plays, server.names = [echo], NAMES
        serve = LiedServe(folder, server, more, env)
        try:
            await asyncio.to_thread(serve.start, until=until)
            yield Attacked(serve, server)
        finally:
            await asyncio.to_thread(serve.stop)
    assert "Traceback" not in serve.log_path.read_text()
