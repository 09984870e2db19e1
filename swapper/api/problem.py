"""Refusals over HTTP: RFC 9457 problems for our own routes, OpenAI's error envelope for the model routes.

Invariant: every refusal is one sentence for a person plus a stable `type` for a program; a handler raises `Problem`,
and only the error middleware turns it into a response. Touches nothing but aiohttp's response class.
"""

from __future__ import annotations

import json
from http import HTTPStatus

from aiohttp import web

from swapper.errors import SwapperError

_OUR_PATHS = ("/api/", "/health", "/ready", "/metrics", "/openapi.json", "/ui")


class Problem(SwapperError):
    """A refusal on its way out. `code` becomes `type` (`urn:swapper:CODE`), `extra` the members beside `detail`."""

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        *,
        headers: dict[str, str] | None = None,
        **extra: object,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.code = code
        self.detail = detail
        self.headers = headers or {}
        self.extra = extra


def is_ours(path: str) -> bool:
    """True for the paths that answer with problems; every other path speaks OpenAI's error envelope."""
    return path == "/api" or path.startswith(_OUR_PATHS)


def render(problem: Problem, path: str) -> web.Response:
    """The response for a problem met on this path."""
    headers = dict(problem.headers)
    retry = problem.extra.get("retry_after_s")
    if isinstance(retry, int | float):
        headers["Retry-After"] = str(max(1, round(retry)))
    if is_ours(path):
        return _problem_json(problem, headers)
    return _envelope(problem, headers)


def _problem_json(problem: Problem, headers: dict[str, str]) -> web.Response:
    body: dict[str, object] = {
        "type": f"urn:swapper:{problem.code}",
        "title": HTTPStatus(problem.status).phrase,
        "status": problem.status,
        "detail": problem.detail,
        **problem.extra,
    }
    return web.Response(
        status=problem.status,
        body=_json(body),
        content_type="application/problem+json",
        headers=headers,
    )


def _envelope(problem: Problem, headers: dict[str, str]) -> web.Response:
    kind = "server_error" if problem.status >= 500 else "invalid_request_error"
    if problem.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        kind = "authentication_error" if problem.status == HTTPStatus.UNAUTHORIZED else "permission_error"
    error = {
        "message": problem.detail,
        "type": kind,
        "param": problem.extra.get("param"),
        "code": problem.code.replace("-", "_"),
    }
    return web.Response(
        status=problem.status,
        body=_json({"error": error}),
        content_type="application/json",
        headers=headers,
    )


def _json(body: dict[str, object]) -> bytes:
    """Undecodable bytes of a client come as lone surrogates, which no UTF-8 has: each becomes a `?`."""
    return json.dumps(body, ensure_ascii=False).encode(errors="replace")
