"""One call's way to its server and back: wait, send, pass the answer through as it comes, and every way that can fail.

Invariant: status and body pass untouched; a call is sent again only before the first byte of its answer went to the
client; when a call ends, however it ends, the connection to the server is closed or back among the idle ones and the
call counts no more. Between a server's byte and the client's nothing waits. Where a router's words matter they were
seen on llama-server b10434.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import msgspec

from swapper.gateway import errors, heads
from swapper.gateway.admission import Call
from swapper.gateway.child import Child
from swapper.gateway.context import GatewayContext, Held, Target
from swapper.gateway.downstream import Arrived, Downstream, refuse
from swapper.gateway.filler import Keepalive, comment
from swapper.gateway.known import Known
from swapper.gateway.link import Link, LinkError
from swapper.gateway.parse import Ask, two_names
from swapper.gateway.proof import Tail
from swapper.gateway.routes import Way
from swapper.gateway.sse import Frames
from swapper.gateway.turns import CallState, Turn
from swapper.gateway.vain import waited
from swapper.problem import Problem
from swapper.snapshots.chain import chain_of

SMALL_BYTES = 8192
"""So much of an error's body is read before it is passed on: it may say that the model is not there."""
DEATHS = 2
"""How often a call is sent again after its server died over it: some prompts kill servers, and would go on to."""
PAUSES_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
_EVENTS = b"text/event-stream"


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


class _Relay:
    """What passes from a server to a client: all of it as it comes, but of events only whole ones."""

    __slots__ = ("_down", "_frames", "_tail")

    def __init__(self, down: Downstream, tail: Tail) -> None:
        self._down = down
        self._tail = tail
        self._frames = Frames() if tail.sse else None

    def feed(self, chunk: bytes) -> None:
        """See Sink."""
        self._tail.feed(chunk)
        if self._frames is not None:
            chunk = self._frames.feed(chunk)
        if chunk:
            self._down.write(chunk)

    @property
    def rest(self) -> bytes:
        """An unfinished event."""
        return b"" if self._frames is None else self._frames.rest

    @property
    def torn(self) -> bool:
        """Whether a part of an unfinished event is out: nothing of ours can follow it."""
        return self._frames is not None and self._frames.torn


class Exchange:
    """One admitted or waiting call; `run` answers it and returns the status that went out."""

    __slots__ = (
        "_arrived",
        "_ask",
        "_call",
        "_complete",
        "_ctx",
        "_deaths",
        "_down",
        "_first_try_ms",
        "_held",
        "_keepalive",
        "_known",
        "_sse",
        "_status",
        "_target",
        "_tries",
        "_way",
    )

    def __init__(
        self,
        ctx: GatewayContext,
        arrived: Arrived,
        down: Downstream,
        target: Target,
        ask: Ask,
        way: Way,
        held: Held,
        call: Call,
    ) -> None:
        self._ctx = ctx
        self._arrived = arrived
        self._down = down
        self._target = target
        self._way = way
        self._held = held
        self._known = self._know(ask)
        self._ask = ask if ask.fields is None else Ask(ask.model, ask.stream)  # without its views of the body
        self._call = call
        self._status: int | None = None
        self._sse = False
        self._complete = False
        self._keepalive: Keepalive | None = None
        self._deaths = 0
        self._tries = 0
        self._first_try_ms: int | None = None
        if ask.stream:
            chosen = comment if ctx.limits.keepalive_comments else way.route.api.keepalive
            self._keepalive = Keepalive(down, chosen, ask.model, ctx.limits.keepalive_ms / 1000)

    def _know(self, ask: Ask) -> Known | None:
        """The call's conversation, and its body as it is sent. What has to be copied for it takes of the budget too.

        None where its prompt is none that can be followed.
        """
        target, way, held = self._target, self._way, self._held
        model = target.called(ask.model)
        unclear = target.several and not target.router and two_names(held.body)
        renamed = way.rename is not None and (way.own or ask.model != model or unclear)
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

    async def run(self) -> int:
        """See the class."""
        try:
            while True:
                turn = Turn.RUN if self._call.state is CallState.RUNNING else await self._call.turn()
                outcome = (
                    await self._attempt()
                    if turn is Turn.RUN
                    else await waited(self._ctx, self._ask.model, self._call, turn)
                )
                if isinstance(outcome, _Again):
                    outcome = await self._pause(outcome)
                if isinstance(outcome, Problem):
                    return self._refuse(outcome)
                if self._complete and self._status is not None:
                    return self._status
        finally:
            if self._keepalive is not None:
                self._keepalive.stop()

    async def _attempt(self) -> Problem | _Again | None:
        """Send it once. None: it is answered, or was cut before the first byte and waits again."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("an exchange runs in a task")
        outcome: Problem | _Again | None = None
        if self._call.cut_reason is None:
            ready = True
            with _Interrupt(self._call, task) as interrupt:
                if self._way.route.runs and self._target.slots:
                    ready = await self._ctx.talks.ready(self._target.tenant, self._known)
                if ready:
                    outcome = await self._send()
            if ready and not interrupt.fired:
                return outcome
            if self._complete:
                return None  # the cut came while the last bytes went out
        reason = self._call.cut_reason or "it was cut"
        if self._call.started:
            return errors.ended(reason)
        self._call.requeue()
        self._first_try_ms = None  # a swap takes its time, and that is not the server's
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

    async def _send(self) -> Problem | _Again | None:
        tenant, children = self._target.tenant, self._ctx.children
        child = None
        if self._target.router:
            child = await children.locate(self._target, self._ctx.admission.gate(tenant).epoch)
        fresh = False
        while True:
            try:
                return await self._ask_server(child, fresh=fresh)
            except LinkError as error:
                if error.stale:
                    fresh = True  # it had idled until its server closed it, which has most likely not read the call
                    continue
                if child is not None:
                    children.forget(tenant, child)
                return _Again(str(error), died=not error.unsent)

    async def _ask_server(self, child: Child | None, *, fresh: bool) -> Problem | _Again | None:
        """Raises LinkError as long as nothing of the answer is there."""
        way, body = self._way, self._held.body
        url = self._target.url if child is None else child.url
        origin, links = heads.base(url)[0], self._ctx.links
        link = (None if fresh else links.idle(origin)) or await links.to(origin)
        try:
            length = len(body) if body or way.method == "POST" else None
            called = self._target.called(self._ask.model)
            head = heads.request_head(self._arrived, self._target, child, way, called, length)
            link.send(head, body, headless=way.method == "HEAD")
            del body  # it may go before the answer has passed
            await link.answered()
            return await self._receive(link, child)
        finally:
            if child is not None and link.broken:
                self._ctx.children.forget(self._target.tenant, child)
            links.back(link)

    async def _receive(self, link: Link, child: Child | None) -> Problem | _Again | None:
        """The first bytes decide: not ready (again), an error after our 200 (an event), else pass it through."""
        if child is not None and not child.process.alive():  # else the port was its own all the time
            return _Again("its process ended", died=True)
        first = b""
        if link.status >= 400:
            try:
                while len(first) <= SMALL_BYTES and (more := await link.more()):
                    first += more
            except LinkError as error:
                return _Again(str(error), died=True)
            if (again := _not_ready(link.status, first)) is not None:
                return again
        early = self._keepalive is not None and self._keepalive.stop()
        self._call.first_byte()
        if (known := self._known) is None:
            self._held.release()
        else:
            known.sent(keep=self._held.sent(wanted=0 if known.request is None else len(known.request.body)))
        head = heads.answer_head(link.headers, self._call)
        self._sse = early or head.kind == _EVENTS
        if not early:
            self._status = link.status
            if self._sse:
                head = head.without_length()
            self._down.begin(link.status, link.reason, head.headers, bounded=head.bounded)
        else:
            self._status = 200
            if head.kind != _EVENTS:
                return await self._error_event(link, first)
        tail = self._ctx.talks.tap(self._way.path, sse=self._sse)
        try:
            return await self._relay(link, first, tail)
        finally:
            if link.status == 200 and self._way.route.runs:
                self._ctx.talks.answered(self._known, tail if self._complete else None, self._target)

    async def _relay(self, link: Link, first: bytes, tail: Tail) -> Problem | None:
        """Pass every chunk on as it comes; the client's pace holds back the server's."""
        relay = _Relay(self._down, tail)
        self._down.fed_by(link)
        try:
            if first:
                relay.feed(first)
            await link.pipe(relay)
        except LinkError as error:
            return errors.upstream_failed(self._ask.model, str(error))
        finally:
            self._down.fed_by(None)
            self._sse = self._sse and not relay.torn
        if self._sse and not link.bounded and not self._way.route.api.last(tail.last_event()):
            return errors.upstream_failed(self._ask.model, "its stream ended before its last event")
        if relay.rest:
            router_words = relay.rest.find(b"proxy error: ", -SMALL_BYTES)
            if router_words >= 0:
                text = relay.rest[router_words:].decode(errors="replace").strip()
                return errors.upstream_failed(self._ask.model, text)
            self._down.write(relay.rest)
        self._end()
        return None

    async def _error_event(self, link: Link, first: bytes) -> Problem | None:
        """The 200 is out, but the server answered otherwise: its own error object becomes the last event."""
        body = first
        try:
            while len(body) <= SMALL_BYTES and (more := await link.more()):
                body += more
        except LinkError as error:
            return errors.upstream_failed(self._ask.model, str(error))
        error = _error_object(body)
        if error is None:
            text = body[:500].decode(errors="replace")
            return errors.upstream_failed(self._ask.model, f"HTTP {link.status}: {text}")
        self._down.write(self._way.route.api.error(msgspec.json.encode(error)))
        self._end()
        return None

    def _end(self) -> None:
        self._complete = True
        self._down.end()

    def _refuse(self, problem: Problem) -> int:
        """A Problem as HTTP while nothing was sent, as events in a stream, as a broken connection in a plain body."""
        if self._keepalive is not None and self._keepalive.stop() and self._status is None:
            self._status, self._sse = 200, True
        if self._status is None:
            return refuse(self._down, problem)
        if self._sse:
            self._down.write(self._way.route.api.error(problem.error()))
            self._down.end()
        else:
            self._down.abort()
        return self._status


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
