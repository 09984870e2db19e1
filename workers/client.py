"""Requests to a server of any kind, and what its answers mean.

Invariant: an answer that is not a success becomes a BackendError with the server's own words, nothing is asked twice,
and each request has a connection of its own, so that none is sent into one that the server just closed. Before each
POST stands the fence. Touches the network only.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TypeVar

import aiohttp
import msgspec

from swapper.errors import BackendDown, BackendError, BackendGone, BackendRefused

T = TypeVar("T")

NO_LIMIT_S = 0.0
"""Whoever asks bounds the answer itself."""
READ_S = 4.0
"""How long an answer that costs the server nothing may take."""
_CONNECT_S = 3.0
_SHOWN = 500


class ServerClient:
    """Client of the server at `url`, called `who` in sentences ("Ollama"). `api_key`: for every request.

    `read_s`: how long an answer may take for which no other limit is given.
    """

    def __init__(self, url: str, who: str, api_key: str | None = None, *, read_s: float = READ_S) -> None:
        self.url = url.rstrip("/")
        self.who = who
        self.read_s = read_s
        self.fence: Callable[[], Awaitable[None]] = _unfenced
        """Awaited right before what changes something: it lets nothing through that must have no effect any more."""
        self._api_key = api_key
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Drop the connections."""
        if self._session is not None:
            await self._session.close()

    async def get(self, path: str, *, limit_s: float | None = None, key: str | None = None) -> bytes:
        """One GET. `key`: instead of the server's own, for a model that has another."""
        async with self._answer("GET", path, None, limit_s, key) as response:
            return await response.read()

    async def post(
        self,
        path: str,
        body: Mapping[str, object] | None = None,
        *,
        limit_s: float | None = None,
        key: str | None = None,
    ) -> bytes:
        """One POST of JSON (None: without a body)."""
        await self.fence()
        async with self._answer("POST", path, body, limit_s, key) as response:
            return await response.read()

    @asynccontextmanager
    async def stream(self, path: str) -> AsyncGenerator[aiohttp.StreamReader]:
        """The answer to a GET while it comes, for `read_s` in all."""
        async with self._answer("GET", path, None, None, None) as response:
            yield response.content

    async def has(self, path: str) -> bool:
        """Whether a GET of this path is known to the server, whatever it answers."""
        try:
            await self.get(path)
        except BackendRefused as refused:
            return refused.status not in (404, 405)
        return True

    @asynccontextmanager
    async def _answer(
        self, method: str, path: str, body: Mapping[str, object] | None, limit_s: float | None, key: str | None
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        key = key or self._api_key
        limit_s = self.read_s if limit_s is None else limit_s
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        bounded = limit_s != NO_LIMIT_S
        timeout = aiohttp.ClientTimeout(
            total=limit_s if bounded else None, connect=min(_CONNECT_S, limit_s) if bounded else _CONNECT_S
        )
        asked = self._opened().request(
            method, self.url + path, json=body, headers=headers, timeout=timeout, allow_redirects=False
        )
        try:
            async with asked as response:
                if response.status >= 300:
                    said = words(await response.read()) or "nothing"
                    text = f"{self.who} at {self.url} answered {response.status} to {path}: {said}"
                    raise BackendRefused(text, response.status)
                yield response
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise _unanswered(f"{self.who} at {self.url}", path, error) from error

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None or self._session.closed:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True, limit=0))
        return self._session


def decoded(data: bytes, shape: type[T], who: str) -> T:
    """A JSON answer; raises BackendRefused where it is another server's."""
    try:
        return msgspec.json.decode(data, type=shape)
    except msgspec.DecodeError as error:
        raise BackendRefused(f"the answer is not what {who} gives ({error}); is it another server?") from error


def words(data: bytes) -> str:
    """What an error answer says: `error.message`, `error`, `detail` or `message` of an object, else the text itself."""
    try:
        said: object = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return data[:_SHOWN].decode(errors="replace").strip()
    for name in ("error", "message", "detail", "message"):
        if isinstance(said, dict) and name in said:
            said = said[name]  # pyright: ignore[reportUnknownVariableType]
    return said[:_SHOWN] if isinstance(said, str) else msgspec.json.encode(said)[:_SHOWN].decode(errors="replace")


def _unanswered(who: str, path: str, error: BaseException) -> BackendError:
    refused = isinstance(error, ConnectionRefusedError) or isinstance(
        getattr(error, "os_error", None), ConnectionRefusedError
    )
    return (BackendGone if refused else BackendDown)(
        f"{who} does not answer {path}: {str(error) or type(error).__name__}"
    )


async def _unfenced() -> None:
    """Nobody else is there."""
