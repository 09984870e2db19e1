"""The client's side of a call that aiohttp serves: a task sends what is written to it, at the client's pace.

Invariant: what waits here for the client is bounded: beyond QUEUE_BYTES its source is held back until all of it is out.
"""

from __future__ import annotations

import asyncio
from collections import deque

from aiohttp import web
from multidict import CIMultiDict

from swapper.gateway.downstream import Source
from swapper.gateway.link import Headers

QUEUE_BYTES = 1 << 16


class Pumped:
    """Implements `Downstream` on an aiohttp request; `response` is what its handler returns."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._handler = asyncio.current_task()
        self._head: tuple[int, str, Headers] | None = None
        self._queue: deque[bytes] = deque()
        self._size = 0
        self._ended = False
        self._source: Source | None = None
        self._held_back = False
        self._wake = asyncio.Event()
        self._pump: asyncio.Task[web.StreamResponse] | None = None

    def begin(self, status: int, reason: str, headers: Headers, *, bounded: bool) -> None:
        """See Downstream."""
        self._head = (status, reason, headers)

    def write(self, chunk: bytes) -> None:
        """See Downstream."""
        self._queue.append(chunk)
        self._size += len(chunk)
        if self._pump is None:
            self._pump = asyncio.create_task(self._run())
            self._pump.add_done_callback(self._ended_early)
        self._wake.set()
        if self._size > QUEUE_BYTES and self._source is not None and not self._held_back:
            self._held_back = True
            self._source.pause()

    def end(self) -> None:
        """See Downstream."""
        self._ended = True
        self._wake.set()

    def abort(self) -> None:
        """See Downstream."""
        self._ended = True
        if self._pump is not None:
            self._pump.cancel()
        if self._request.transport is not None:
            self._request.transport.abort()

    def fed_by(self, source: Source | None) -> None:
        """See Downstream."""
        self._source = source
        if source is not None and self._held_back:
            source.pause()

    async def response(self) -> web.StreamResponse:
        """The whole answer, once it has gone out."""
        if self._pump is None:
            self._pump = asyncio.create_task(self._run())
        try:
            return await self._pump
        except asyncio.CancelledError:
            if not self._pump.cancelled() or (task := asyncio.current_task()) is None or task.cancelling():
                raise
            return self._made()  # aborted: whoever serves finds the connection gone

    def close(self) -> None:
        """The handler ends: nothing more goes out."""
        if self._pump is not None:
            self._pump.cancel()

    def _ended_early(self, pump: asyncio.Task[web.StreamResponse]) -> None:
        """What cannot go out is made by nobody any more: the handler ends, and hears why."""
        if not pump.cancelled() and pump.exception() is not None and not self._ended and self._handler is not None:
            self._handler.cancel()

    def _made(self) -> web.StreamResponse:
        status, reason, headers = self._head or (500, "Internal Server Error", [])
        pairs = ((name.decode("latin-1"), value.decode("utf-8", "replace")) for name, value in headers)
        return web.StreamResponse(status=status, reason=reason, headers=CIMultiDict(pairs))

    async def _run(self) -> web.StreamResponse:
        response = self._made()
        await response.prepare(self._request)
        while self._queue or not self._ended:
            if not self._queue:
                self._wake.clear()
                await self._wake.wait()
                continue
            chunk = self._queue.popleft()
            self._size -= len(chunk)
            await response.write(chunk)
            if not self._queue and self._held_back:
                self._held_back = False
                if self._source is not None:
                    self._source.resume()
        await response.write_eof()
        return response
