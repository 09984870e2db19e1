"""`/upstream/{model}/...`: one model's own server, any path and method, as llama-swap has it.

Invariant: what is asked for counts as a call of that model: it waits for the card like any other, and brings the model
onto it. It goes to the model's own process where there is one that can be reached, so that paths work that name no
model; else to its server, with the model named where that server needs it. What would change slots behind swapper's
back, and with them conversations, is the administrator's.
"""

from __future__ import annotations

import re
from collections.abc import Container
from urllib.parse import unquote

from aiohttp import web

from swapper.problem import Problem

PREFIX = "/upstream/"
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
"""HEAD goes with GET."""
_ROUTERS_OWN = re.compile(r"/+models(/|$)")
_SLOT_ACTION = re.compile(r"/slots/[^/]*/?")


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


def to_slash(request: web.Request) -> web.Response:
    """To the same address with a slash at its end: the pages of a server name what they need from there."""
    query = f"?{request.query_string}" if request.query_string else ""
    status = 301 if request.method in ("GET", "HEAD") else 308
    return web.Response(status=status, headers={"Location": f"{request.rel_url.raw_path}/{query}"})


def refused(request: web.Request, path: str, *, router: bool) -> Problem | None:
    """Why this may not be passed on to the server, if so. Whoever needs no key is the administrator."""
    if request.method in ("GET", "HEAD", "OPTIONS"):
        return None
    decoded = unquote(path)
    if router and _ROUTERS_OWN.match(decoded) is not None:
        text = f"{path} would change models behind swapper's back; POST /api/models/MODEL/load and /unload are for that"
        return Problem(403, "forbidden", text)
    if _SLOT_ACTION.fullmatch(decoded) is not None and "admin" not in request.get("scopes", ("admin",)):
        text = f"{request.method} {path} changes conversations that swapper keeps: it needs a key of scope 'admin'"
        return Problem(403, "forbidden", text)
    return None
