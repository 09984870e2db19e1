"""From bytes to what the gateway must know of a call: the model, whether it streams, its class; and back.

Invariant: bodies are decoded as JSON, never searched; all but `model` and `stream` stays the client's own bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from swapper.core.types import WorkClass
from swapper.gateway.errors import Problem, bad_request


class _Body(msgspec.Struct):
    model: str | None = None
    stream: bool | None = None


@dataclass(frozen=True, slots=True)
class Ask:
    """What a body asks for."""

    model: str
    stream: bool


_decoder = msgspec.json.Decoder(_Body)
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def parse_body(body: bytes) -> Ask | Problem:
    """The model and `stream` of a JSON body, or 400."""
    try:
        decoded = _decoder.decode(body)
    except msgspec.ValidationError as error:
        return bad_request(f"the body has a wrong field: {error}")
    except RecursionError:
        return bad_request("the body is nested too deeply")
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return bad_request(f"the body is not JSON: {error}")
    if not decoded.model:
        return bad_request("the body names no model", param="model", code="model_missing")
    return Ask(decoded.model, bool(decoded.stream))


def with_model(body: bytes, model: str) -> bytes:
    """The same body under another model name; every other value keeps its bytes."""
    fields = _fields.decode(body)
    fields["model"] = msgspec.Raw(msgspec.json.encode(model))
    return msgspec.json.encode(fields)


def parse_class(header: str | None, default: str | None, allowed: frozenset[str] | None) -> WorkClass | Problem:
    """The call's class: the X-Swapper-Class header, else the key's default, else interactive."""
    name = header if header is not None else default
    if name is None:
        return WorkClass.INTERACTIVE
    try:
        klass = WorkClass(name.strip().lower())
    except ValueError:
        known = ", ".join(WorkClass)
        return bad_request(f"X-Swapper-Class: '{name}' is not one of {known}", param="X-Swapper-Class")
    if header is not None and allowed is not None and klass.value not in allowed:
        text = f"X-Swapper-Class: this key may not use '{klass.value}'"
        return Problem(403, "forbidden", text, param="X-Swapper-Class")
    return klass
