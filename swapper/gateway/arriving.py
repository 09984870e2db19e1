"""Which requests are answered on the gateway's bare connections, by their heads: what they ask for, and who asks.

Invariant: a head that is taken llhttp found sound (httptools), and exactly one Content-Length frames its body; whatever
is strange, refused or rare is not taken, and then aiohttp's handlers judge all of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b

import httptools

from swapper.caller import Caller
from swapper.core.types import WorkClass
from swapper.gateway.calls import class_of
from swapper.gateway.downstream import Arrived, arrived
from swapper.gateway.link import Headers
from swapper.gateway.parse import with_model
from swapper.gateway.routes import POST, Way
from swapper.problem import Problem

HEAD_BYTES = 1 << 13
"""A larger head is aiohttp's to refuse."""
KNOWN = 256
BARE = re.compile(rb"\r(?!\n|\Z)|(?<!\r)\n")
"""A line that ends otherwise than lines do: such a head may have no end that would be seen here."""
Identify = Callable[[Mapping[bytes, bytes]], "Caller | None"]
"""Who calls a model's route, by the headers (lower case); None: aiohttp's handlers are to say what is wrong."""

_WAYS = {path.encode(): Way("POST", route.path or path, (), route, with_model) for path, route in POST.items()}
_SECRET = frozenset({b"authorization", b"x-api-key"})
_ELSEWHERE = frozenset({b"transfer-encoding", b"content-encoding", b"expect", b"upgrade", b"origin", b"sec-fetch-site"})
"""With one of these a request is aiohttp's: framed or packed otherwise, or of a page in a browser."""


@dataclass(frozen=True, slots=True)
class Head:
    """Of a request that is answered here."""

    way: Way
    arrived: Arrived
    klass: WorkClass
    kind: str
    length: int
    stays: bool


class _Reading:
    """What llhttp finds in one head."""

    __slots__ = ("complete", "headers", "parser", "stays", "url")

    def __init__(self) -> None:
        self.url = b""
        self.headers: Headers = []
        self.complete = self.stays = False
        self.parser: httptools.HttpRequestParser | None = None

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self.complete = True
        self.stays = self.parser is not None and self.parser.should_keep_alive()


class Heads:
    """Reads heads; a client's are alike, so that some are kept as they were read."""

    def __init__(self, identify: Identify, body_limit: int) -> None:
        self._identify = identify
        self._body_limit = body_limit
        self._known: dict[bytes, Head] = {}

    def of(self, data: bytes) -> Head | None:
        """The head that `data` is, or None where its request is aiohttp's."""
        name = blake2b(data, digest_size=16).digest()  # not the head itself, for it may hold a key
        known = self._known.get(name)
        if known is None and (known := self._read(data)) is not None:
            if len(self._known) >= KNOWN:
                self._known.clear()
            self._known[name] = known
        return known

    def _read(self, data: bytes) -> Head | None:
        reading = _Reading()
        parser = reading.parser = httptools.HttpRequestParser(reading)
        try:
            parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            return None
        way = _WAYS.get(reading.url)
        if way is None or not reading.complete or BARE.search(data) or parser.get_http_version() != "1.1":
            return None
        named = {name.lower(): value for name, value in reading.headers}
        if len(named) != len(reading.headers) or not named.keys().isdisjoint(_ELSEWHERE):
            return None
        length = named.get(b"content-length", b"")
        if b"host" not in named or not length.isdigit() or int(length) > self._body_limit:
            return None
        caller = self._identify(named)
        if caller is None:
            return None
        came = arrived([pair for pair in reading.headers if pair[0].lower() not in _SECRET], caller)
        klass = class_of(came)
        if isinstance(klass, Problem):
            return None
        kind = named.get(b"content-type", b"").decode("latin-1")
        return Head(way, came, klass, kind, int(length), reading.stays)
