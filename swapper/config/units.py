"""Sizes and durations as people write them, turned into MiB, bytes and milliseconds.

Invariant: pure functions; a wrong value raises ValueError whose text says what to write instead.
"""

from __future__ import annotations

import math
import re

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)")
_DIGITS = re.compile(r"[0-9]+")
_BYTES = {"": 1, "b": 1, "kib": 1024, "mib": 1024**2, "gib": 1024**3, "tib": 1024**4}
_NEAR = {"k": "KiB", "kb": "KiB", "m": "MiB", "mb": "MiB", "g": "GiB", "gb": "GiB", "t": "TiB", "tb": "TiB"}
_DURATION = re.compile(r"(?:[0-9]+(?:\.[0-9]+)?(?:ms|s|m|h|d))+")
_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h|d)")
_MOST_BYTES, _MOST_MS = 1 << 60, 1000 * 365 * 86_400_000
"""1 EiB and 1000 years: beyond them nothing is meant, and numbers lose their last digits on the way to the store."""
_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


def size_bytes(value: object) -> int:
    """Bytes of `24GiB`, `19.5 MiB`, `512KiB` or a bare number of bytes."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f"{value!r} is not a size; write it like 24GiB or 512MiB")
    found = _SIZE.fullmatch(str(value).strip())
    if found is None:
        raise ValueError(f"{value!r} is not a size; write it like 24GiB or 512MiB")
    number, unit = found[1], found[2]
    factor = _BYTES.get(unit.lower())
    if factor is None:
        near = _NEAR.get(unit.lower())
        hint = f"did you mean {number}{near}?" if near else "units are KiB, MiB and GiB"
        raise ValueError(f"{value!r} is not a size; {hint}")
    size = float(number) * factor
    if size > _MOST_BYTES:
        raise ValueError(f"{_short(value)} is more than any card or disk has; write it like 24GiB or 512MiB")
    return math.ceil(size)


def size_mib(value: object) -> int:
    """MiB, rounded up. A bare number too small to be meant as bytes is refused rather than rounded to 1 MiB."""
    size = size_bytes(value)
    bare = str(value).strip()
    if 0 < size < 1024**2 and _DIGITS.fullmatch(bare):
        raise ValueError(f"{bare} means {bare} bytes; did you mean {bare}GiB?")
    return math.ceil(size / 1024**2)


def duration_ms(value: object) -> int:
    """Milliseconds of `30s`, `10m`, `2h`, `1h30m`, `250ms` or `1d`; a bare 0 is 0."""
    if value == 0 and not isinstance(value, bool):
        return 0
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise ValueError(f"{value} has no unit; write {value}s for seconds")
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a duration; write it like 30s, 10m or 2h")
    text = value.strip().replace(" ", "").lower()
    if text == "0":
        return 0
    if re.fullmatch(r"[0-9]+(?:\.[0-9]+)?", text):
        raise ValueError(f"{text} has no unit; write {text}s for seconds")
    if not _DURATION.fullmatch(text):
        raise ValueError(f"{value!r} is not a duration; write it like 30s, 10m or 2h")
    ms = sum(float(part[1]) * _MS[part[2]] for part in _PART.finditer(text))
    if ms > _MOST_MS:
        raise ValueError(f"{_short(value)} is longer than 1000 years; write it like 30s, 10m or 2h")
    return round(ms)


def _short(value: object) -> str:
    """A value as it stands in a sentence, also one of a thousand digits."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:40]}...{text[-10:]}"


def show_mib(mib: int) -> str:
    """`19.5 GiB` or `512 MiB`, for sentences."""
    return f"{mib / 1024:.4g} GiB" if mib >= 1024 else f"{mib} MiB"


def show_bytes(count: int) -> str:
    """`262 MiB`, for sentences."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.3g} {unit}"
        amount /= 1024
    return f"{amount:.4g} GiB"
