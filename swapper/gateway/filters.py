"""What a model's entry changes in the bodies of its calls: parameters taken out, and parameters set.

Invariant: `model` is never touched; a body in which nothing is changed is the same bytes, and in a changed one all that
is not named keeps its bytes. Pure. The order is llama-swap's: strip, then set, then what belongs to the name that was
called.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec
from msgspec import Raw

_OBJECT = b"{"
_fields = msgspec.json.Decoder(dict[str, Raw])


@dataclass(frozen=True, slots=True)
class Filter:
    """`strip`: parameters to take out; `put`: parameters with their JSON. A dot leads into an object: `a.b`."""

    strip: tuple[str, ...] = ()
    put: Mapping[str, bytes] = field(default_factory=dict[str, bytes])

    def body(self, body: bytes) -> bytes:
        """A JSON object as the server is to get it. Raises msgspec.DecodeError where it is none."""
        fields = _fields.decode(body)
        changed = False
        for name in self.strip:
            changed |= _drop(fields, name.split("."))
        for name, value in self.put.items():
            _put(fields, name.split("."), Raw(value))
            changed = True
        return msgspec.json.encode(fields) if changed else body

    def form(self) -> Mapping[str, bytes | None]:
        """For a form: each field with its text, None for those to be taken out. What is no text stands as JSON."""
        return {**dict.fromkeys(self.strip), **{name: _text(value) for name, value in self.put.items()}}


def filter_of(strip: Iterable[str], *puts: Mapping[str, object]) -> Filter | None:
    """Of what is configured, the later of `puts` over the earlier; None where nothing is."""
    put = {name: msgspec.json.encode(value) for one in puts for name, value in one.items()}
    strip = tuple(strip)
    return Filter(strip, put) if strip or put else None


def _drop(fields: dict[str, Raw], path: list[str]) -> bool:
    name, *rest = path
    if name not in fields:
        return False
    if not rest:
        del fields[name]
        return True
    inner = _inner(fields[name])
    if inner is None or not _drop(inner, rest):
        return False
    fields[name] = Raw(msgspec.json.encode(inner))
    return True


def _put(fields: dict[str, Raw], path: list[str], value: Raw) -> None:
    name, *rest = path
    if rest:
        inner = _inner(fields.get(name)) or {}
        _put(inner, rest, value)
        value = Raw(msgspec.json.encode(inner))
    fields[name] = value


def _inner(value: Raw | None) -> dict[str, Raw] | None:
    """The fields of an object; None of anything else."""
    return _fields.decode(value) if value is not None and bytes(memoryview(value)[:1]) == _OBJECT else None


def _text(value: bytes) -> bytes:
    text: object = msgspec.json.decode(value)
    return text.encode() if isinstance(text, str) else value
