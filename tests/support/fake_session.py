"""The backend's HTTP client on a fake router, without a socket: what `RouterHttp` and `RouterEvents` ask of aiohttp.

Invariant: whatever ends here, ends with the exception that aiohttp would raise; limits are the loop's own, so that the
whole backend lives in virtual time. `no_sockets` is for the time of a test.
"""

from __future__ import annotations

import asyncio
import json as json_module
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import aiohttp
import pytest

from tests.support.fake_router import FakeRouter
from tests.support.fake_wire import Answer, Dropped, NobodyThere, Stream
from workers.llama.http import RouterHttp


@dataclass(frozen=True, slots=True)
class FakeResponse:
    """An answer as aiohttp shows it."""

    answer: Answer

    @property
    def status(self) -> int:
        """The HTTP status."""
        return self.answer.status

    @property
    def content(self) -> AsyncIterator[bytes]:
        """The body, line by line."""
        return self._lines()

    async def read(self) -> bytes:
        """The whole body."""
        return b"".join([line async for line in self._lines()])

    def raise_for_status(self) -> None:
        """Raise ClientPayloadError unless it is a success."""
        if self.status >= 400:
            raise aiohttp.ClientPayloadError(f"status {self.status}")

    async def _lines(self) -> AsyncIterator[bytes]:
        if isinstance(self.answer.body, bytes):
            yield self.answer.body
            return
        try:
            async for chunk in self.answer.body:
                for line in chunk.splitlines(keepends=True):
                    yield line
        except Dropped as dropped:
            raise aiohttp.ClientPayloadError(str(dropped)) from dropped


class FakeSession:
    """An `aiohttp.ClientSession` whose every URL leads to a router of `routers`, by its beginning."""

    def __init__(self, routers: Mapping[str, FakeRouter]) -> None:
        self._routers = routers
        self.closed = False

    async def close(self) -> None:
        """No more requests."""
        self.closed = True

    @asynccontextmanager
    async def request(
        self,
        method: str,
        url: str,
        *,
        params: Mapping[str, str] | None = None,
        json: Mapping[str, object] | None = None,
        timeout: aiohttp.ClientTimeout | None = None,  # noqa: ASYNC109  # aiohttp's own name
    ) -> AsyncGenerator[FakeResponse]:
        """One request; its limit holds until the body was read. Raises as aiohttp would."""
        base = next((base for base in self._routers if url.startswith(base)), None)
        if base is None:
            raise NobodyThere(url)
        body = b"" if json is None else json_module.dumps(json).encode()
        async with asyncio.timeout(timeout.total if timeout is not None else None):
            try:
                answer = await self._routers[base].request(method, url.removeprefix(base), params, body)
            except Dropped as dropped:
                raise aiohttp.ServerDisconnectedError(str(dropped)) from dropped
            try:
                yield FakeResponse(answer)
            finally:
                if isinstance(answer.body, Stream):
                    await answer.body.aclose()

    def get(
        self, url: str, *, params: Mapping[str, str] | None = None, timeout: aiohttp.ClientTimeout | None = None
    ) -> object:
        """As `request`."""
        return self.request("GET", url, params=params, timeout=timeout)


@contextmanager
def no_sockets(routers: Mapping[str, FakeRouter]) -> Generator[None]:
    """Every `RouterHttp` talks to these routers, by URL, and to nobody else."""
    opened: Callable[..., FakeSession] = lambda *_: FakeSession(routers)  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RouterHttp, "_opened", opened)
        yield
