"""Doubles of the gateway's surroundings: a scripted server on a real socket, a clock by hand; a gateway on them."""

from __future__ import annotations

import asyncio
import json
import time
import warnings
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.typedefs import Middleware

from swapper.api.problem import is_ours
from swapper.caller import Caller
from swapper.core.types import Gate
from swapper.gateway import origins
from swapper.gateway.admission import Admission
from swapper.gateway.child import Children
from swapper.gateway.context import GatewayContext, Limits, Target
from swapper.gateway.http import SERVER_OPTIONS, routes
from swapper.gateway.listed import ModelInfo
from swapper.gateway.member import Member
from swapper.gateway.session import open_session
from swapper.gateway.wire import Door
from tests.unit.gateway_link import ALPHA, FakeLink

CHAT = {"model": "alpha", "messages": [{"role": "user", "content": "hi"}]}
STREAM = {**CHAT, "stream": True}
Script = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Clock:
    """Monotonic milliseconds that move only when told."""

    def __init__(self) -> None:
        self.now_ms = 1_000

    def __call__(self) -> int:
        return self.now_ms


@dataclass
class Seen:
    """One request as the server got it."""

    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes
    method: str = "POST"
    raw_path: str = ""


class Running:
    """A process that ends when the test says so."""

    def __init__(self) -> None:
        self.runs = True

    def alive(self) -> bool:
        return self.runs


class Upstream:
    """A model server whose answers are scripted: each call takes the next script (the last one stays)."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self.scripts: list[Script] = [answer({"ok": True})]
        self.arrived: asyncio.Queue[Seen] = asyncio.Queue()
        self.left = asyncio.Event()
        self.slots: list[dict[str, object]] = []
        self.slot_queries: list[Mapping[str, str]] = []
        self.url = ""
        self.child: tuple[str, str] | None = None
        self.looks: list[Seen] = []
        self.looked = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.props: dict[str, object] = {"max_instances": 0}
        self.process: Running | None = Running()
        self.seconds = 0.0

    async def get_models(self, request: web.Request) -> web.StreamResponse:
        """A router's listing once `child` is (port, what it says it is)."""
        self.looks.append(Seen(request.path, dict(request.query), dict(request.headers), b""))
        self.looked.set()
        await self.may_answer.wait()
        if self.child is None:
            raise web.HTTPNotFound
        status = {"value": "loaded", "args": ["llama-server", "--port", "1", "--port", self.child[0]]}
        return web.json_response({"data": [{"id": "alpha", "aliases": ["alpha"], "status": status}]})

    async def get_props(self, request: web.Request) -> web.StreamResponse:
        self.looks.append(Seen(request.path, dict(request.query), dict(request.headers), b""))
        return web.json_response({**self.props, "model_alias": "" if self.child is None else self.child[1]})

    async def post(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        where = (request.method, request.rel_url.raw_path)
        seen = Seen(request.path, dict(request.query), dict(request.headers), body, *where)
        self.seen.append(seen)
        self.arrived.put_nowait(seen)
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        try:
            return await script(request)
        except (asyncio.CancelledError, ConnectionError):
            self.left.set()
            raise

    async def get_slots(self, request: web.Request) -> web.StreamResponse:
        self.slot_queries.append(dict(request.query))
        return web.json_response(self.slots)


def answer(body: object, status: int = 200) -> Script:
    async def script(request: web.Request) -> web.StreamResponse:
        return web.json_response(body, status=status)

    return script


def plain(text: str, status: int) -> Script:
    async def script(request: web.Request) -> web.StreamResponse:
        return web.Response(text=text, status=status)

    return script


def die() -> Script:
    """Break the connection before a byte."""

    async def script(request: web.Request) -> web.StreamResponse:
        abort(request)
        return web.Response()

    return script


def abort(request: web.Request) -> None:
    assert request.transport is not None
    request.transport.abort()


class Stream:
    """A streamed answer fed by the test: bytes, None for a clean end, an exception to break off."""

    def __init__(self, content_type: str = "text/event-stream", length: int | None = None) -> None:
        self.feed: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()
        self._headers = {"Content-Type": content_type}
        if length is not None:
            self._headers["Content-Length"] = str(length)

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers=self._headers)
        await response.prepare(request)
        while (chunk := await self.feed.get()) is not None:
            if isinstance(chunk, Exception):
                abort(request)
                return response
            await response.write(chunk)
        await response.write_eof()
        return response

    def put(self, *chunks: bytes | Exception | None) -> Stream:
        for chunk in chunks:
            self.feed.put_nowait(chunk)
        return self


def keyed(**values: object) -> Middleware:
    """A middleware that puts what the api's own puts on a request: owner, default_class, classes."""

    @web.middleware
    async def key(request: web.Request, handler: Script) -> web.StreamResponse:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", web.NotAppKeyWarning)
            for name, value in values.items():
                request[name] = value
        return await handler(request)

    return key


def event(data: str) -> bytes:
    return f"data: {data}\n\n".encode()


@dataclass(frozen=True)
class Answer:
    """A response read to its end."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> dict[str, Any]:
        body: dict[str, Any] = json.loads(self.body)
        return body

    def error(self) -> dict[str, Any]:
        """The error of an OpenAI envelope, whose shape is checked."""
        body = self.json()
        assert set(body) == {"error"}
        assert set(body["error"]) == {"message", "type", "param", "code"}
        error: dict[str, Any] = body["error"]
        return error


def events_of(text: bytes) -> list[Any]:
    """The data of a stream's events; `[DONE]` stays a word."""
    data = [line[6:] for line in text.decode().split("\n\n") if line.startswith("data: ")]
    return [one if one == "[DONE]" else json.loads(one) for one in data]


@dataclass
class Served:
    """A gateway on a real port before one scripted server."""

    upstream: Upstream
    link: FakeLink
    admission: Admission
    member: Member
    ctx: GatewayContext
    client: aiohttp.ClientSession
    url: str
    door: Door | None = None

    def post(
        self, body: object, path: str = "/v1/chat/completions", headers: Mapping[str, str] | None = None
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        return self.client.post(self.url + path, json=body, headers=headers)

    async def call(
        self, body: object, path: str = "/v1/chat/completions", headers: Mapping[str, str] | None = None
    ) -> Answer:
        """A call from its first byte to its last."""
        async with self.post(body, path, headers) as response:
            return Answer(response.status, dict(response.headers), await response.read())

    async def waiting(self, count: int = 1) -> None:
        """Until so many calls wait, as the store is told."""
        await self.link.beaten(lambda demand: sum(record.waiting for record in demand) == count)


def _loop_ms() -> int:
    return int(time.monotonic() * 1000)


async def _listen(app: web.Application) -> tuple[web.AppRunner, str]:
    runner = web.AppRunner(app, shutdown_timeout=0.1, **SERVER_OPTIONS)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port: int = runner.addresses[0][1]
    return runner, f"http://127.0.0.1:{port}"


async def listen_as(upstream: Upstream) -> web.AppRunner:
    """Put a scripted server on a port; whoever does cleans the runner up."""
    app = web.Application(client_max_size=1 << 30)
    app.router.add_get("/slots", upstream.get_slots)
    app.router.add_get("/models", upstream.get_models)
    app.router.add_get("/props", upstream.get_props)
    app.router.add_route("*", "/{path:.*}", upstream.post)
    runner, upstream.url = await _listen(app)
    return runner


@asynccontextmanager
async def serve(
    *,
    opened: bool = True,
    limits: Limits | None = None,
    max_waiting: int = 100,
    concurrency: Mapping[str, int] | None = None,
    middleware: Middleware | None = None,
    private: frozenset[str] = frozenset(),
    pages: origins.Origins | None = None,
    doored: bool = True,
) -> AsyncGenerator[Served]:
    """Start upstream, member and gateway; `opened`: the gate is open from the start. `pages`: those that may call.

    `doored`: behind the door that stands before aiohttp's handlers; never with a middleware, which calls at it pass by.
    """
    doored = doored and middleware is None
    upstream, link = Upstream(), FakeLink()
    link.gates[ALPHA] = Gate(1, open=opened)
    upstream_runner = await listen_as(upstream)
    admission = Admission("g1", clock=_loop_ms, max_waiting=max_waiting, concurrency=concurrency)
    member = Member(link, admission, private=private)
    session = open_session()
    ctx = GatewayContext(
        names={"alpha": ALPHA, "gpt-4o": ALPHA},
        targets={ALPHA: Target(ALPHA, upstream.url, "alpha", api_key="server-key")},
        models=(ModelInfo("alpha", ALPHA, ("gpt-4o",), 8192),),
        limits=limits or Limits(),
        admission=admission,
        member=member,
        session=session,
    )
    ctx.children = Children(session, find=lambda model, port: upstream.process, clock=lambda: upstream.seconds)
    asked = [] if pages is None else [origins.middleware(pages, is_ours)]
    front = web.Application(middlewares=[*asked, *([middleware] if middleware else [])])
    if pages is not None:
        front.on_response_prepare.append(origins.signal(pages, is_ours))
    front.add_routes(routes(ctx))
    runner, url = await _listen(front)
    door = listening = None
    if doored and runner.server is not None:
        door = Door(ctx, runner.server, lambda _: Caller())
        listening = await asyncio.get_running_loop().create_server(door, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    async with aiohttp.ClientSession() as client:
        await member.start()
        try:
            yield Served(upstream, link, admission, member, ctx, client, url, door)
        finally:
            if door is not None and listening is not None:
                listening.close()
                await door.close(0.1)
            await member.close()
            await runner.cleanup()
            ctx.links.close()
            await session.close()
            await upstream_runner.cleanup()
