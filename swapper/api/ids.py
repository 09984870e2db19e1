"""Ids: a prefix (`ls` leases, `sw` swaps, `g` gateway processes) and 26 characters, sortable by time.

Invariant: an id of a later millisecond sorts after one of an earlier. The only place of the API that draws randomness.
"""

from __future__ import annotations

import secrets
import time

_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_RANDOM_BITS = 80
_LENGTH = 26


def new_id(prefix: str, now_ms: int | None = None) -> str:
    """A fresh id `PREFIX_...`: 48 bits of milliseconds, then 80 random bits, in Crockford's base 32."""
    stamp = time.time_ns() // 1_000_000 if now_ms is None else now_ms
    number = (stamp << _RANDOM_BITS) | secrets.randbits(_RANDOM_BITS)
    digits = [_ALPHABET[(number >> (5 * place)) & 31] for place in reversed(range(_LENGTH))]
    return f"{prefix}_{''.join(digits)}"


def lease_id(now_ms: int | None = None) -> str:
    """A fresh lease id."""
    return new_id("ls", now_ms)
