"""Which paths are calls of a model, and how such a call goes on to its server.

Invariant: values only. The routes are those of OpenAI, Anthropic and llama-server, and those beside them that
llama-swap dispatches by model, so that what was pointed at any of these can be pointed here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from swapper.gateway import filler
from swapper.gateway.filler import Api


@dataclass(frozen=True, slots=True)
class Route:
    """A path's API; `runs`: the call is worked on in a slot of the server, where it takes another prompt's place.

    `looks`: it asks how a server is, which is no work of the model and keeps it nowhere. `brings` False: nor does it
    bring the model onto its card; whoever watches a server asks this all the time. `path` goes upstream where it
    differs from the one that was asked for.
    """

    api: Api = filler.PLAIN
    runs: bool = True
    looks: bool = False
    brings: bool = True
    path: str | None = None


@dataclass(frozen=True, slots=True)
class Way:
    """How one call goes upstream: `path` as it stands on the wire, percent-encoded; `query` decoded.

    `by_query`: the model is named there, not in the body. `rename` gives a body another model's name; None: it is
    passed on as it is. `own`: the path is the server's own affair, and the body need not name the model.
    """

    method: str
    path: str
    query: tuple[tuple[str, str], ...] = ()
    route: Route = Route()
    rename: Callable[[bytes, str], bytes] | None = None
    by_query: bool = False
    own: bool = False


_LOOKS = Route(runs=False)
"""What only asks a server something: no prompt takes a slot."""
_SEES = Route(runs=False, looks=True)
_WATCHES = Route(runs=False, looks=True, brings=False)

_POSTED: dict[str, Route] = {
    "/v1/chat/completions": Route(filler.CHAT),
    "/chat/completions": Route(filler.CHAT),
    "/v1/completions": Route(filler.TEXT),
    "/v1/messages": Route(filler.MESSAGES),
    "/v1/messages/count_tokens": _LOOKS,
    "/v1/responses": Route(filler.RESPONSES),
    "/completion": Route(filler.COMPLETION),
    "/completions": Route(filler.COMPLETION),
    "/infill": Route(filler.COMPLETION),
    "/tokenize": _LOOKS,
    "/detokenize": _LOOKS,
    "/apply-template": _LOOKS,
}
_PLAIN = (
    *("/v1/embeddings", "/embeddings", "/embedding", "/v1/rerank", "/v1/reranking", "/rerank", "/reranking"),
    *("/v1/audio/speech", "/v1/audio/transcriptions", "/v1/audio/translations", "/v1/audio/voices"),
    *("/v1/images/generations", "/v1/images/edits", "/v1/images/variations", "/sdapi/v1/txt2img", "/sdapi/v1/img2img"),
)
_VERSIONLESS = (
    *("chat/completions", "responses", "completions", "messages", "messages/count_tokens", "embeddings", "rerank"),
    "reranking",
)
"""llama-swap's `/v/...`: the server is asked without the `/v`."""

POST: dict[str, Route] = {
    **_POSTED,
    **{path: Route() for path in _PLAIN},
    **{
        f"/v/{path}": Route(found.api, found.runs, path=f"/{path}")
        for path in _VERSIONLESS
        for found in [_POSTED.get(f"/v1/{path}", Route())]
    },
    "/audioapi/v1/tasks/run": Route(path="/v1/tasks/run"),
}
"""The model stands in the JSON body, or in a field of a form."""

GET: dict[str, Route] = {
    **dict.fromkeys(("/props", "/slots"), _WATCHES),
    **dict.fromkeys(("/v1/audio/voices", "/sdapi/v1/loras"), _SEES),
}
"""The model stands in the query."""
_WATCHED = frozenset({"/health", "/v1/health", "/props", "/slots", "/metrics", "/models", "/v1/models"})
"""What of a model's own server is asked to see how it is."""


def route_of(method: str, path: str) -> Route:
    """What a server does with a call that is passed through to it as it is."""
    if method in ("GET", "HEAD"):
        return _WATCHES if path in _WATCHED else _SEES
    if method != "POST":
        return _LOOKS
    return POST.get(path, Route())
