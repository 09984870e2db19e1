"""The HTTP server under every route: aiohttp's, with what it refuses by itself said in our words, and bounded heads.

Invariant: whoever sends what is no HTTP gets one answer in OpenAI's envelope (no path could be read) that repeats
nothing of what came, and the connection ends. No connection is held for a head that does not end. Who is answered
before all of its body came is told that its connection ends: what is still to come would be read as its next request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong

from swapper.api.errors import error_middleware
from swapper.problem import Problem

Handle = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
HEAD_S = 30.0
"""From a connection's beginning, or a request's first byte, to the end of its head."""
_HEADERS_TOO_LARGE = 431


class _Connection(web.RequestHandler):
    """One client's connection."""

    __slots__ = ("_late",)

    def __init__(self, manager: web.Server, *, loop: asyncio.AbstractEventLoop, **kwargs: object) -> None:
        super().__init__(manager, loop=loop, **kwargs)  # pyright: ignore[reportArgumentType]
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It waits for a first head."""
        super().connection_made(transport)
        self._late = self._loop.call_later(HEAD_S, self._too_late)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Nobody waits any more."""
        self._in_time()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """What lies between two requests is the beginning of a head."""
        super().data_received(data)
        if self._messages or self._request_in_progress:
            self._in_time()
        elif self._late is None:
            self._late = self._loop.call_later(HEAD_S, self._too_late)

    def _in_time(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _too_late(self) -> None:
        self._late = None
        self.force_close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What was refused before there was a request, told in the log by the framework."""
        super().handle_error(request, status, exc, message)  # raises where an answer has begun
        response = _refusal(status, exc).response()
        response.force_close()
        response.headers["Connection"] = "close"  # said too: as HTTP/1.0, which it is taken for, it would not be
        return response


def _refusal(status: int, error: BaseException | None) -> Problem:
    """The framework's words up to where they repeat what came, which may hold a key."""
    if isinstance(error, LineTooLong):
        return Problem(_HEADERS_TOO_LARGE, "head_too_large", "the request line or a header is too long")
    if isinstance(error, HttpProcessingError):
        lines = [line.strip().rstrip(":") for line in str(error.message).split("\n")[:2]]
        kind = (lines[1] if lines[0] == "Bad status line" and len(lines) > 1 else lines[0])[:80]
        return Problem(status, "bad_request", f"this is no HTTP/1.1 request: {kind}")
    return Problem(status, "internal", "swapper failed over this request; its log tells why")


class _Server(web.Server):
    """Makes a connection's protocol."""

    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)


async def _end_where_a_body_is_left(request: web.Request, response: web.StreamResponse) -> None:
    if not request.content.is_eof():
        response.force_close()
        response.headers["Connection"] = "close"


class Runner(web.AppRunner):
    """aiohttp's runner on this server."""

    def __init__(self, app: web.Application, *, shutdown_timeout: float, **kwargs: object) -> None:
        app.on_response_prepare.append(_end_where_a_body_is_left)
        super().__init__(app, shutdown_timeout=shutdown_timeout, **kwargs)  # pyright: ignore[reportArgumentType]

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        supervised = partial(error_middleware(), handler=made.request_handler)  # what is raised before any middleware
        return _Server(cast("Handle", supervised), request_factory=made.request_factory, **self._kwargs)
