"""The store protocol: what the coordinator, the API, agents and gateways may ask of the store.

Invariant: the store never chooses. `commit` is the only writer of grants and of card state; `enqueue`, `heartbeat`,
`end` and `errand` touch only their lease or errand and wake the coordinator. Every function takes `now_ms`: None
(production) means the store's own TIME read inside the function; a value is for tests and simulation. Expected outcomes
are values, I/O problems are `StoreDown`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from swapper.core.commit import Commit, Committed, Conflict
from swapper.core.errand import Errand
from swapper.core.jobs import Job
from swapper.core.orders import Command, Report
from swapper.core.types import Demand, Lease, LeaseRequest, LeaseState, Swap, World


@dataclass(frozen=True, slots=True)
class Idempotency:
    """An Idempotency-Key and the digest of the body it came with; kept 24 h per owner."""

    key: str
    body_digest: str


@dataclass(frozen=True, slots=True)
class Enqueued:
    """`created` is False when the same Idempotency-Key gave the lease of an earlier call."""

    lease: Lease
    created: bool


@dataclass(frozen=True, slots=True)
class QueueFull:
    """`queued` leases (or errands) wait already; nothing was written."""

    queued: int


@dataclass(frozen=True, slots=True)
class KeyReused:
    """The Idempotency-Key came before with another body; nothing was written."""

    lease_id: str


@dataclass(frozen=True, slots=True)
class NotFound:
    """No such lease."""


@dataclass(frozen=True, slots=True)
class WrongToken:
    """The token given is not the lease's token."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The lease has ended (heartbeat only)."""

    lease: Lease


@dataclass(frozen=True, slots=True)
class Claimed:
    """The executor is the caller's. `floor`: the highest token there was when it passed to its owner.

    What was ordered until then was another's to carry out, and is not known to be done or not.
    """

    floor: int


@dataclass(frozen=True, slots=True)
class Held:
    """Another has the executor: `who`, in words, until `ends_ms` (`left_ms` from now) if it is not heard before."""

    who: str
    ends_ms: int
    left_ms: int


@dataclass(frozen=True, slots=True)
class LeaseFilter:
    """Query of `leases`; `cursor` is opaque, as returned by the page before."""

    state: LeaseState | None = None
    card: str | None = None
    owner: str | None = None
    limit: int = 100
    cursor: str | None = None


@dataclass(frozen=True, slots=True)
class LeasePage:
    """Newest first; `next_cursor` None on the last page."""

    items: tuple[Lease, ...]
    next_cursor: str | None


@dataclass(frozen=True, slots=True)
class StoredCommand:
    """A command and its place in the executor's outbox stream."""

    id: str
    command: Command


@dataclass(frozen=True, slots=True)
class Inputs:
    """What woke the coordinator: reports in order, and whether anything else changed. `last` resumes the reading."""

    last: str
    reports: tuple[Report, ...]
    woken: bool


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """One line of the event log. `type` is lease|swap|card|tenant|conversation|window|job|alert; `data` is JSON."""

    id: str
    type: str
    subject: str
    version: int
    data: str


class Store(Protocol):
    """See the module text. Blocking reads return empty after `block_ms` with nothing to say; 0 never blocks."""

    async def enqueue(
        self,
        request: LeaseRequest,
        *,
        lease_id: str,
        max_queue: int,
        idempotency: Idempotency | None = None,
        now_ms: int | None = None,
    ) -> Enqueued | QueueFull | KeyReused:
        """Append to the queue; `seq` is given here. Wakes the coordinator."""
        ...

    async def heartbeat(
        self,
        lease_id: str,
        token: int,
        *,
        progress: float | None = None,
        request: LeaseRequest | None = None,
        now_ms: int | None = None,
    ) -> Lease | NotFound | WrongToken | Ended:
        """Move `expires_ms` to now + ttl. A lease already past its expiry but not yet expired by commit lives on.

        `request`: the lease's own, with the process that holds it from now on; where that is another than before, it is
        a change like any, with its event, and wakes the coordinator.
        """
        ...

    async def end(
        self, lease_id: str, token: int | None, *, now_ms: int | None = None
    ) -> Lease | NotFound | WrongToken:
        """Granted -> released (token needed), queued or preparing -> cancelled (no token needed); ended: unchanged."""
        ...

    async def lease(self, lease_id: str) -> Lease | None:
        """One lease, final ones included while they are retained."""
        ...

    async def leases(self, query: LeaseFilter) -> LeasePage:
        """A page of leases, newest first."""
        ...

    async def position(self, lease_id: str) -> int | None:
        """1 for the head of the queue in (class rank, seq) order; None when it does not wait."""
        ...

    async def read(self, *, now_ms: int | None = None) -> World:
        """One consistent view of everything the core decides on."""
        ...

    async def commit(self, commit: Commit, *, now_ms: int | None = None) -> Committed | Conflict:
        """Check every guard, then write everything, or nothing."""
        ...

    async def errand(self, errand: Errand, *, max_errands: int, now_ms: int | None = None) -> Errand | QueueFull:
        """Ask for something by hand, which a commit ends; the moment is stamped here. Wakes the coordinator.

        A known id gives the errand that has it, while that is not over. `max_errands` wait at most.
        """
        ...

    async def raise_token(self, mark: int) -> None:
        """Make the next token higher than `mark` (an agent reported it: the store may have been rolled back)."""
        ...

    async def outbox(self, executor: str, *, after: str, block_ms: int) -> tuple[StoredCommand, ...]:
        """Commands for one executor after the id given (`0` = from the start of what is retained)."""
        ...

    async def report(self, *reports: Report) -> None:
        """Tell the coordinator, in this order, in one write."""
        ...

    async def wake(self) -> None:
        """Make the coordinator look again (demand changed, a member joined or left)."""
        ...

    async def inputs(self, *, after: str, block_ms: int) -> Inputs:
        """Reports and wake-ups after the id given (`$` = from now on)."""
        ...

    async def beat(self, gateway: str, demand: tuple[Demand, ...], *, ttl_ms: int, now_ms: int | None = None) -> bool:
        """Renew a gateway's membership and replace its demand records, in one write. Wakes when demand changed.

        False when it was no member (any more): nobody told it what was ordered meanwhile.
        """
        ...

    async def leave(self, gateway: str) -> None:
        """Drop a gateway's membership and demand at once."""
        ...

    async def claim(
        self, executor: str, owner: str, *, who: str, ttl_ms: int, now_ms: int | None = None
    ) -> Claimed | Held:
        """Be the one that obeys as this executor, for `ttl_ms` from now; claimed again before, it goes on.

        Who had it last has it at once, everybody else once it has ended. `who` names the owner to those it keeps away.
        """
        ...

    async def unclaim(self, executor: str, owner: str) -> None:
        """Give it up, if it is the owner's; nothing of it is forgotten but that it is held."""
        ...

    async def note(self, executor: str, owner: str, text: str) -> bool:
        """Keep how far its owner has come, for whoever is the owner next; False where it is another's by now."""
        ...

    async def noted(self, executor: str) -> str | None:
        """What was noted last of an executor; None where nothing was."""
        ...

    async def swap(self, swap_id: str) -> Swap | None:
        """One swap, running or retained."""
        ...

    async def swaps(self, *, limit: int, card: str | None = None) -> tuple[Swap, ...]:
        """Newest first."""
        ...

    async def put_job(self, job: Job) -> Job | None:
        """Write a job over the version it was read as (0: a new one); None where it was changed since, or is over.

        The last 1,000 that are over are kept.
        """
        ...

    async def job(self, job_id: str) -> Job | None:
        """One job, while it is retained."""
        ...

    async def jobs(self, *, limit: int, unfinished: bool = False) -> tuple[Job, ...]:
        """Newest first; `unfinished`: only those that are not over."""
        ...

    async def events(self, *, after: str, limit: int, block_ms: int) -> tuple[StoredEvent, ...]:
        """The log after the id given (`0` = from the oldest retained, `$` = only what is new)."""
        ...

    async def close(self) -> None:
        """Drop the connections."""
        ...
