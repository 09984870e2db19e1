"""Model calls through the shipped gateway handlers, without a socket on either side.

Invariant: what a handler sees of its client and of a server is what aiohttp would show it; a client that hangs up
cancels the handler, as the server's `handler_cancellation` does; who dies takes his calls along.
"""

from __future__ import annotations

import asyncio
import json
import traceback
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import Mock

import aiohttp
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import HttpVersion11, RawRequestMessage
from aiohttp.streams import StreamReader
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from swapper.gateway.http import routes
from tests.sim.plan import CallPlan
from tests.sim.process import RouterWire
from tests.support.fake_wire import Answer, Dropped, NobodyThere, Stream

if TYPE_CHECKING:
    from tests.sim.serve import Serving


class _Content:
    """The body of a server's answer."""

    def __init__(self, body: bytes | Stream) -> None:
        self._body = body
        self._ended = False
        self._broken: BaseException | None = None

    async def readany(self) -> bytes:
        """What comes next, nothing at the end."""
        if self._ended:
            return b""
        if isinstance(self._body, bytes):
            self._ended = True
            return self._body
        try:
            return await anext(self._body)
        except StopAsyncIteration:
            self._ended = True
            return b""
        except Dropped as dropped:
            self._broken = aiohttp.ClientPayloadError(str(dropped))
            raise self._broken from dropped

    async def read(self) -> bytes:
        """All of it."""
        pieces: list[bytes] = []
        while piece := await self.readany():
            pieces.append(piece)
        return b"".join(pieces)

    def at_eof(self) -> bool:
        """Whether it ended."""
        return self._ended

    def exception(self) -> BaseException | None:
        """What broke it off."""
        return self._broken


class Upstream:
    """A server's answer, as `aiohttp.ClientResponse`."""

    def __init__(self, answer: Answer) -> None:
        self._body = answer.body
        self.status = answer.status
        self.reason = "as it says"
        self.headers = CIMultiDict(answer.headers)
        self.content = _Content(answer.body)

    @property
    def content_type(self) -> str:
        """Without parameters."""
        return str(self.headers.get("Content-Type", "")).partition(";")[0]

    def close(self) -> None:
        """Close the connection."""
        if isinstance(self._body, Stream):
            self._body.shut()

    def release(self) -> None:
        """Give the connection back."""

    async def read(self) -> bytes:
        """The whole body."""
        return await self.content.read()

    def raise_for_status(self) -> None:
        """ClientPayloadError unless it is a success."""
        if self.status >= 400:
            raise aiohttp.ClientPayloadError(f"status {self.status}")


class Session:
    """The gateway's client session."""

    closed = False

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def request(self, method: str, url: URL, *, data: Any, **_: object) -> Upstream:  # noqa: ANN401
        """Any method."""
        return await self._ask(method, url, data.read())

    async def post(self, url: URL, *, data: Any, **_: object) -> Upstream:  # noqa: ANN401
        """POST."""
        return await self.request("POST", url, data=data)

    @asynccontextmanager
    async def get(self, url: str, *, params: Mapping[str, str] | None = None, **_: object) -> AsyncGenerator[Upstream]:
        """GET."""
        upstream = await self._ask("GET", URL(url).update_query(dict(params or {})), b"")
        try:
            yield upstream
        finally:
            upstream.close()

    async def _ask(self, method: str, url: URL, body: bytes) -> Upstream:
        found = self._serving.wire(str(url))
        if found is None:
            raise aiohttp.ClientConnectorError(Mock(), ConnectionRefusedError(f"nobody listens at {url.origin()}"))
        wire, port = found
        try:
            return Upstream(await _sent(wire, method, url, body, port))
        except NobodyThere as nobody:
            raise aiohttp.ClientConnectorError(Mock(), ConnectionRefusedError(str(nobody))) from nobody
        except Dropped as dropped:
            raise aiohttp.ServerDisconnectedError(str(dropped)) from dropped


async def _sent(wire: RouterWire, method: str, url: URL, body: bytes, port: str | None) -> Answer:
    return await wire.request(method, url.path, dict(url.query), body, port=port)


@dataclass(slots=True)
class _Client(AbstractStreamWriter):
    """Where a handler's answer goes."""

    status: str = ""
    pieces: list[bytes] = field(default_factory=list[bytes])
    ended: bool = False

    async def write(self, chunk: bytes | bytearray | memoryview) -> None:
        """A piece of the body."""
        self.pieces.append(bytes(chunk))
        await asyncio.sleep(0)

    async def write_eof(self, chunk: bytes = b"") -> None:
        """The end of it."""
        if chunk:
            self.pieces.append(chunk)
        self.ended = True

    async def write_headers(self, status_line: str, headers: CIMultiDict[str]) -> None:
        """Status and headers."""
        del headers
        self.status = status_line

    async def drain(self) -> None:
        """Nothing waits."""

    def enable_compression(self, *_: object, **__: object) -> None:
        """Not here."""

    def enable_chunking(self) -> None:
        """It is whole anyhow."""

    @property
    def body(self) -> bytes:
        """What came so far."""
        return b"".join(self.pieces)


class _Transport:
    """The client's connection."""

    def __init__(self) -> None:
        self.aborted = False

    def abort(self) -> None:
        """Break it."""
        self.aborted = True

    def get_extra_info(self, *_: object) -> None:
        """Nothing is known."""

    def is_closing(self) -> bool:
        """Whether it was broken."""
        return self.aborted


class _Protocol:
    """The part of aiohttp's server a request holds on to."""

    def __init__(self, transport: _Transport) -> None:
        self.transport = transport
        self.writer = None
        self.ssl_context = None
        self.peername = None

    def __getattr__(self, name: str) -> object:
        return Mock()


@dataclass(frozen=True, slots=True)
class Result:
    """How a call ended for its client. `status` 0: without an answer."""

    status: int
    body: bytes
    whole: bool


def request_of(call: CallPlan, prompt: str, model: str) -> tuple[str, bytes]:
    """Path and body of a call."""
    body: dict[str, object] = {"model": model, "stream": call.stream}
    if call.chat:
        turns = prompt.split("and ")
        roles = ("user", "assistant")
        messages = [{"role": roles[n % 2], "content": turn} for n, turn in enumerate(turns)]
        body |= {"messages": messages, "max_tokens": call.tokens}
        return "/v1/chat/completions", json.dumps(body).encode()
    return "/completion", json.dumps(body | {"prompt": prompt, "n_predict": call.tokens}).encode()


async def ask(serving: Serving, path: str, body: bytes, patience_s: float) -> Result:
    """One call to a gateway; after `patience_s` the client hangs up."""
    context = serving.context
    assert context is not None
    handler = next(route.handler for route in routes(context) if route.path == path)
    client, transport = _Client(), _Transport()
    request = _request(path, body, client, transport)

    async def handle() -> None:
        response = await cast("Any", handler)(request)
        if not response.prepared:
            await response.prepare(request)
            await response.write_eof()

    task = serving.process.spawn(handle())
    with suppress(TimeoutError, asyncio.CancelledError):
        async with asyncio.timeout(patience_s):
            await asyncio.wait({task})
    if not task.done():
        task.cancel()
        await asyncio.wait({task})
        return Result(0, client.body, whole=False)
    if task.cancelled() or transport.aborted:
        return Result(0, client.body, whole=False)
    error = task.exception()
    if error is not None:
        serving.world.say("".join(traceback.format_exception(error)))
        serving.world.check.fail(f"a handler of {serving.process.name} raised {error!r}")
        return Result(0, client.body, whole=False)
    return Result(int(client.status.split()[1]), client.body, client.ended)


def _request(path: str, body: bytes, client: _Client, transport: _Transport) -> web.Request:
    protocol = cast("Any", _Protocol(transport))
    loop = asyncio.get_running_loop()
    payload = StreamReader(cast("Any", Mock()), 1 << 20, loop=loop)
    payload.feed_data(body)
    payload.feed_eof()
    headers = CIMultiDictProxy(CIMultiDict({"Content-Type": "application/json", "Content-Length": str(len(body))}))
    message = RawRequestMessage(
        "POST", path, HttpVersion11, headers, (), False, None, False, False, URL(path, encoded=True)
    )
    task = cast("Any", asyncio.current_task())
    request = web.Request(message, payload, protocol, client, task, loop)
    match = Mock()
    match._apps = ()
    request._match_info = match  # pyright: ignore[reportPrivateUsage]
    return request
