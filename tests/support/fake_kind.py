"""A server of another kind than llama.cpp's, on a port: what all the doubles share, and what starts and stops one.

Invariant: `holding` is the truth (which models have their VRAM); what the server says of it may be a lie. A call in
flight is there from `begin` to `end`. Nothing happens by the clock: what takes time takes a number of looks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from aiohttp import web

from swapper.errors import BackendError
from tests.support.router import free_port
from workers.control import ExitStatus

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class FakeKind:
    """Base of the doubles. `models` are those it has; `embeds` those that only embed."""

    lag = 2
    """So many looks pass before what was asked for is seen."""

    def __init__(self, *models: str, embeds: tuple[str, ...] = ()) -> None:
        self.models = (*models, *embeds)
        self.embeds = embeds
        self.port = free_port()
        self.asked: list[str] = []
        self.computed: list[str] = []
        self.holding: set[str] = set()
        self.flying: dict[str, int] = {}
        self.cut = 0
        """Calls that were broken off by what was asked for."""
        self.keys: list[str | None] = []
        self.hangs = False
        self.status: int | None = None
        self.stuck = False
        """What is asked for is answered with ok, and nothing happens."""
        self.key: str | None = None
        self._looks = asyncio.Condition()
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def up(self) -> bool:
        return self._runner is not None

    def routes(self) -> list[web.RouteDef]:
        raise NotImplementedError

    def fresh(self) -> None:
        """Its process has just begun."""
        self.holding.clear()
        self.flying.clear()

    async def start(self) -> None:
        if self._runner is not None:
            return
        self.fresh()
        app = web.Application(middlewares=[self._through])
        app.add_routes(self.routes())
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.0, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()

    async def vanish(self) -> None:
        """Its process is gone, with all it held."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()
        self.cut += sum(self.flying.values())
        self.holding.clear()
        self.flying.clear()

    async def looked(self, times: int) -> None:
        """Return once so many requests more have come."""
        until = len(self.asked) + times
        async with self._looks:
            await self._looks.wait_for(lambda: len(self.asked) >= until)

    def begin(self, model: str) -> None:
        """A call of somebody else runs from here on."""
        self.flying[model] = self.flying.get(model, 0) + 1

    def end(self, model: str) -> None:
        """It has ended."""
        self.flying[model] -= 1

    def compute(self, model: str) -> None:
        self.computed.append(model)

    def posts(self) -> list[str]:
        return [one for one in self.asked if one.startswith("POST")]

    @web.middleware
    async def _through(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        query = f"?{request.query_string}" if request.query_string else ""
        async with self._looks:
            self.asked.append(f"{request.method} {request.path}{query}")
            self._looks.notify_all()
        given = request.headers.get("Authorization")
        self.keys.append(given)
        if self.hangs:
            await asyncio.Event().wait()
        if self.status is not None:
            return web.json_response({"error": {"message": "the disk is on fire"}}, status=self.status)
        if self.key is not None and given != f"Bearer {self.key}":
            return web.json_response({"error": "unauthorized"}, status=401)
        return await handler(request)


def refusal(status: int, text: str) -> web.Response:
    """An error as OpenAI's API words it."""
    return web.json_response({"error": {"message": text}}, status=status)


class OpenAi(FakeKind):
    """Any server with OpenAI's routes: its model is there as soon as its process answers."""

    chats = True
    lists = True
    tells: Mapping[str, object] = MappingProxyType({})
    """What it says of each model it lists, beside its name."""

    def fresh(self) -> None:
        super().fresh()
        self.holding.update(self.models)

    def routes(self) -> list[web.RouteDef]:
        found = [web.get("/v1/models", self._models), web.post("/v1/embeddings", self._embed)]
        return [*found, web.post("/v1/chat/completions", self._chat), web.get("/health", self._health)]

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, _: web.Request) -> web.Response:
        if not self.lists:
            return web.json_response({"detail": "Not Found"}, status=404)
        return web.json_response(
            {"object": "list", "data": [{"id": one, "object": "model", **self.tells} for one in self.models]}
        )

    async def _chat(self, request: web.Request) -> web.Response:
        model = (await request.json())["model"]
        if model not in self.models:
            return refusal(404, f"The model `{model}` does not exist.")
        if not self.chats or model in self.embeds:
            return refusal(400, "The model does not support Chat Completions API")
        return self.answer(model)

    async def _embed(self, request: web.Request) -> web.Response:
        model = (await request.json())["model"]
        if model not in self.embeds:
            return refusal(400, "The model does not support Embeddings API")
        return self.answer(model)

    def answer(self, model: str) -> web.Response:
        """A call that computes."""
        self.compute(model)
        choice = {"index": 0, "message": {"role": "assistant", "content": "a"}, "finish_reason": "length"}
        return web.json_response({"object": "chat.completion", "model": model, "choices": [choice]})


class Starter:
    """Implements `workers.control.Control` over a double: its process is the port being open."""

    def __init__(self, fake: FakeKind) -> None:
        self._fake = fake
        self.orders: list[str] = []
        self.fails = False
        self.ended: ExitStatus | None = None

    async def ensure(self) -> None:
        self.orders.append("ensure")
        if self.fails:
            raise BackendError("it cannot be started")
        await self._fake.start()

    async def stop(self, grace_ms: int | None = None) -> None:
        self.orders.append("stop")
        self._fake.hangs = False
        await self._fake.vanish()

    async def restart(self, grace_ms: int | None = None) -> None:
        self.orders.append("restart")
        self._fake.hangs = False
        await self._fake.vanish()
        await self._fake.start()

    def alive(self) -> bool | None:
        return self._fake.up

    def pid(self) -> int | None:
        return None

    def exit_status(self) -> ExitStatus | None:
        return self.ended

    def log_tail(self, n: int) -> list[str] | None:
        return ["CUDA error: out of memory"][-n:]

    def log_path(self) -> Path | None:
        return None
