"""Doubles of the gateway's surroundings: a scripted model server on a real socket, a store link and a clock by hand."""

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
import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware

from swapper.core.types import Card, Command, Demand, Failure, Gate, Report, Swap, World
from swapper.errors import StoreDown
from swapper.gateway.admission import Admission
from swapper.gateway.child import Children
from swapper.gateway.context import GatewayContext, Limits, ModelInfo, Target
from swapper.gateway.http import SERVER_OPTIONS, routes
from swapper.gateway.member import Member
from swapper.gateway.pipe import open_session
from swapper.store.protocol import StoredCommand, StoredEvent

ALPHA = "llama/alpha"
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


class Running:
    """A process that ends when the test says so."""

    def __init__(self) -> None:
        self.runs = True

    def alive(self) -> bool:
        return self.runs


class Upstream:
    """A model server whose answers are scripted: each POST takes the next script (the last one stays)."""

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
        seen = Seen(request.path, dict(request.query), dict(request.headers), await request.read())
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


class FakeLink:
    """The store as a gateway sees it: the test writes the outbox and reads the reports."""

    def __init__(self) -> None:
        self.gates: dict[str, Gate] = {}
        self.failed: dict[str, Failure] = {}
        self.swap: Swap | None = None
        self.down = False
        self.member = True
        self.reports_down = False
        self.broken = False
        self.refused = asyncio.Event()
        self._beats = 0
        self._taken = 0
        self.reports: asyncio.Queue[Report] = asyncio.Queue()
        self.left: list[str] = []
        self._commands: list[StoredCommand] = []
        self._events: list[StoredEvent] = []
        self._demand: tuple[Demand, ...] | None = None
        self._moved = asyncio.Condition()

    def _check(self) -> None:
        if self.down:
            self.refused.set()
            raise StoreDown("the store is down")

    async def _notify(self) -> None:
        async with self._moved:
            self._moved.notify_all()

    async def send(self, command: Command) -> None:
        self._commands.append(StoredCommand(str(len(self._commands) + 1), command))
        await self._notify()

    async def tell_cards(self) -> None:
        image = msgspec.json.encode(self._card()).decode()
        self._events.append(StoredEvent(str(len(self._events) + 1), "card", "gpu0", 1, image))
        await self._notify()

    async def beaten(self, wanted: Callable[[tuple[Demand, ...]], bool]) -> tuple[Demand, ...]:
        """Wait for a beat whose demand is as wanted."""
        async with self._moved:
            await self._moved.wait_for(lambda: self._demand is not None and wanted(self._demand))
        assert self._demand is not None
        return self._demand

    async def next_beat(self) -> None:
        """Wait for one more beat."""
        async with self._moved:
            seen = self._beats
            await self._moved.wait_for(lambda: self._beats > seen)

    async def looked(self) -> None:
        """Wait until the gateway has looked at the cards after this moment's events, and acted on it."""
        async with self._moved:
            await self._moved.wait_for(lambda: self._taken == len(self._events))

    async def outbox(self, executor: str, *, after: str, block_ms: int) -> tuple[StoredCommand, ...]:
        self._check()
        async with self._moved:
            await self._moved.wait_for(lambda: len(self._commands) > int(after))
        if self.broken:
            raise ValueError("not a command")
        return tuple(self._commands[int(after) :])

    async def events(self, *, after: str, limit: int, block_ms: int) -> tuple[StoredEvent, ...]:
        self._check()
        start = len(self._events) if after == "$" else int(after)
        async with self._moved:
            self._taken = start
            self._moved.notify_all()
            await self._moved.wait_for(lambda: len(self._events) > start)
        return tuple(self._events[start:])

    async def report(self, report: Report) -> None:
        self._check()
        if self.reports_down:
            self.refused.set()
            raise StoreDown("the store is down")
        self.reports.put_nowait(report)

    async def beat(self, gateway: str, demand: tuple[Demand, ...], *, ttl_ms: int, now_ms: int | None = None) -> bool:
        self._check()
        self._demand = demand
        self._beats += 1
        await self._notify()
        return self.member

    async def leave(self, gateway: str) -> None:
        self._check()
        self.left.append(gateway)

    async def read(self, *, now_ms: int | None = None) -> World:
        self._check()
        return World(int(time.time() * 1000), {"gpu0": self._card()}, {}, gates=dict(self.gates))

    def _card(self) -> Card:
        return Card("gpu0", failed=dict(self.failed), swap=self.swap)


def command(verb: str, token: int, n: int, **args: object) -> Command:
    return Command("gateway:g1", "gpu0", ALPHA, token, n, verb, args)


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
    app.router.add_post("/{path:.*}", upstream.post)
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
) -> AsyncGenerator[Served]:
    """Start upstream, member and gateway; `opened`: the gate is open from the start."""
    upstream, link = Upstream(), FakeLink()
    link.gates[ALPHA] = Gate(1, open=opened)
    upstream_runner = await listen_as(upstream)
    admission = Admission("g1", clock=_loop_ms, max_waiting=max_waiting, concurrency=concurrency)
    member = Member(link, admission)
    session = open_session()
    ctx = GatewayContext(
        names={"alpha": ALPHA, "gpt-4o": ALPHA},
        targets={ALPHA: Target(ALPHA, upstream.url, "alpha", api_key="server-key")},
        models=(ModelInfo("alpha", ALPHA, ("gpt-4o",), 8192),),
        limits=limits or Limits(),
        admission=admission,
        member=member,
        proofs=member.proofs,
        session=session,
    )
    ctx.children = Children(session, find=lambda model, port: upstream.process, clock=lambda: upstream.seconds)
    front = web.Application(middlewares=[middleware] if middleware else [])
    front.add_routes(routes(ctx))
    runner, url = await _listen(front)
    async with aiohttp.ClientSession() as client:
        await member.start()
        try:
            yield Served(upstream, link, admission, member, ctx, client, url)
        finally:
            await member.close()
            await runner.cleanup()
            await session.close()
            await upstream_runner.cleanup()
