"""Who calls, and may they: keys by Bearer, x-api-key or Basic password, scopes by path.

Invariant: no handler runs before the caller is known; a key is compared in constant time with every key there is.
Sets `owner`, `scopes`, `classes` and `default_class` on the request (`local` with every right when no keys are
configured). Reads the context, touches no store.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import warnings
from collections.abc import Callable, Iterator, Mapping

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from yarl import URL

from swapper.api.context import ApiContext
from swapper.api.problem import Problem, is_ours
from swapper.caller import Caller
from swapper.config import ApiKey
from swapper.core.types import WorkClass

_OPEN = frozenset({"/health"})
UNLOAD_ALL = "/unload"
"""llama-swap's: it unloads though it is a GET, which any page could have an image made of."""
_OWN_PAGES = frozenset({"none", "same-origin"})
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
_LOCAL = ApiKey("local", "", frozenset({"admin"}), frozenset(WorkClass), WorkClass.INTERACTIVE)
_announced: set[str] = set()
_Digests = tuple[tuple[bytes, ApiKey], ...]
Header = Callable[[str], str | None]
"""The value of a request's first header of this name."""


def auth_middleware(ctx: ApiContext) -> Middleware:
    """Finds the caller's key, checks its scope for the path, and puts who it is on the request."""
    digests = tuple((_digest(key.secret), key) for key in ctx.keys)

    @web.middleware
    async def auth(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in _OPEN:
            return await handler(request)
        key = _identify(request.headers.get, digests) if digests else _local(request)
        needed = scope_needed(request.method, request.path)
        if needed is not None and not key.scopes & {needed, "admin"}:
            raise Problem(403, "forbidden", f"The key {key.name!r} has no scope {needed!r}.")
        _put(request, "owner", key.name)
        _put(request, "scopes", key.scopes)
        _put(request, "classes", key.classes)
        _put(request, "default_class", _default_class(key))
        return await handler(request)

    return auth


def model_caller(keys: tuple[ApiKey, ...]) -> Callable[[Mapping[bytes, bytes]], Caller | None]:
    """Who calls a model's route, by its headers (lower case); None where the middleware is to say why he may not."""
    digests = tuple((_digest(key.secret), key) for key in keys)
    callers = {key.name: _caller(key) for key in (*keys, _LOCAL) if key.scopes & {"models", "admin"}}

    def identify(headers: Mapping[bytes, bytes]) -> Caller | None:
        if not digests:
            return callers[_LOCAL.name]
        try:
            key = _identify(lambda name: _decoded(headers.get(name.lower().encode())), digests)
        except Problem:
            return None
        return callers.get(key.name)

    return identify


def _decoded(value: bytes | None) -> str | None:
    return None if value is None else value.decode("utf-8", "surrogateescape")


def _caller(key: ApiKey) -> Caller:
    return Caller(key.name, _default_class(key), frozenset(key.classes))


def scope_needed(method: str, path: str) -> str | None:
    """`models`, `leases`, `admin`, or None where any key will do (all that only looks).

    Loading a model is what a call of it does as well; whatever sends one away by hand is the administrator's.
    """
    loads = path.endswith("/load") and not path.startswith("/api/models/unload/")
    if path == UNLOAD_ALL or (path.startswith("/api/models/") and not loads):
        return "admin"
    if path.startswith(("/api/leases", "/api/jobs")):
        return "leases"
    if path.startswith("/api/models") or not is_ours(path):
        return "models"
    return None if method in _SAFE else "admin"


def may_act_for(request: web.Request, owner: str) -> bool:
    """True for the owner itself and for admin."""
    return request["owner"] == owner or "admin" in request["scopes"]


def class_or_default(request: web.Request, klass: WorkClass | None) -> WorkClass:
    """The class asked for; else `normal`, or the key's own default where the key may not use that. Problem 403."""
    fallback = WorkClass.NORMAL if WorkClass.NORMAL in request["classes"] else request["default_class"]
    return check_class(request, klass or fallback)


def check_class(request: web.Request, klass: WorkClass) -> WorkClass:
    """The class, if the caller's key allows it; else Problem 403."""
    classes: frozenset[WorkClass] = request["classes"]
    if klass not in classes:
        allowed = ", ".join(sorted(classes, key=_rank)) or "no class"
        raise Problem(403, "class-not-allowed", f"The key {request['owner']!r} may use {allowed}, not {klass}.")
    return klass


def _default_class(key: ApiKey) -> WorkClass:
    """For calls that name no class: the key's own, else interactive, else the most urgent it may use."""
    if key.default_class is not None:
        return key.default_class
    return min(key.classes, key=_rank, default=WorkClass.INTERACTIVE)


def _rank(klass: WorkClass) -> int:
    return klass.rank


def _identify(header: Header, digests: _Digests) -> ApiKey:
    found: ApiKey | None = None
    given = False
    for secret in _credentials(header):
        given = True
        offered = _digest(secret)
        for digest, key in digests:
            if hmac.compare_digest(digest, offered) and found is None:
                found = key
    if found is None:
        text = "This key is not known here." if given else "A key is needed: send it as a Bearer token."
        raise Problem(401, "unauthorized", text, headers={"WWW-Authenticate": 'Bearer realm="swapper"'})
    return found


def _local(request: web.Request) -> ApiKey:
    """Without keys everybody who reaches the port is `local`, but not the pages a local browser happens to show."""
    origin = request.headers.get("Origin")
    if request.path == UNLOAD_ALL:
        if request.headers.get("Sec-Fetch-Site", "none") not in _OWN_PAGES:
            raise Problem(403, "cross-origin", "A page of another site may not unload models; configure a key for it.")
        origin = origin or request.headers.get("Referer")
    elif request.method in _SAFE or not is_ours(request.path):
        return _LOCAL
    if origin is None:
        return _LOCAL
    try:
        authority = URL(origin).authority
    except ValueError:
        authority = ""
    if authority != request.host:
        raise Problem(403, "cross-origin", f"A page of {origin!r} may not act here; configure a key for it.")
    return _LOCAL


def _credentials(header: Header) -> Iterator[str]:
    kind, _, value = (header("Authorization") or "").partition(" ")
    if kind.lower() == "bearer":
        yield value.strip()
    elif kind.lower() == "basic":
        try:
            yield base64.b64decode(value, validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            yield ""
    if (given := header("x-api-key")) is not None:
        yield given.strip()


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()


def _put(request: web.Request, key: str, value: object) -> None:
    """Plain string keys are the seam to the gateway; aiohttp advises against them once per key and process."""
    if key in _announced:
        request[key] = value
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", web.NotAppKeyWarning)
        request[key] = value
    _announced.add(key)
