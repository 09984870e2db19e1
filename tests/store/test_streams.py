"""Outboxes, the coordinator's inputs and the event log: resuming, redelivery, and waiting without polling."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from swapper.core.commit import Commit
from swapper.core.orders import Command, Report
from swapper.store.protocol import Inputs, Store
from tests.store.acts import NOW, ask, grant, request

REPORT = Report("agent:main", "gpu0", "llama/med", 2**53 + 1, 3, "save", "ok", backend_ms=1.5, data={"tokens": 4000})


def order(n: int) -> Command:
    return Command("agent:main", "gpu0", "llama/med", 7, n, "save")


async def test_an_executor_that_starts_again_gets_the_same_commands_again(store: Store) -> None:
    await store.commit(Commit(commands=(order(1), order(2))), now_ms=NOW)
    await store.commit(Commit(commands=(order(3),)), now_ms=NOW)
    first = await store.outbox("agent:main", after="0", block_ms=0)
    assert [stored.command.n for stored in first] == [1, 2, 3]
    assert await store.outbox("agent:main", after="0", block_ms=0) == first
    assert await store.outbox("agent:main", after=first[1].id, block_ms=0) == first[2:]
    assert await store.outbox("agent:main", after=first[2].id, block_ms=0) == ()
    assert await store.outbox("agent:other", after="0", block_ms=0) == ()


async def test_reports_arrive_in_order_and_as_they_were_sent(store: Store) -> None:
    second = Report("agent:main", "gpu0", None, 0, 0, "observed", "ok", data={"tenants": {"a": "loaded"}})
    await store.report(REPORT)
    await store.report(second)
    inputs = await store.inputs(after="0", block_ms=0)
    assert (inputs.reports, inputs.woken) == ((REPORT, second), False)
    assert await store.inputs(after=inputs.last, block_ms=0) == Inputs(inputs.last, (), woken=False)


async def test_from_now_on_leaves_out_what_was_said_before_and_loses_nothing_after(store: Store) -> None:
    await store.report(REPORT)
    start = await store.inputs(after="$", block_ms=0)
    assert start.reports == ()
    await store.wake()
    assert (await store.inputs(after=start.last, block_ms=0)).woken


async def test_from_now_on_works_before_anything_was_ever_said(store: Store) -> None:
    start = await store.inputs(after="$", block_ms=0)
    await store.report(REPORT)
    assert (await store.inputs(after=start.last, block_ms=0)).reports == (REPORT,)


@pytest.mark.parametrize("what", ["enqueue", "cancel", "release", "wake"])
async def test_the_coordinator_is_woken(store: Store, what: str) -> None:
    await ask(store, "a")
    await ask(store, "b")
    token = await grant(store, "a")
    last = (await store.inputs(after="$", block_ms=0)).last

    async def enqueue() -> object:
        return await ask(store, "c", request())

    acts: dict[str, Callable[[], Awaitable[object]]] = {
        "enqueue": enqueue,
        "cancel": lambda: store.end("b", None, now_ms=NOW),
        "release": lambda: store.end("a", token, now_ms=NOW),
        "wake": store.wake,
    }
    await acts[what]()
    assert (await store.inputs(after=last, block_ms=0)).woken


async def test_who_has_read_further_than_the_stream_ever_came_is_given_all_of_it(store: Store) -> None:
    """The store is an older copy, and its clock lies behind what it had given out."""
    await store.commit(Commit(commands=(order(1), order(2))), now_ms=NOW)
    last = (await store.outbox("agent:main", after="0", block_ms=0))[-1].id
    ms, _, n = last.partition("-")
    again = await store.outbox("agent:main", after=f"{ms}-{int(n) + 3}", block_ms=20)
    assert [stored.command.n for stored in again] == [1, 2]
    assert await store.outbox("agent:main", after=last, block_ms=20) == ()


async def test_a_waiting_reader_is_answered_by_the_write_it_waits_for(store: Store) -> None:
    async with asyncio.TaskGroup() as group:
        inputs = group.create_task(store.inputs(after="0", block_ms=60_000))
        commands = group.create_task(store.outbox("agent:main", after="0", block_ms=60_000))
        events = group.create_task(store.events(after="0", limit=10, block_ms=60_000))
        await store.report(REPORT)
        await store.commit(Commit(commands=(order(1),)), now_ms=NOW)
        await ask(store, "a")
    assert inputs.result().reports == (REPORT,)
    assert [stored.command.n for stored in commands.result()] == [1]
    assert [event.subject for event in events.result()] == ["a"]


async def test_a_reader_with_nothing_to_read_returns_empty_in_its_time(store: Store) -> None:
    assert await store.outbox("agent:main", after="0", block_ms=20) == ()
    assert await store.events(after="$", limit=10, block_ms=20) == ()
    assert await store.inputs(after="0", block_ms=20) == Inputs("0", (), woken=False)


async def test_events_are_read_in_pages(store: Store) -> None:
    for number in range(5):
        await ask(store, f"a{number}")
    first = await store.events(after="0", limit=2, block_ms=0)
    rest = await store.events(after=first[-1].id, limit=10, block_ms=0)
    assert [event.subject for event in (*first, *rest)] == [f"a{number}" for number in range(5)]


async def test_a_reader_that_is_cancelled_leaves_the_x(able: Store) -> None:
    for _ in range(3):
        reading = asyncio.create_task(able.events(after="0", limit=9, block_ms=60_000))
        await able.position("a")
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
    await ask(able, "a")
    assert len(await able.events(after="0", limit=9, block_ms=60_000)) == 1
