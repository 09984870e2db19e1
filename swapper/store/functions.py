"""The library's functions, each a typed coroutine whose signature is its contract.

Invariant: one call is one round trip and one atomic write. A subclass says how a call reaches a server (`_call`);
nothing here knows of connections. Times are milliseconds; `now_ms` None lets the server read its own TIME.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from importlib import resources
from typing import Any, TypeAlias

from swapper.core.commit import Commit, Committed, Conflict
from swapper.core.errand import Errand
from swapper.core.jobs import Job
from swapper.core.types import Demand, Lease, LeaseRequest, Swap, World
from swapper.store import codec
from swapper.store.protocol import (
    Claimed,
    Ended,
    Enqueued,
    Held,
    Idempotency,
    KeyReused,
    LeaseFilter,
    LeasePage,
    NotFound,
    QueueFull,
    WrongToken,
)

Reply: TypeAlias = Any
"""What a server answers: nested lists of str, int and None. Each function's text in library.lua tells its shape."""

LIBRARY = "swapper_1"
"""The library's name; its number rises when the layout or a signature changes."""


PARTS = ("library.lua", "members.lua", "claims.lua", "errands.lua", "jobs.lua", "views.lua")
"""Its text, in this order."""


def library_source() -> str:
    """The library's text, as `FUNCTION LOAD` wants it: library.lua, which defines what the others use, goes first."""
    room = resources.files("swapper.store")
    return "\n".join(room.joinpath(name).read_text(encoding="utf-8") for name in PARTS)


class Functions(ABC):
    """The half of the store that is function calls; redis.py adds connections and streams."""

    @abstractmethod
    async def _call(self, name: str, *args: str) -> Reply:
        """Call the library's function. Raises StoreDown; ValueError where the caller broke a rule."""

    async def enqueue(
        self,
        request: LeaseRequest,
        *,
        lease_id: str,
        max_queue: int,
        idempotency: Idempotency | None = None,
        now_ms: int | None = None,
    ) -> Enqueued | QueueFull | KeyReused:
        """Append to the queue and wake the coordinator; a known `lease_id` gives the lease that has it."""
        kind, answer = await self._call(
            "enqueue",
            codec.optional(now_ms),
            lease_id,
            codec.encode(request),
            request.owner,
            codec.optional(request.card),
            str(request.klass.rank),
            str(request.ttl_ms),
            str(request.max_hold_ms),
            codec.optional(request.not_before_ms),
            codec.optional(request.deadline_ms),
            str(max_queue),
            "" if idempotency is None else idempotency.key,
            "" if idempotency is None else idempotency.body_digest,
        )
        if kind == "full":
            return QueueFull(int(answer))
        if kind == "reused":
            return KeyReused(answer)
        return Enqueued(codec.lease(answer), kind == "created")

    async def heartbeat(
        self,
        lease_id: str,
        token: int,
        *,
        progress: float | None = None,
        request: LeaseRequest | None = None,
        now_ms: int | None = None,
    ) -> Lease | NotFound | WrongToken | Ended:
        """Move `expires_ms` to now + ttl, never back. No event, no wake-up, unless `request` names another process."""
        named = "" if request is None else codec.encode(request)
        args = (codec.optional(now_ms), lease_id, str(token), codec.optional(progress), named)
        answer = await self._call("heartbeat", *args)
        match answer[0]:
            case "missing":
                return NotFound()
            case "token":
                return WrongToken()
            case "ended":
                return Ended(codec.lease(answer[1]))
            case _:
                return codec.lease(answer[1])

    async def end(
        self, lease_id: str, token: int | None, *, now_ms: int | None = None
    ) -> Lease | NotFound | WrongToken:
        """Granted -> released (token needed), queued or preparing -> cancelled; an ended lease stays as it is."""
        answer = await self._call("finish", codec.optional(now_ms), lease_id, codec.optional(token))
        match answer[0]:
            case "missing":
                return NotFound()
            case "token":
                return WrongToken()
            case _:
                return codec.lease(answer[1])

    async def leases(self, query: LeaseFilter) -> LeasePage:
        """A page of leases, newest first; one round trip for each 1,000 leases looked at."""
        found: list[Lease] = []
        before = query.cursor or ""
        while len(found) <= query.limit:
            before, rows = await self._call(
                "list",
                codec.optional(query.state),
                codec.optional(query.card),
                codec.optional(query.owner),
                str(query.limit + 1 - len(found)),
                before,
            )
            found += [codec.lease(row) for row in rows]
            if before == "":
                break
        more = len(found) > query.limit
        page = tuple(found[: query.limit])
        return LeasePage(page, str(page[-1].seq) if more and page else None)

    async def read(self, *, now_ms: int | None = None) -> World:
        """One consistent view: all cards, gates and live gateways, and the leases a decision may need.

        Of the leases: the preparing and granted ones, those a card names (also ended ones), the first 256 of each
        card's queue, not counting those whose `not_before` is ahead; the first 256 that have a `not_before`, and
        1,000 waiting ones past their deadline. In (held first, then class rank, seq) order. `next_due_ms` is the
        earliest expiry, end of max_hold, revocation, deadline, `not_before` or end of a membership still ahead.
        """
        answer = await self._call("read", codec.optional(now_ms))
        now, cards, rows, queued, due, gateways, records, gates, token, stepped, errands = answer
        leases = sorted((codec.lease_image(*row) for row in rows), key=codec.order)
        documents = [codec.card(text) for text in cards]
        return World(
            now_ms=int(now),
            cards={card.name: card for card in documents},
            leases={lease.id: lease for lease in leases},
            queued=int(queued),
            next_due_ms=int(due) if due else None,
            demand=tuple(record for text in records for record in codec.demand(text)),
            gateways=tuple(gateways),
            gates=codec.gates(gates),
            token=int(token),
            stepped_ms=int(stepped),
            errands=tuple(map(codec.errand, errands)),
        )

    async def commit(self, commit: Commit, *, now_ms: int | None = None) -> Committed | Conflict:
        """Check every guard, then write everything, or nothing.

        Raises ValueError when a change could never be right: a step that a lease's life does not have, a grant
        without a token, one card, lease or swap named twice.
        """
        answer = await self._call("commit", codec.optional(now_ms), codec.commit(commit))
        return Committed() if answer[0] == "ok" else Conflict(answer[1])

    async def errand(self, errand: Errand, *, max_errands: int, now_ms: int | None = None) -> Errand | QueueFull:
        """Ask for something by hand and wake the coordinator; a known id gives the errand that has it."""
        when, docs = codec.optional(now_ms), (codec.errand_text(errand), codec.queued_text(errand))
        kind, answer = await self._call("errand", when, errand.id, *docs, str(max_errands))
        return QueueFull(int(answer)) if kind == "full" else codec.errand(answer)

    async def raise_token(self, mark: int) -> None:
        """Make every later token higher than `mark`."""
        await self._call("raise_token", str(mark))

    async def beat(self, gateway: str, demand: tuple[Demand, ...], *, ttl_ms: int, now_ms: int | None = None) -> bool:
        """Renew a membership and replace its demand; wakes the coordinator when the records differ. False: it joins."""
        return await self._call("beat", codec.optional(now_ms), gateway, codec.encode(demand), str(ttl_ms)) == "ok"

    async def leave(self, gateway: str) -> None:
        """Drop a membership, its demand and its outbox."""
        await self._call("leave", gateway)

    async def claim(
        self, executor: str, owner: str, *, who: str, ttl_ms: int, now_ms: int | None = None
    ) -> Claimed | Held:
        """Be the one that obeys as this executor, for `ttl_ms` from now; who had it last has it at once."""
        answer = await self._call("claim", codec.optional(now_ms), executor, owner, who, str(ttl_ms))
        if answer[0] == "ok":
            return Claimed(int(answer[1]))
        return Held(answer[1], int(answer[2]), int(answer[3]))

    async def unclaim(self, executor: str, owner: str) -> None:
        """Give it up, if it is the owner's."""
        await self._call("unclaim", executor, owner)

    async def note(self, executor: str, owner: str, text: str) -> bool:
        """Keep how far its owner has come; False where it is another's by now."""
        return await self._call("note", executor, owner, text) == "ok"

    async def swaps(self, *, limit: int, card: str | None = None) -> tuple[Swap, ...]:
        """Newest first; the last 1,000 are kept."""
        return tuple(codec.swap(text) for text in await self._call("swaps", str(limit), codec.optional(card)))

    async def put_job(self, job: Job) -> Job | None:
        """Write a job over the version it was read as (0: a new one); None where it was changed since, or is over."""
        ended, doc = codec.optional(job.ended_ms if job.over else None), codec.job_text(job)
        answer = await self._call("put_job", job.id, str(job.version), str(job.created_ms), ended, doc)
        return replace(job, version=int(answer[1])) if answer[0] == "ok" else None

    async def job(self, job_id: str) -> Job | None:
        """One job, while it is retained."""
        doc = await self._call("job", job_id)
        return None if doc is None else codec.job(doc)

    async def jobs(self, *, limit: int, unfinished: bool = False) -> tuple[Job, ...]:
        """Newest first; `unfinished`: only those that are not over."""
        return tuple(map(codec.job, await self._call("jobs", str(limit), "1" if unfinished else "")))
