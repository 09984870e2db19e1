"""The store in memory by itself: how it fails when told to, what it keeps, and that it runs on any clock."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import count
from typing import cast

import pytest

from swapper.core.commit import Alert, Commit, Committed, LeaseChange
from swapper.core.types import Card, Gate, LeaseState
from swapper.errors import StoreDown
from swapper.store.memory import MemoryStore
from swapper.store.protocol import LeaseFilter, QueueFull, Store
from tests.store.acts import NOW, QUEUED, ask, card_of, draw, grant, request, state
from tests.store.test_commit import ORDER, SWAP
from tests.store.test_streams import REPORT

ONCE: dict[str, Callable[[Store], Awaitable[object]]] = {
    "enqueue": lambda store: ask(store, "a"),
    "commit": lambda store: store.commit(Commit(cards=(Card("gpu0"),)), now_ms=NOW),
    "report": lambda store: store.report(REPORT),
    "beat": lambda store: store.beat("g1", (), ttl_ms=1_000, now_ms=NOW),
}


class Time:
    """A clock that stands until it is moved."""

    def __init__(self) -> None:
        self.ms = NOW

    def __call__(self) -> int:
        return self.ms


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def twin(time: Time) -> MemoryStore:
    return MemoryStore(time)


async def everything(store: Store) -> tuple[object, ...]:
    return (
        await store.read(now_ms=NOW),
        await store.leases(LeaseFilter()),
        await store.events(after="0", limit=100, block_ms=0),
        await store.inputs(after="0", block_ms=0),
        await store.outbox(ORDER.executor, after="0", block_ms=0),
    )


@pytest.mark.parametrize("name", ONCE)
async def test_a_call_that_fails_before_it_acts_has_written_nothing(twin: MemoryStore, name: str) -> None:
    before = await everything(twin)
    twin.fail(before=1)
    with pytest.raises(StoreDown, match="not reachable"):
        await ONCE[name](twin)
    assert await everything(twin) == before
    await ONCE[name](twin)


@pytest.mark.parametrize("name", ONCE)
async def test_a_call_whose_answer_is_lost_has_written_all(twin: MemoryStore, name: str) -> None:
    other = MemoryStore(Time())
    await ONCE[name](other)
    twin.fail(after=1)
    with pytest.raises(StoreDown, match="did not answer"):
        await ONCE[name](twin)
    assert await everything(twin) == await everything(other)


async def test_only_the_calls_named_fail_and_only_so_many(twin: MemoryStore) -> None:
    twin.fail(before=1, after=1, of=["wake"])
    await twin.report(REPORT)
    for _ in range(2):
        with pytest.raises(StoreDown):
            await twin.wake()
    await twin.wake()
    inputs = await twin.inputs(after="0", block_ms=0)
    assert (inputs.reports, inputs.woken) == ((REPORT,), True)
    assert len(await twin.events(after="0", limit=9, block_ms=0)) == 0


async def test_a_store_that_is_down_answers_nobody_and_keeps_everything(twin: MemoryStore) -> None:
    await ask(twin, "a")
    before = await everything(twin)
    waiting = asyncio.create_task(twin.outbox("agent:main", after="0", block_ms=60_000))
    await until(lambda: twin.readers == 1)
    twin.down()
    for call in (waiting, twin.read(), twin.events(after="0", limit=9, block_ms=60_000), ask(twin, "b")):
        with pytest.raises(StoreDown):
            await call
    twin.up()
    assert await everything(twin) == before


async def test_going_down_while_a_call_is_under_way_loses_the_answer_not_the_write(twin: MemoryStore) -> None:
    asking = asyncio.create_task(ask(twin, "a"))
    await until(lambda: asking.done() or bool(twin.copy().library.leases.queue()))
    twin.down()
    twin.up()
    with pytest.raises(StoreDown):
        await asking
    assert await state(twin, "a") is LeaseState.QUEUED


async def test_a_reader_is_cut_off_even_if_the_store_is_back_before_it_looks(twin: MemoryStore) -> None:
    waiting = asyncio.create_task(twin.inputs(after="0", block_ms=60_000))
    await until(lambda: twin.readers == 1)
    twin.down()
    twin.up()
    with pytest.raises(StoreDown):
        await waiting
    assert twin.readers == 0


async def test_a_rolled_back_store_is_what_it_was_then_ids_included(twin: MemoryStore, time: Time) -> None:
    await ask(twin, "a")
    token = await grant(twin, "a")
    await twin.commit(Commit(commands=(ORDER,), swaps=(SWAP,)), now_ms=NOW)
    then, at = await everything(twin), twin.copy()
    await twin.heartbeat("a", token, now_ms=NOW + 5)
    await twin.end("a", token, now_ms=NOW + 5)
    await ask(twin, "b")
    await twin.beat("g1", (), ttl_ms=9, now_ms=NOW)
    await twin.commit(Commit(commands=(ORDER,), swaps=(replace(SWAP, id="sw2"),), cards=(Card("gpu1"),)), now_ms=NOW)
    lost = (await twin.events(after="0", limit=100, block_ms=0))[-1].id

    for _ in range(2):  # a snapshot may be used again
        waiting = asyncio.create_task(twin.events(after=lost, limit=9, block_ms=60_000))
        await until(lambda: twin.readers == 1)
        twin.rollback(at)
        with pytest.raises(StoreDown):
            await waiting
        assert await everything(twin) == then
        assert await draw(twin) == token + 1
        assert (await ask(twin, "c")).seq == 2

    time.ms += 1  # the clock went on: who had read further than the copy misses nothing that comes now
    await ask(twin, "d")
    assert [event.subject for event in await twin.events(after=lost, limit=9, block_ms=0)] == ["d"]


async def test_a_reader_that_is_cancelled_leaves_nothing_behind(twin: MemoryStore) -> None:
    reading = [asyncio.create_task(twin.events(after="0", limit=9, block_ms=60_000)) for _ in range(3)]
    await until(lambda: twin.readers == 3)
    reading[1].cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading[1]
    assert twin.readers == 2
    await ask(twin, "a")
    assert await reading[0] == await reading[2]
    assert twin.readers == 0


async def test_what_is_written_wakes_only_who_waits_for_it(twin: MemoryStore) -> None:
    commands = asyncio.create_task(twin.outbox("agent:main", after="0", block_ms=60_000))
    inputs = asyncio.create_task(twin.inputs(after="0", block_ms=60_000))
    await until(lambda: twin.readers == 2)
    await twin.wake()
    assert (await inputs).woken
    assert twin.readers == 1
    commands.cancel()


def test_on_a_virtual_clock_waiting_takes_no_time_and_the_same_calls_give_the_same_ids() -> None:
    def run() -> tuple[object, ...]:
        with asyncio.Runner(loop_factory=Virtual) as runner:
            return runner.run(story())

    async def story() -> tuple[object, ...]:
        loop = asyncio.get_running_loop()
        store = MemoryStore(lambda: NOW + int(loop.time() * 1000), pause=lambda: asyncio.sleep(0.001))
        begun = loop.time()
        assert await store.events(after="0", limit=9, block_ms=3_600_000) == ()
        assert 3_600 <= loop.time() - begun < 3_601
        lease = await ask(store, "a", now_ms=None)
        assert lease.created_ms >= NOW + 3_600_000
        await asyncio.gather(*(ask(store, f"b{number}", now_ms=None) for number in range(5)))
        return (*await everything(store), loop.time())

    assert run() == run()


async def test_nobody_can_change_what_another_reads(twin: MemoryStore) -> None:
    args: dict[str, object] = {"slots": [1]}
    gates = {"m": Gate(1, True)}
    await twin.commit(Commit(commands=(replace(ORDER, args=args),), cards=(Card("gpu0"),), gates=gates), now_ms=NOW)
    first = await everything(twin)
    args["slots"] = "spoilt"
    gates.clear()
    for handed_out in ((await twin.read(now_ms=NOW)).cards, (await twin.read(now_ms=NOW)).gates):
        assert isinstance(handed_out, dict)
        handed_out.clear()
    (order,) = await twin.outbox(ORDER.executor, after="0", block_ms=0)
    assert isinstance(order.command.args, dict)
    order.command.args.clear()
    failed = (await card_of(twin)).failed
    assert isinstance(failed, dict)
    failed["x"] = "spoilt"  # pyright: ignore[reportArgumentType]
    assert await everything(twin) == first


async def test_a_commit_with_a_mistake_in_it_writes_nothing(twin: MemoryStore) -> None:
    await ask(twin, "a")
    before = await everything(twin)
    wrong = Commit(cards=(Card("gpu0"),), leases=(LeaseChange("a", QUEUED, LeaseState.RELEASED),), tokens=(2**62,))
    with pytest.raises(ValueError, match="cannot go from queued to released"):
        await twin.commit(wrong, now_ms=NOW)
    assert await everything(twin) == before


async def test_ten_thousand_ended_leases_are_kept_and_those_that_ended_first_go_first(twin: MemoryStore) -> None:
    for number in range(10_002):
        await ask(twin, f"a{number}")
        await twin.end(f"a{number}", None, now_ms=NOW + (number if number else 20_000))
    assert [await twin.lease(f"a{number}") is not None for number in range(4)] == [True, False, False, True]
    assert len(await twin.events(after="0", limit=0, block_ms=0)) == 10_000
    assert [lease.id for lease in (await twin.leases(LeaseFilter(limit=2))).items] == ["a10001", "a10000"]


async def test_a_thousand_swaps_and_a_thousand_commands_are_kept(twin: MemoryStore) -> None:
    orders = tuple(replace(ORDER, n=number) for number in range(1_500))
    await twin.commit(Commit(commands=orders), now_ms=NOW)
    for number in range(1_001):
        assert await twin.commit(Commit(swaps=(replace(SWAP, id=f"sw{number}"),)), now_ms=NOW) == Committed()
    assert (await twin.outbox(ORDER.executor, after="0", block_ms=0))[0].command.n == 500
    assert await twin.swap("sw0") is None
    assert len(await twin.swaps(limit=2_000)) == 1_000


async def test_an_outbox_is_gone_a_week_after_its_last_command(twin: MemoryStore, time: Time) -> None:
    await twin.commit(Commit(commands=(ORDER,)), now_ms=NOW)
    time.ms += 7 * 86_400_000 - 1
    assert len(await twin.outbox(ORDER.executor, after="0", block_ms=0)) == 1
    time.ms += 1
    assert await twin.outbox(ORDER.executor, after="0", block_ms=0) == ()


async def test_ids_rise_also_when_the_clock_goes_back(twin: MemoryStore, time: Time) -> None:
    for ms in (NOW, NOW, NOW + 5, NOW - 100, NOW + 6):
        time.ms = ms
        await twin.commit(Commit(alerts=(Alert("gpu0", "x"),)), now_ms=NOW)
    ids = [event.id for event in await twin.events(after="0", limit=9, block_ms=0)]
    assert ids == [f"{NOW}-0", f"{NOW}-1", f"{NOW + 5}-0", f"{NOW + 5}-1", f"{NOW + 6}-0"]


async def test_the_queue_is_full_for_the_next_one_at_once(twin: MemoryStore) -> None:
    numbers = count()
    asked = (twin.enqueue(request(), lease_id=f"a{next(numbers)}", max_queue=1, now_ms=NOW) for _ in range(3))
    answers = await asyncio.gather(*asked)
    assert answers[1:] == [QueueFull(1), QueueFull(1)]


async def until(true: Callable[[], bool]) -> None:
    """Give way until it is so; everything here moves by giving way alone."""
    for _ in range(100):
        if true():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never became so")


class Virtual(asyncio.SelectorEventLoop):
    """Time jumps to the next timer when nothing else is to be done."""

    def __init__(self) -> None:
        super().__init__()
        self._ahead = 0.0
        selector = cast("selectors.BaseSelector", self._selector)  # pyright: ignore[reportAttributeAccessIssue]
        select = selector.select

        def jump(timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            self._ahead += timeout or 0.0
            return select(0)

        selector.select = jump

    def time(self) -> float:
        return self._ahead
