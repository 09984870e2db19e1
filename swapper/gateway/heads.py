"""The heads of a call on its way up and of its answer on the way back: where it goes, what passes, what does not.

Invariant: what concerns one connection stays on it, and no key of a client reaches a server. A path goes up as it came,
percent-encoding and all: what is one name for the client is one for the server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from multidict import CIMultiDict, CIMultiDictProxy, MultiMapping
from yarl import URL

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
NOT_ANSWERED = HOP | {"set-cookie", "service-worker-allowed", "clear-site-data"}
"""What of an answer never reaches a client: servers' pages stand on swapper's own origin, and may not act for it."""
_ABOUT_PAGES = "access-control-"
"""llama-server lets any page read its answers: who may is said here."""
_ROUTERS = frozenset({"autoload", "reload", "model"})
"""What of a query is for a router itself: to load, or to read its models anew, which unloads what was changed."""


def url(target: Target, child: Child | None, way: Way, model: str) -> URL:
    """Where the call goes. A router is told never to load a model by itself; a child serves one and needs no name."""
    base = URL((target.url if child is None else child.url) + way.path, encoded=True)
    ours = _ROUTERS if target.router else {"model"} if way.by_query else ()
    query = [(key, value) for key, value in way.query if key not in ours]
    if child is None and (way.by_query or (target.router and way.rename is None)):
        query.append(("model", model))
    if target.router and child is None:
        query.append(("autoload", "false"))
    return base.with_query(query)


def request_headers(headers: CIMultiDictProxy[str], target: Target, child: Child | None, way: Way) -> CIMultiDict[str]:
    """What of a client's headers goes up, with our own key for the server.

    Answers that are read as they pass come as they are; a page of the server's own may come packed.
    """
    passed = _passed(headers, NOT_FORWARDED)
    for name in [name for name in passed if name.lower().startswith("x-swapper-")]:
        del passed[name]
    asked = headers.get("Accept-Encoding") if way.own and not way.route.runs else None
    passed["Accept-Encoding"] = asked or "identity"
    if child is None:
        passed.update(target.auth())
    else:  # it needs no key; an idle connection would keep one of its some dozens of threads for 5 s
        passed["Connection"] = "close"
    return passed


def response_headers(headers: MultiMapping[str], call: Call) -> CIMultiDict[str]:
    """What of an answer's headers goes to the client, with how long it waited and for which swap."""
    passed = _passed(headers, NOT_ANSWERED)
    passed.popall("X-Swapper-Swap", None)
    passed["X-Swapper-Wait-Ms"] = str(call.waited_ms)
    if call.swap is not None:
        passed["X-Swapper-Swap"] = call.swap
    return passed


def _passed(headers: MultiMapping[str], without: frozenset[str]) -> CIMultiDict[str]:
    lines = headers.getall("Connection", ())
    named = {name.strip().lower() for line in lines for name in line.split(",")}
    passed = CIMultiDict[str]()
    for key, value in headers.items():
        if key.lower() not in without and key.lower() not in named and not key.lower().startswith(_ABOUT_PAGES):
            passed.add(key, value)
    return passed
