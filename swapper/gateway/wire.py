"""HTTP/1.1 as most calls speak it: a POST on a model's route, its body of a stated length. All else is aiohttp's.

Invariant: what is answered here llhttp found sound (httptools), and one Content-Length says where it ends. A connection
on which anything else comes is given to aiohttp with every byte of that, and stays there: whatever is strange, refused
or rare has one judge. Requests are answered one after the other, in their order; who leaves ends his call at once; what
a client does not read holds back its server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import structlog

from swapper.gateway import errors
from swapper.gateway.arriving import BARE, HEAD_BYTES, Head, Heads, Identify
from swapper.gateway.calls import answer, in_body
from swapper.gateway.context import GatewayContext, Held
from swapper.gateway.downstream import Source, refuse
from swapper.problem import Problem

if TYPE_CHECKING:
    from swapper.gateway.link import Headers

HEAD_S = 30.0
"""From a connection's beginning, or a request's first byte, to the end of its head; the same as on aiohttp's."""
CLOSING_S = 60.0
"""How long the last answer on a connection may take to be read."""
IDLE_S = 3630.0
"""How long a connection may idle: longer than proxies keep theirs."""
SWEEP_S = 5.0
AHEAD_BYTES = 1 << 16
"""So much of the next requests is read while one is answered."""

_POST = b"POST /"
_BODILESS = frozenset({204, 304})

log = structlog.get_logger(__name__)


class Door:
    """What the connections of one port share, and their protocol factory; `others` makes aiohttp's."""

    def __init__(self, ctx: GatewayContext, others: Callable[[], asyncio.BaseProtocol], identify: Identify) -> None:
        self.ctx = ctx
        self.others = others
        self.wires: set[Wire] = set()
        self.heads = Heads(identify, ctx.limits.body_limit)
        self._loop = asyncio.get_running_loop()
        self._every_s = min(SWEEP_S, ctx.limits.body_pause_ms / 2000)
        self._sweeper: asyncio.TimerHandle | None = None

    def __call__(self) -> Wire:
        """A connection's protocol."""
        if self._sweeper is None:
            self._sweeper = self._loop.call_later(self._every_s, self._sweep)
        return Wire(self)

    async def close(self, wait_s: float) -> None:
        """Idle connections end at once, calls have `wait_s`, then they are ended, too."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        for wire in tuple(self.wires):
            wire.leave()
        tasks = {wire.task for wire in self.wires if wire.task is not None}
        if tasks:
            await asyncio.wait(tasks, timeout=wait_s)
        for wire in tuple(self.wires):
            wire.abort()  # which ends its call
        await asyncio.gather(*tasks, return_exceptions=True)

    def _sweep(self) -> None:
        now = self._loop.time()
        for wire in tuple(self.wires):
            wire.look(now)
        self._sweeper = self._loop.call_later(self._every_s, self._sweep) if self.wires else None


class Wire(asyncio.Protocol):
    """One connection; implements `Downstream` for the call that is answered on it."""

    def __init__(self, door: Door) -> None:
        self.task: asyncio.Task[None] | None = None
        self._door = door
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._ahead = b""
        self._since_s = self._loop.time()
        self._head: Head | None = None
        self._held: Held | None = None
        self._pieces: list[bytes] = []
        self._missing = 0
        self._last = False
        self._out = b""
        self._began = self._chunked = self._full = self._paused = self._asked = False
        self._source: Source | None = None

    # ---- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Somebody is there."""
        self._transport = cast("asyncio.Transport", transport)
        self._door.wires.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nobody is any more."""
        self._transport = None
        self._door.wires.discard(self)
        if self.task is not None:
            self.task.cancel()
        if self._held is not None:
            self._held.release()  # also of a call that never began to run

    def data_received(self, data: bytes) -> None:
        """Bytes of this request, or of the next."""
        if self.task is not None:
            self._ahead += data
            if len(self._ahead) > AHEAD_BYTES and self._transport is not None and not self._paused:
                self._paused = True
                self._transport.pause_reading()
        elif self._missing:
            self._since_s = self._loop.time()
            self._body(data)
        else:
            if not self._ahead:
                self._since_s = self._loop.time()
            self._ahead = self._ahead + data if self._ahead else data
            self._begin_next()

    def pause_writing(self) -> None:
        """The client reads too slowly."""
        self._full = True
        if self._source is not None:
            self._source.pause()

    def resume_writing(self) -> None:
        """It has caught up."""
        self._full = False
        if self._source is not None:
            self._source.resume()

    # ---- requests

    def _begin_next(self) -> None:
        """Read a head, once it is there, and what is there of its body."""
        data = self._ahead
        if self.task is not None or self._missing or not data:
            return  # it was begun meanwhile
        if self._transport is None or self._transport.is_closing():
            return  # and its client has left
        if not data.startswith(_POST) and not _POST.startswith(data):
            self._hand_over()
            return
        end = data.find(b"\r\n\r\n") + 4
        if end < 4:
            if len(data) >= HEAD_BYTES or BARE.search(data):
                self._hand_over()
            return
        head = self._door.heads.of(data[:end]) if end <= HEAD_BYTES else None
        if head is None:
            self._hand_over()
            return
        self._ahead = b""
        self._head, self._missing, self._asked = head, head.length, True
        self._held = Held(self._door.ctx.budget)
        self._last = not head.stays
        if head.length:
            self._since_s = self._loop.time()
            self._body(data[end:])
        else:
            self._ahead = data[end:]
            self._call(head, self._held)

    def _body(self, data: bytes) -> None:
        if len(data) > self._missing:
            data, self._ahead = data[: self._missing], data[self._missing :]
        self._missing -= len(data)
        head, held = self._head, self._held
        if head is not None and held is not None:
            if data and not held.add(len(data)):
                self._give_up(errors.body_budget(self._door.ctx.limits.body_budget))
            else:
                self._pieces.append(data)
        if self._missing:
            return
        if self._head is None or self._held is None:
            self._over()  # it was refused before it was there
            return
        self._held.body = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self._call(self._head, self._held)

    def _give_up(self, problem: Problem) -> None:
        """Refuse a request whose body is still to come; the rest of it is read and thrown away."""
        if self._held is not None:
            self._held.release()
        self._head = self._held = None
        self._pieces.clear()
        refuse(self, problem)

    def _call(self, head: Head, held: Held) -> None:
        self._head = None
        self.task = self._loop.create_task(self._answer(head, held))

    async def _answer(self, head: Head, held: Held) -> None:
        try:
            await _answered(self._door.ctx, head, held, self)
        except Exception:  # the supervisor: a bug ends one request, and is told in the log
            log.exception("a call failed", path=head.way.path)
            if self._began:
                self.abort()
            else:
                refuse(self, Problem(500, "internal", "swapper failed over this request; its log tells why."))
        finally:
            held.release()
            self.task = self._held = None
            self._over()

    def _over(self) -> None:
        """A request is answered: on to the next one."""
        self._began = False
        self._source = None
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        self._since_s = self._loop.time()
        if self._last:
            transport.close()
            return
        if self._paused:
            self._paused = False
            transport.resume_reading()
        if self._ahead:
            self._loop.call_soon(self._begin_next)

    def _hand_over(self) -> None:
        """From here on the connection is aiohttp's."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        self._transport = None
        self._door.wires.discard(self)
        other = cast("asyncio.Protocol", self._door.others())
        transport.set_protocol(other)
        other.connection_made(transport)
        if self._full:
            other.pause_writing()
        other.data_received(self._ahead)
        self._ahead = b""

    def look(self, now: float) -> None:
        """Close what takes too long."""
        if self.task is not None or self._transport is None:
            return
        waited = now - self._since_s
        if self._transport.is_closing():
            if waited > CLOSING_S:
                self._transport.abort()  # nobody reads what is still to go out
            return
        limits = self._door.ctx.limits
        if self._missing:
            if waited > limits.body_pause_ms / 1000:
                self._last = True
                if self._head is not None:
                    self._give_up(errors.body_stopped(limits.body_pause_ms))
                self._transport.close()
        elif waited > (IDLE_S if self._asked and not self._ahead else HEAD_S):
            self._transport.close()

    def leave(self) -> None:
        """No request after this one."""
        self._last = True
        if self.task is None and self._transport is not None:
            self._transport.close()

    # ---- the answer

    def begin(self, status: int, reason: str, headers: Headers, *, bounded: bool) -> None:
        """See Downstream."""
        self._began = True
        self._chunked = not bounded and status not in _BODILESS
        lines = [b"HTTP/1.1 %d %b" % (status, reason.encode("latin-1", "replace"))]
        lines += [name + b": " + value for name, value in headers]
        if self._chunked:
            lines.append(b"Transfer-Encoding: chunked")
        if self._last:
            lines.append(b"Connection: close")
        self._out = b"\r\n".join((*lines, b"\r\n"))

    def write(self, chunk: bytes) -> None:
        """See Downstream."""
        self._send(b"%x\r\n%b\r\n" % (len(chunk), chunk) if self._chunked else chunk)

    def end(self) -> None:
        """See Downstream."""
        if self._chunked:
            self._send(b"0\r\n\r\n")
        elif self._out:
            self._send(b"")

    def abort(self) -> None:
        """See Downstream."""
        if self._transport is not None:
            self._transport.abort()

    def fed_by(self, source: Source | None) -> None:
        """See Downstream."""
        self._source = source
        if source is not None and self._full:
            source.pause()

    def _send(self, data: bytes) -> None:
        if self._out:
            data, self._out = self._out + data, b""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)


async def _answered(ctx: GatewayContext, head: Head, held: Held, wire: Wire) -> None:
    asked = await in_body(ctx, head.kind, held, head.way)
    if isinstance(asked, Problem):
        refuse(wire, asked)
        return
    work = answer(ctx, head.arrived, head.klass, asked, held, wire)
    del asked  # views of the body, which may go before the answer has passed
    await work
