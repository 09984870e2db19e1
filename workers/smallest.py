"""The smallest real call of a server with OpenAI's routes: proof that a model computes, not only that it is listed.

Invariant: made only of a model that was just loaded. What sort of model it is nobody says beforehand: what a server
does not offer (it says so before it computes) is followed by the next, and where it offers none of them its health
counts. Source: the refusals of llama-server, vLLM, SGLang and plain FastAPI servers.
"""

from __future__ import annotations

import re

from swapper.errors import BackendRefused
from workers.client import ServerClient

_DOT = "."
_NOT_OFFERED = frozenset({400, 404, 405, 415, 422, 501})


async def smallest_call(http: ServerClient, model: str, limit_s: float, key: str | None = None) -> None:
    """One token, else one embedding, else one ranking; raises BackendError when the model does not answer."""
    calls: tuple[tuple[str, dict[str, object]], ...] = (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": _DOT}], "max_tokens": 1, "stream": False}),
        ("/v1/completions", {"prompt": _DOT, "max_tokens": 1, "stream": False}),
        ("/v1/embeddings", {"input": _DOT}),
        ("/v1/rerank", {"query": _DOT, "documents": [_DOT]}),
    )
    first: BackendRefused | None = None
    for path, body in calls:
        try:
            await http.post(path, {"model": model, **body}, limit_s=limit_s, key=key)
        except BackendRefused as refused:
            unknown = refused.status == 404 and _names(str(refused).rpartition(f"{path}: ")[2], model)
            if refused.status not in _NOT_OFFERED or unknown:
                raise
            first = first or refused
        else:
            return
    if first is not None and not await _healthy(http, key):
        raise first


def _names(said: str, model: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(model)}(?!\w)", said) is not None


async def _healthy(http: ServerClient, key: str | None) -> bool:
    for path in ("/health", "/v1/models"):
        try:
            await http.get(path, key=key)
        except BackendRefused:
            continue
        return True
    return False
