"""The store in memory: the same protocol and meaning as the one on a server, for virtual time and for tests.

Invariant: nothing happens but what a caller or the clock it was given makes happen: no thread, no timer of its own, the
same calls in the same order give the same answers, ids included. Each call gives way to others before it acts and again
before it answers, as one over a socket does, and acts whole in between; so it may be cut off having written or not.
It can be told to fail the ways a server fails, and to go back to an earlier state.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from swapper.core.commit import Commit, Committed, Conflict
from swapper.core.errand import Errand
from swapper.core.jobs import Job
from swapper.core.orders import Report
from swapper.core.types import Demand, Lease, LeaseRequest, Swap, World
from swapper.errors import StoreDown
from swapper.store import codec
from swapper.store.memory_library import Library, outbox
from swapper.store.memory_streams import Entry, Id, parsed, written
from swapper.store.protocol import (
    Claimed,
    Ended,
    Enqueued,
    Held,
    Idempotency,
    Inputs,
    KeyReused,
    LeaseFilter,
    LeasePage,
    NotFound,
    QueueFull,
    StoredCommand,
    StoredEvent,
    WrongToken,
)

T = TypeVar("T")
_READ_COUNT = 500


@dataclass(slots=True)
class _Fault:
    """So many calls to come fail before they act, and after these so many having acted; `of`: only those named."""

    before: int
    after: int
    of: Collection[str]

    def hits(self, name: str) -> str | None:
        if self.of and name not in self.of:
            return None
        if self.before:
            self.before -= 1
            return "before"
        if self.after:
            self.after -= 1
            return "after"
        return None


@dataclass(frozen=True, slots=True)
class Copy:
    """What the store held at one moment; for `MemoryStore.rollback`."""

    library: Library


class MemoryStore:
    """A Store (store/protocol.py). `clock` gives milliseconds: the store's own time, where `now_ms` is None.

    `pause` is awaited twice in every call: before it acts, and before it answers. It may take (virtual) time, and may
    raise StoreDown. All who use the store share one object; `close` is nothing to it.
    """

    def __init__(self, clock: Callable[[], int], *, pause: Callable[[], Awaitable[None]] | None = None) -> None:
        self._clock = clock
        self._pause: Callable[[], Awaitable[None]] = pause or partial(asyncio.sleep, 0)
        self._library = Library(clock)
        self._faults: list[_Fault] = []
        self._reading: dict[asyncio.Future[None], tuple[str, Id]] = {}
        self._up = True
        self._breaks = 0

    # How it fails.

    def fail(self, *, before: int = 0, after: int = 0, of: Collection[str] = ()) -> None:
        """The next `before` calls raise StoreDown with nothing written, then the next `after` with all of it written.

        `of` names the methods that count; without it all do, reads too.
        """
        self._faults.append(_Fault(before, after, frozenset(of)))

    def down(self) -> None:
        """Every call raises StoreDown until `up`: those waiting to read at once, one that has acted with its answer."""
        self._up = False
        self._cut()

    def up(self) -> None:
        """Serve again, with all that was written."""
        self._up = True

    def copy(self) -> Copy:
        """A copy to go back to."""
        return Copy(self._library.copy())

    def rollback(self, copy: Copy) -> None:
        """What was written since is lost, stream ids included: a server started on an older copy. Cuts every call."""
        self._library = copy.library.copy()
        self._cut()

    @property
    def readers(self) -> int:
        """How many calls wait for something to be written."""
        return len(self._reading)

    def _cut(self) -> None:
        self._breaks += 1
        self._answer(*self._reading)

    # The protocol.

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
        return await self._call(
            "enqueue",
            lambda library: library.enqueue(self._now(now_ms), request, lease_id, max_queue, idempotency),
        )

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
        return await self._call(
            "heartbeat", lambda library: library.heartbeat(self._now(now_ms), lease_id, token, progress, request)
        )

    async def end(
        self, lease_id: str, token: int | None, *, now_ms: int | None = None
    ) -> Lease | NotFound | WrongToken:
        """Granted -> released (token needed), queued or preparing -> cancelled; an ended lease stays as it is."""
        return await self._call("end", lambda library: library.end(self._now(now_ms), lease_id, token))

    async def lease(self, lease_id: str) -> Lease | None:
        """One lease, final ones included while they are retained."""
        return await self._call("lease", lambda library: library.leases.get(lease_id))

    async def leases(self, query: LeaseFilter) -> LeasePage:
        """A page of leases, newest first."""
        return await self._call("leases", lambda library: library.leases.page(query))

    async def position(self, lease_id: str) -> int | None:
        """1 for the head of the queue in (class rank, seq) order; None when it does not wait."""
        ids = await self._call("position", lambda library: [lease.id for lease in library.leases.queue()])
        return ids.index(lease_id) + 1 if lease_id in ids else None

    async def read(self, *, now_ms: int | None = None) -> World:
        """One consistent view of everything the core decides on; `Functions.read` tells what is in it."""
        return await self._call("read", lambda library: library.read(self._now(now_ms)))

    async def commit(self, commit: Commit, *, now_ms: int | None = None) -> Committed | Conflict:
        """Check every guard, then write everything, or nothing. Raises ValueError as `Functions.commit` does."""
        return await self._call("commit", lambda library: library.commit(self._now(now_ms), commit))

    async def errand(self, errand: Errand, *, max_errands: int, now_ms: int | None = None) -> Errand | QueueFull:
        """Ask for something by hand and wake the coordinator; a known id gives the errand that has it."""
        return await self._call("errand", lambda library: library.errand(self._now(now_ms), errand, max_errands))

    async def raise_token(self, mark: int) -> None:
        """Make every later token higher than `mark`."""
        await self._call("raise_token", lambda library: library.raise_token(mark))

    async def beat(self, gateway: str, demand: tuple[Demand, ...], *, ttl_ms: int, now_ms: int | None = None) -> bool:
        """Renew a membership and replace its demand; wakes the coordinator when the records differ. False: it joins."""
        return await self._call("beat", lambda library: library.beat(self._now(now_ms), gateway, demand, ttl_ms))

    async def leave(self, gateway: str) -> None:
        """Drop a membership, its demand and its outbox."""
        await self._call("leave", lambda library: library.leave(gateway))

    async def claim(
        self, executor: str, owner: str, *, who: str, ttl_ms: int, now_ms: int | None = None
    ) -> Claimed | Held:
        """Be the one that obeys as this executor, for `ttl_ms` from now; who had it last has it at once."""
        return await self._call("claim", lambda library: library.claim(self._now(now_ms), executor, owner, who, ttl_ms))

    async def unclaim(self, executor: str, owner: str) -> None:
        """Give it up, if it is the owner's."""
        await self._call("unclaim", lambda library: library.unclaim(executor, owner))

    async def note(self, executor: str, owner: str, text: str) -> bool:
        """Keep how far its owner has come; False where it is another's by now."""
        return await self._call("note", lambda library: library.note(executor, owner, text))

    async def noted(self, executor: str) -> str | None:
        """What was noted last of an executor; None where nothing was."""
        return await self._call("noted", lambda library: library.noted(executor))

    async def swap(self, swap_id: str) -> Swap | None:
        """One swap, running or retained."""
        return await self._call("swap", lambda library: library.swap(swap_id))

    async def swaps(self, *, limit: int, card: str | None = None) -> tuple[Swap, ...]:
        """Newest first; the last 1,000 are kept."""
        return await self._call("swaps", lambda library: library.swaps(limit, card))

    async def put_job(self, job: Job) -> Job | None:
        """Write a job over the version it was read as (0: a new one); None where it was changed since, or is over."""
        return await self._call("put_job", lambda library: library.put_job(job))

    async def job(self, job_id: str) -> Job | None:
        """One job, while it is retained."""
        return await self._call("job", lambda library: library.job(job_id))

    async def jobs(self, *, limit: int, unfinished: bool = False) -> tuple[Job, ...]:
        """Newest first; `unfinished`: only those that are not over."""
        return await self._call("jobs", lambda library: library.jobs(limit, unfinished=unfinished))

    async def report(self, *reports: Report) -> None:
        """Tell the coordinator, in this order, in one write."""
        doc = codec.encode(reports)  # as they are now, not once they arrive
        await self._call("report", lambda library: library.report(doc))

    async def wake(self) -> None:
        """Make the coordinator look again."""
        await self._call("wake", lambda library: library.wake())

    async def outbox(self, executor: str, *, after: str, block_ms: int) -> tuple[StoredCommand, ...]:
        """Commands for one executor after the id given, at most 500; `0` = from the start of what is retained.

        All of it is given where the stream never reached the id, as `RedisStore.outbox` tells.
        """
        name = outbox(executor)
        _, entries = await self._read("outbox", name, after, block_ms, _READ_COUNT)
        if not entries and self._library.streams.newest(name) < parsed(after):
            _, entries = await self._read("outbox", name, "0", 0, _READ_COUNT)
        return tuple(StoredCommand(written(at), codec.command(doc)) for at, (doc,) in entries)

    async def inputs(self, *, after: str, block_ms: int) -> Inputs:
        """Reports and wake-ups after the id given, at most 500; `$` = from now on."""
        start, entries = await self._read("inputs", "inputs", after, block_ms, _READ_COUNT)
        reports = tuple(report for _, (kind, doc) in entries if kind == "r" for report in codec.reports(doc))
        last = written(entries[-1][0] if entries else start) if entries or after == "$" else after
        return Inputs(last, reports, any(kind == "w" for _, (kind, _doc) in entries))

    async def events(self, *, after: str, limit: int, block_ms: int) -> tuple[StoredEvent, ...]:
        """The log after the id given; `0` = from the oldest retained, `$` = only what is new."""
        _, entries = await self._read("events", "events", after, block_ms, limit)
        return tuple(StoredEvent(written(at), kind, name, int(v), data) for at, (kind, name, v, data) in entries)

    async def close(self) -> None:
        """Nothing is held that could be dropped."""

    # How a call is served.

    def _now(self, now_ms: int | None) -> int:
        return self._clock() if now_ms is None else now_ms

    async def _call(self, name: str, act: Callable[[Library], T]) -> T:
        fault, breaks = await self._reach(name)
        answer = act(self._library)
        after = self._library.streams.after
        self._answer(*(reader for reader, (key, last) in self._reading.items() if after(key, last, 1)))
        await self._pause()
        self._hold(fault, breaks)
        return answer

    async def _read(self, name: str, key: str, after: str, block_ms: int, count: int) -> tuple[Id, list[Entry]]:
        fault, breaks = await self._reach(name)
        last = self._library.streams.newest(key) if after == "$" else parsed(after)
        entries = self._library.streams.after(key, last, count)
        if not entries and block_ms > 0:
            await self._written(key, last, block_ms)
            self._hold(None, breaks)
            entries = self._library.streams.after(key, last, count)
        await self._pause()
        self._hold(fault, breaks)
        return last, entries

    async def _reach(self, name: str) -> tuple[str | None, int]:
        """Get through to the store. What will befall the answer, and how often calls have been cut until now."""
        await self._pause()
        if not self._up:
            raise StoreDown("the store in memory is not reachable")
        fault = next(filter(None, (one.hits(name) for one in self._faults)), None)
        self._faults = [one for one in self._faults if one.before or one.after]
        if fault == "before":
            raise StoreDown("the store in memory is not reachable")
        return fault, self._breaks

    def _hold(self, fault: str | None, breaks: int) -> None:
        """Raise StoreDown when the answer does not arrive."""
        if fault is not None or breaks != self._breaks:
            raise StoreDown("the store in memory did not answer in time")

    async def _written(self, key: str, last: Id, block_ms: int) -> None:
        """Wait until there is an entry after `last`, calls are cut, or the time is over."""
        reader = asyncio.get_running_loop().create_future()
        self._reading[reader] = (key, last)
        try:
            async with asyncio.timeout(block_ms / 1000):
                await reader
        except TimeoutError:
            pass
        finally:
            del self._reading[reader]

    def _answer(self, *readers: asyncio.Future[None]) -> None:
        for reader in readers:
            if not reader.done():
                reader.set_result(None)
