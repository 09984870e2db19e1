"""The streams of the in-memory store: entries with ids that only rise, bounded, each stream by name.

Invariant: an id is given once and is higher than every one before it, in whatever stream and wherever the clock goes;
entries are immutable, so a copy of the lists is a copy of all. Knows nothing of who waits for an entry.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

Id: TypeAlias = tuple[int, int]
Fields: TypeAlias = tuple[str, ...]
Entry: TypeAlias = tuple[Id, Fields]
NOTHING: Id = (0, 0)


@dataclass(slots=True)
class _Stream:
    entries: list[Entry] = field(default_factory=list[Entry])
    until_ms: int | None = None


class Streams:
    """`clock` gives the milliseconds of an id, and says when a stream with an end is gone."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._streams: dict[str, _Stream] = {}
        self._newest = NOTHING

    def copy(self) -> Streams:
        """The same entries; what is added to one of the two is not in the other."""
        other = Streams(self._clock)
        other._streams = {name: _Stream([*held.entries], held.until_ms) for name, held in self._streams.items()}
        other._newest = self._newest
        return other

    def add(self, name: str, fields: Fields, *, keep: int, life_ms: int | None = None) -> None:
        """Append an entry; the oldest beyond `keep` go, and the stream is gone `life_ms` after its last entry."""
        now_ms = self._clock()
        stream = self._streams.setdefault(name, _Stream()) if self._alive(name) is None else self._streams[name]
        ms, n = self._newest
        self._newest = (now_ms, 0) if now_ms > ms else (ms, n + 1)
        stream.entries.append((self._newest, fields))
        if len(stream.entries) > keep:
            del stream.entries[:-keep]
        if life_ms is not None:
            stream.until_ms = now_ms + life_ms

    def after(self, name: str, last: Id, count: int = 0) -> list[Entry]:
        """The entries after an id, at most `count` (0: all)."""
        stream = self._alive(name)
        if stream is None or not stream.entries or stream.entries[-1][0] <= last:
            return []
        start = bisect_right(stream.entries, last, key=lambda entry: entry[0])
        return stream.entries[start : start + count if count > 0 else None]

    def newest(self, name: str) -> Id:
        """The id of the last entry; (0, 0) where there is none."""
        stream = self._alive(name)
        return stream.entries[-1][0] if stream is not None and stream.entries else NOTHING

    def drop(self, name: str) -> None:
        """Forget a stream."""
        self._streams.pop(name, None)

    def _alive(self, name: str) -> _Stream | None:
        stream = self._streams.get(name)
        if stream is not None and stream.until_ms is not None and stream.until_ms <= self._clock():
            del self._streams[name]
            return None
        return stream


def written(at: Id) -> str:
    """An id as the protocol gives it."""
    return f"{at[0]}-{at[1]}"


def parsed(text: str) -> Id:
    """An id as the protocol takes it. Raises ValueError."""
    ms, _, n = text.partition("-")
    return int(ms), int(n or 0)
