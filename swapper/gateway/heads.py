"""The heads of a call on its way up and of its answer on the way back: where it goes, what passes, what does not.

Invariant: what concerns one connection stays on it, and no key of a client reaches a server. A path goes up as it came,
percent-encoding and all: what is one name for the client is one for the server. Heads are bytes as they were sent.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING

from yarl import URL

from swapper.gateway.link import Headers, Origin

if TYPE_CHECKING:
    from swapper.gateway.admission import Call
    from swapper.gateway.child import Child
    from swapper.gateway.context import Target
    from swapper.gateway.downstream import Arrived
    from swapper.gateway.routes import Way

HOP = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer"),
        *("transfer-encoding", "upgrade"),
    }
)
"""Headers that concern one connection only."""
NOT_FORWARDED = HOP | {
    *("host", "content-length", "content-encoding", "expect", "authorization", "x-api-key", "api-key", "cookie"),
    *("accept-encoding", "origin"),
}
"""What of a request never reaches a server: the client's key, and whose page it is, which was judged here."""
NOT_ANSWERED = HOP | {"set-cookie", "service-worker-allowed", "clear-site-data", "x-swapper-swap", "x-swapper-wait-ms"}
"""What of an answer never reaches a client: servers' pages stand on swapper's own origin, and may not act for it."""
_ABOUT_PAGES = b"access-control-"
"""llama-server lets any page read its answers: who may is said here."""
_ROUTERS = frozenset({"autoload", "reload", "model"})
"""What of a query is for a router itself: to load, or to read its models anew, which unloads what was changed."""
_OURS = b"x-swapper-"


def _bytes(names: Iterable[str]) -> frozenset[bytes]:
    return frozenset(name.encode() for name in names)


_NOT_FORWARDED, _NOT_ANSWERED = _bytes(NOT_FORWARDED), _bytes(NOT_ANSWERED)


@lru_cache(maxsize=1024)
def base(url: str) -> tuple[Origin, str, bytes]:
    """Of a server's base URL: whom to connect to, what every path begins with, and its Host header."""
    parsed = URL(url)
    origin = Origin(parsed.raw_host or "", parsed.port or 80, parsed.scheme == "https")
    return origin, parsed.raw_path.rstrip("/"), (parsed.host_port_subcomponent or "").encode()


def passed_on(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """What of a client's headers goes up, as lines; each begins with its line break."""
    named = _named(headers)
    lines = [b""]
    for name, value in headers:
        low = name.lower()
        if low not in _NOT_FORWARDED and low not in named and not low.startswith(_OURS):
            lines.append(name + b": " + value)
    return b"\r\n".join(lines)


def request_head(
    arrived: Arrived, target: Target, child: Child | None, way: Way, model: str, length: int | None
) -> bytes:
    """The head of a call as it is sent, with our own key for the server. `length` of its body; None: there is none.

    Answers that are read as they pass come as they are; a page of the server's own may come packed.
    """
    wanted = _wanted(target, child, way, model)
    head = _line(target.url if child is None else child.url, way.method, wanted) + arrived.passed
    head += b"\r\nAccept-Encoding: "
    packed = header(arrived.headers, b"accept-encoding") if way.own and not way.route.runs else ""
    head += packed.encode("latin-1") or b"identity"
    if length is not None:
        head += b"\r\nContent-Length: %d" % length
    if child is not None:  # it needs no key; an idle connection would keep one of its some dozens of threads for 5 s
        return head + b"\r\nConnection: close\r\n\r\n"
    if target.api_key is not None:
        head += "".join(f"\r\n{name}: {value}" for name, value in target.auth().items()).encode()
    return head + b"\r\n\r\n"


@lru_cache(maxsize=1024)
def _line(url: str, method: str, wanted: str) -> bytes:
    _, prefix, host = base(url)
    return f"{method} {prefix}{wanted} HTTP/1.1\r\nHost: ".encode() + host


def _wanted(target: Target, child: Child | None, way: Way, model: str) -> str:
    """Path and query. A router is told never to load a model by itself; a child serves one and needs no name."""
    if not (way.query or way.by_query or target.router):
        return way.path
    ours = _ROUTERS if target.router else {"model"} if way.by_query else ()
    query = [(key, value) for key, value in way.query if key not in ours]
    if child is None and (way.by_query or (target.router and way.rename is None)):
        query.append(("model", model))
    if target.router and child is None:
        if not query:
            return way.path + "?autoload=false"
        query.append(("autoload", "false"))
    if not query:
        return way.path
    return way.path + str(URL().with_query(query))


class _Fate(Enum):
    """What becomes of an answer's header."""

    PASSES = "passes"
    ENDS = "ends here"
    LENGTH = "length"
    KIND = "kind"
    NAMES = "names others that end here"


_FATES: dict[bytes, _Fate] = {}
_KNOWN = 1000
_NAMES_NOTHING = frozenset({b"keep-alive", b"close"})


def _fate(name: bytes) -> _Fate:
    low = name.lower()
    fate = _Fate.PASSES
    if low in _NOT_ANSWERED or low.startswith(_ABOUT_PAGES):
        fate = _Fate.NAMES if low == b"connection" else _Fate.ENDS
    elif low == b"content-length":
        fate = _Fate.LENGTH
    elif low == b"content-type":
        fate = _Fate.KIND
    if len(_FATES) >= _KNOWN:
        _FATES.clear()
    _FATES[name] = fate
    return fate


@dataclass(slots=True)
class AnswerHead:
    """What of an answer's headers goes to the client; its media type; whether it says its length."""

    headers: Headers
    kind: bytes = b""
    bounded: bool = False

    def without_length(self) -> AnswerHead:
        """For a stream that something of ours may follow."""
        if not self.bounded:
            return self
        return AnswerHead([pair for pair in self.headers if pair[0].lower() != b"content-length"], self.kind)


def answer_head(headers: Headers, call: Call) -> AnswerHead:
    """The head of an answer, with how long the call waited and for which swap."""
    head, names = AnswerHead([]), False
    for pair in headers:
        match _FATES.get(pair[0]) or _fate(pair[0]):
            case _Fate.PASSES:
                head.headers.append(pair)
            case _Fate.KIND:
                head.headers.append(pair)
                head.kind = pair[1].partition(b";")[0].strip().lower()
            case _Fate.LENGTH:
                head.headers.append(pair)
                head.bounded = True
            case _Fate.NAMES:
                names = names or pair[1].lower() not in _NAMES_NOTHING
            case _Fate.ENDS:
                pass
    if names:
        named = _named(headers)
        head.headers = [pair for pair in head.headers if pair[0].lower() not in named]
    head.headers.append((b"X-Swapper-Wait-Ms", b"%d" % call.waited_ms))
    if call.swap is not None:
        head.headers.append((b"X-Swapper-Swap", call.swap.encode()))
    return head


def header(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> str:
    """The value of the first header of this (lower case) name, or nothing."""
    size = len(name)
    for key, value in headers:
        if len(key) == size and key.lower() == name:
            return value.decode("latin-1")
    return ""


def _named(headers: Iterable[tuple[bytes, bytes]]) -> frozenset[bytes]:
    """What a Connection header says concerns this connection only."""
    values = [value for name, value in headers if name.lower() == b"connection"]
    return frozenset(word.strip().lower() for value in values for word in value.split(b","))
