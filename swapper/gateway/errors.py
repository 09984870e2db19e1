"""What the gateway refuses, as values: a Problem becomes an HTTP answer in OpenAI's envelope, or an SSE event.

Invariant: every refusal has a status, a code and one sentence that says what to do; nothing here does I/O.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from swapper.problem import Problem

_LONGEST_NAME = 512


def bad_request(message: str, param: str | None = None, code: str = "bad_request") -> Problem:
    """400: the request cannot be understood."""
    return Problem(400, code, message, param=param)


def model_not_found(model: str, known: Iterable[str]) -> Problem:
    """404 with the names that look like the one asked for."""
    if len(model) > _LONGEST_NAME:  # comparing takes time that grows with the length, and holds everybody up
        return Problem(404, "model_not_found", "no model has so long a name; GET /v1/models lists them", param="model")
    near = get_close_matches(model, list(known), n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(near)}?" if near else "; GET /v1/models lists the models"
    return Problem(404, "model_not_found", f"model '{model}' does not exist here{hint}", param="model")


def no_model_in_query(path: str, named: int) -> Problem:
    """404 (as llama-swap says it) where the query names no model, 400 where it names several."""
    if named > 1:
        return bad_request(f"{path} was asked for with several models; name one: {path}?model=NAME", param="model")
    text = f"{path} is a model's own; name one: {path}?model=NAME (GET /v1/models lists them)"
    return Problem(404, "model_missing", text, param="model")


def bad_encoding(encoding: str) -> Problem:
    """415: a Content-Encoding nobody here can undo."""
    text = f"Content-Encoding {encoding[:100]!r} is not known here; send gzip, deflate or the body as it is"
    return Problem(415, "content_encoding", text, param="Content-Encoding")


def body_stopped(pause_ms: int) -> Problem:
    """408: the body was announced, and no more of it came for `pause_ms`."""
    text = f"no more of the body came for {pause_ms / 1000:g} s; is it as long, or chunked, as its headers say?"
    return Problem(408, "body_stopped", text)


def too_large(limit: int) -> Problem:
    """413: one body over `gateway.body_limit` (bytes)."""
    return Problem(413, "body_too_large", f"the body is larger than gateway.body_limit ({limit} bytes)")


def body_budget(budget: int) -> Problem:
    """429: the bodies of all waiting calls together reached `gateway.body_budget` (bytes)."""
    text = f"the bodies of waiting calls fill gateway.body_budget ({budget} bytes); try again later"
    return Problem(429, "body_budget", text, retry_after_s=5)


def queue_full(waiting: int) -> Problem:
    """429: as many calls wait as may."""
    text = f"{waiting} calls wait already; try again later"
    return Problem(429, "queue_full", text, retry_after_s=5)


RETRY_S = 30
"""When to come again where nobody can tell."""
_LONGEST_RETRY_S = 3600


def gpu_busy(model: str, waited_ms: int, why: str = "", there_in_ms: int | None = None) -> Problem:
    """503: the call waited as long as it may and the model is still not resident."""
    text = f"waited {waited_ms / 1000:.0f} s for '{model}', but the card is still busy with other work{_because(why)}"
    return Problem(503, "gpu_busy", text, retry_after_s=_retry_s(there_in_ms))


def _because(why: str) -> str:
    return f": {why}" if why else ""


def _retry_s(there_in_ms: int | None) -> int:
    """Whole seconds, rounded up, from 1 to an hour."""
    return RETRY_S if there_in_ms is None else min(max(1, -(-there_in_ms // 1000)), _LONGEST_RETRY_S)


def not_there(model: str) -> Problem:
    """503: whoever only looks brings no model."""
    text = f"'{model}' is not on its card, and looking does not bring it: a call does (GET /v1/models tells which are)"
    return Problem(503, "model_not_loaded", text)


def page_waits(model: str, retry_s: int) -> Problem:
    """503: a page opened a socket of a model that is not there; it brings none."""
    text = f"'{model}' is not on its card, and an open page's socket does not bring it: load the page anew, or call it"
    return Problem(503, "gpu_busy", text, retry_after_s=retry_s)


def load_timeout(model: str, waited_ms: int, why: str = "", there_in_ms: int | None = None) -> Problem:
    """504: the model was being loaded when the wait ran out."""
    text = f"waited {waited_ms / 1000:.0f} s for '{model}', which is still being loaded{_because(why)}"
    return Problem(504, "load_timeout", text, retry_after_s=_retry_s(there_in_ms))


def load_failed(model: str, reason: str, again_in_ms: int | None = None) -> Problem:
    """502 with the server's own words, and when it is tried again; None: at once."""
    text = f"'{model}' could not be loaded: {reason}"
    if again_in_ms is None:
        return Problem(502, "upstream_failed", text)
    retry_s = _retry_s(again_in_ms)
    return Problem(502, "upstream_failed", f"{text}; next try in {retry_s} s", retry_after_s=retry_s)


def upstream_failed(model: str, reason: str) -> Problem:
    """502: the server could not be reached, or died over this call."""
    return Problem(502, "upstream_failed", f"the server of '{model}' failed: {reason}")


def ended(reason: str) -> Problem:
    """A running call was ended on purpose (drain limit, forced vacate); only ever seen as an SSE event."""
    return Problem(503, "gpu_busy", f"the call was ended: {reason}", retry_after_s=30)
