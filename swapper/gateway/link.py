"""One connection to a server: a request goes out in one write, its answer comes back as it comes.

Invariant: one request at a time, and no byte of one answer is ever taken for another's: what comes unasked, or after an
answer's end, closes the connection. An answer is whole only where HTTP says so: by its length, its last chunk, or,
where it has neither, the end of the connection. llhttp parses (httptools), strictly; what it refuses is no answer.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple, Protocol, cast

import httptools

HEAD_BYTES = 1 << 17
"""The head of an answer may be as large."""
WRITE_BYTES = 1 << 18
"""A larger body is written in pieces, as the server takes them: asyncio copies what it cannot write at once."""
AHEAD_BYTES = 1 << 16
"""So much of an answer is read before anybody takes it."""
STALE_S = 1.0
"""Who closes an idle connection does so at once; later it was the call that was too much."""

Headers = list[tuple[bytes, bytes]]


def _frames(name: bytes, value: bytes) -> bool:
    """Whether this header says where a body ends."""
    chunked = name == b"transfer-encoding" and value.lower().rstrip().endswith(b"chunked")
    return chunked or name == b"content-length"


class LinkError(Exception):
    """The server broke off, in words. `unsent`: nobody was reached; `stale`: an idle connection ended under a call."""

    def __init__(self, why: str, *, unsent: bool = False, stale: bool = False) -> None:
        super().__init__(why)
        self.unsent = unsent
        self.stale = stale


class Origin(NamedTuple):
    """Who is connected to."""

    host: str
    port: int
    tls: bool = False


class Sink(Protocol):
    """Takes an answer's body as it comes."""

    def feed(self, chunk: bytes) -> None:
        """The next bytes."""
        ...


class _Reading:
    """One answer as llhttp reads it; `pieces` are what of its body nobody has taken yet.

    `ended`: it is whole. `sound`: another request may follow on the connection.
    """

    def __init__(self) -> None:
        self.parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        self.pieces: list[bytes] = []
        self.begin(headless=False)
        self.ended = True  # nothing was asked yet

    def begin(self, *, headless: bool) -> None:
        """`headless`: there will be no body, whatever the head says."""
        self.headless = headless
        self.headers: Headers = []
        self.status = 0
        self.reason = ""
        self.headed = self.ended = False
        self.sound = True

    @property
    def bounded(self) -> bool:
        """Whether the answer says itself where it ends; else only the end of the connection does."""
        return self.status in (204, 304) or any(_frames(name.lower(), value) for name, value in self.headers)

    # ---- llhttp's callbacks

    def on_message_begin(self) -> None:
        if self.ended:
            self.sound = False  # two answers to one request

    def on_status(self, status: bytes) -> None:
        if not self.headed:
            self.reason += status.decode("latin-1")

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.headed:  # else it is a trailer
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self.headed or self.parser is None:
            return
        self.status = self.parser.get_status_code()
        if self.status < 200:
            self.headers, self.reason = [], ""
            return
        self.headed = True
        self.sound = self.sound and self.parser.should_keep_alive()
        if self.headless:
            self.ended, self.sound = True, False

    def on_body(self, body: bytes) -> None:
        if not self.ended:
            self.pieces.append(body)

    def on_message_complete(self) -> None:
        self.ended = self.headed  # an informational one is none


class Link(_Reading, asyncio.Protocol):
    """See the module. `reused`: another request was answered on it before; `idle_since`: the loop's time, s.

    Of the answer: `status`, `reason`, `headers` as they came, `bounded`, and `ended` once it is whole.
    """

    def __init__(self, origin: Origin) -> None:
        super().__init__()
        self.origin = origin
        self.reused = False
        self.idle_since = 0.0
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._sink: Sink | None = None
        self._error: LinkError | None = None
        self._unsent: memoryview | None = None
        self._full = self._held_back = self._ahead = self._dropped = False
        self._reads = True
        self._came = 0
        self._sent_s = 0.0

    @property
    def broken(self) -> bool:
        """Whether the server broke off."""
        return self._error is not None

    @property
    def fit(self) -> bool:
        """Whether it may take another request."""
        transport = self._transport
        if transport is None or self._dropped or not (self.ended and self.sound):
            return False
        return self._unsent is None and not transport.get_write_buffer_size()  # it may answer before it has read all

    def send(self, head: bytes, body: bytes, *, headless: bool = False) -> None:
        """One request; `headless`: its answer has no body (HEAD)."""
        self.begin(headless=headless)
        self._came = 0
        self._sent_s = self._loop.time()
        if self._transport is None:
            self._error = LinkError("it closed the connection", stale=self.reused)
        elif len(body) < WRITE_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._unsent = memoryview(body)
            self._write_on()

    async def answered(self) -> None:
        """Return when the head is there, and the first bytes of the body or its end. Raises LinkError."""
        while not self.ended and (self._error is not None or not self.pieces):
            await self._wait()

    async def more(self) -> bytes:
        """The next bytes of the body, none at its end. Raises LinkError."""
        await self.answered()
        return self._taken()

    async def pipe(self, sink: Sink) -> None:
        """What comes from here on goes to the sink in the moment it comes; returns at the end. Raises LinkError."""
        if self.pieces:
            sink.feed(self._taken())
        if self.ended:
            return
        self._sink = sink
        try:
            while not self.ended:
                await self._wait()
        finally:
            self._sink = None

    def pause(self) -> None:
        """The sink is full: read no more."""
        self._held_back = True
        self._flow()

    def resume(self) -> None:
        """It is no more."""
        self._held_back = False
        self._flow()

    def rest(self) -> None:
        """Nobody asks for now: what was not taken is nobody's, and what comes is unasked, which is seen by reading."""
        self.pieces.clear()
        self._held_back = self._ahead = False
        self._flow()

    def drop(self) -> None:
        """Close it at once: the server sees it, and gives up what it does."""
        self._dropped = True
        self._unsent = None
        if self._transport is not None:
            self._transport.abort()

    # ---- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connected."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Bytes of the answer."""
        if self.ended or self.parser is None:
            self.drop()  # unasked
            return
        self._came += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._break("it wants to speak another protocol")
        except httptools.HttpParserError as error:
            if self.ended:
                self.drop()  # what follows the answer is none
            else:
                self._break(f"its answer is not HTTP: {error}")
        if self.pieces:
            if self._sink is not None:
                self._sink.feed(self._taken())
            else:
                self._wake()
                if sum(map(len, self.pieces)) > AHEAD_BYTES and not self.ended:
                    self._ahead = True
                    self._flow()
        elif not self.headed and self._came > HEAD_BYTES:
            self._break(f"the head of its answer is larger than {HEAD_BYTES >> 10} KiB")
        if self.ended:
            self._wake()

    def pause_writing(self) -> None:
        """The server takes no more for now."""
        self._full = True

    def resume_writing(self) -> None:
        """It does."""
        self._full = False
        self._write_on()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is closed."""
        self._transport = self._unsent = None
        if self.headed and not self.ended and exc is None and not self._dropped and not self.bounded:
            self.ended = True  # that is how such an answer ends
        if self._error is None and not self.ended:
            why = "the connection was closed in the middle of its answer" if self._came else "it closed the connection"
            soon = self._loop.time() - self._sent_s < STALE_S
            self._error = LinkError(str(exc or "") or why, stale=self.reused and soon and not self._came)
        self._wake()
        self.parser = None  # it holds us

    # ---- inside

    async def _wait(self) -> None:
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _write_on(self) -> None:
        while self._unsent is not None and not self._full and self._transport is not None:
            self._transport.write(self._unsent[:WRITE_BYTES])
            self._unsent = self._unsent[WRITE_BYTES:] or None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _taken(self) -> bytes:
        """What came since."""
        pieces = self.pieces
        chunk = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        if self._ahead:
            self._ahead = False
            self._flow()
        return chunk

    def _flow(self) -> None:
        """Read, or not."""
        reads = not (self._held_back or self._ahead)
        if reads is self._reads or self._transport is None or self._transport.is_closing():
            return
        self._reads = reads
        if reads:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def _break(self, why: str) -> None:
        self._error = LinkError(why)
        self.drop()
        self._wake()
