"""What a request to the fake router asks for: the verb, the model, and what is refused before anybody looks.

Invariant: as on the real one the model stands in the query of a GET and in the body of a POST, nowhere else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from tests.support.fake_faults import Verb
from tests.support.fake_wire import Answer, Json, refused, said

NOT_FOUND = said({"error": {"message": "File Not Found", "type": "not_found_error", "code": 404}}, 404)
ACTIONS = {"save": Verb.SAVE, "restore": Verb.RESTORE, "erase": Verb.ERASE}
_READS = {
    "/health": Verb.HEALTH,
    "/v1/health": Verb.HEALTH,
    "/models": Verb.MODELS,
    "/v1/models": Verb.MODELS,
    "/models/sse": Verb.EVENTS,
    "/slots": Verb.SLOTS,
    "/metrics": Verb.METRICS,
    "/props": Verb.PROPS,
}
_WRITES = {
    "/models/load": Verb.LOAD,
    "/models/unload": Verb.UNLOAD,
    **dict.fromkeys(
        (
            "/completion",
            "/completions",
            "/v1/completions",
            "/chat/completions",
            "/v1/chat/completions",
            "/embedding",
            "/embeddings",
            "/v1/embeddings",
            "/rerank",
            "/v1/rerank",
            "/apply-template",
        ),
        Verb.ANSWER,
    ),
}


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as far as it was understood. `body` is an answer where it could not be read."""

    verb: Verb
    path: str
    model: str | None
    query: Mapping[str, str]
    body: Json | Answer


def understood(method: str, path: str, query: Mapping[str, str], body: bytes) -> Asked | Answer:
    """Which verb this is, and of which model; an answer where it is none."""
    if method == "GET":
        verb = _READS.get(path)
        return NOT_FOUND if verb is None else Asked(verb, path, query.get("model"), query, {})
    verb = ACTIONS.get(query.get("action", ""), Verb.ERASE) if path.startswith("/slots/") else _WRITES.get(path)
    if verb is None:
        return NOT_FOUND
    content = _parsed(body)
    model = None if isinstance(content, Answer) else content.get("model")
    return Asked(verb, path, model if isinstance(model, str) else None, query, content)


def _parsed(body: bytes) -> Json | Answer:
    try:
        value = json.loads(body)
    except ValueError:
        value = None
    if isinstance(value, dict):
        return cast("Json", value)
    return refused(500, "[json.exception.parse_error.101] parse error at line 1, column 1: syntax error")
