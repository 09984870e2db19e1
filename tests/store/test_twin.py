"""The store in memory and the one on a real server, side by side: the same calls, the same answers, the same log.

Whatever differs is a bug of one of them.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import ClassVar, TypeVar

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from swapper.core.commit import Alert, Commit, LeaseChange
from swapper.core.conversations import Conversation, ProofResult
from swapper.core.errand import Errand, Verb
from swapper.core.orders import Command, Report, answer_to
from swapper.core.types import (
    ACTIVE,
    Card,
    Demand,
    Failure,
    Gate,
    Hold,
    LeaseRequest,
    LeaseState,
    Step,
    Swap,
    WorkClass,
)
from swapper.store.embedded import Embedded
from swapper.store.memory import MemoryStore
from swapper.store.protocol import Idempotency, LeaseFilter, Store
from swapper.store.redis import RedisStore
from tests.store.acts import NOW

T = TypeVar("T")
TTL, HOLD, DAY = 30_000, 100_000, 86_400_000
LEASES, CARDS, OWNERS = ("a", "b/1", "c", "d", "e"), ("gpu0", "gpu1"), ("ann", "a:n/ü")
KEYS = (Idempotency("k", "one"), Idempotency("k", "two"), Idempotency("", "one"), Idempotency("k:/", "one"))
GATES = ((10, True), (10, False), (9, False), (11, True))
SEEN = [*LEASES, "nobody"]
EXECUTORS, TENANTS, GATEWAYS = ("agent:main", "gateway:g1"), ("llama/med", "llama/ü"), ("g1", "g2", "g3")
WAYS: Mapping[LeaseState, tuple[LeaseState | None, ...]] = {
    **dict.fromkeys(LeaseState, (None, LeaseState.QUEUED)),
    LeaseState.QUEUED: (LeaseState.GRANTED, LeaseState.PREPARING, LeaseState.EXPIRED, LeaseState.REVOKED),
    LeaseState.PREPARING: (LeaseState.GRANTED, LeaseState.QUEUED, LeaseState.FAILED, LeaseState.RELEASED),
    LeaseState.GRANTED: (None, LeaseState.GRANTED, LeaseState.EXPIRED, LeaseState.REVOKED, LeaseState.QUEUED),
}
"""From a state: where a step of the test tries to take the lease, also where its life does not lead."""
NASTY = ("", 'a "word" / ünder\\way', "\x00\x1f\x7f\b\f\n\r\t", "\u2028😀é")
DOCUMENTS: tuple[Mapping[str, object], ...] = (
    {},
    {"a/b": (1, 2.5, None), "": {"n": 2**60 + 1, "deep": {"x": (True,)}}},
    dict.fromkeys(NASTY, -1e-9),
)


def maybe(strategy: st.SearchStrategy[T]) -> st.SearchStrategy[T | None]:
    return st.none() | strategy


def some(*values: T) -> st.SearchStrategy[tuple[T, ...]]:
    """None of the values, one, or all."""
    return st.sampled_from([(), *((value,) for value in values), values])


lease_ids = st.sampled_from([*LEASES[:2], *LEASES, "nobody"])
words = st.sampled_from(NASTY) | st.text(max_size=3)
offsets = st.sampled_from([0, -1, 1, 1_000, TTL, HOLD])
talk = Conversation(TENANTS[0], 1, NASTY[1], 2**40, 2**50, saved=True, result=ProofResult.WARM)
orders = [
    Command(
        EXECUTORS[number % 2], CARDS[0], TENANTS[0] if number else None, 2**62 - number, number, Step.SAVE, document
    )
    for number, document in enumerate(DOCUMENTS)
]
swap = Swap("sw/1", CARDS[0], NASTY[1], 2**53 + 1, TENANTS, (), Step.SAVE, NOW, NOW, conversations=(talk,))
swaps = (swap, replace(swap, id="sw2", card=CARDS[1], pending=tuple(orders), outcome="done", reason=NASTY[2]))
held = Card(CARDS[0], holds=(Hold("a", NASTY[1], 4096, 7), Hold("b/1", "", None, None, granted=True)), swap=swap)
cards = (held, Card(CARDS[1], residents=TENANTS, failed={TENANTS[1]: Failure(NASTY[2], 1, NOW)}))
changes = st.builds(
    LeaseChange,
    id=lease_ids,
    expect=st.just(ACTIVE),
    reason=maybe(words),
    token=maybe(st.just(2**53 + 1)),
    card=maybe(st.sampled_from(CARDS)),
    swap_id=maybe(words),
    explain=maybe(words),
    revoke_ms=maybe(offsets.map(lambda ms: NOW + ms)),
)
commits = st.builds(
    Commit,
    cards=st.sampled_from([cards[:1], (), cards[1:], cards, (replace(held, holds=(Hold("nobody", "", None, None),)),)]),
    leases=st.lists(changes, max_size=1).map(tuple),
    swaps=some(*swaps),
    gates=st.sampled_from([{}, *({TENANTS[0]: Gate(epoch, is_open)} for epoch, is_open in GATES)]),
    commands=some(*orders),
    conversations=some(talk),
    over=st.sampled_from([(), (), ("e0",), ("e1", "e2")]),
    alerts=some(*(Alert(CARDS[0], NASTY[1], document) for document in DOCUMENTS)),
)
requests = st.builds(
    LeaseRequest,
    owner=st.sampled_from(OWNERS),
    card=st.sampled_from(["gpu0", "gpu1", None, ""]),
    label=st.sampled_from(NASTY),
    klass=st.sampled_from(WorkClass),
    ttl_ms=st.sampled_from([TTL, 1_000]),
    max_hold_ms=st.sampled_from([HOLD, 1_000]),
)
demands = some(*(Demand("g1", name, WorkClass.NORMAL, number, 0, NOW) for number, name in enumerate(TENANTS)))
reports = some(*(answer_to(order, NASTY[1], NASTY[2], order.args, 1.5) for order in orders))


async def outcome(call: Awaitable[object]) -> object:
    """What a call gives, a rule broken included."""
    try:
        return await call
    except ValueError as error:
        return f"ValueError: {error}"


async def view(store: Store, now_ms: int) -> tuple[object, ...]:
    """What a decision sees, with the orders that are given too, and every lease."""
    world = await store.read(now_ms=now_ms)
    return world, list(world.leases), await store.leases(LeaseFilter())


async def rest(store: Store) -> tuple[object, ...]:
    """What else can be asked."""
    orders = [await store.outbox(name, after="0", block_ms=0) for name in EXECUTORS]
    return (
        [await store.position(name) for name in SEEN],
        [[stored.command for stored in some] for some in orders],
        await store.swaps(limit=10),
        await store.swap("sw2"),
    )


class Twins(RuleBasedStateMachine):
    url: ClassVar[str]
    numbers = itertools.count()

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.now = NOW
        self.real = self.runner.run(RedisStore.open(self.url, prefix=f"{{w{next(self.numbers)}}}"))
        self.memory = MemoryStore(lambda: NOW)
        self.read: dict[str, tuple[str, str]] = dict.fromkeys(("memory", "real"), ("0", "0"))

    def teardown(self) -> None:
        self.both(rest)
        self.runner.run(self.real.close())
        self.runner.close()

    def both(self, call: Callable[[Store], Awaitable[object]]) -> None:
        real = self.runner.run(outcome(call(self.real)))
        memory = self.runner.run(outcome(call(self.memory)))
        assert memory == real

    def token_of(self, lease_id: str) -> int:
        lease = self.runner.run(self.memory.lease(lease_id))
        return 1 if lease is None or lease.token is None else lease.token

    @initialize(wanted=st.tuples(requests, requests, requests))
    def begin(self, wanted: tuple[LeaseRequest, ...]) -> None:
        for lease_id, request in zip(LEASES, wanted, strict=False):
            self.enqueue(request, lease_id, None, None, 10, KEYS[0])

    @rule(ms=st.sampled_from([1, 999, 1_000, TTL - 1, TTL, HOLD, DAY, -500]))
    def pass_time(self, ms: int) -> None:
        self.now += ms

    @rule(
        wanted=requests,
        lease_id=st.sampled_from(LEASES),
        start=maybe(offsets),
        end=maybe(offsets),
        max_queue=st.sampled_from([1, 2, 10]),
        key=st.sampled_from([*KEYS, None]),
    )
    def enqueue(
        self,
        wanted: LeaseRequest,
        lease_id: str,
        start: int | None,
        end: int | None,
        max_queue: int,
        key: Idempotency | None,
    ) -> None:
        times = [None if ms is None else self.now + ms for ms in (start, end)]
        request = replace(wanted, not_before_ms=times[0], deadline_ms=times[1])
        now = self.now
        self.both(
            lambda store: store.enqueue(request, lease_id=lease_id, max_queue=max_queue, idempotency=key, now_ms=now)
        )

    @rule(
        lease_id=lease_ids,
        other=st.sampled_from([0, 0, 1]),
        progress=maybe(st.sampled_from([0, 0.1, 1.0])),
        pid=maybe(st.sampled_from([4711, 4712])),
    )
    def heartbeat(self, lease_id: str, other: int, progress: float | None, pid: int | None) -> None:
        token = self.token_of(lease_id) + other
        lease = self.runner.run(self.memory.lease(lease_id))
        named = None if lease is None or pid is None else replace(lease.request, holder_pid=pid)
        now = self.now
        self.both(lambda store: store.heartbeat(lease_id, token, progress=progress, request=named, now_ms=now))

    @rule(lease_id=lease_ids, other=st.sampled_from([None, 0, 1]), really=st.sampled_from([False, False, True]))
    def end(self, lease_id: str, other: int | None, really: bool) -> None:
        """Not `really`: only where it is refused, so that some leases live long."""
        token = None if other is None else self.token_of(lease_id) + other
        lease = self.runner.run(self.memory.lease(lease_id))
        if really or lease is None or (lease.token is not None and lease.token != token):
            self.both(lambda store: store.end(lease_id, token, now_ms=self.now))

    @rule(commit=commits, right=st.booleans() | st.just(True), tokens=st.sampled_from([(), (0,), (1,), (1, 2), (2, 1)]))
    def commit(self, commit: Commit, right: bool, tokens: tuple[int, ...]) -> None:
        """`right`: the versions are those read."""
        world = self.runner.run(self.memory.read(now_ms=self.now))
        versions = {name: card.version for name, card in world.cards.items()}
        written = tuple(replace(card, version=versions.get(card.name, 0) + (not right)) for card in commit.cards)
        given = replace(commit, cards=written, tokens=tuple(world.token + token for token in tokens))
        self.both(lambda store: store.commit(given, now_ms=self.now))

    @rule(
        step_ms=st.sampled_from([None, 0, HOLD, -HOLD, DAY]),
        members_ms=st.sampled_from([None, 0, 1_000]),
        off_ms=st.sampled_from([0, 0, 1, -1, HOLD]),
        right=st.booleans() | st.just(True),
    )
    def clock(self, step_ms: int | None, members_ms: int | None, off_ms: int, right: bool) -> None:
        """A step is told, as the clock has it or not; members are renewed. `right`: on the steps that were read."""
        self.now += step_ms or 0
        known = self.runner.run(self.memory.read(now_ms=self.now)).stepped_ms + (not right)
        stepped = None if step_ms is None else (known, known + step_ms)
        between = (self.now + off_ms, self.now + off_ms + 1)
        commit = Commit(between_ms=between, stepped=stepped, members_ms=members_ms)
        self.both(lambda store: store.commit(commit, now_ms=self.now))

    @rule(
        lease_id=st.sampled_from(LEASES), way=st.integers(0, 5), ms=st.sampled_from([0, 1, 999]), extend=maybe(offsets)
    )
    def step(self, lease_id: str, way: int, ms: int, extend: int | None) -> None:
        """One lease goes on as a decision has it: from where it is, mostly a way its life has, a grant with a token."""
        self.now += ms
        lease = self.runner.run(self.memory.lease(lease_id))
        token = self.runner.run(self.memory.read(now_ms=self.now)).next_token
        before = LeaseState.QUEUED if lease is None else lease.state
        after = WAYS[before][way % len(WAYS[before])]
        grant = after is LeaseState.GRANTED
        change = LeaseChange(
            lease_id,
            frozenset({before}),
            after,
            token=token if grant else None,
            card="gpu0" if after is LeaseState.PREPARING else None,
            lives_ms=extend,
            shift_ms=None if extend is None or way % 2 else HOLD - 3 * extend,
            revoke_ms=None if after is not None or extend is None else self.now + extend,
            only_if_expired=after is LeaseState.EXPIRED and ms > 0,
        )
        commit = Commit(leases=(change,), tokens=(token,) if grant else ())
        self.both(lambda store: store.commit(commit, now_ms=self.now))
        self.heartbeat(lease_id, 0, None, 4711 if way % 2 else None)

    @rule(
        gateway=st.sampled_from(GATEWAYS),
        demand=maybe(demands),
        ttl_ms=st.sampled_from([0, 1_000, TTL]),
    )
    def member(self, gateway: str, demand: tuple[Demand, ...] | None, ttl_ms: int) -> None:
        """A gateway beats, or leaves."""
        if demand is None:
            self.both(lambda store: store.leave(gateway))
            return
        for _ in range(2):  # the second changes nothing, and so wakes nobody
            self.both(lambda store: store.beat(gateway, demand, ttl_ms=ttl_ms, now_ms=self.now))
            self.both(self.news)

    @rule(
        executor=st.sampled_from(EXECUTORS),
        owner=st.sampled_from(OWNERS),
        ttl_ms=st.sampled_from([None, 1_000, TTL]),
    )
    def claim(self, executor: str, owner: str, ttl_ms: int | None) -> None:
        """Somebody would be the executor, or is it no more."""
        if ttl_ms is None:
            self.both(lambda store: store.unclaim(executor, owner))
        else:
            self.both(lambda store: store.claim(executor, owner, who=f"who/{owner}", ttl_ms=ttl_ms, now_ms=self.now))

    @rule(executor=st.sampled_from(EXECUTORS), owner=st.sampled_from(OWNERS), text=words)
    def note(self, executor: str, owner: str, text: str) -> None:
        """An owner notes how far it has come."""
        self.both(lambda store: store.note(executor, owner, text))
        self.both(lambda store: store.noted(executor))

    @rule(
        number=st.integers(0, 4),
        verb=st.sampled_from(Verb),
        tenants=some(*TENANTS),
        owner=words,
        drain_ms=maybe(offsets),
        force=st.booleans(),
        most=st.sampled_from([1, 10]),
    )
    def by_hand(
        self,
        number: int,
        verb: Verb,
        tenants: tuple[str, ...],
        owner: str,
        drain_ms: int | None,
        force: bool,
        most: int,
    ) -> None:
        """Somebody asks for something by hand."""
        errand = Errand(f"e{number}", CARDS[0], verb, tenants, owner, drain_ms, force)
        self.both(lambda store: store.errand(errand, max_errands=most, now_ms=self.now))

    @rule(said=reports, mark=maybe(st.sampled_from([0, 2**53, 2**53 + 1]) | st.integers(0, 2**62)))
    def tell(self, said: tuple[Report, ...], mark: int | None) -> None:
        """An executor reports, or knows a higher token."""
        if mark is None:
            self.both(lambda store: store.report(*said))
        else:
            self.both(lambda store: store.raise_token(mark))

    @rule(
        state=maybe(st.sampled_from(LeaseState)),
        card=st.sampled_from([None, "", *CARDS]),
        owner=st.sampled_from([None, "", *OWNERS]),
        limit=st.integers(0, 3),
    )
    def list(self, state: LeaseState | None, card: str | None, owner: str | None, limit: int) -> None:
        async def pages(store: Store) -> object:
            found = [await store.leases(LeaseFilter(state, card, owner, limit))]
            while (cursor := found[-1].next_cursor) is not None:
                found.append(await store.leases(LeaseFilter(state, card, owner, limit, cursor)))
            return found

        self.both(pages)
        self.both(rest)
        self.both(lambda store: store.swaps(limit=limit, card=card))

    @invariant()
    def they_agree(self) -> None:
        self.both(lambda store: view(store, self.now))
        self.both(self.news)

    async def news(self, store: Store) -> object:
        """What was logged and said since the last time, without the ids: those are the store's own."""
        name = "real" if store is self.real else "memory"
        after, last = self.read[name]
        events = await store.events(after=after, limit=1_000, block_ms=0)
        inputs = await store.inputs(after=last, block_ms=0)
        self.read[name] = events[-1].id if events else after, inputs.last
        assert sorted(events, key=lambda event: [int(part) for part in event.id.split("-")]) == list(events)
        return (
            [(event.type, event.subject, event.version, event.data) for event in events],
            inputs.reports,
            inputs.woken,
        )


def test_the_store_in_memory_and_the_real_one_are_told_apart_by_nothing(server: Embedded) -> None:
    class Here(Twins):
        url = server.url

    run_state_machine_as_test(
        Here,
        settings=settings(
            max_examples=150,
            stateful_step_count=25,
            deadline=None,
            phases=[Phase.reuse, Phase.generate],  # to shrink a failure takes longer than a test may take
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
        ),
    )
