"""What the store tests do over and over: ask for a card, prepare it, grant it, and fold the log."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

from swapper.core.commit import Commit, Committed, Conflict, LeaseChange
from swapper.core.types import Card, Hold, Lease, LeaseRequest, LeaseState, Swap, WorkClass
from swapper.store import codec
from swapper.store.functions import Reply
from swapper.store.protocol import Enqueued, Store, StoredEvent
from swapper.store.redis import RedisStore

NOW = 1_800_000_000_000
"""A moment of the virtual clock, ms."""
QUEUED = frozenset({LeaseState.QUEUED})
PREPARING = frozenset({LeaseState.PREPARING})
GRANTED = frozenset({LeaseState.GRANTED})
WAITING = QUEUED | PREPARING


def request(
    owner: str = "ann",
    card: str | None = "gpu0",
    klass: WorkClass = WorkClass.NORMAL,
    *,
    not_before_ms: int | None = None,
    deadline_ms: int | None = None,
    max_hold_ms: int = 3_600_000,
) -> LeaseRequest:
    return LeaseRequest(
        owner,
        card,
        klass=klass,
        not_before_ms=not_before_ms,
        deadline_ms=deadline_ms,
        max_hold_ms=max_hold_ms,
    )


async def ask(store: Store, lease_id: str, wanted: LeaseRequest | None = None, now_ms: int | None = NOW) -> Lease:
    answer = await store.enqueue(wanted or request(), lease_id=lease_id, max_queue=10_000, now_ms=now_ms)
    assert isinstance(answer, Enqueued)
    return answer.lease


async def ask_all(store: Store, prefix: str, count: int, wanted: LeaseRequest) -> None:
    """Many alike, at once; their order among each other is not given."""
    await asyncio.gather(*(ask(store, f"{prefix}{number}", wanted) for number in range(count)))


async def card_of(store: Store, name: str = "gpu0") -> Card:
    return (await store.read(now_ms=NOW)).cards.get(name, Card(name))


async def prepare(store: Store, lease_id: str, now_ms: int = NOW) -> Committed | Conflict:
    card = replace(await card_of(store), holds=(Hold(lease_id, "", None, None),))
    change = LeaseChange(lease_id, QUEUED, LeaseState.PREPARING, card="gpu0", swap_id=f"sw-{lease_id}")
    return await store.commit(Commit(cards=(card,), leases=(change,)), now_ms=now_ms)


async def draw(store: Store, now_ms: int | None = NOW) -> int:
    """A token, given out as a decision does it: on a conflict read and decide again."""
    while True:
        token = (await store.read(now_ms=now_ms)).next_token
        if await store.commit(Commit(tokens=(token,)), now_ms=now_ms) == Committed():
            return token


async def grant(store: Store, lease_id: str, now_ms: int = NOW) -> int:
    """Grant whatever waits under this id; returns its token."""
    token = await draw(store, now_ms)
    card = replace(await card_of(store), holds=(Hold(lease_id, "", None, None, granted=True),))
    change = LeaseChange(lease_id, WAITING, LeaseState.GRANTED, token=token, card="gpu0")
    assert await store.commit(Commit(cards=(card,), leases=(change,)), now_ms=now_ms) == Committed()
    return token


async def state(store: Store, lease_id: str) -> LeaseState:
    lease = await store.lease(lease_id)
    assert lease is not None
    return lease.state


async def raw(store: RedisStore, command: str, key: str, *args: str) -> Reply:
    """A command of the server on one of the store's own keys, past the protocol."""
    return await store._do("raw", command, store._key(key), *args)  # pyright: ignore[reportPrivateUsage]


@dataclass(slots=True)
class Folded:
    """The state that the event log gives, subject by subject."""

    leases: dict[str, Lease] = field(default_factory=dict[str, Lease])
    cards: dict[str, Card] = field(default_factory=dict[str, Card])
    swaps: dict[str, Swap] = field(default_factory=dict[str, Swap])
    versions: dict[tuple[str, str], list[int]] = field(default_factory=dict[tuple[str, str], list[int]])


def fold(events: tuple[StoredEvent, ...]) -> Folded:
    folded = Folded()
    for event in events:
        folded.versions.setdefault((event.type, event.subject), []).append(event.version)
        match event.type:
            case "lease":
                folded.leases[event.subject] = codec.lease_of(event)
            case "card":
                folded.cards[event.subject] = codec.card_of(event)
            case "swap":
                folded.swaps[event.subject] = codec.swap_of(event)
            case _:
                pass
    return folded


def unmoved(lease: Lease) -> Lease:
    """The lease without what heartbeats move, as after-images have it."""
    return replace(lease, expires_ms=None, progress=None)
