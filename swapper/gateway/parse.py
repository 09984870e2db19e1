"""From bytes to what the gateway must know of a call: the model, whether it streams, its class; and back.

Invariant: bodies are decoded as JSON, never searched; all but `model` and `stream` stays the client's own bytes. What
can be seen to be no JSON is refused here, so that it never brings a model onto the card.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec

from swapper.core.types import WorkClass
from swapper.gateway.errors import Problem, bad_encoding, bad_request

_PIECE_BYTES = 1 << 20
_AS_IT_IS = frozenset({"", "identity"})
_ZLIB = frozenset({"gzip", "x-gzip", "deflate"})
_GZIP_OR_ZLIB_HEADER = 32 + zlib.MAX_WBITS


class Decoding:
    """Undoes the Content-Encoding of one body as it comes, in pieces small enough to be counted before the next."""

    __slots__ = ("_inflate",)

    def __init__(self, *, compressed: bool) -> None:
        self._inflate = zlib.decompressobj(_GZIP_OR_ZLIB_HEADER) if compressed else None

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """What a chunk gives, piece by piece. Raises ValueError with the reason when it cannot be undone."""
        if self._inflate is None:
            yield chunk
            return
        while chunk:
            if self._inflate.eof:
                raise ValueError("something follows its end")
            try:
                piece = self._inflate.decompress(chunk, _PIECE_BYTES)
            except zlib.error as error:
                raise ValueError(str(error)) from None
            chunk = self._inflate.unconsumed_tail or self._inflate.unused_data
            if piece:
                yield piece

    def finish(self) -> None:
        """The body has ended. Raises ValueError when it is cut."""
        if self._inflate is not None and not self._inflate.eof:
            raise ValueError("it is cut")


def decoding(encodings: Iterable[str]) -> Decoding | Problem:
    """What undoes a body with these Content-Encoding headers, or 415."""
    encoding = ", ".join(encodings)
    name = encoding.strip().lower()
    if name in _AS_IT_IS or name in _ZLIB:
        return Decoding(compressed=name in _ZLIB)
    return bad_encoding(encoding)


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
        if not body.isascii():
            body.decode()  # the decoder skips what it does not look for
        decoded = _decoder.decode(body)
    except msgspec.ValidationError as error:
        return bad_request(f"the body has a wrong field: {error}")
    except RecursionError:
        return bad_request("the body is nested too deeply")
    except UnicodeDecodeError as error:
        return bad_request(f"the body is not JSON: {error.reason} (byte {error.start}), and JSON is UTF-8")
    except msgspec.DecodeError as error:
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
        return bad_request(f"X-Swapper-Class: {name[:40]!r} is not one of {known}", param="X-Swapper-Class")
    if header is not None and allowed is not None and klass.value not in allowed:
        text = f"X-Swapper-Class: this key may not use '{klass.value}'"
        return Problem(403, "forbidden", text, param="X-Swapper-Class")
    return klass
