"""What goes over the wire of the fake router: answers, streams, and the two ways to get none.

Invariant: a stream ends exactly once, by its end, by `aclose` of its reader or by `drop`; whoever makes its chunks is
told of the last two. asyncio primitives only.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]

JSON_TYPE = {"Content-Type": "application/json; charset=utf-8"}
SSE_TYPE = {"Content-Type": "text/event-stream"}
LOST = "proxy error: Failed to read connection"
NO_CONNECTION = "proxy error: Could not establish connection"


class Dropped(ConnectionError):
    """The connection ended without an answer, or in the midst of one."""


class NobodyThere(ConnectionRefusedError):
    """No router runs."""


class Stream:
    """A body that is still being made; chunks as the server writes them."""

    def __init__(self, on_close: Callable[[], object] = lambda: None) -> None:
        self._chunks: asyncio.Queue[bytes | Dropped | None] = asyncio.Queue()
        self._on_close = on_close
        self.open = True

    def put(self, chunk: bytes) -> None:
        """Write a chunk; lost once nobody reads any more."""
        if self.open:
            self._chunks.put_nowait(chunk)

    def end(self) -> None:
        """No more chunks."""
        self._chunks.put_nowait(None)

    def drop(self) -> None:
        """Cut the connection."""
        self._chunks.put_nowait(Dropped("the connection was cut"))
        self.shut()

    async def aclose(self) -> None:
        """The reader goes away, as a client that closes its connection."""
        self.shut()

    def shut(self) -> None:
        """Nobody reads any more."""
        if self.open:
            self.open = False
            self._on_close()

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> bytes:
        chunk = await self._chunks.get()
        if isinstance(chunk, bytes):
            return chunk
        self._chunks.put_nowait(chunk)  # who asks again hears the same
        self.shut()
        if chunk is None:
            raise StopAsyncIteration
        raise chunk


@dataclass(frozen=True, slots=True)
class Answer:
    """Status, headers, and a body that is there or still comes."""

    status: int
    body: bytes | Stream = b""
    headers: Mapping[str, str] = field(default_factory=lambda: dict(JSON_TYPE))

    def json(self) -> Any:  # noqa: ANN401  # whatever the server said
        """The body read as JSON."""
        assert isinstance(self.body, bytes), "a stream is no JSON"
        return json.loads(self.body)


def said(value: object, status: int = 200) -> Answer:
    """An answer in JSON, written without spaces as the server writes it."""
    return Answer(status, packed(value))


def refused(status: int, message: str, **more: object) -> Answer:
    """An answer of 4xx or 5xx in the server's words. `type` among `more` replaces what goes with the status."""
    kinds = {400: "invalid_request_error", 404: "not_found_error", 501: "not_supported_error"}
    body = {"code": status, "message": message, "type": kinds.get(status, "server_error"), **more}
    return said({"error": body}, status)


def proxy_error(text: str) -> Answer:
    """What the router says of a child that it cannot talk to: a text, no JSON, whatever its type claims."""
    return Answer(500, text.encode())


def event(value: object) -> bytes:
    """One event of a stream."""
    return b"data: " + packed(value) + b"\n\n"


def packed(value: object) -> bytes:
    """JSON without spaces."""
    return json.dumps(value, separators=(",", ":")).encode()
