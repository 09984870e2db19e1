"""Model calls through the shipped gateway handlers, without a socket on either side.

Invariant: what a call sees of its client and of a server is what the shipped connections would show it; a client that
hangs up cancels it, as whoever serves does; who dies takes his calls along.
"""

from __future__ import annotations

import asyncio
import json
import traceback
from collections.abc import AsyncGenerator, Awaitable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from unittest.mock import Mock

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from swapper.caller import Caller
from swapper.core.types import WorkClass
from swapper.gateway.calls import Asked, answer, in_body
from swapper.gateway.context import GatewayContext, Held
from swapper.gateway.downstream import arrived
from swapper.gateway.link import LinkError, Origin, Sink
from swapper.gateway.routes import POST, Way
from tests.sim.plan import CallPlan
from tests.sim.process import RouterWire
from tests.support.fake_wire import Answer, Dropped, NobodyThere, Stream

if TYPE_CHECKING:
    from tests.sim.serve import Serving

T = TypeVar("T")


class _Content:
    """The body of a server's answer."""

    def __init__(self, body: bytes | Stream) -> None:
        self._body = body
        self._ended = False

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
            raise aiohttp.ClientPayloadError(str(dropped)) from dropped

    async def read(self) -> bytes:
        """All of it."""
        pieces: list[bytes] = []
        while piece := await self.readany():
            pieces.append(piece)
        return b"".join(pieces)

    def at_eof(self) -> bool:
        """Whether it ended."""
        return self._ended

    def shut(self) -> None:
        """Close the connection."""
        if isinstance(self._body, Stream):
            self._body.shut()


class Upstream:
    """A server's answer, as `aiohttp.ClientResponse`."""

    def __init__(self, answer: Answer) -> None:
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
        self.content.shut()

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

    async def post(self, url: URL, *, data: Any, **_: object) -> Upstream:  # noqa: ANN401
        """POST."""
        return await self.ask("POST", url, data.read())

    @asynccontextmanager
    async def get(self, url: str, *, params: Mapping[str, str] | None = None, **_: object) -> AsyncGenerator[Upstream]:
        """GET."""
        upstream = await self.ask("GET", URL(url).update_query(dict(params or {})), b"")
        try:
            yield upstream
        finally:
            upstream.close()

    async def ask(self, method: str, url: URL, body: bytes) -> Upstream:
        """Anything. Raises as aiohttp would."""
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


class Link:
    """The gateway's connection to a server, as `swapper.gateway.link.Link`."""

    def __init__(self, session: Session, origin: Origin) -> None:
        self.origin = origin
        self.ended = self.broken = False
        self.bounded = True
        self.status, self.reason = 0, "as it says"
        self.headers: list[tuple[bytes, bytes]] = []
        self._session = session
        self._asked: tuple[str, URL, bytes] | None = None
        self._content: _Content | None = None
        self._first: bytes | None = None

    def send(self, head: bytes, body: bytes, *, headless: bool = False) -> None:
        """What will be asked when the answer is waited for."""
        assert not headless
        method, target, _ = head.split(b"\r\n", 1)[0].decode().split(" ")
        self._asked = (method, URL(f"http://{self.origin.host}:{self.origin.port}{target}", encoded=True), body)

    async def answered(self) -> None:
        """Head and first bytes."""
        if self._content is None:
            assert self._asked is not None
            upstream = await self._through(self._session.ask(*self._asked))
            self.status, self._content = upstream.status, upstream.content
            self.headers = [(name.encode(), value.encode()) for name, value in upstream.headers.items()]
        if self._first is None:
            self._first = await self._through(self._content.readany())
            self.ended = self._content.at_eof()

    async def more(self) -> bytes:
        """What comes next."""
        await self.answered()
        chunk, self._first = self._first or b"", None
        if not chunk:
            self.ended = True
        return chunk

    async def pipe(self, sink: Sink) -> None:
        """All that comes."""
        while chunk := await self.more():
            sink.feed(chunk)

    def pause(self) -> None:
        """Never: nobody here is slow."""

    def resume(self) -> None:
        """Never paused."""

    def drop(self) -> None:
        """The call is over."""
        if self._content is not None:
            self._content.shut()

    async def _through(self, work: Awaitable[T]) -> T:
        try:
            return await work
        except aiohttp.ClientError as error:
            self.broken = True
            raise LinkError(str(error), unsent=isinstance(error, aiohttp.ClientConnectorError)) from error


class Links:
    """The gateway's connections: each is new."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def idle(self, origin: Origin) -> None:
        """None is."""
        del origin

    async def to(self, origin: Origin) -> Link:
        """Somebody is there, or the first wait says so."""
        return Link(self._session, origin)

    def back(self, link: Link) -> None:
        """It is over."""
        link.drop()


class _Client:
    """Where an answer goes, as `swapper.gateway.downstream.Downstream`."""

    def __init__(self) -> None:
        self.status = 0
        self.pieces: list[bytes] = []
        self.ended = self.aborted = False

    def begin(self, status: int, reason: str, headers: list[tuple[bytes, bytes]], *, bounded: bool) -> None:
        """Status and headers."""
        del reason, headers, bounded
        self.status = status

    def write(self, chunk: bytes) -> None:
        """A piece of the body."""
        self.pieces.append(chunk)

    def end(self) -> None:
        """The end of it."""
        self.ended = True

    def abort(self) -> None:
        """Break it."""
        self.aborted = True

    def fed_by(self, source: object) -> None:
        """Nobody here is slow."""

    @property
    def body(self) -> bytes:
        """What came so far."""
        return b"".join(self.pieces)


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
    client = _Client()
    task = serving.process.spawn(_handle(context, path, body, client))
    with suppress(TimeoutError, asyncio.CancelledError):
        async with asyncio.timeout(patience_s):
            await asyncio.wait({task})
    if not task.done():
        task.cancel()
        await asyncio.wait({task})
        return Result(0, client.body, whole=False)
    if task.cancelled() or client.aborted:
        return Result(0, client.body, whole=False)
    error = task.exception()
    if error is not None:
        serving.world.say("".join(traceback.format_exception(error)))
        serving.world.check.fail(f"a handler of {serving.process.name} raised {error!r}")
        return Result(0, client.body, whole=False)
    return Result(client.status, client.body, client.ended)


async def _handle(context: GatewayContext, path: str, body: bytes, client: _Client) -> None:
    held = Held(context.budget)
    held.add(len(body))
    held.body = body
    try:
        asked = await in_body(context, "application/json", held, Way("POST", path, (), POST[path]))
        assert isinstance(asked, Asked)
        came = arrived(((b"Content-Type", b"application/json"),), Caller())
        await answer(context, came, WorkClass.INTERACTIVE, asked, held, client)
    finally:
        held.release()
