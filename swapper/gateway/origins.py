"""Which pages of a browser may call models: CORS, and who is turned away although no answer would be read.

Invariant: only paths that are a model's are spoken for, never those of the administration; where no key is needed, no
page that is not admitted reaches a handler, whether or not its browser asks before. Without keys a page is admitted
that comes from this machine or from the host it calls, or that a program on this machine shows; with keys any page,
which then has to have one. No cookie counts here, so `Access-Control-Allow-Credentials` is never said.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from yarl import URL

from swapper.problem import Problem

AUTO, LOCAL, ANY, NONE = "auto", "local", "any", "none"
METHODS = "GET, POST, PUT, PATCH, DELETE, OPTIONS"
MAX_AGE_S = 86_400
_HEADERS = "Authorization, Content-Type, X-Api-Key, X-Swapper-Class, X-Swapper-Max-Wait"
_EXPOSED = "X-Swapper-Wait-Ms, X-Swapper-Swap, Retry-After"
_HERE = frozenset({"localhost", "127.0.0.1", "::1"})
_WEB = frozenset({"http", "https"})
_PASSED_ON = "/upstream/"

Signal = Callable[[web.Request, web.StreamResponse], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Origins:
    """`everyone`: any page; `here`: pages of this machine and of the host that is called; `named`: these as well.

    `guarded`: calls need no key, so that a page that is not admitted must not get through.
    """

    everyone: bool = False
    here: bool = True
    named: frozenset[str] = frozenset()
    guarded: bool = True

    def admit(self, origin: str, hosts: tuple[str, ...]) -> bool:
        """Whether a page of this origin may; `hosts` as in Host: what it may have called us by."""
        parts = _parts(origin)
        if self.everyone or origin in self.named:
            return True
        if parts is None:
            return False  # `null`: also what any page puts into a sandboxed frame
        scheme, host, authority = parts
        if scheme not in _WEB:
            return self.here  # a program's or an extension's own page, which somebody installed here
        if authority in hosts:
            return True  # a server's own page, shown at `/upstream`
        beside = {name for one in hosts if (name := _host(one)) is not None}
        return self.here and (host in _HERE or host.endswith(".localhost") or host in beside)


def origins_of(written: tuple[str, ...], *, keyed: bool) -> Origins:
    """Of what is configured: these words, and origins; `keyed`: calls need a key."""
    auto = ANY if keyed else LOCAL
    words = {auto if word == AUTO else word for word in written}
    named = frozenset(_normal(word) for word in words - {LOCAL, ANY, NONE})
    return Origins(ANY in words, LOCAL in words or bool(named), named, guarded=not keyed)


def middleware(origins: Origins, ours: Callable[[str], bool]) -> Middleware:
    """Answers what browsers ask before a call, and turns pages away. The outermost: no key is needed to be asked.

    `ours` tells the paths of the administration, which are let alone.
    """

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if ours(request.path):
            return await handler(request)
        origin = request.headers.get("Origin")
        asked = request.method == "OPTIONS" and origin is not None and _ASKED in request.headers
        if origins.guarded or asked:
            page = origin if origin is not None else _referred(request)
            if page is not None and not origins.admit(_normal(page), _hosts(request)):
                return _refused(page).response()
        if asked or (request.method == "OPTIONS" and not request.path.startswith(_PASSED_ON)):
            return _preflight(request)
        return await handler(request)

    return check


def signal(origins: Origins, ours: Callable[[str], bool]) -> Signal:
    """For `on_response_prepare`: lets an admitted page read the answer, whatever became of the call."""

    async def allow(request: web.Request, response: web.StreamResponse) -> None:
        origin = request.headers.get("Origin")
        if ours(request.path):
            return
        if not origins.everyone:
            response.headers.add("Vary", "Origin")
        if origin is None or not origins.admit(_normal(origin), _hosts(request)):
            return
        response.headers["Access-Control-Allow-Origin"] = "*" if origins.everyone else origin
        response.headers["Access-Control-Expose-Headers"] = _EXPOSED

    return allow


_ASKED = "Access-Control-Request-Method"


def _preflight(request: web.Request) -> web.Response:
    headers = {
        "Access-Control-Allow-Methods": METHODS,
        "Access-Control-Allow-Headers": request.headers.get("Access-Control-Request-Headers") or _HEADERS,
        "Access-Control-Max-Age": str(MAX_AGE_S),
    }
    if request.headers.get("Access-Control-Request-Private-Network") == "true":
        headers["Access-Control-Allow-Private-Network"] = "true"
    return web.Response(status=204, headers=headers)


def _refused(page: str) -> Problem:
    text = f"a page of {page[:200]!r} may not call models here: add it to gateway.cors in swapper.yaml"
    return Problem(403, "cross_origin", text)


def _referred(request: web.Request) -> str | None:
    """Whose page it is that a browser loads something for (an image, a script) without saying Origin; None: nobody's.

    A link that somebody follows is nobody's.
    """
    if request.headers.get("Sec-Fetch-Site", "none") in ("none", "same-origin"):
        return None
    if request.headers.get("Sec-Fetch-Mode") == "navigate":
        return None
    return _normal(request.headers.get("Referer", "")) or "null"


def _hosts(request: web.Request) -> tuple[str, ...]:
    """What it may have called us by. No page can make its browser send `X-Forwarded-Host` without having asked."""
    forwarded = request.headers.get("X-Forwarded-Host", "")
    return tuple(one.strip().lower() for one in (request.host, *forwarded.split(",")) if one.strip())


def _parts(origin: str) -> tuple[str, str, str] | None:
    """Scheme, host and authority."""
    scheme, separator, authority = origin.partition("://")
    host = _host(authority)
    return (scheme, host or "", authority) if separator else None


def _host(authority: str) -> str | None:
    try:
        return urlsplit(f"//{authority}").hostname
    except ValueError:
        return None


def _normal(text: str) -> str:
    """An address's origin as browsers write it."""
    try:
        url = URL(text)
        return str(url.origin()).lower() if url.scheme in _WEB else text.lower().rstrip("/")
    except ValueError:
        return text.lower()
