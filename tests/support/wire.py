"""A client on a bare socket: what it sends is byte for byte what a test wrote, and what it gets is judged by h11.

Invariant: an answer counts as complete only where its own framing says so: a length that was reached, a last chunk, or
a clean end of a connection that promised neither. A status line or a header that HTTP does not allow is an error here.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import h11

HUNG_S = 20.0
"""Nothing here takes so long that does not hang."""
PIECE = 1 << 16
PASSES = 300


@dataclass(frozen=True, slots=True)
class Got:
    """One answer as it stood on the wire; `complete`: it ended as its head had said."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes
    complete: bool
    interim: tuple[int, ...] = ()

    def all(self, name: str) -> list[str]:
        """Every value of a header."""
        return [value for key, value in self.headers if key == name.lower()]

    def one(self, name: str) -> str | None:
        """The value of a header that stands there once at most."""
        values = self.all(name)
        assert len(values) <= 1, f"{name} stands there {len(values)} times"
        return values[0] if values else None

    def error(self) -> Mapping[str, Any]:
        """The error of a whole OpenAI envelope."""
        assert self.complete, f"the answer was cut: {self}"
        body = json.loads(self.body)
        assert set(body) == {"error"}
        assert set(body["error"]) == {"message", "type", "param", "code"}
        error: dict[str, Any] = body["error"]
        return error


def request(
    body: bytes = b"", path: str = "/v1/chat/completions", *headers: str, method: str = "POST", host: str = "gateway"
) -> bytes:
    """A request as a plain client writes it; `headers` are whole lines."""
    lines = (f"{method} {path} HTTP/1.1", f"Host: {host}", *headers, f"Content-Length: {len(body)}")
    return "\r\n".join((*lines, "", "")).encode() + body


class Wire:
    """One connection to the server under test; nothing is awaited on it for longer than `patience_s`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._beyond = b""
        self.sent = 0
        self.patience_s = HUNG_S

    @property
    def beyond(self) -> bytes:
        """What came after the last answer's end."""
        return self._beyond

    async def send(self, data: bytes) -> None:
        """Write it all, at the pace the server takes it."""
        for at in range(0, len(data), PIECE):
            self._writer.write(data[at : at + PIECE])
            await self._writer.drain()
            self.sent += len(data[at : at + PIECE])

    async def drip(self, data: bytes) -> None:
        """One byte at a time, each given to the server by itself."""
        for at in range(len(data)):
            await self.send(data[at : at + 1])
            await asyncio.sleep(0)

    async def some(self) -> bytes:
        """What comes next, raw; none at the end."""
        if self._beyond:
            found, self._beyond = self._beyond, b""
            return found
        async with asyncio.timeout(self.patience_s):
            try:
                return await self._reader.read(PIECE)
            except ConnectionError:
                return b""

    async def answer(self, method: str = "POST", before: bytes = b"") -> Got:
        """The next answer, to its end or to the connection's; `before`: what was read of it already.

        Raises ConnectionError where there is none, h11.RemoteProtocolError where it is no HTTP.
        """
        talk = h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 22)
        talk.send(h11.Request(method=method, target="/", headers=[("Host", "gateway")]))
        talk.send(h11.EndOfMessage())
        if not (first := before or await self.some()):
            raise ConnectionError("the connection ended without an answer")
        talk.receive_data(first)
        head: h11.Response | None = None
        interim, body = list[int](), bytearray()
        while True:
            try:
                event = talk.next_event()
            except h11.RemoteProtocolError:
                if head is None:
                    raise
                return _got(head, body, interim, complete=False)
            if event is h11.NEED_DATA:
                talk.receive_data(await self.some())
            elif isinstance(event, h11.InformationalResponse):
                interim.append(event.status_code)
            elif isinstance(event, h11.Response):
                head = event
            elif isinstance(event, h11.Data):
                body += event.data
            else:
                assert head is not None
                self._beyond, _ = talk.trailing_data
                return _got(head, body, interim, complete=True)

    async def until(self, mark: bytes) -> bytes:
        """What comes, raw, up to a mark at its end, or to the connection's."""
        found = b""
        while not found.endswith(mark) and (more := await self.some()):
            found += more
        return found

    async def ended(self) -> bytes:
        """What comes until the server ends the connection."""
        found = b""
        while more := await self.some():
            found += more
        return found

    async def call(self, data: bytes, method: str = "POST") -> Got:
        """Send it and read its answer."""
        await self.send(data)
        return await self.answer(method)

    def leave(self, *, reset: bool = False) -> None:
        """Hang up; `reset`: as a process that is killed with unread data does."""
        hang_up(self._writer, reset=reset)


def _got(head: h11.Response, body: bytearray, interim: list[int], *, complete: bool) -> Got:
    headers = tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in head.headers)
    return Got(head.status_code, headers, bytes(body), complete, tuple(interim))


def hang_up(writer: asyncio.StreamWriter, *, reset: bool) -> None:
    """Close a socket with FIN, or with RST."""
    sock = writer.get_extra_info("socket")
    if reset and sock is not None and not writer.transport.is_closing():
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    writer.transport.abort()


@asynccontextmanager
async def wire(url: str) -> AsyncGenerator[Wire]:
    """A connection to a server; it is hung up when the block is left."""
    address = urlsplit(url)
    async with asyncio.timeout(HUNG_S):
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
    made = Wire(reader, writer)
    try:
        yield made
    finally:
        made.leave()


async def settled(progress: Callable[[], object]) -> None:
    """Until nothing moves any more: so many passes of the loop, all of them with free sockets, changed nothing."""
    still, seen = 0, progress()
    while still < PASSES:
        await asyncio.sleep(0)
        now = progress()
        still, seen = (still + 1, now) if now == seen else (0, now)
