"""A model server on a bare socket that answers what a test wrote, byte for byte: too much, too little, or never.

Each request takes the next play (the last one stays). What came is kept as it stood on the wire, and what was no
request at all is kept, too: bytes of one caller that reach the server as another's would be seen there. Looks at a
router (`/models`, `/props`), at slots, health and `/v1/models` are answered honestly, and take no play.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

from tests.support.wire import PIECE, hang_up

LOOKS = frozenset({"/models", "/props", "/slots", "/health", "/ready", "/v1/models"})


@dataclass(frozen=True, slots=True)
class Heard:
    """One request as it came, and on which connection (from 1)."""

    head: bytes
    body: bytes
    line: int

    @property
    def method(self) -> str:
        """As it stood there."""
        return self.head.split(b" ", 1)[0].decode("latin-1")

    @property
    def target(self) -> str:
        """As it stood there."""
        return self.head.split(b" ", 2)[1].decode("latin-1")

    def all(self, name: str) -> list[str]:
        """Every value of a header."""
        lines = [line.partition(b":") for line in self.head.split(b"\r\n")[1:]]
        return [value.strip().decode("latin-1") for key, _, value in lines if key.lower() == name.lower().encode()]


class Line:
    """One connection of the liar's. `wrote`: bytes that it could get rid of. `gone`: its peer hung up."""

    def __init__(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.number = number
        self.reader = reader
        self.writer = writer
        self.wrote = 0
        self.gone = asyncio.Event()

    async def write(self, data: bytes) -> None:
        """At the pace the peer takes it."""
        for at in range(0, len(data), PIECE):
            self.writer.write(data[at : at + PIECE])
            await self.writer.drain()
            self.wrote += len(data[at : at + PIECE])

    async def drip(self, data: bytes) -> None:
        """One byte at a time, each given to the peer by itself."""
        for at in range(len(data)):
            await self.write(data[at : at + 1])
            await asyncio.sleep(0)

    async def hung_up(self) -> None:
        """Until the peer leaves; what it sends meanwhile is read and thrown away."""
        try:
            while await self.reader.read(PIECE):
                pass
        except ConnectionError:
            pass
        self.gone.set()

    def half_close(self) -> None:
        """No more comes from here, but the connection stays."""
        self.writer.write_eof()

    def die(self, *, reset: bool = False) -> None:
        """As a process does that is killed."""
        hang_up(self.writer, reset=reset)


Play = Callable[[Line, Heard], Awaitable[None]]


class Liar:
    """See the module.

    Without `reads_bodies` a play begins when a request's head is there, and its body lies unread. `child`: it is a
    router and its own model at once.
    """

    def __init__(self) -> None:
        self.plays: list[Play] = [says(ok())]
        self.heard: list[Heard] = []
        self.nonsense: list[bytes] = []
        self.arrived: asyncio.Queue[Heard] = asyncio.Queue()
        self.lines: list[Line] = []
        self.url = ""
        self.names: tuple[str, ...] = ("alpha",)
        self.child = False
        self.reads_bodies = True
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def wrote(self) -> int:
        """Bytes on all connections."""
        return sum(line.wrote for line in self.lines)

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A connection; its task ends with the liar."""
        task = asyncio.create_task(self._serve(Line(len(self.lines) + 1, reader, writer)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """Hang up everywhere."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, line: Line) -> None:
        self.lines.append(line)
        try:
            while not line.writer.transport.is_closing():
                heard = await self._next(line)
                if heard is None:
                    return
                await self._play(line, heard)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            line.gone.set()
            line.writer.transport.abort()

    async def _next(self, line: Line) -> Heard | None:
        try:
            head = await line.reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError as cut:
            if cut.partial:
                self.nonsense.append(cut.partial)
            return None
        heard = Heard(head, b"", line.number)
        if not head.split(b"\r\n", 1)[0].endswith(b" HTTP/1.1"):
            self.nonsense.append(head)
            return None
        if self._is_look(heard) or not self.reads_bodies:
            return heard
        return Heard(head, await _body(line.reader, heard), line.number)

    def _is_look(self, heard: Heard) -> bool:
        return heard.method == "GET" and urlsplit(heard.target).path in LOOKS

    async def _play(self, line: Line, heard: Heard) -> None:
        if self._is_look(heard):
            await line.write(self._seen(urlsplit(heard.target).path))
            return
        play = self.plays.pop(0) if len(self.plays) > 1 else self.plays[0]
        self.heard.append(heard)
        self.arrived.put_nowait(heard)
        await play(line, heard)

    def _seen(self, path: str) -> bytes:
        if path in ("/slots", "/health", "/ready"):
            return ok(b"[]")
        if path == "/v1/models":
            return ok(json.dumps({"data": [{"id": name} for name in self.names]}).encode())
        if not self.child:
            return answer(404, b"{}")
        port = str(urlsplit(self.url).port)
        models = {"data": [{"id": "alpha", "status": {"value": "loaded", "args": ["llama-server", "--port", port]}}]}
        props = {"max_instances": 0, "model_alias": "alpha"}
        return ok(json.dumps(models if path == "/models" else props).encode())


async def _body(reader: asyncio.StreamReader, heard: Heard) -> bytes:
    if heard.all("Transfer-Encoding"):
        body = b""
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            body += (await reader.readexactly(size + 2))[:-2]
        await reader.readuntil(b"\r\n")
        return body
    lengths = heard.all("Content-Length")
    return await reader.readexactly(int(lengths[0])) if lengths else b""


def answer(status: int, body: bytes, *headers: str, kind: str = "application/json") -> bytes:
    """An honest answer; `headers` are whole lines."""
    lines = (f"HTTP/1.1 {status} Words", f"Content-Type: {kind}", *headers, f"Content-Length: {len(body)}")
    return "\r\n".join((*lines, "", "")).encode() + body


def ok(body: bytes = b'{"ok":true}', *headers: str) -> bytes:
    """200 with this body."""
    return answer(200, body, *headers)


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%s\r\n" % (len(data), data)


LAST = b"0\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def says(*parts: bytes) -> Play:
    """Answers so, part by part, and waits for the next request."""

    async def play(line: Line, heard: Heard) -> None:
        for part in parts:
            await line.write(part)

    return play


async def echo(line: Line, heard: Heard) -> None:
    """Answers with what it was asked."""
    said = {"method": heard.method, "target": heard.target, "body": heard.body.decode("latin-1")}
    await line.write(ok(json.dumps(said).encode()))


def drips(data: bytes) -> Play:
    """Answers so, byte by byte."""

    async def play(line: Line, heard: Heard) -> None:
        await line.drip(data)

    return play


def dies(*parts: bytes, reset: bool = False) -> Play:
    """Answers so much and is gone: what it wrote goes out first."""

    async def play(line: Line, heard: Heard) -> None:
        for part in parts:
            await line.write(part)
        if reset:
            line.die(reset=True)
        else:
            line.writer.close()
            await line.writer.wait_closed()

    return play


def leaves_half_open(*parts: bytes) -> Play:
    """Answers so much, ends its side, and keeps the other open for ever."""

    async def play(line: Line, heard: Heard) -> None:
        for part in parts:
            await line.write(part)
        line.half_close()
        await line.hung_up()

    return play


def hangs(*parts: bytes) -> Play:
    """Answers so much, and then nothing any more."""

    async def play(line: Line, heard: Heard) -> None:
        for part in parts:
            await line.write(part)
        await line.hung_up()

    return play


@asynccontextmanager
async def liar() -> AsyncGenerator[Liar]:
    """One on a port of its own."""
    made = Liar()
    server = await asyncio.start_server(made.accept, "127.0.0.1", 0, limit=1 << 20)
    made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield made
    finally:
        server.close()
        await made.stop()
        await server.wait_closed()
