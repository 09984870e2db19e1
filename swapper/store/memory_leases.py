"""The leases of the in-memory store: every lease there is, in order of arrival, and what is asked about them.

Invariant: the meaning of library.lua and views.lua, which keep indexes where this looks through what is still active.
A Lease is immutable, so a copy of the containers is a copy of all. Pure: no clock, no I/O, nothing is logged here.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from swapper.core.commit import LIFE, LeaseChange
from swapper.core.types import ACTIVE, Lease, LeaseState
from swapper.store import codec
from swapper.store.protocol import LeaseFilter, LeasePage

FINALS, HEADS, AHEAD, DEADLINES = 10_000, 256, 4096, 1000
_WAITING = (LeaseState.QUEUED, LeaseState.PREPARING)


@dataclass(frozen=True, slots=True)
class Revision:
    """A lease and how often it was changed (heartbeats not counted)."""

    lease: Lease
    rev: int


class Leases:
    """See the module text."""

    def __init__(self) -> None:
        self._all: dict[str, Revision] = {}
        self._active: dict[str, None] = {}
        self._finals: list[tuple[int, str]] = []
        self._seq = 0

    def copy(self) -> Leases:
        """The same leases; a change of one of the two is not seen in the other."""
        other = Leases()
        other._all, other._active = {**self._all}, {**self._active}
        other._finals, other._seq = [*self._finals], self._seq
        return other

    def next_seq(self) -> int:
        """The next place in the order of arrival."""
        self._seq += 1
        return self._seq

    def get(self, lease_id: str) -> Lease | None:
        """A lease, ended ones included while they are retained."""
        found = self._all.get(lease_id)
        return None if found is None else found.lease

    def put(self, lease: Lease) -> int:
        """Write a lease as changed; how often it was by now. Beyond 10,000 the ones that ended first are forgotten."""
        before = self._all.get(lease.id)
        rev = 1 if before is None else before.rev + 1
        self._all[lease.id] = Revision(lease, rev)
        if lease.state in ACTIVE:
            self._active[lease.id] = None
        elif lease.id in self._active:
            del self._active[lease.id]
            insort(self._finals, (lease.ended_ms or 0, lease.id))
            while len(self._finals) > FINALS:
                del self._all[self._finals.pop(0)[1]]
        return rev

    def move(self, lease: Lease) -> None:
        """Write what a heartbeat moved: no change that counts."""
        self._all[lease.id] = Revision(lease, self._all[lease.id].rev)

    def queue(self) -> list[Lease]:
        """Who waits, in (class rank, seq) order."""
        return sorted(self._in(LeaseState.QUEUED), key=lambda lease: (lease.request.klass.rank, lease.seq))

    def due_ms(self) -> Iterator[int]:
        """Every time at which something of an active lease is due, past ones included."""
        for lease in self._in(*ACTIVE):
            asked = lease.request
            if lease.state is LeaseState.GRANTED:
                held = None if lease.granted_ms is None else lease.granted_ms + asked.max_hold_ms
                times = (lease.expires_ms, held, lease.revoke_ms)
            else:
                times = (asked.deadline_ms, asked.not_before_ms if lease.state is LeaseState.QUEUED else None)
            yield from (ms for ms in times if ms is not None)

    def wanted(self, now_ms: int, named: Iterable[str]) -> list[Lease]:
        """The leases a decision may need: `Functions.read` tells which. `named`: those that a card names."""
        queue = self.queue()
        starts = sorted((ms, lease.id) for lease in queue if (ms := lease.request.not_before_ms) is not None)
        ids = dict.fromkeys(lease.id for lease in self._in(LeaseState.PREPARING, LeaseState.GRANTED))
        ids |= dict.fromkeys(name for name in named if name in self._all)
        ids |= dict.fromkeys(name for _, name in starts[:HEADS])
        ahead = min(sum(1 for ms, _ in starts if ms > now_ms), AHEAD)
        for card in {lease.request.card or None: None for lease in queue}:
            heads = islice((lease for lease in queue if (lease.request.card or None) == card), HEADS + ahead)
            ready = (lease.id for lease in heads if (lease.request.not_before_ms or 0) <= now_ms)
            ids |= dict.fromkeys(islice(ready, HEADS))
        ends = ((lease.request.deadline_ms, lease.id) for lease in self._in(*_WAITING))
        past = sorted((ms, name) for ms, name in ends if ms is not None and ms <= now_ms)
        ids |= dict.fromkeys(name for _, name in past[:DEADLINES])
        return sorted((self._all[name].lease for name in ids), key=codec.order)

    def page(self, query: LeaseFilter) -> LeasePage:
        """A page of leases, newest first."""
        below = int(query.cursor) if query.cursor else self._seq + 1
        fits = (
            lease
            for lease in (revision.lease for revision in reversed(self._all.values()))
            if lease.seq < below
            and query.state in (None, lease.state)
            and (query.card or lease.card) == lease.card
            and (query.owner or lease.request.owner) == lease.request.owner
        )
        found = list(islice(fits, query.limit + 1))
        page = tuple(found[: query.limit])
        return LeasePage(page, str(page[-1].seq) if len(found) > query.limit and page else None)

    def _in(self, *states: LeaseState) -> list[Lease]:
        active = (self._all[name].lease for name in self._active)
        return sorted((lease for lease in active if lease.state in states), key=lambda lease: lease.seq)


def refused(lease: Lease | None, change: LeaseChange, now_ms: int) -> bool:
    """Whether a guard of the change does not hold. Raises ValueError when the change could never be right."""
    if lease is None or lease.state not in change.expect:
        return True
    if change.only_if_expired and (lease.expires_ms is None or lease.expires_ms > now_ms):
        return True
    if change.state in (None, lease.state):
        return False
    if change.state not in LIFE.get(lease.state, ()):
        raise ValueError(f"lease {lease.id} cannot go from {lease.state} to {change.state}")
    if change.state is LeaseState.GRANTED and change.token is None and lease.token is None:
        raise ValueError(f"lease {lease.id} cannot be granted without a token")
    return False


def image(lease: Lease) -> str:
    """The after-image, letter by letter as library.lua writes it: without what heartbeats move, the token a string."""
    parts = {
        "id": _string(lease.id),
        "request": codec.encode(lease.request),
        "seq": _number(lease.seq),
        "created_ms": _number(lease.created_ms),
        "state": _string(lease.state),
        "card": _string(lease.card),
        "reason": _string(lease.reason),
        "token": _string(None if lease.token is None else str(lease.token)),
        "granted_ms": _number(lease.granted_ms),
        "ended_ms": _number(lease.ended_ms),
        "revoke_ms": _number(lease.revoke_ms),
        "swap_id": _string(lease.swap_id),
        "explain": _string(lease.explain),
    }
    return "{" + ",".join(f'"{name}":{text}' for name, text in parts.items()) + "}"


def _number(value: int | None) -> str:
    return "null" if value is None else str(value)


def _string(value: str | None) -> str:
    """JSON as the server's encoder has it, which escapes two letters more than ours."""
    return codec.encode(value).replace("/", "\\/").replace("\x7f", "\\u007f")
