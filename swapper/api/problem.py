"""Which style a path speaks: RFC 9457 problems on our own routes, OpenAI's error envelope on all others.

Invariant: a handler raises `Problem`, and only the error middleware turns it into a response.
"""

from __future__ import annotations

from aiohttp import web

from swapper.problem import Problem

__all__ = ["Problem", "is_ours", "render"]

_OUR_PATHS = ("/api/", "/health", "/ready", "/metrics", "/openapi.json", "/ui")


def is_ours(path: str) -> bool:
    """True for the paths that answer with problems; every other path speaks OpenAI's error envelope."""
    return path == "/api" or path.startswith(_OUR_PATHS)


def render(problem: Problem, path: str) -> web.Response:
    """The response for a problem met on this path."""
    return problem.response(ours=is_ours(path))
