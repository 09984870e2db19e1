"""What is wrong with a value, in our words: the kinds of errors that pydantic finds, each as what must be.

Invariant: no word of pydantic's comes out, also of a kind that is not named here. Touches nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic_core import ErrorDetails

_MUST = {
    "missing": "is required",
    "model_type": "must be a section with keys",
    "dict_type": "must be a section with keys",
    "tuple_type": "must be a list",
    "list_type": "must be a list",
    "string_type": "must be text (put it in quotes)",
    "bool_type": "must be true or false",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "greater_than": "must be more than {gt:g}",
    "greater_than_equal": "must be {ge:g} or more",
    "less_than": "must be less than {lt:g}",
    "less_than_equal": "must be {le:g} or less",
    "string_too_short": "must not be empty",
    "string_too_long": "must have {max_length} characters at most",
    "enum": "must be one of {expected}",
    "literal_error": "must be one of {expected}",
}
_TIME = "must be a time with its zone, like 2026-03-01T04:00:00Z"
_ANY = "cannot have this value"


def wrong(detail: ErrorDetails, words: Mapping[str, str] | None = None) -> str:
    """`must be a whole number`. `words` are said instead of ours, by pydantic's name of the kind.

    What a validator of ours says is taken as it is.
    """
    kind = detail["type"]
    if kind == "value_error":
        return str(detail["msg"]).removeprefix("Value error, ")
    if kind.startswith(("datetime_", "timezone_")):
        return _TIME
    context: dict[str, Any] = detail.get("ctx") or {}
    said = (words or {}).get(kind) or _MUST.get(kind, _ANY)
    return said.format_map({**context, "expected": str(context.get("expected", "")).replace("'", "")})
