"""`/upstream/{model}/...`: one model's own server, any path and method, as llama-swap has it.

Invariant: what is asked for counts as a call of that model: it waits for the card like any other, and brings the model
onto it, but for what only tells how a server is (routes.py). It goes to the model's own process where there is one that
can be reached, so that paths work that name no model; else to its server, with the model named where that server needs
it. What would change slots behind swapper's back, and with them conversations, is the administrator's.
"""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING
from urllib.parse import unquote

from aiohttp import web

from swapper.gateway import errors
from swapper.gateway.routes import POST
from swapper.problem import Problem

if TYPE_CHECKING:
    from swapper.gateway.context import GatewayContext, Target

PREFIX = "/upstream/"
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
"""HEAD goes with GET."""
_LOOKING = frozenset({"GET", "HEAD", "OPTIONS"})
_ROUTERS_OWN = "/models"
_ADAPTERS = "lora_adapter"


def model_and_path(raw_path: str, names: Container[str]) -> tuple[str, str] | None:
    """The model that a path (percent-encoded, as it came) begins with, and the rest; None where it begins with none.

    Names may contain `/` and `:`, themselves or percent-encoded; of several the longest is meant. The rest is empty
    where nothing, not even a slash, follows the name.
    """
    rest = raw_path.removeprefix(PREFIX)
    end = len(rest)
    while end > 0:
        name = unquote(rest[:end])
        if name in names:
            return name, rest[end:]
        end = rest.rfind("/", 0, end)
    return None


def asked_for(ctx: GatewayContext, request: web.Request) -> tuple[str, str, Target] | Problem | web.Response:
    """The model, the path at its server and where that is; or why not, or where to ask instead."""
    raw = request.rel_url.raw_path
    found = model_and_path(raw, ctx.names)
    if found is None:
        return errors.model_not_found(unquote(raw.removeprefix(PREFIX)), ctx.names)
    model, path = found
    if not path:
        return to_slash(request)
    target = ctx.targets[ctx.names[model]]
    return refused(request, path, target) or (model, path, target)


def to_slash(request: web.Request) -> web.Response:
    """To the same address with a slash at its end: the pages of a server name what they need from there."""
    query = f"?{request.rel_url.raw_query_string}" if request.rel_url.raw_query_string else ""
    status = 301 if request.method in ("GET", "HEAD") else 308
    return web.Response(status=status, headers={"Location": f"{request.rel_url.raw_path}/{query}"})


def refused(request: web.Request, path: str, target: Target) -> Problem | None:
    """Why this may not be passed on to the server, if so. Whoever needs no key is the administrator.

    Work is for everybody, and so are the pages and counters of a server of one model; what else a server has may
    unload a model, load another or change a slot, each kind's by paths of its own.
    """
    decoded = "/" + unquote(path).lstrip("/")
    looking = request.method in _LOOKING
    if target.router and not looking and (decoded + "/").startswith(_ROUTERS_OWN + "/"):
        text = f"{path} would change models behind swapper's back; models are loaded by calls, and leave for a lease"
        return Problem(403, "forbidden", text)
    steps = decoded.split("/")
    work = decoded in POST or (decoded.startswith("/v1/") and _ADAPTERS not in decoded)
    alone = target.slots or not target.several
    if not {".", ".."} & {*steps} and (work or (looking and alone)):
        return None
    if "admin" in request.get("scopes", ("admin",)):
        return None
    text = f"{request.method} {path} may change what is loaded, or conversations: it needs a key of scope 'admin'"
    return Problem(403, "forbidden", text)
