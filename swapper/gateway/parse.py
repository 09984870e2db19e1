"""From bytes to what the gateway must know of a call: the model, whether it streams, its class; and back.

Invariant: bodies are decoded as JSON, never searched; all but `model` and `stream` stays the client's own bytes. What
can be seen to be no JSON is refused here, so that it never brings a model onto the card.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import msgspec

from swapper.core.types import WorkClass
from swapper.gateway.errors import bad_encoding, bad_request
from swapper.problem import Problem
from swapper.snapshots.chain import Prompt

MEMBERS = 4096
"""How many gzip members a body may have: an empty one takes 20 bytes and counts for no byte of any limit."""
CHECKED_BYTES = 1 << 16
"""In a larger body what the parser does not look at is looked at only where a model would come onto its card for it."""
MESSAGES = 250_000
"""Beyond so many objects in a body no chain is made of it."""
_PIECE_BYTES = 1 << 20
_AS_IT_IS = frozenset({"", "identity"})
_GZIP = frozenset({"gzip", "x-gzip"})
_DEFLATE = "deflate"
_RAW, _GZIP_HEADER, _GZIP_OR_ZLIB_HEADER = -zlib.MAX_WBITS, 16 + zlib.MAX_WBITS, 32 + zlib.MAX_WBITS
_HEADER_NIBBLES = (0x8, 0xF)
"""The low half of the first byte of a zlib or gzip header; of bare deflate it is an odd padding or no block at all."""


class Decoding:
    """Undoes the Content-Encoding of one body as it comes, in pieces small enough to be counted before the next.

    `name`: gzip, of one member or several (RFC 1952), or deflate, with a zlib header (RFC 9110) or, as many send it,
    without; None: the body is as it is.
    """

    __slots__ = ("_inflate", "_members", "_name")

    def __init__(self, name: str | None) -> None:
        self._name = name
        self._inflate = zlib.decompressobj()
        self._members = 0

    @property
    def plain(self) -> bool:
        """Whether there is nothing to undo: a piece then costs nothing, else milliseconds."""
        return self._name is None

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """What a chunk gives, piece by piece. Raises ValueError with the reason when it cannot be undone."""
        if self._name is None:
            yield chunk
            return
        while chunk:
            if self._members == 0 or self._inflate.eof:
                self._inflate = zlib.decompressobj(self._begin(chunk[0]))
                self._members += 1
            try:
                piece = self._inflate.decompress(chunk, _PIECE_BYTES)
            except zlib.error as error:
                raise ValueError(str(error)) from None
            chunk = self._inflate.unconsumed_tail or self._inflate.unused_data
            if piece:
                yield piece

    def finish(self) -> None:
        """The body has ended. Raises ValueError when it is cut."""
        if self._name is not None and not self._inflate.eof:
            raise ValueError("it is cut")

    def _begin(self, first: int) -> int:
        """How zlib is to take what begins with this byte."""
        if self._members == 0:
            bare = self._name == _DEFLATE and first & 0xF not in _HEADER_NIBBLES
            return _RAW if bare else _GZIP_OR_ZLIB_HEADER
        if self._name not in _GZIP:
            raise ValueError("something follows its end")
        if self._members == MEMBERS:
            raise ValueError(f"it has more than {MEMBERS} members")
        return _GZIP_HEADER


def decoding(encodings: Iterable[str]) -> Decoding | Problem:
    """What undoes a body with these Content-Encoding headers, or 415."""
    encoding = ", ".join(encodings)
    name = encoding.strip().lower()
    if name in _AS_IT_IS:
        return Decoding(None)
    return Decoding(name) if name in _GZIP or name == _DEFLATE else bad_encoding(encoding)


class _Bare(msgspec.Struct):
    model: str | None = None
    stream: bool | None = None


class _Body(Prompt):
    model: str | None = None
    stream: bool | None = None


@dataclass(slots=True)  # a frozen one takes three times as long to make, on the way of every call
class Ask:
    """What a body asks for; `fields` are views of it, None where no chain can be made of what stands there."""

    model: str
    stream: bool
    fields: Prompt | None = field(default=None, repr=False, compare=False)


_LONE_AT_END = re.compile(rb"(?<!\\)\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\?$|\\u[0-9a-fA-F]{0,4}$|\\u[dD][c-fC-F])")
"""Where fewer bytes follow than the other half has, the decoder says that the body is cut."""
_LONE_BYTES = 16
_MODEL = "model"
_bare = msgspec.json.Decoder(_Bare)
_decoder = msgspec.json.Decoder(_Body)
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def parse_body(body: bytes, model: str | None = None) -> Ask | Problem:
    """The model and `stream` of a JSON body, or 400. `model`: whose call it is whatever the body names."""
    if len(body) <= CHECKED_BYTES and (problem := not_utf8(body)) is not None:
        return problem
    try:
        decoded = _decode(body)
    except msgspec.ValidationError as error:
        return bad_request(f"the body has a wrong field: {error}")
    except RecursionError:
        return bad_request("the body is nested too deeply")
    except UnicodeDecodeError as error:
        return _not_utf8(error)
    except msgspec.DecodeError as error:
        if _LONE_AT_END.search(body[-_LONE_BYTES:]):
            return bad_request("the body is not JSON: a lone surrogate, half of a character, stands near its end")
        return bad_request(f"the body is not JSON: {error}")
    named = model or decoded.model
    if not named:
        return bad_request("the body names no model", param="model", code="model_missing")
    return Ask(named, bool(decoded.stream), decoded if isinstance(decoded, Prompt) else None)


def not_utf8(body: bytes) -> Problem | None:
    """What is wrong where the parser does not look; 400."""
    try:
        if not body.isascii():
            body.decode()
    except UnicodeDecodeError as error:
        return _not_utf8(error)
    return None


def _not_utf8(error: UnicodeDecodeError) -> Problem:
    return bad_request(f"the body is not JSON: {error.reason} (byte {error.start}), and JSON is UTF-8")


def _decode(body: bytes) -> _Body | _Bare:
    """The body with what its chain is made of, or without where that is not of its type: the server says its own error.

    Of a body that may hold very many messages nothing is made: each takes 30 times the three bytes it can be sent in.
    """
    if len(body) > 2 * MESSAGES and _many_objects(body):
        return _bare.decode(body)
    try:
        return _decoder.decode(body)
    except msgspec.ValidationError:
        return _bare.decode(body)


def _many_objects(body: bytes) -> bool:
    """Looked for one by one: `count` takes a nanosecond for every byte that is none."""
    at = -1
    return all((at := body.find(b"{", at + 1)) >= 0 for _ in range(MESSAGES + 1))


def two_names(body: bytes) -> bool:
    """Whether it may name another model to a server that takes `MODEL` for `model`, as those written in Go do."""
    text = body.lower()
    return text.count(b'"model"') != 1 or b"\\u00" in text


def with_model(body: bytes, model: str) -> bytes:
    """The same body under another model name, and that alone; every other value keeps its bytes."""
    fields = {name: value for name, value in _fields.decode(body).items() if name == _MODEL or name.lower() != _MODEL}
    fields[_MODEL] = msgspec.Raw(msgspec.json.encode(model))
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
