"""The supervisor of the handlers: whatever escapes one becomes an answer in the style of the path.

Invariant: no handler's exception reaches the framework, whose own answers are bare text; only a cancellation passes
(the client left, or the server stops). Nothing is answered twice: once a byte is out, the connection is broken instead.
"""

from __future__ import annotations

import structlog
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from swapper.api.ids import new_id
from swapper.api.problem import Problem, render
from swapper.errors import StoreDown

log = structlog.get_logger(__name__)

_CODES = {400: "bad-request", 404: "not-found", 405: "method-not-allowed", 413: "body-too-large"}


class _Nothing(web.StreamResponse):
    """What the framework is given after a broken answer: it sends nothing and runs no hook of an answer's begin."""

    async def prepare(self, request: web.BaseRequest) -> None:
        """Nothing."""

    async def write_eof(self, data: bytes = b"") -> None:
        """Nothing."""


def error_middleware() -> Middleware:
    """Turns `Problem`, the framework's HTTP errors, a dead store and any bug into a response of the path's style."""

    @web.middleware
    async def supervisor(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except Problem as problem:
            found = problem
        except StoreDown as error:
            text = f"The store does not answer, nothing was done: {error}"
            found = Problem(503, "store-down", text, retry_after_s=1)
        except web.HTTPException as error:
            if error.status < 400:
                raise
            found = _framework_problem(request, error)
        except Exception as error:  # the supervisor: a bug ends one request, and is told in the log
            found = _bug(request, error)
        if request.writer.output_size == 0:
            return render(found, request.path)
        if request.transport is not None:
            request.transport.abort()
        return _Nothing(status=found.status)

    return supervisor


def _framework_problem(request: web.Request, error: web.HTTPException) -> Problem:
    detail = error.text or error.reason
    if isinstance(error, web.HTTPNotFound):
        detail = f"There is nothing at {request.path}."
    elif isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        detail = f"{request.method} is not possible at {request.path}, only {allowed}."
    headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
    return Problem(error.status, _CODES.get(error.status, "http-error"), detail, headers=headers)


def _bug(request: web.Request, error: Exception) -> Problem:
    ident = new_id("rq")
    where = {"request": ident, "method": request.method, "path": request.path}
    if isinstance(error, ConnectionError) and (request.transport is None or request.transport.is_closing()):
        log.debug("a client left while it was answered", **where)
    else:
        log.error("a request failed", **where, exc_info=error)
    return Problem(500, "internal", f"swapper failed over this request; its log tells why, at {ident}.")
