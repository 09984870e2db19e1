"""The coordinator over the shipped store: what it commits when things happen, and what it does after a gap."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from swapper import coordinator as module
from swapper.coordinator import Coordinator
from swapper.core.commit import AlertKind
from swapper.core.orders import Command, Report
from swapper.core.types import LeaseRequest, LeaseState, World
from swapper.errors import StoreDown
from swapper.store import codec, embedded
from swapper.store.protocol import Inputs, LeaseFilter
from swapper.store.redis import RedisStore
from tests.support.play import spec, tenant

MED = "llama/med"


@dataclass
class Hands:
    """The agent of host main and the gateway g1: they answer every command with ok, and remember what came."""

    store: RedisStore
    done: list[Command] = field(default_factory=list[Command])
    answers: dict[str, dict[str, object]] = field(default_factory=dict[str, dict[str, object]])
    refuses: list[str] = field(default_factory=list[str])
    """Verbs, each refused once."""
    misses: list[str] = field(default_factory=list[str])
    """Verbs, each lost once on its way."""

    async def hello(self, mark: int = 0) -> None:
        await self.say("hello", {"mark": mark})

    async def observed(self, states: dict[str, str], free_mib: int, mark: tuple[int, int] = (0, 0)) -> None:
        cards: dict[str, object] = {"gpu0": {"total_mib": 24_576, "used_mib": 0, "free_mib": free_mib, "holders": []}}
        await self.say("observed", {"tenants": states, "cards": cards, "marks": {"gpu0": mark}})

    async def say(self, verb: str, data: dict[str, object]) -> None:
        await self.store.report(Report("agent:main", "", None, 0, 0, verb, "ok", data=data))

    async def work(self, executor: str) -> None:
        after = "0"
        while True:
            for stored in await self.store.outbox(executor, after=after, block_ms=1000):
                after = stored.id
                command = stored.command
                if command.verb in self.misses:
                    self.misses.remove(command.verb)
                    continue
                self.done.append(command)
                identity = (command.executor, command.card, command.tenant, command.token, command.n, command.verb)
                refused = command.verb in self.refuses
                if refused:
                    self.refuses.remove(command.verb)
                outcome = "refused" if refused else "ok"
                await self.store.report(Report(*identity, outcome, data=self.answers.get(command.verb, {})))


def serving(world: World) -> bool:
    card = world.cards.get("gpu0")
    return card is not None and card.residents == (MED,) and card.swap is None


@dataclass
class Rig:
    store: RedisStore
    coordinator: Coordinator
    hands: Hands

    async def until(self, wanted: Callable[[World], bool]) -> World:
        """Wait, from event to event, until the store's view is as wanted."""
        after = "0"
        async with asyncio.timeout(10):
            while not wanted(world := await self.store.read()):
                for event in await self.store.events(after=after, limit=100, block_ms=200):
                    after = event.id
        return world

    async def enqueue(self, lease_id: str) -> None:
        await self.store.enqueue(LeaseRequest("ann"), lease_id=lease_id, max_queue=10)

    async def states(self) -> dict[str, LeaseState]:
        page = await self.store.leases(LeaseFilter())
        return {lease.id: lease.state for lease in page.items}


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[RedisStore]:
    """The real embedded server: fakeredis swallows the cancellation of a blocked reader."""
    server = await embedded.start(tmp_path)
    made = await RedisStore.open(server.url)
    yield made
    await made.close()
    await embedded.stop(tmp_path)


@pytest.fixture
async def rig(store: RedisStore) -> AsyncIterator[Rig]:
    ids = count(1)
    made = Coordinator(store, spec(tenant("med", default=True)), lambda prefix: f"{prefix}_{next(ids)}")
    hands = Hands(store)
    await store.beat("g1", (), ttl_ms=60_000)
    work = (made.run(), hands.work("agent:main"), hands.work("gateway:g1"))
    tasks = [asyncio.create_task(one) for one in work]
    await made.listening.wait()
    yield Rig(store, made, hands)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_nothing_is_started_before_the_agent_of_the_card_said_hello(rig: Rig) -> None:
    await rig.enqueue("ls_a")
    await rig.store.wake()
    await rig.until(lambda world: "ls_a" in world.leases)
    assert rig.hands.done == []
    await rig.hands.hello()
    await rig.until(lambda world: world.leases["ls_a"].state is LeaseState.GRANTED)


async def test_a_default_is_loaded_and_a_lease_gets_the_card_and_gives_it_back(rig: Rig) -> None:
    await rig.hands.hello()
    await rig.until(serving)
    await rig.enqueue("ls_a")
    world = await rig.until(lambda world: world.leases["ls_a"].state is LeaseState.GRANTED)
    assert world.cards["gpu0"].phase == "hold"
    await rig.store.end("ls_a", world.leases["ls_a"].token)
    await rig.until(serving)
    assert world.gates[MED].open is False
    assert [c.verb for c in rig.hands.done if c.token == world.leases["ls_a"].token and c.executor == "agent:main"] == [
        "drain",
        "release",
        "vacate",
    ]


async def test_the_log_says_how_a_swap_ended_and_names_one_that_moved_nothing_by_what_is_on_record(rig: Rig) -> None:
    await rig.enqueue("ls_a")
    with capture_logs() as logs:
        await rig.hands.hello()
        world = await rig.until(lambda world: world.leases["ls_a"].state is LeaseState.GRANTED)
        await rig.store.end("ls_a", world.leases["ls_a"].token)
        await rig.until(serving)
    told = [line for line in logs if line["event"].endswith((" started", " ended"))]
    proof, swap = told[:2], told[2:]
    assert [(line["event"], line["lease"]) for line in proof] == [("proof started", "ls_a"), ("proof ended", "ls_a")]
    assert ("swap" in proof[0], proof[1]["outcome"]) == (False, "done")
    assert [line["event"] for line in swap] == ["swap started", "swap ended"]
    assert await rig.store.swap(swap[1]["swap"]) is not None
    assert await rig.store.swap("sw_1") is None, "a swap that moves nothing is on no record"


async def test_the_log_names_what_a_resident_is_looked_after_for_and_no_swap_that_is_on_no_record(rig: Rig) -> None:
    await rig.hands.hello()
    await rig.until(serving)
    rig.hands.answers["restore"] = {"slot": 0, "tokens": 900}
    with capture_logs() as logs:
        data: dict[str, object] = {"snapshot": "med.1.c2.kv", "tokens": 900, "talks": []}
        await rig.store.report(Report("gateway:g1", "gpu0", MED, 0, 0, "wanted", "ok", data=data))
        await rig.until(lambda _: "placed" in [command.verb for command in rig.hands.done])
    told = [line for line in logs if line["event"].startswith(("tending", "swap"))]
    assert [line["event"] for line in told] == ["tending started", "tending ended"]
    assert [(line["cause"], "swap" in line) for line in told] == 2 * [(f"conversation of {MED}", False)]


async def test_a_mark_above_the_counter_raises_it_before_anything_is_granted(rig: Rig) -> None:
    mark = (await rig.store.read()).next_token + 5_000_000
    await rig.hands.hello(mark)
    await rig.enqueue("ls_a")
    world = await rig.until(lambda world: world.leases["ls_a"].state is LeaseState.GRANTED)
    assert (world.leases["ls_a"].token or 0) > mark


@pytest.mark.parametrize("verb", ["vacate", "open"])
async def test_what_an_executor_refuses_though_it_is_awaited_goes_out_again_under_a_higher_token(
    rig: Rig, verb: str
) -> None:
    """It knows orders of ours that a rolled-back store has lost, also of the same token."""
    rig.hands.refuses.append(verb)
    await rig.hands.hello()
    await rig.until(serving)
    first, second = (order for order in rig.hands.done if order.verb == verb)
    assert second.token > first.token


@pytest.mark.parametrize("verb", ["hello", "observed"])
async def test_a_mark_above_the_counter_is_a_rollback_and_said_once_for_each_card(rig: Rig, verb: str) -> None:
    """Also where the agent is known already, and its new hello came while the coordinator heard nothing."""
    await rig.hands.hello()
    await rig.until(serving)
    mark = (await rig.store.read()).next_token + 5_000_000
    await rig.hands.say(verb, {"mark": mark})
    await rig.hands.say(verb, {"mark": mark})
    await rig.enqueue("ls_a")
    await rig.until(lambda world: world.leases["ls_a"].state is LeaseState.GRANTED)
    said = [event for event in await rig.store.events(after="0", limit=500, block_ms=0) if event.type == "alert"]
    assert [(event.subject, str(mark) in event.data) for event in said] == [("gpu0", True)]


async def test_a_token_of_another_coordinator_that_our_view_has_not_seen_is_no_rollback(rig: Rig) -> None:
    await rig.hands.hello()
    world = await rig.until(serving)
    theirs = world.next_token
    await rig.store.raise_token(theirs)  # wakes nobody, as a commit of theirs might not have yet
    await rig.hands.say("observed", {"mark": theirs})
    await rig.enqueue("ls_a")
    await rig.until(lambda world: world.leases["ls_a"].state is LeaseState.GRANTED)
    assert "alert" not in {event.type for event in await rig.store.events(after="0", limit=500, block_ms=0)}


async def test_a_store_that_returns_with_a_lower_counter_was_put_back_and_it_is_said_before_anything_is_decided(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.hands.hello()
    ours = (await rig.until(serving)).token
    monkeypatch.setattr(module, "BACKOFF_S", 0.01)
    read, inputs, outage = rig.store.read, rig.store.inputs, [StoreDown("killed")]

    async def put_back(*, now_ms: int | None = None) -> World:
        return replace(await read(now_ms=now_ms), token=5)

    async def down_once(*, after: str, block_ms: int) -> Inputs:
        if outage:
            monkeypatch.setattr(rig.store, "read", put_back)
            raise outage.pop()
        return await inputs(after=after, block_ms=block_ms)

    monkeypatch.setattr(rig.store, "inputs", down_once)
    seen = (await rig.store.events(after="0", limit=500, block_ms=0))[-1].id
    await rig.store.wake()
    async with asyncio.timeout(10):
        first, *_ = await rig.store.events(after=seen, limit=1, block_ms=5_000)
    assert (first.type, f"token {ours} was given out" in first.data) == ("alert", True)


async def test_what_was_seen_before_the_last_command_was_carried_out_is_not_believed(rig: Rig) -> None:
    await rig.hands.hello()
    world = await rig.until(serving)
    last = [order for order in rig.hands.done if order.executor == "agent:main"][-1]
    await rig.hands.observed({MED: "unloaded"}, 24_576, mark=(last.token, last.n - 1))
    await rig.enqueue("ls_a")
    await rig.until(lambda world: world.leases["ls_a"].state is LeaseState.GRANTED)
    assert world.cards["gpu0"].residents == (MED,)
    causes = [swap.cause for swap in await rig.store.swaps(limit=10)]
    assert causes == ["lease ls_a", "recovery"], "no second recovery"


async def test_a_resident_seen_gone_after_the_swap_is_brought_back(rig: Rig) -> None:
    await rig.hands.hello()
    await rig.until(serving)
    loads = len([c for c in rig.hands.done if c.verb == "load"])
    last = [order for order in rig.hands.done if order.executor == "agent:main"][-1]
    await rig.hands.observed({MED: "failed"}, 24_576, mark=(last.token, last.n))
    await rig.until(lambda world: len([c for c in rig.hands.done if c.verb == "load"]) > loads)


async def test_while_the_store_is_down_nothing_is_decided_and_then_it_goes_on(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.hands.hello()
    await rig.until(serving)
    monkeypatch.setattr(module, "BACKOFF_S", 0.01)
    failures = count()
    inputs = rig.store.inputs

    async def down(*, after: str, block_ms: int) -> Inputs:
        if next(failures) < 3:
            raise StoreDown("refused")
        return await inputs(after=after, block_ms=block_ms)

    monkeypatch.setattr(rig.store, "inputs", down)
    await rig.store.wake()
    await rig.enqueue("ls_a")
    await rig.hands.hello()
    await rig.until(lambda world: "ls_a" in world.leases and world.leases["ls_a"].state is LeaseState.GRANTED)
    assert next(failures) > 3


async def test_what_an_executor_missed_is_sent_again_after_a_while(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REMIND_MS", 200)
    rig.hands.misses = ["load"]
    await rig.hands.hello()
    await rig.until(serving)
    assert [c.verb for c in rig.hands.done].count("load") == 1


async def test_a_server_that_every_report_says_is_not_started_is_told_of_once_until_it_is(rig: Rig) -> None:
    await rig.hands.hello()
    for told in ({"llama": "no such file"}, {"llama": "no such file"}, {"llama": "no such file"}, {}, {}):
        await rig.hands.say("observed", {"troubles": told})
    await rig.enqueue("ls_a")
    await rig.until(lambda world: world.leases["ls_a"].state is LeaseState.GRANTED)
    events = await rig.store.events(after="0", limit=1000, block_ms=0)
    said = [codec.alert_of(event) for event in events if event.type == "alert"]
    assert [(one.kind, one.data["tenant"], one.over) for one in said] == [
        (AlertKind.NOT_STARTED, "llama", False),
        (AlertKind.NOT_STARTED, "llama", True),
    ]
    assert rig.coordinator.seen.why_not_started() == {}
