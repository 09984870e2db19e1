"""Whatever happens in whatever order: no lease is lost, none is in two places, and the log tells the same story."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swapper.core.commit import LIFE, Commit, LeaseChange
from swapper.core.types import ACTIVE, LeaseState, WorkClass
from swapper.store.protocol import LeaseFilter, Store
from tests.store.acts import NOW, ask, draw, fold, request, unmoved
from tests.store.conftest import fake_store, memory_store

ACTS = ("ask", "cancel", "release", "beat", *(state.value for state in LeaseState))
STEPS = st.lists(
    st.tuples(st.sampled_from(ACTS), st.integers(0, 4), st.sampled_from(WorkClass), st.integers(0, 20_000)),
    max_size=40,
)


async def act(store: Store, what: str, lease_id: str, klass: WorkClass, now_ms: int) -> None:
    lease = await store.lease(lease_id)
    if what == "ask":
        deadline = now_ms + 30_000 if klass is WorkClass.BATCH else None
        await ask(store, lease_id, request(klass=klass, deadline_ms=deadline), now_ms)
    elif lease is None:
        return
    elif what in ("cancel", "release"):
        await store.end(lease_id, lease.token if what == "release" else None, now_ms=now_ms)
    elif what == "beat":
        await store.heartbeat(lease_id, lease.token or 1, now_ms=now_ms)
    elif what in {state.value for state in LIFE.get(lease.state, ())}:
        token = await draw(store, now_ms) if what == "granted" else None
        change = LeaseChange(lease_id, frozenset({lease.state}), LeaseState(what), token=token)
        await store.commit(Commit(leases=(change,)), now_ms=now_ms)


async def check(store: Store, now_ms: int) -> None:
    listed = {lease.id: lease for lease in (await store.leases(LeaseFilter())).items}
    world = await store.read(now_ms=now_ms)
    active = {name: lease for name, lease in listed.items() if lease.state in ACTIVE}
    assert world.leases == active
    waiting = [lease for lease in active.values() if lease.state is LeaseState.QUEUED]
    assert world.queued == len(waiting)
    waiting.sort(key=lambda lease: (lease.request.klass.rank, lease.seq))
    for place, lease in enumerate(waiting, 1):
        assert await store.position(lease.id) == place
    tokens = Counter(lease.token for lease in listed.values() if lease.token is not None)
    assert all(count == 1 for count in tokens.values())
    due = [
        time
        for lease in active.values()
        for time in (
            lease.expires_ms if lease.state is LeaseState.GRANTED else lease.request.deadline_ms,
            lease.granted_ms + lease.request.max_hold_ms if lease.granted_ms else None,
        )
        if time is not None and time > now_ms
    ]
    assert world.next_due_ms == min(due, default=None)
    folded = fold(await store.events(after="0", limit=10_000, block_ms=0))
    assert folded.leases == {name: unmoved(lease) for name, lease in listed.items()}


@pytest.mark.parametrize("make", [fake_store, memory_store])
@settings(max_examples=40, deadline=None)
@given(steps=STEPS)
def test_leases_are_conserved(
    make: Callable[[], Awaitable[Store]], steps: list[tuple[str, int, WorkClass, int]]
) -> None:
    async def play() -> None:
        store = await make()
        now_ms = NOW
        for what, number, klass, passed in steps:
            now_ms += passed
            await act(store, what, f"a{number}", klass, now_ms)
        await check(store, now_ms)
        await store.close()

    asyncio.run(play())
