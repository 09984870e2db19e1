"""The model of a call whose body is a form (audio, pictures to be edited), and the form with other fields.

Invariant: read strictly by the rules of RFC 7578, so that the server reads the same form; every part that is not named
keeps its bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from email.message import Message

from multipart import MultipartError, MultipartSegment, PushMultipartParser

from swapper.gateway.errors import bad_request
from swapper.gateway.parse import Ask
from swapper.problem import Problem

PARTS = 1_000
"""A form of more parts than this is refused."""
_FIELD_BYTES = 4096
_YES = frozenset({"true", "1", "yes", "on"})


def is_form(content_type: str) -> bool:
    """Whether a body of this Content-Type is such a form."""
    return _read(content_type).get_content_type() == "multipart/form-data"


def parse_form(body: bytes, content_type: str) -> Ask | Problem:
    """The form's `model` and `stream`, or 400."""
    fields: dict[str, str] = {}
    try:
        for segment, data in _parts(body, content_type):
            if segment.name not in ("model", "stream") or segment.filename is not None:
                continue
            if segment.name in fields:
                return bad_request(f"the form names its {segment.name} twice", param=segment.name)
            if len(data) > _FIELD_BYTES:
                return bad_request(f"the form's {segment.name} is too long", param=segment.name)
            fields[segment.name] = data.decode()
    except MultipartError as error:
        return bad_request(f"the body is not the form that its Content-Type says: {error}")
    except UnicodeDecodeError:
        return bad_request("the form's model is not UTF-8", param="model")
    if not fields.get("model"):
        return bad_request("the form names no model", param="model", code="model_missing")
    return Ask(fields["model"], fields.get("stream", "").strip().lower() in _YES)


def form_with_model(body: bytes, model: str, content_type: str) -> bytes:
    """The same form under another model name. `body` was read by `parse_form`."""
    return form_with(body, {"model": model.encode()}, content_type)


def form_with(body: bytes, values: Mapping[str, bytes | None], content_type: str) -> bytes:
    """The same form with these fields, without those whose value is None. `body` was read by `parse_form`.

    A file is no field, whatever its name.
    """
    edge = b"--" + _boundary(content_type).encode()
    pieces: list[bytes] = []
    missing = {name: value for name, value in values.items() if value is not None}
    for segment, data in _parts(body, content_type):
        name = segment.name or ""
        if segment.filename is None and name in values:
            value = missing.pop(name, None)
            if value is None:
                continue  # taken out, or there already
            data = value
        head = "".join(f"{name}: {value}\r\n" for name, value in segment.headerlist)
        pieces += (edge, b"\r\n", head.encode(), b"\r\n", data, b"\r\n")
    for name, value in missing.items():
        head = f'Content-Disposition: form-data; name="{name}"\r\n'
        pieces += (edge, b"\r\n", head.encode(), b"\r\n", value, b"\r\n")
    return b"".join((*pieces, edge, b"--\r\n"))


def _boundary(content_type: str) -> str:
    return _read(content_type).get_boundary("")


def _read(content_type: str) -> Message:
    head = Message()
    head["Content-Type"] = content_type
    return head


def _parts(body: bytes, content_type: str) -> Iterator[tuple[MultipartSegment, bytes]]:
    """Each part with its bytes. Raises MultipartError."""
    with PushMultipartParser(
        _boundary(content_type), content_length=len(body), max_segment_count=PARTS, strict=True
    ) as parser:
        segment: MultipartSegment | None = None
        pieces: list[bytes] = []
        for event in parser.parse(body):
            if isinstance(event, MultipartSegment):
                segment, pieces = event, []
            elif event is None:
                if segment is not None:
                    yield segment, b"".join(pieces)
            else:
                pieces.append(bytes(event))
