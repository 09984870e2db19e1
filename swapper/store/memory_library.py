"""The library of the in-memory store: what library.lua and views.lua do, each function whole in one plain call.

Invariant: the same answers, the same guards in the same order, the same events letter by letter; everything is checked
before anything is written. Nothing handed out can be changed by who gets it to the harm of another: documents are kept
as text, all else is immutable. No I/O, no clock but the one that gives stream ids; `now_ms` is always given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from swapper.core.apply import changed
from swapper.core.commit import Commit, Committed, Conflict
from swapper.core.errand import Errand
from swapper.core.jobs import Job
from swapper.core.orders import Command
from swapper.core.types import ACTIVE, Card, Demand, Gate, Lease, LeaseRequest, LeaseState, Swap, World
from swapper.store import codec
from swapper.store.memory_leases import Leases, image, refused
from swapper.store.memory_streams import Streams
from swapper.store.protocol import (
    Claimed,
    Ended,
    Enqueued,
    Held,
    Idempotency,
    KeyReused,
    NotFound,
    QueueFull,
    WrongToken,
)

EVENTS, INPUTS, OUTBOX, SWAPS, JOBS = 10_000, 10_000, 1_000, 1_000, 1_000
DAY_MS = 86_400_000
_DEAD_AT_ONCE = 100
_RELEASED, _CANCELLED = "given back by its holder", "given up before it was granted"


@dataclass(frozen=True, slots=True)
class _Card:
    doc: str
    version: int
    holds: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Swap:
    doc: str
    card: str
    version: int


@dataclass(frozen=True, slots=True)
class _Key:
    lease: str
    digest: str
    until_ms: int
    gone_ms: int


@dataclass(frozen=True, slots=True)
class _Claim:
    owner: str
    who: str
    ends_ms: int
    floor: int
    note: str | None = None


class Library:
    """All that the store holds, and the functions on it. `clock` is the server's own time, ms."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self.streams = Streams(clock)
        self.leases = Leases()
        self._cards: dict[str, _Card] = {}
        self._swaps: dict[str, _Swap] = {}
        self._gates: dict[str, Gate] = {}
        self._keys: dict[tuple[str, str], _Key] = {}
        self._gateways: dict[str, int] = {}
        self._demand: dict[str, str] = {}
        self._claims: dict[str, _Claim] = {}
        self._jobs: dict[str, str] = {}
        self._errands: dict[str, str] = {}
        self._token = 0
        self._stepped_ms = 0

    def copy(self) -> Library:
        """All of it as it is now; what is written to one of the two is not in the other."""
        other = Library(self._clock)
        other.streams, other.leases = self.streams.copy(), self.leases.copy()
        other._cards, other._swaps, other._gates = {**self._cards}, {**self._swaps}, {**self._gates}
        other._keys, other._gateways, other._demand = {**self._keys}, {**self._gateways}, {**self._demand}
        other._claims, other._jobs, other._errands = {**self._claims}, {**self._jobs}, {**self._errands}
        other._token, other._stepped_ms = self._token, self._stepped_ms
        return other

    def enqueue(
        self, now_ms: int, request: LeaseRequest, lease_id: str, max_queue: int, idempotency: Idempotency | None
    ) -> Enqueued | QueueFull | KeyReused:
        """A new lease at the end of the queue, or the one that the key or the id already has."""
        key = (request.owner, idempotency.key) if idempotency is not None and idempotency.key else None
        seen = None if key is None else self._keys.get(key)
        if idempotency is not None and seen is not None and seen.until_ms > now_ms and not self._gone(seen):
            first = self.leases.get(seen.lease)
            if first is not None:
                same = seen.digest == idempotency.body_digest
                return Enqueued(first, created=False) if same else KeyReused(first.id)
        known = self.leases.get(lease_id)
        if known is not None:
            return Enqueued(known, created=False)
        queued = len(self.leases.queue())
        if queued >= max_queue:
            return QueueFull(queued)
        lease = Lease(lease_id, request, self.leases.next_seq(), now_ms, card=request.card or None)
        self._change(lease)
        if key is not None and idempotency is not None:
            self._keys = {name: kept for name, kept in self._keys.items() if not self._gone(kept)}
            self._keys[key] = _Key(lease_id, idempotency.body_digest, now_ms + DAY_MS, self._clock() + DAY_MS)
        self.wake()
        return Enqueued(lease, created=True)

    def heartbeat(
        self, now_ms: int, lease_id: str, token: int, progress: float | None, request: LeaseRequest | None = None
    ) -> Lease | NotFound | WrongToken | Ended:
        """Move the expiry, never back, and note the progress. No event, unless the request names another process."""
        lease = self.leases.get(lease_id)
        if lease is None:
            return NotFound()
        if lease.state not in ACTIVE:
            return Ended(lease)
        if lease.state is not LeaseState.GRANTED or lease.token != token:
            return WrongToken()
        expires_ms = max(lease.expires_ms or 0, now_ms + lease.request.ttl_ms)
        told = lease.progress if progress is None else float(progress)
        moved = replace(lease, expires_ms=expires_ms, progress=told)
        self.leases.move(moved)
        if request is not None and request != lease.request:
            moved = replace(moved, request=request)
            self._change(moved)
            self.wake()
        return moved

    def end(self, now_ms: int, lease_id: str, token: int | None) -> Lease | NotFound | WrongToken:
        """The holder or who waits gives up; an ended lease stays as it is."""
        lease = self.leases.get(lease_id)
        if lease is None:
            return NotFound()
        if lease.state not in ACTIVE:
            return lease
        held = lease.state is LeaseState.GRANTED
        if held and lease.token != token:
            return WrongToken()
        state, reason = (LeaseState.RELEASED, _RELEASED) if held else (LeaseState.CANCELLED, _CANCELLED)
        ended = replace(lease, state=state, reason=reason, ended_ms=now_ms)
        self._change(ended)
        self.wake()
        return ended

    def read(self, now_ms: int) -> World:
        """One consistent view; `Functions.read` tells what is in it."""
        live = [gateway for end, gateway in self._by_end() if end > now_ms]
        named = (lease_id for card in self._cards.values() for lease_id in card.holds)
        due = (ms for ms in (*self.leases.due_ms(), *self._gateways.values()) if ms > now_ms)
        return World(
            now_ms=now_ms,
            cards={name: codec.card(card.doc) for name, card in self._cards.items()},
            leases={lease.id: lease for lease in self.leases.wanted(now_ms, named)},
            queued=len(self.leases.queue()),
            next_due_ms=min(due, default=None),
            demand=tuple(record for gateway in live for record in codec.demand(self._demand[gateway])),
            gateways=tuple(live),
            gates={**self._gates},
            token=self._token,
            stepped_ms=self._stepped_ms,
            errands=tuple(map(codec.errand, self._errands.values())),
        )

    def commit(self, now_ms: int, commit: Commit) -> Committed | Conflict:
        """Every guard, then every write."""
        codec.check(commit)
        conflict = self._conflict(now_ms, commit)
        if conflict is not None:
            return Conflict(conflict)
        if commit.tokens:
            self._token = commit.tokens[-1]
        if commit.members_ms is not None:
            self._renew_members(now_ms, commit.stepped, commit.members_ms)
        if commit.stepped is not None:
            self._stepped_ms = commit.stepped[1]
        for change in commit.leases:
            lease = self.leases.get(change.id)
            assert lease is not None  # refused() saw it
            self._change(changed(lease, change, now_ms))
        for errand in commit.over:
            del self._errands[errand]
        for card in commit.cards:
            self._write_card(card)
        for swap in commit.swaps:
            self._write_swap(swap)
        for tenant, gate in commit.gates.items():
            self._gates[tenant] = gate
            self._emit("tenant", tenant, gate.epoch, codec.gate_text(tenant, gate))
        for order in commit.commands:
            self._order(order)
        for said in codec.said(commit):
            self._emit(said["type"], said["subject"], 0, said["doc"])
        return Committed()

    def errand(self, now_ms: int, errand: Errand, max_errands: int) -> Errand | QueueFull:
        """A new one behind the others, or the one that has the id."""
        if errand.id not in self._errands:
            if len(self._errands) >= max_errands:
                return QueueFull(len(self._errands))
            self._errands[errand.id] = f'{codec.errand_text(errand)},"asked_ms":{now_ms}}}'
            image = f'{codec.queued_text(errand)},"started_ms":{now_ms},"stage_ms":{now_ms}}}'
            self._emit("swap", errand.id, 0, image)
            self.wake()
        return codec.errand(self._errands[errand.id])

    def raise_token(self, mark: int) -> None:
        """The counter is at least `mark` afterwards."""
        self._token = max(self._token, mark)

    def beat(self, now_ms: int, gateway: str, demand: tuple[Demand, ...], ttl_ms: int) -> bool:
        """Renew a membership; those that have ended are forgotten. False when it was none."""
        member = self._gateways.get(gateway, now_ms) > now_ms
        for _, dead in [row for row in self._by_end() if row[0] <= now_ms][:_DEAD_AT_ONCE]:
            del self._gateways[dead], self._demand[dead]
        before, text = self._demand.get(gateway), codec.encode(demand)
        self._gateways[gateway], self._demand[gateway] = now_ms + ttl_ms, text
        if before != text:
            self.wake()
        return member

    def leave(self, gateway: str) -> None:
        """Drop a membership, its demand and its outbox."""
        self._demand.pop(gateway, None)
        if self._gateways.pop(gateway, None) is not None:
            self.wake()
        self.streams.drop(outbox(f"gateway:{gateway}"))

    def claim(self, now_ms: int, executor: str, owner: str, who: str, ttl_ms: int) -> Claimed | Held:
        """Taken by who had it last, or once it has ended; no claim lies further ahead than it may last."""
        had = self._claims.get(executor)
        if had is not None and had.owner != owner and had.ends_ms > now_ms:
            ends_ms = min(had.ends_ms, now_ms + ttl_ms)
            self._claims[executor] = replace(had, ends_ms=ends_ms)
            return Held(had.who, ends_ms, ends_ms - now_ms)
        floor = had.floor if had is not None and had.owner == owner else self._token
        self._claims[executor] = _Claim(owner, who, now_ms + ttl_ms, floor, None if had is None else had.note)
        return Claimed(floor)

    def unclaim(self, executor: str, owner: str) -> None:
        """Its end is now, if it is the owner's."""
        had = self._claims.get(executor)
        if had is not None and had.owner == owner:
            self._claims[executor] = replace(had, ends_ms=0)

    def note(self, executor: str, owner: str, text: str) -> bool:
        """Kept beside the claim, if it is the owner's."""
        had = self._claims.get(executor)
        if had is None or had.owner != owner:
            return False
        self._claims[executor] = replace(had, note=text)
        return True

    def noted(self, executor: str) -> str | None:
        """What was noted last."""
        had = self._claims.get(executor)
        return None if had is None else had.note

    def put_job(self, job: Job) -> Job | None:
        """Written by who has read its newest version; one that has ended stays as it is."""
        before = self.job(job.id)
        if (0 if before is None else before.version) != job.version or (before is not None and before.over):
            return None
        self._jobs[job.id] = doc = codec.job_text(job)
        over = sorted((one for one in map(codec.job, self._jobs.values()) if one.over), key=_by_end)
        for old in over[:-JOBS]:
            del self._jobs[old.id]
        self._emit("job", job.id, job.version + 1, doc)
        return replace(job, version=job.version + 1)

    def job(self, job_id: str) -> Job | None:
        """One job, while it is retained."""
        doc = self._jobs.get(job_id)
        return None if doc is None else codec.job(doc)

    def jobs(self, limit: int, *, unfinished: bool) -> tuple[Job, ...]:
        """Newest first."""
        found = sorted(map(codec.job, self._jobs.values()), key=lambda job: (job.created_ms, job.id), reverse=True)
        return tuple(job for job in found if not (unfinished and job.over))[:limit]

    def swap(self, swap_id: str) -> Swap | None:
        """One swap, running or retained."""
        swap = self._swaps.get(swap_id)
        return None if swap is None else codec.swap(swap.doc)

    def swaps(self, limit: int, card: str | None) -> tuple[Swap, ...]:
        """Newest first."""
        docs = [swap.doc for swap in reversed(self._swaps.values()) if (card or swap.card) == swap.card]
        return tuple(codec.swap(doc) for doc in docs[:limit])

    def report(self, doc: str) -> None:
        """Tell the coordinator: some Reports, encoded, as one entry."""
        self.streams.add("inputs", ("r", doc), keep=INPUTS)

    def wake(self) -> None:
        """Make the coordinator look again."""
        self.streams.add("inputs", ("w", "1"), keep=INPUTS)

    def _renew_members(self, now_ms: int, stepped: tuple[int, int] | None, lasts_ms: int) -> None:
        """Memberships that have not ended, by the clock before a step ahead or after it, last so long from now."""
        step_ms = 0 if stepped is None else stepped[1] - stepped[0]
        since_ms = now_ms - max(step_ms, 0)
        self._gateways = {name: now_ms + lasts_ms if end > since_ms else end for name, end in self._gateways.items()}

    def _conflict(self, now_ms: int, commit: Commit) -> str | None:
        between = commit.between_ms
        if between is not None and not between[0] <= now_ms <= between[1]:
            return "clock"
        if commit.stepped is not None and commit.stepped[0] != self._stepped_ms:
            return "clock"
        for card in commit.cards:
            held = self._cards.get(card.name)
            if (0 if held is None else held.version) != card.version:
                return f"card {card.name}"
        for tenant, gate in commit.gates.items():
            now = self._gates.get(tenant)
            if now is not None and (gate.epoch < now.epoch or (gate.epoch == now.epoch and gate != now)):
                return f"gate {tenant}"
        gone = [errand for errand in commit.over if errand not in self._errands]
        if gone:
            return f"errand {gone[0]}"
        if commit.tokens and commit.tokens[0] <= self._token:
            return "tokens"
        for change in commit.leases:
            if refused(self.leases.get(change.id), change, now_ms):
                return f"lease {change.id}"
        return None

    def _change(self, lease: Lease) -> None:
        self._emit("lease", lease.id, self.leases.put(lease), image(lease))

    def _write_card(self, card: Card) -> None:
        holds = tuple(hold.lease for hold in card.holds)
        self._cards[card.name] = _Card(codec.card_text(card), card.version + 1, holds)
        self._emit("card", card.name, card.version + 1, self._cards[card.name].doc)

    def _write_swap(self, swap: Swap) -> None:
        before = self._swaps.get(swap.id)
        version = 1 if before is None else before.version + 1
        self._swaps[swap.id] = _Swap(codec.swap_text(swap), swap.card, version)
        while len(self._swaps) > SWAPS:
            del self._swaps[next(iter(self._swaps))]
        self._emit("swap", swap.id, version, codec.swap_text(swap))

    def _order(self, order: Command) -> None:
        self.streams.add(outbox(order.executor), (codec.encode(order),), keep=OUTBOX, life_ms=7 * DAY_MS)

    def _emit(self, kind: str, subject: str, version: int, data: str) -> None:
        self.streams.add("events", (kind, subject, str(version), data), keep=EVENTS)

    def _by_end(self) -> list[tuple[int, str]]:
        return sorted((end, gateway) for gateway, end in self._gateways.items())

    def _gone(self, key: _Key) -> bool:
        return key.gone_ms <= self._clock()


def _by_end(job: Job) -> tuple[int, str]:
    return job.ended_ms or 0, job.id


def outbox(executor: str) -> str:
    """The name of an executor's stream of commands."""
    return f"out:{executor}"
