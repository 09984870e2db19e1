"""A server of paced event streams and its clients, cheap enough that neither hides what a proxy between them costs.

Invariant: raw asyncio protocols, no HTTP library; every stream has the same chunks at the same pace, told apart by
nothing, so that a count of chunks is all that there is to know. Run as a program it is the server:
`python -m tests.bench.paced PORT STREAMS` serves `POST /v1/chat/completions` with a stream that never ends by itself.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from typing import cast

PACE_HZ = 200
"""Chunks a second and stream."""
BATCHES = 8
"""The streams are served in so many turns a period: not all at one moment."""
EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"%s"},"finish_reason":null}]}\n\n' % (b"x" * 120)
CHUNK = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
MODELS = b'{"object":"list","data":[{"id":"alpha","object":"model"}]}'
IDLE = b"idle"
"""A body that holds this has one chunk and then nothing more."""


class _Paced(asyncio.Protocol):
    """One connection of the server."""

    def __init__(self, batches: list[list[asyncio.Transport]]) -> None:
        self._batches = batches
        self._came = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are none of asyncio's classes

    def data_received(self, data: bytes) -> None:
        transport = self._transport
        assert transport is not None
        self._came += data
        if b"\r\n\r\n" not in self._came:
            return
        head, _, body = self._came.partition(b"\r\n\r\n")
        if not head.startswith(b"POST"):
            self._came = b""
            transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(MODELS), MODELS))
            return
        if not body.endswith(b"}"):
            return
        transport.write(HEAD + CHUNK)
        if IDLE not in body:
            min(self._batches, key=len).append(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        for batch in self._batches:
            if self._transport in batch:
                batch.remove(self._transport)


async def _serve(port: int) -> None:
    loop = asyncio.get_running_loop()
    batches: list[list[asyncio.Transport]] = [[] for _ in range(BATCHES)]
    await loop.create_server(lambda: _Paced(batches), "127.0.0.1", port, backlog=2048)
    due = loop.time()
    while True:
        for batch in batches:
            for transport in batch:
                transport.write(CHUNK)
            due += 1 / PACE_HZ / BATCHES
            await asyncio.sleep(max(due - loop.time(), 0))


class Listener(asyncio.Protocol):
    """One client: counts the chunks that came; `began` is done with the first."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.began: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.chunks = 0
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.chunks += data.count(b"data: ")
        if self.chunks and not self.began.done():
            self.began.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.began.done():
            self.began.set_exception(ConnectionError("the stream ended before it began"))


async def listen(port: int, count: int, *, idle: bool = False) -> list[Listener]:
    """So many streams from whoever serves them on this port; returns once each has begun."""
    body = b'{"model":"alpha","stream":true,"messages":[{"role":"user","content":"%b"}]}' % (IDLE if idle else b"go")
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nContent-Length: %d"
    request = head % len(body) + b"\r\n\r\n" + body
    loop = asyncio.get_running_loop()
    listeners: list[Listener] = []
    for _ in range(count):
        _, listener = await loop.create_connection(lambda: Listener(request), "127.0.0.1", port)
        listeners.append(listener)
        await listener.began
    return listeners


def run(work: Coroutine[None, None, None]) -> None:
    """On uvloop where it is there."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(work)
    else:
        uvloop.run(work)


if __name__ == "__main__":
    run(_serve(int(sys.argv[1])))
