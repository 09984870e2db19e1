"""The heads of a call on its way up and of its answer on the way back: where it goes, what passes, what does not.

Invariant: what concerns one connection stays on it, and no key of a client reaches a server. A path goes up as it came,
percent-encoding and all: what is one name for the client is one for the server. Heads are bytes as they were sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from yarl import URL

from swapper.gateway.link import Headers, Origin

if TYPE_CHECKING:
    from swapper.gateway.admission import Call
    from swapper.gateway.child import Child
    from swapper.gateway.context import Target
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


def request_head(
    headers: Sequence[tuple[bytes, bytes]],
    target: Target,
    child: Child | None,
    way: Way,
    model: str,
    length: int | None,
) -> bytes:
    """The head of a call as it is sent, with our own key for the server. `length` of its body; None: there is none.

    Answers that are read as they pass come as they are; a page of the server's own may come packed.
    """
    _, prefix, host = base(target.url if child is None else child.url)
    lines = [f"{way.method} {prefix}{_wanted(target, child, way, model)} HTTP/1.1\r\nHost: ".encode() + host]
    asked = b"identity"
    without = _without(_NOT_FORWARDED, headers)
    for name, value in headers:
        low = name.lower()
        if low not in without and not low.startswith(_OURS):
            lines.append(name + b": " + value)
        elif low == b"accept-encoding" and way.own and not way.route.runs:
            asked = value
    lines.append(b"Accept-Encoding: " + asked)
    if length is not None:
        lines.append(b"Content-Length: %d" % length)
    if child is None:
        lines += [f"{name}: {value}".encode() for name, value in target.auth().items()]
    else:  # it needs no key; an idle connection would keep one of its some dozens of threads for 5 s
        lines.append(b"Connection: close")
    return b"\r\n".join((*lines, b"\r\n"))


def _wanted(target: Target, child: Child | None, way: Way, model: str) -> str:
    """Path and query. A router is told never to load a model by itself; a child serves one and needs no name."""
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


def answer_headers(headers: Headers, call: Call) -> Headers:
    """What of an answer's headers goes to the client, with how long it waited and for which swap."""
    without = _without(_NOT_ANSWERED, headers)
    names = ((pair, pair[0].lower()) for pair in headers)
    passed = [pair for pair, low in names if low not in without and not low.startswith(_ABOUT_PAGES)]
    passed.append((b"X-Swapper-Wait-Ms", b"%d" % call.waited_ms))
    if call.swap is not None:
        passed.append((b"X-Swapper-Swap", call.swap.encode()))
    return passed


def header(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> str:
    """The value of the first header of this (lower case) name, or nothing."""
    return next((value.decode("latin-1") for key, value in headers if key.lower() == name), "")


def _without(names: frozenset[bytes], headers: Iterable[tuple[bytes, bytes]]) -> frozenset[bytes]:
    """These, and what a Connection header says concerns this connection only."""
    values = [value for name, value in headers if len(name) == len(b"connection") and name.lower() == b"connection"]
    return names if not values else names | {word.strip().lower() for value in values for word in value.split(b",")}
