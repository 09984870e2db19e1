"""The lease of a gate: asked for in the store, waited for, kept by heartbeats, given back, and found again.

Invariant: at most one lease of the tenant is active for this gate; what the store says of it is the truth. Nothing here
knows ComfyUI or who waits for the lease.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Protocol

from swapper.core.types import ACTIVE, Lease, LeaseRequest, LeaseState, WorkClass
from swapper.errors import StoreDown
from swapper.store.protocol import Ended, KeyReused, LeaseFilter, NotFound, QueueFull, Store, WrongToken

OWNER = "local"
TTL_MS = 30_000
RETRY_S = 0.5
_ORDER = (LeaseState.GRANTED, LeaseState.PREPARING, LeaseState.QUEUED)


class Watching(Protocol):
    """Who wakes us when something happened to a lease (store.tail.Tail does)."""

    def watch(self, subject: str) -> AbstractContextManager[asyncio.Event]:
        """A flag that is set whenever something happened to the subject."""
        ...


@dataclass(frozen=True, slots=True)
class Wish:
    """What is asked for: the tenant on its card, MiB of it (None: all), and for how long at most."""

    tenant: str
    card: str
    vram_mib: int | None
    max_hold_ms: int
    max_queue: int


class Holding:
    """The lease life of one gate. `new_id` gives a fresh lease id. StoreDown is waited out unless it is said."""

    def __init__(self, store: Store, watching: Watching, wish: Wish, new_id: Callable[[], str]) -> None:
        self._store = store
        self._watching = watching
        self._wish = wish
        self._new_id = new_id

    async def found(self) -> Lease | None:
        """The lease that an earlier process of this gate had, the furthest first; further ones are given up."""
        mine: list[Lease] = []
        for state in _ORDER:
            cursor: str | None = None
            while True:
                page = await self._store.leases(LeaseFilter(state=state, owner=OWNER, limit=1000, cursor=cursor))
                mine += [lease for lease in page.items if lease.request.holder == self._wish.tenant]
                cursor = page.next_cursor
                if cursor is None:
                    break
        for lease in mine[1:]:
            await self._store.end(lease.id, lease.token)
        return mine[0] if mine else None

    async def ask(self, klass: WorkClass, prompts: int) -> Lease | QueueFull:
        """Raises StoreDown."""
        wish = self._wish
        request = LeaseRequest(
            owner=OWNER,
            card=wish.card,
            vram_mib=wish.vram_mib,
            label=f"{wish.tenant}: {prompts} prompt{'s' * (prompts != 1)}",
            klass=klass,
            ttl_ms=TTL_MS,
            max_hold_ms=wish.max_hold_ms,
            holder=wish.tenant,
        )
        answer = await self._store.enqueue(request, lease_id=self._new_id(), max_queue=wish.max_queue)
        assert not isinstance(answer, KeyReused)  # none was given
        return answer if isinstance(answer, QueueFull) else answer.lease

    async def settled(self, lease: Lease, wanted: Callable[[LeaseState], bool], turned: asyncio.Event) -> Lease | None:
        """The lease once it is granted or over, None where it was given up, or lost by the store.

        Given up once it is not `wanted` any more, as it stands; that is asked again whenever `turned` is set.
        """
        given_up = False
        with self._watching.watch(lease.id) as changed:
            while True:
                changed.clear()
                turned.clear()
                try:
                    seen = await self._store.lease(lease.id)
                    if seen is None or (given_up and seen.state is LeaseState.CANCELLED):
                        return None
                    if seen.state not in (LeaseState.QUEUED, LeaseState.PREPARING):
                        return seen
                    if not wanted(seen.state):
                        given_up = True
                        await self._store.end(lease.id, None)
                        continue
                except StoreDown:
                    await asyncio.sleep(RETRY_S)
                    continue
                await either(changed, turned)

    async def lost(self, lease: Lease) -> str:
        """Keep it alive until it ends though we did not end it; the reason."""
        token = lease.token or 0
        with self._watching.watch(lease.id) as changed:
            while True:
                changed.clear()
                try:
                    match await self._store.heartbeat(lease.id, token):
                        case Ended(lease=ended):
                            return ended.reason or str(ended.state)
                        case NotFound() | WrongToken():
                            return "the store knows it no more"
                        case alive:
                            if alive.revoke_ms is not None:
                                return "it was asked to leave"
                except StoreDown:
                    await asyncio.sleep(RETRY_S)
                    continue
                if (reason := await self._ended(lease, changed)) is not None:
                    return reason

    async def _ended(self, lease: Lease, changed: asyncio.Event) -> str | None:
        """Until the next heartbeat is due; a reason where the lease ended before."""
        deadline = asyncio.get_running_loop().time() + TTL_MS / 3000
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    await changed.wait()
            except TimeoutError:
                return None
            changed.clear()
            with suppress(StoreDown):
                seen = await self._store.lease(lease.id)
                if seen is None or seen.state not in ACTIVE or seen.revoke_ms is not None:
                    return "it was lost" if seen is None else seen.reason or str(seen.state)

    async def give_back(self, lease: Lease) -> None:
        """End it; one that has ended stays as it is."""
        while True:
            try:
                await self._store.end(lease.id, lease.token)
                return
            except StoreDown:
                await asyncio.sleep(RETRY_S)


async def either(*events: asyncio.Event, limit_s: float | None = None) -> None:
    """Return once one of them is set, or `limit_s` has passed."""
    tasks = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(tasks, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
