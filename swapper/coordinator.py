"""The coordinator: reads what happened, asks the core, commits what it decided. The only place that runs the machine.

Invariant: it keeps nothing that the store does not have, except what agents saw (which they say again), since when a
card is idle, and how its own clock stood to the store's. Every commit is made on a World read just before; a conflict
means somebody else moved, or the store's clock did, so it reads and decides again. It may be killed at any line:
commands travel in the commit that causes them, and `resume` sends what is pending again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import cast

import structlog

from swapper.core import abandoned, clock, machine, reuse, rollback, tend, turn, unused, watchdog
from swapper.core.apply import apply
from swapper.core.commit import Alert, AlertKind, Commit, Committed
from swapper.core.orders import Command, Report
from swapper.core.spec import Spec
from swapper.core.troubles import not_started
from swapper.core.turn import Seen, busy, card_of
from swapper.core.types import Card, Swap, World
from swapper.core.watchdog import Watch
from swapper.errors import StoreDown
from swapper.store.protocol import Inputs, Store

log = structlog.get_logger(__name__)

LOOK_MS = 1_000
GAP_MS = 2_500
"""Longer than this between two turns (we look every second) and our service had a gap: we were stopped or starved.

What is no gap must cost no holder its lease: the shortest ttl is 5 s, and a holder is silent for a third of it.
"""
REMIND_MS = 30_000
"""Executors answer a repeat from their record, and are silent about one that they are still at."""
RETRIES = 20
CONFLICT_S = 0.002
"""A pause before each further try, growing by this: whoever was faster gets done."""
BACKOFF_S = 0.5


class Coordinator:
    """Events in, decisions committed, commands out. `new_id` gives a fresh, time-sortable id for a prefix."""

    def __init__(self, store: Store, spec: Spec, new_id: Callable[[str], str]) -> None:
        self._store = store
        self._configured = self._spec = spec
        self._new_id = new_id
        self._after = "$"
        self._caught_up = False
        self._world: World | None = None
        self._looked: clock.Look | None = None
        self._turned_ms: int | None = None
        self._token = 0
        self._awaited: dict[str, tuple[int, tuple[Command, ...]]] = {}
        self.seen = Seen()
        self.on_learned: Callable[[Spec], None] = lambda _: None
        """Told what the core goes by from now on, once a probe told how much a card has, or what a tenant takes."""
        self.listening = asyncio.Event()
        """Set once reports are heard: an agent that says hello before is heard with its next observation."""

    @property
    def spec(self) -> Spec:
        """What the core goes by now."""
        return self._spec

    async def run(self) -> None:
        """Run until cancelled; while the store is down nothing is decided, and afterwards no lease has aged."""
        while True:
            try:
                if not self._caught_up:
                    await self._catch_up()
                await self._turn()
            except StoreDown as down:
                self._caught_up = False
                log.warning("store down, no swaps meanwhile", error=str(down))
                await asyncio.sleep(BACKOFF_S)

    async def _catch_up(self) -> None:
        """After a start or a gap: a store put back is told, leases get their grace, pending commands go out again."""
        self._world = None
        newest = (await self._store.inputs(after="$", block_ms=0)).last
        if self._after == "$" or _place(newest) < _place(
            self._after
        ):  # nothing was read yet, or the store was put back
            self._after = newest
        self.listening.set()
        await self._raise(self._token)
        await self._extend()
        for name in self._spec.cards:
            await self._decide(lambda world, name=name: machine.resume(world, self._spec, card_of(world, name)))
        self._caught_up = True
        await self._settle()

    async def _extend(self) -> None:
        """No lease ages while nobody could have heard its heartbeat."""
        await self._decide(lambda world: clock.moved(world, self._spec))
        self._turned_ms = _own_ms()

    async def _turn(self) -> None:
        """Wait for something to happen or to fall due, then bring every card to rest."""
        inputs = await self._store.inputs(after=self._after, block_ms=await self._patience())
        self._after = inputs.last
        self._age(inputs)
        await self._look()
        passed_ms = 0 if self._turned_ms is None else _own_ms() - self._turned_ms
        if passed_ms > GAP_MS:
            log.warning("a gap in our service; leases get their time back", seconds=passed_ms / 1000)
            await self._extend()
        self._turned_ms = _own_ms()
        answers: list[Report] = []
        for report in inputs.reports:
            if report.token and report.outcome != "refused":
                answers.append(report)
                continue
            if report.outcome == "refused":  # it sends again what is pending: nothing answered must be among that
                await self._settle(answers)
            await self._hear(report)
            if not self._caught_up:
                return  # given up: what was not taken is sent again, and answered again
        await self._settle(answers)
        await self._remind()

    async def _remind(self) -> None:
        """What nobody answers for long is sent again: an executor may have missed it (a store that was put back)."""
        for name, card in (await self._look()).cards.items():
            awaited = () if card.swap is None else card.swap.pending
            since_ms, before = self._awaited.get(name, (0, ()))
            if not awaited or awaited != before:
                self._awaited[name] = (_own_ms(), awaited)
            elif _own_ms() - since_ms >= REMIND_MS:
                self._awaited[name] = (_own_ms(), awaited)
                await self._decide(lambda world, name=name: machine.resume(world, self._spec, card_of(world, name)))

    async def _patience(self) -> int:
        world = await self._look()
        if world.next_due_ms is None:
            return LOOK_MS
        return min(max(world.next_due_ms - world.now_ms, 1), LOOK_MS)

    def _age(self, inputs: Inputs) -> None:
        """Reports alone change nothing but what their commits will: the view goes on with our own clock for a while.

        Everything else that changes the store wakes us, save heartbeats, and an expiry is checked by the store itself.
        """
        elapsed_ms = 0 if self._looked is None else _own_ms() - self._looked.after_ms
        if self._world is None or self._looked is None or inputs.woken or not inputs.reports or elapsed_ms > LOOK_MS:
            self._world = None
        else:
            self._world = replace(self._world, now_ms=max(self._world.now_ms, self._looked.store_ms + elapsed_ms))

    async def _look(self) -> World:
        """The store's view: what we commit is applied to it, and after a conflict it is read again.

        Nothing is decided on a clock that was stepped before the records have followed it.
        """
        while self._world is None:
            before_ms = _own_ms()
            world = await self._store.read()
            look = clock.Look(world.now_ms, world.stepped_ms, before_ms, _own_ms())
            step_ms = 0 if self._looked is None else clock.step_between(self._looked, look)
            if step_ms:
                await self._step(world, look, step_ms)
                continue
            followed_ms = 0 if self._looked is None else look.stepped_ms - self._looked.stepped_ms
            if followed_ms:
                self.seen.idle_since.update({card: ms + followed_ms for card, ms in self.seen.idle_since.items()})
                self.seen.used.update({tenant: ms + followed_ms for tenant, ms in self.seen.used.items()})
                self.seen.unwanted.update({card: ms + followed_ms for card, ms in self.seen.unwanted.items()})
                self.seen.watches.update({card: one.later(followed_ms) for card, one in self.seen.watches.items()})
            self._token = max(self._token, world.token)
            self._looked, self._world = look, world
        return self._world

    async def _step(self, world: World, look: clock.Look, step_ms: int) -> None:
        """The store's clock was stepped: its records follow, once, also where two coordinators saw it."""
        commit = clock.moved(world, self._spec, step_ms)
        assert commit is not None  # a step is told in any case
        answer = await self._store.commit(replace(commit, between_ms=clock.between(look, _own_ms())))
        if isinstance(answer, Committed):
            log.warning("the store's clock was stepped", seconds=step_ms / 1000)
        else:
            await asyncio.sleep(CONFLICT_S)

    async def _hear(self, report: Report) -> None:
        """Everything but the answers that a swap waits for."""
        match report.verb:
            case "hello":
                await self._meet(report.executor, cast("int", report.data.get("mark", 0)))
            case "observed":
                await self._observed(report)
            case "proof":
                await self._about_line(report, reuse.on_proof)
            case "recalled":
                await self._about_line(report, reuse.on_recalled)
            case "wanted":
                await self._decide(self._want(report))
            case "ahead":
                await self._decide(lambda world: rollback.on_gate_ahead(world, self._spec, report))
            case _:
                await self._refused(report)

    async def _meet(self, executor: str, mark: int) -> None:
        """An agent is there: no token at or below its mark may be given out any more (the store may be an old copy)."""
        await self._raise(mark)
        host = executor.removeprefix("agent:")
        await self._decide(lambda world: machine.on_hello(world, self._spec, host, mark))
        self.seen.hosts.add(host)

    async def _raise(self, mark: int) -> None:
        """The alert first: killed in between, it is said again, never left out."""
        if (await self._look()).token >= mark:
            return
        self._world = None  # our view may be from before another coordinator's commit
        if await self._decide(lambda world: rollback.on_mark(world, self._spec, mark)):
            await self._store.raise_token(mark)
            self._world = None
            self._caught_up = False  # it may have lost commands that were not carried out, and heartbeats

    async def _observed(self, report: Report) -> None:
        if (said := report.data.get("said")) is not None:
            alerts = tuple(
                Alert(card, str(said), {"tenant": report.data.get("server")}, AlertKind.HUNG)
                for card in cast("Sequence[str]", report.data.get("on", ()))
            )
            await self._decide(lambda _: Commit(alerts=alerts))
        await self._hear_troubles(report)
        self.seen.states.update(cast("Mapping[str, str]", report.data.get("tenants", {})))
        await self._read(cast("Mapping[str, Mapping[str, object]]", report.data.get("cards", {})))
        marks = cast("Mapping[str, tuple[int, int]]", report.data.get("marks", {}))
        self.seen.contexts.update(cast("Mapping[str, Mapping[str, int]]", report.data.get("contexts", {})))
        self.seen.inputs.update(cast("Mapping[str, Mapping[str, Sequence[str]]]", report.data.get("inputs", {})))
        self.seen.carried_out.update({card: (token, n) for card, (token, n) in marks.items()})
        mark = cast("int", report.data.get("mark", 0))
        if report.executor.removeprefix("agent:") not in self.seen.hosts or mark > (await self._look()).token:
            await self._meet(report.executor, mark)  # its hello may have come while nobody listened

    async def _hear_troubles(self, report: Report) -> None:
        """Say once which servers could not be started, and once when they were; each concerns its own cards."""
        if "troubles" not in report.data:
            return
        before = self.seen.troubles.get(report.executor, {})
        now = self.seen.troubles[report.executor] = cast("Mapping[str, str]", report.data["troubles"])
        if alerts := tuple(not_started(self._spec, before, now)):
            await self._decide(lambda _: Commit(alerts=alerts))

    async def _read(self, cards: Mapping[str, Mapping[str, object]]) -> None:
        """What probes read now; of a card that cannot be read stays how much it has, and which devices it is."""
        for card, reading in cards.items():
            known = self.seen.readings.get(card, {})
            still = {"env": known["env"]} if "unread" in reading and "env" in known else {}
            self.seen.readings[card] = {**reading, **still}
        read = {card: reading.get("total_mib") for card, reading in self.seen.readings.items()}
        totals = {card: total for card, total in read.items() if isinstance(total, int)}
        world = await self._look()
        self._configured = self._configured.learned(totals)
        self._learn(world)
        for card in cards.keys() & self._spec.cards.keys():
            before = self.seen.watches.get(card, Watch())
            reading, states = self.seen.readings[card], self.seen.states
            self.seen.watches[card] = watchdog.look(before, self._spec, card, reading, states, world.now_ms)

    def _learn(self, world: World) -> None:
        """Go by what probes read of the cards, and by what the store says was measured of tenants."""
        spec = self._configured.needing(world.cards)
        if spec != self._spec:
            self._spec = spec
            self.on_learned(spec)

    def _want(self, report: Report) -> Callable[[World], Commit | None]:
        swap_id = self._new_id("sw")
        return lambda world: tend.on_wanted(world, self._spec, report, swap_id=swap_id, token=world.next_token)

    async def _about_line(self, report: Report, on_line: Callable[[Card, Swap, Report], Commit | None]) -> None:
        """About a conversation of a swap, which may be over by now."""
        swap = await self._store.swap(str(report.data.get("swap")))
        if swap is not None:
            await self._decide(lambda world: on_line(card_of(world, swap.card), swap, report))

    async def _refused(self, report: Report) -> None:
        """An executor knows more of our orders than we (or a higher epoch): the store was rolled back. Go on above."""
        if "epoch" in report.data:
            await self._decide(lambda world: rollback.on_gate_refused(world, self._spec, report))
            return
        mark = report.data.get("mark")
        if isinstance(mark, int):
            await self._raise(mark)

        def again(world: World) -> Commit | None:
            card = card_of(world, report.card)
            awaited = () if card.swap is None else card.swap.pending
            if not any((c.executor, c.token, c.n) == (report.executor, report.token, report.n) for c in awaited):
                return None  # we have overtaken it ourselves
            return rollback.retoken(world, self._spec, card, world.next_token)

        await self._decide(again)

    async def _settle(self, answers: Sequence[Report] = ()) -> None:
        """Take the answers, let the machine do all that is due and the policy start what is worth starting."""
        decision = turn.Decision(None)

        def following(world: World) -> Commit | None:
            nonlocal decision
            decision = self._next(world, answers)
            return decision.commit

        while await self._decide(following) and decision.more:
            pass

    def _next(self, world: World, answers: Sequence[Report]) -> turn.Decision:
        self._learn(world)
        for name in self._spec.cards:
            if busy(world, self._spec, name):
                self.seen.idle_since[name] = world.now_ms
            else:
                self.seen.idle_since.setdefault(name, world.now_ms)
        unused.note(world, self._spec, self.seen.used)
        abandoned.note(world, self._spec, self.seen.unwanted)
        return turn.decide(world, self._spec, self.seen, answers, lambda: self._new_id("sw"))

    async def _decide(self, decide: Callable[[World], Commit | None]) -> bool:
        """Read, decide, commit; on a conflict again. True when something was written."""
        for attempt in range(RETRIES):
            if attempt:
                await asyncio.sleep(attempt * CONFLICT_S)
            world = await self._look()
            commit = decide(world)
            if commit is None:
                return False
            self._world = None
            if isinstance(await self._store.commit(self._now(commit)), Committed):
                self._world = apply(world, commit)
                self._token = max(self._token, self._world.token)
                self._remember(world, commit)
                return True
        log.warning("gave up after conflicts; what is pending is sent again", tries=RETRIES)
        self._caught_up = False
        return False

    def _now(self, commit: Commit) -> Commit:
        """The commit, good for about now: what it stamps is of the clock it was decided by."""
        return commit if self._looked is None else replace(commit, between_ms=clock.between(self._looked, _own_ms()))

    def _remember(self, world: World, commit: Commit) -> None:
        for card in commit.cards:
            before, after = card_of(world, card.name).swap, card.swap
            if before is not None and (after is None or after.id != before.id):
                proof = replace(before, outcome="fault" if card.fault is not None else "done")
                _log_end(next((s for s in commit.swaps if s.id == before.id), proof), world.now_ms)
            if after is not None and (before is None or after.id != before.id):
                log.info(f"{_kind(after)} started", **_named(after), card=card.name, token=after.token)
        for alert in commit.alerts:
            log.warning("alert", card=alert.card, text=alert.text)


def _place(entry: str) -> tuple[int, int]:
    """Where an entry of the inputs stands among them."""
    ms, _, n = entry.partition("-")
    return int(ms), int(n or 0)


def _own_ms() -> int:
    """Our own clock, which nobody steps, ms."""
    return int(asyncio.get_running_loop().time() * 1000)


def _log_end(swap: Swap, now_ms: int) -> None:
    """`swap` as it is on record; of one that moved nothing, and is on none, what it came to."""
    took = (swap.ended_ms or now_ms) - swap.started_ms
    log.info(f"{_kind(swap)} ended", **_named(swap), card=swap.card, outcome=swap.outcome, ms=took, reason=swap.reason)


def _kind(swap: Swap) -> str:
    if swap.listed:
        return "swap"
    return "tending" if swap.tends is not None else "proof"


def _named(swap: Swap) -> dict[str, str | None]:
    """By what it can be looked up: one that moves nobody is on no record, so that its id would lead nowhere."""
    if swap.listed:
        return {"swap": swap.id}
    return {"lease": swap.lease} if swap.tends is None else {"cause": swap.cause}
