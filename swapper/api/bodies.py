"""What comes in over HTTP, checked: bodies and query values.

Invariant: a value that leaves this room is of the right type and inside its limits; everything else is a `Problem`
(400 for text that is no JSON, 408 for one that stops coming, 413 for too much of it, 415 for a compressed one, 422
naming each bad field). Touches only the request.
"""

from __future__ import annotations

import asyncio
import difflib
import json
import re
from collections.abc import Mapping
from typing import Annotated, TypeVar

from aiohttp import web
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import ErrorDetails

from swapper.api.problem import Problem
from swapper.config.units import size_mib
from swapper.core.types import WorkClass
from swapper.wrong import wrong

BODY_LIMIT = 64 * 1024
BODY_S = 30.0
LABEL_LIMIT = 200
MAX_WAIT_S = 600.0
_MONTH_S = 30 * 86_400
_JSON = {"model_type": "the body must be a JSON object, at least {{}}", "string_type": "must be text"}
_Model = TypeVar("_Model", bound=BaseModel)


class LeaseBody(BaseModel):
    """`POST /api/leases`. Seconds as in the contract; `vram` is `all` or a size.

    `holder_started` is when the process `holder_pid` did, in clock ticks since boot: field 22 of /proc/PID/stat.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    card: Annotated[str, Field(min_length=1, max_length=100)] | None = None
    vram: str | None = "all"
    label: Annotated[str, Field(max_length=LABEL_LIMIT)] = ""
    klass: Annotated[WorkClass | None, Field(alias="class")] = None
    ttl_s: Annotated[float, Field(ge=5, le=3600)] = 30
    max_hold_s: Annotated[float, Field(ge=1, le=_MONTH_S)] | None = None
    expected_s: Annotated[float, Field(ge=0, le=_MONTH_S)] | None = None
    not_before: AwareDatetime | None = None
    deadline: AwareDatetime | None = None
    preemptible: bool = False
    holder_pid: Annotated[int, Field(ge=2, le=4_194_304)] | None = None
    holder_started: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None
    webhook: Annotated[str, Field(max_length=2000)] | None = None

    @field_validator("label")
    @classmethod
    def _printable(cls, value: str) -> str:
        if not value.isprintable():
            raise ValueError("a label is one line of printable characters")
        return value

    @field_validator("vram")
    @classmethod
    def _size(cls, value: str | None) -> str | None:
        if value not in (None, "all") and size_mib(value) <= 0:
            raise ValueError(f"{value!r} is no VRAM at all")
        return value

    @property
    def vram_mib(self) -> int | None:
        """MiB asked for; None for the whole card."""
        return None if self.vram in (None, "all") else size_mib(self.vram)


class HeartbeatBody(BaseModel):
    """`POST /api/leases/{id}/heartbeat`. `progress` runs from 0 to 1."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    token: Annotated[int, Field(ge=1)]
    progress: Annotated[float, Field(ge=0, le=1)] | None = None


class JobBody(BaseModel):
    """`POST /api/jobs`. `params` by name; their types are the recipe's."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, populate_by_name=True)

    recipe: Annotated[str, Field(max_length=200)]
    params: dict[str, str | int | float] = Field(default_factory=dict)
    klass: Annotated[WorkClass | None, Field(alias="class")] = None


class PurgeBody(BaseModel):
    """`DELETE /api/snapshots` without `?model=`: `{"all": true}`, else nothing is deleted."""

    model_config = ConfigDict(extra="forbid", strict=True)

    all: bool = False


async def read_body(request: web.Request, model: type[_Model]) -> _Model:
    """The request's JSON as `model`; raises Problem 400, 408, 413, 415 or 422."""
    raw = await _read_limited(request)
    if not raw:
        raise Problem(400, "bad-json", "The body is empty: send JSON, at least {}.")
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        raise _refusal(error, model, raw) from None


async def _read_limited(request: web.Request) -> bytes:
    too_much = Problem(413, "body-too-large", f"The body is over {BODY_LIMIT // 1024} KiB.")
    if (request.content_length or 0) > BODY_LIMIT:
        raise too_much
    encoding = ", ".join(request.headers.getall("Content-Encoding", ()))
    if encoding.strip().lower() not in ("", "identity"):
        raise Problem(415, "content-encoding", f"Content-Encoding {encoding[:100]!r}: send the body as it is.")
    raw = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for chunk in request.content.iter_any():
                raw.extend(chunk)
                if len(raw) > BODY_LIMIT:
                    raise too_much
    except TimeoutError:
        raise Problem(408, "body-stopped", f"The body was not complete within {BODY_S:g} s.") from None
    except web.RequestPayloadError:
        raise Problem(400, "bad-json", "The body could not be read: it is not chunked as it says.") from None
    return bytes(raw)


def _refusal(error: ValidationError, model: type[BaseModel], raw: bytes) -> Problem:
    details = error.errors(include_url=False)
    if details[0]["type"] == "json_invalid":
        said = details[0]["msg"].removeprefix("Invalid JSON: ")
        return Problem(400, "bad-json", f"The body is not JSON: {_no_json(raw, said)}.")
    known = [field.alias or name for name, field in model.model_fields.items()]
    fields = [_field_error(detail, known) for detail in details]
    text = "; ".join(
        f"{field['field']}: {field['message']}" if field["field"] else field["message"] for field in fields
    )
    return Problem(422, "bad-field", text, errors=fields)


def _no_json(raw: bytes, said: str) -> str:
    """Of a lone surrogate the parser speaks as of a hex escape that is cut; Python's own takes it for text."""
    if "escape" in said or "code point" in said:
        try:
            json.loads(raw)
        except (ValueError, RecursionError):
            return said
        return "a lone surrogate, half of a character (an escape like \\ud800 without its other half)"
    return said


def _field_error(detail: ErrorDetails, known: list[str]) -> dict[str, str]:
    path = ".".join(str(part) for part in detail["loc"] if not str(part).startswith("function-"))
    if detail["type"] == "extra_forbidden":
        near = difflib.get_close_matches(path[:100], known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
        return {"field": path, "message": f"there is no such field; {hint}"}
    return {"field": path, "message": wrong(detail, _JSON)}


def bad_value(name: str, message: str) -> Problem:
    """A 422 that names one field or query value."""
    return Problem(422, "bad-field", f"{name}: {message}", errors=[{"field": name, "message": message}])


def wait_seconds(query: Mapping[str, str]) -> float | None:
    """`?wait=30` -> 30.0, bounded by MAX_WAIT_S; None when absent."""
    text = query.get("wait")
    if text is None:
        return None
    if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", text) is None:
        raise bad_value("wait", f"{text!r} is not a number of seconds")
    return min(float(text), MAX_WAIT_S)


def whole_number(query: Mapping[str, str], name: str, *, low: int, high: int) -> int | None:
    """A query value as an integer from low to high; None when absent."""
    text = query.get(name)
    if text is None:
        return None
    if re.fullmatch(r"[0-9]{1,19}", text) is None or not low <= int(text) <= high:
        raise bad_value(name, f"{text!r} is not a whole number from {low} to {high}")
    return int(text)
