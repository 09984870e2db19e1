"""One call's way to its server and back: wait, send, pass the answer through as it comes, and every way that can fail.

Invariant: status and body pass untouched; a call is sent again only before the first byte of its answer went to the
client; when a handler ends, however it ends, the upstream socket is closed or back in the pool and the call counts no
more. Where a router's words matter they were seen on llama-server b10434.
"""

from __future__ import annotations

import asyncio
import io
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from swapper.gateway import errors, heads
from swapper.gateway.admission import Call, CallState, Turn
from swapper.gateway.child import Child
from swapper.gateway.context import GatewayContext, Held, Target
from swapper.gateway.filler import Keepalive, comment
from swapper.gateway.known import Known
from swapper.gateway.parse import Ask
from swapper.gateway.proof import Tail
from swapper.gateway.routes import Way
from swapper.gateway.sse import Frames
from swapper.problem import Problem
from swapper.snapshots.chain import chain_of

SMALL_BYTES = 8192
"""An error answer up to this size is read before it is passed on: it may say that the model is not there."""
DEATHS = 2
"""How often a call is sent again after its server died over it: some prompts kill servers, and would go on to."""
PAUSES_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)


def open_session() -> aiohttp.ClientSession:
    """The one client session of a gateway process: no limit of its own, bodies as they are. The caller closes it."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=("User-Agent", "Accept", "Content-Type"),
    )


@dataclass(frozen=True, slots=True)
class _Again:
    """No byte went out and the call may be sent again; `died`: the server broke off over it."""

    reason: str
    died: bool = False


class _Interrupt:
    """While entered, a cut of the call cancels what the task awaits; `fired` says so afterwards.

    Cancellation from elsewhere (the client left) passes through.
    """

    __slots__ = ("_call", "_cancelling", "_task", "fired")

    def __init__(self, call: Call, task: asyncio.Task[Any]) -> None:
        self._call = call
        self._task = task
        self._cancelling = 0
        self.fired = False

    def _fire(self) -> None:
        self.fired = True
        self._task.cancel()

    def __enter__(self) -> _Interrupt:
        self._cancelling = self._task.cancelling()
        self._call.on_cut = self._fire
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._call.on_cut = None
        if not self.fired:
            return False
        return self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError


class Exchange:
    """One admitted or waiting call. `run` returns the finished response, or a Problem while nothing was sent."""

    def __init__(
        self,
        ctx: GatewayContext,
        request: web.Request,
        target: Target,
        ask: Ask,
        way: Way,
        held: Held,
        call: Call,
    ) -> None:
        self._ctx = ctx
        self._request = request
        self._target = target
        self._way = way
        self._held = held
        self._known = self._know(ask)
        self._ask = replace(ask, fields=None)
        self._call = call
        self._response: web.StreamResponse | None = None
        self._complete = False
        self._keepalive: Keepalive | None = None
        self._deaths = 0
        self._tries = 0
        self._first_try_ms: int | None = None
        if ask.stream:
            chosen = comment if ctx.limits.keepalive_comments else way.route.api.keepalive
            self._keepalive = Keepalive(request, chosen, ask.model, ctx.limits.keepalive_ms / 1000)

    def _know(self, ask: Ask) -> Known | None:
        """The call's conversation, and its body as it is sent. What has to be copied for it takes of the budget too.

        None where its prompt is none that can be followed.
        """
        target, way, held = self._target, self._way, self._held
        model = target.called(ask.model)
        renamed = way.rename is not None and (way.own or ask.model != model)
        chain = None if ask.fields is None or not target.slots else chain_of(way.path, ask.fields)
        if way.rename is not None and renamed:
            held.body = way.rename(held.body, model)
            held.add(max(len(held.body) - held.size, 0))
        if chain is None:
            return None
        beside = len(chain.text) if renamed and chain.text is not None else chain.copied
        if beside and not held.add(beside):
            chain = chain.without_text()
        return self._ctx.talks.know(target.tenant, way.path, chain, held.body)

    async def run(self) -> web.StreamResponse | Problem:
        """See the class."""
        try:
            while True:
                turn = Turn.RUN if self._call.state is CallState.RUNNING else await self._call.turn()
                outcome = await self._attempt() if turn is Turn.RUN else self._waited_in_vain(turn)
                match outcome:
                    case Problem():
                        return await self._refuse(outcome)
                    case _Again():
                        problem = await self._pause(outcome)
                        if problem is not None:
                            return await self._refuse(problem)
                    case None:
                        pass
                    case _:
                        return outcome
        finally:
            if self._keepalive is not None:
                self._keepalive.abandon()

    def _waited_in_vain(self, turn: Turn) -> Problem:
        name, call = self._ask.model, self._call
        if turn is Turn.FAILED:
            return errors.load_failed(name, call.error or "the server gave no reason")
        waited_ms = call.waited_ms + self._ctx.admission.now() - call.since_ms
        if self._ctx.member.loading(call.tenant):
            return errors.load_timeout(name, waited_ms)
        return errors.gpu_busy(name, waited_ms)

    async def _attempt(self) -> web.StreamResponse | Problem | _Again | None:
        """Send it once. None: cut before the first byte, it waits again."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("an exchange runs in a task")
        outcome: web.StreamResponse | Problem | _Again | None = None
        if self._call.cut_reason is None:
            ready = True
            with _Interrupt(self._call, task) as interrupt:
                ready = not self._way.route.runs or await self._ctx.talks.ready(self._target.tenant, self._known)
                if ready:
                    outcome = await self._send()
            if ready and not interrupt.fired:
                return outcome
            if self._complete and self._response is not None:
                return self._response  # the cut came while the last bytes went out
        reason = self._call.cut_reason or "it was cut"
        if self._call.started:
            return errors.ended(reason)
        self._call.requeue()
        return None

    async def _pause(self, again: _Again) -> Problem | None:
        """Park the call for a moment, unless it was tried often or long enough."""
        now = self._ctx.admission.now()
        if self._first_try_ms is None:
            self._first_try_ms = now
        self._deaths += again.died
        if self._deaths > DEATHS or now - self._first_try_ms > self._ctx.limits.retry_ms:
            return errors.upstream_failed(self._ask.model, again.reason)
        self._call.requeue(parked=True)
        await asyncio.sleep(PAUSES_S[min(self._tries, len(PAUSES_S) - 1)])
        self._tries += 1
        self._call.unpark()
        return None

    # ---- one try

    async def _send(self) -> web.StreamResponse | Problem | _Again:
        tenant, children = self._target.tenant, self._ctx.children
        child = await children.locate(self._target, self._ctx.admission.gate(tenant).epoch)
        try:
            upstream = await self._ctx.session.request(
                self._way.method,
                heads.url(self._target, child, self._way, self._target.called(self._ask.model)),
                data=io.BytesIO(self._held.body) if self._held.body else None,
                headers=heads.request_headers(self._request.headers, self._target, child, self._way),
                allow_redirects=False,
            )
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            if child is not None:
                children.forget(tenant, child)
            unread = isinstance(error, aiohttp.ClientConnectorError | aiohttp.ServerTimeoutError)
            return _Again(_words(error), died=not unread)
        try:
            return await self._receive(upstream, child)
        finally:
            if child is not None and upstream.content.exception() is not None:
                children.forget(tenant, child)
            if not upstream.content.at_eof():
                upstream.close()
            upstream.release()

    async def _receive(
        self, upstream: aiohttp.ClientResponse, child: Child | None
    ) -> web.StreamResponse | Problem | _Again:
        """The first bytes decide: not ready (again), an error after our 200 (an event), else pass it through."""
        try:
            first = await upstream.content.readany()
            if child is not None and not child.process.alive():  # else the port was its own all the time
                return _Again("its process ended", died=True)
            if upstream.status >= 400:
                while len(first) <= SMALL_BYTES and (more := await upstream.content.readany()):
                    first += more
                again = _not_ready(upstream.status, first)
                if again is not None:
                    return again
        except (aiohttp.ClientError, OSError) as error:
            return _Again(_words(error), died=True)
        early = await self._keepalive.stop() if self._keepalive is not None else None
        self._call.first_byte()
        if (known := self._known) is None:
            self._held.release()
        else:
            known.sent(keep=self._held.sent(wanted=0 if known.request is None else len(known.request.body)))
        sse = upstream.content_type == "text/event-stream"
        if early is not None:
            self._response = early
            if not sse:
                return await self._error_event(early, upstream, first)
        else:
            self._response = web.StreamResponse(
                status=upstream.status,
                reason=upstream.reason,
                headers=heads.response_headers(upstream.headers, self._call),
            )
            await self._response.prepare(self._request)
        tail = self._ctx.talks.tap(self._way.path, sse=sse)
        try:
            return await self._relay(self._response, upstream, first, tail)
        finally:
            if upstream.status == 200 and self._way.route.runs:
                self._ctx.talks.answered(self._known, tail if self._complete else None, self._target)

    async def _relay(
        self, response: web.StreamResponse, upstream: aiohttp.ClientResponse, first: bytes, tail: Tail
    ) -> web.StreamResponse | Problem:
        """Pass every chunk on as it comes; the client's pace holds back the upstream's."""
        frames = Frames() if tail.sse else None
        chunk = first
        while chunk:
            tail.feed(chunk)
            whole = chunk if frames is None else frames.feed(chunk)
            if whole:
                await response.write(whole)
            try:
                chunk = await upstream.content.readany()
            except (aiohttp.ClientError, OSError) as error:
                return errors.upstream_failed(self._ask.model, _words(error))
        if frames is not None and frames.rest:
            router_words = frames.rest.find(b"proxy error: ", -SMALL_BYTES)
            if router_words >= 0:
                text = frames.rest[router_words:].decode(errors="replace").strip()
                return errors.upstream_failed(self._ask.model, text)
            await response.write(frames.rest)
        self._complete = True
        await response.write_eof()
        return response

    async def _error_event(
        self, response: web.StreamResponse, upstream: aiohttp.ClientResponse, first: bytes
    ) -> web.StreamResponse | Problem:
        """The 200 is out, but the server answered otherwise: its own error object becomes the last event."""
        body = first + await upstream.content.read()
        error = _error_object(body)
        if error is None:
            text = body[:500].decode(errors="replace")
            return errors.upstream_failed(self._ask.model, f"HTTP {upstream.status}: {text}")
        self._complete = True
        await response.write(self._way.route.api.error(msgspec.json.encode(error)))
        await response.write_eof()
        return response

    async def _refuse(self, problem: Problem) -> web.StreamResponse | Problem:
        """A Problem as HTTP while nothing was sent, as events in a stream, as a broken connection in a plain body."""
        if self._keepalive is not None:
            self._response = await self._keepalive.stop() or self._response
        response = self._response
        if response is None:
            return problem
        if response.content_type == "text/event-stream":
            await response.write(self._way.route.api.error(problem.error()))
            await response.write_eof()
        elif self._request.transport is not None:
            self._request.transport.abort()
        return response


def _words(error: BaseException) -> str:
    return str(error) or type(error).__name__


class _ErrorBody(msgspec.Struct):
    error: dict[str, Any]


def _error_object(body: bytes) -> dict[str, Any] | None:
    try:
        return msgspec.json.decode(body, type=_ErrorBody).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _not_ready(status: int, body: bytes) -> _Again | None:
    """Is this the server saying that the model is not there (yet), or that its child died? Then nothing was read."""
    if status == 500 and body.startswith(b"proxy error"):
        text = body.decode(errors="replace").strip()
        return _Again(text, died="establish" not in text)
    message = (_error_object(body) or {}).get("message")
    if (status, message) in ((400, "model is not loaded"), (503, "Loading model")):
        return _Again(str(message))
    return None
