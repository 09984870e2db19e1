"""One gateway process as the coordinator knows it: it joins, obeys its outbox, reports, and beats the store.

Invariant: commands are obeyed in the order of the outbox and each (token, n) is answered from one record; nothing is
admitted before the store's gates were read, nor once the membership lapsed. Survives StoreDown: it tries again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol, cast

import msgspec
import structlog

from swapper.core.keeping import RECALL
from swapper.core.orders import Command, Report, answer_to
from swapper.core.periodic import PASSED, SAVED, TALKS
from swapper.core.steps import PLACED
from swapper.core.types import Card, Demand, Failure, Step, World
from swapper.errors import StoreDown
from swapper.gateway.admission import Admission, said
from swapper.gateway.talks import Talks
from swapper.snapshots.index import Index
from swapper.store.codec import card_of
from swapper.store.protocol import StoredCommand, StoredEvent

TTL_MS = 10_000
BEAT_MS = 2_500
BLOCK_MS = 2_000
RETRY_S = 0.2
UNSEEN_MS = 10_000
"""So long after a join a gate may still move by a commit that was decided before, and told nobody here."""
_OF_TALKS = frozenset({PLACED, SAVED, TALKS, RECALL, PASSED})


class Link(Protocol):
    """What a gateway asks of the store; see store/protocol.py."""

    async def outbox(self, executor: str, *, after: str, block_ms: int) -> tuple[StoredCommand, ...]:
        """Commands for this gateway."""
        ...

    async def report(self, report: Report, /) -> None:
        """Tell the coordinator."""
        ...

    async def beat(self, gateway: str, demand: tuple[Demand, ...], *, ttl_ms: int, now_ms: int | None = None) -> bool:
        """Membership and demand."""
        ...

    async def leave(self, gateway: str) -> None:
        """Drop both."""
        ...

    async def read(self, *, now_ms: int | None = None) -> World:
        """Gates, and which loads failed."""
        ...

    async def events(self, *, after: str, limit: int, block_ms: int) -> tuple[StoredEvent, ...]:
        """The log: a `card` event is the moment to look again."""
        ...


class _Record:
    """Answers by (token, n) for one (card, tenant); `None` while the answer is still to come. `orders`: to what."""

    __slots__ = ("answers", "mark", "orders")

    def __init__(self) -> None:
        self.mark: tuple[int, int] = (0, 0)
        self.answers: dict[tuple[int, int], Report | None] = {}
        self.orders: dict[tuple[int, int], Command] = {}


Later = Callable[[], Awaitable[Report]]
"""The answer of a command that takes its time."""


class Member:
    """The shell of one gateway process. `clock` is Admission's (monotonic ms).

    `alone`: coordinator and the only gateway share this process and its store connection; while the store is down
    nobody can swap, so residents keep serving. Elsewhere a gateway cut off from the store stops admitting.
    `problem` says why this process is out of service for good, and `ended` is set then.
    """

    def __init__(
        self,
        link: Link,
        admission: Admission,
        *,
        alone: bool = False,
        ttl_ms: int = TTL_MS,
        beat_ms: int = BEAT_MS,
        index: Index | None = None,
        private: frozenset[str] = frozenset(),
    ) -> None:
        self._link = link
        self._admission = admission
        self._alone = alone
        self._ttl_ms = ttl_ms
        self._beat_s = beat_ms / 1000
        self.problem: str | None = None
        self.ended = asyncio.Event()
        self.executor = f"gateway:{admission.gateway}"
        self.talks = Talks(self.executor, self._send, self._store_ms, index=index, private=private)
        self._records: dict[tuple[str, str | None], _Record] = {}
        self._cards: dict[str, Card] = {}
        self._failed: dict[str, Failure] = {}
        self._loading: frozenset[str] = frozenset()
        self._dirty = asyncio.Event()
        self._joined = asyncio.Event()
        self._outage = False
        self._joined_ms = 0
        self._loops: list[asyncio.Task[None]] = []
        self._pending: dict[asyncio.Task[None], str | None] = {}
        admission.on_change = self._dirty.set

    async def start(self) -> None:
        """Join: the store knows this process and this process knows the gates. Waits while the store is down.

        Returns as well when a loop ends by a bug before that; `ended` is set then.
        """
        for loop in (self._beats, self._obey, self._watch):
            task = asyncio.create_task(loop(), name=f"{self.executor} {loop.__name__}")
            task.add_done_callback(self._ended)
            self._loops.append(task)
        try:
            await self._joined.wait()
        except asyncio.CancelledError:
            await self.close()
            raise

    def _failed_by_a_bug(self, task: asyncio.Task[None]) -> None:
        """An answer that never comes would keep a swap waiting for ever."""
        if not task.cancelled() and task.exception() is not None:
            self._ended(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A loop that ends by a bug takes the others along: the membership lapses and swaps go on without us."""
        if task.cancelled():
            return
        self.problem = f"the gateway is out of service: {task.get_name()} ended: {task.exception()!r}"
        _log().error("gateway out of service", loop=task.get_name(), exc_info=task.exception())
        for other in self._loops:
            other.cancel()
        self.ended.set()
        self._joined.set()  # whoever waits in `start` is not kept waiting

    async def close(self) -> None:
        """Leave: membership and demand are gone at once. Calls in flight are the HTTP server's to end first."""
        for task in (*self._loops, *self._pending):
            task.cancel()
        await asyncio.gather(*self._loops, *self._pending, return_exceptions=True)
        await self.talks.close()
        try:
            await self._link.leave(self._admission.gateway)
        except StoreDown:
            _log().warning("store down while leaving; the membership runs out by itself", gateway=self.executor)

    def resting(self, tenant: str) -> Failure | None:
        """Why the tenant could not be loaded, while it is not to be tried again yet."""
        failure = self._failed.get(tenant)
        return failure if failure is not None and failure.retry_ms > self._store_ms() else None

    def left_ms(self, failure: Failure) -> int:
        """Milliseconds until it is tried again."""
        return max(0, failure.retry_ms - self._store_ms())

    def _store_ms(self) -> int:
        """The store's clock, as far as this process knows it."""
        return self._admission.now() + self._admission.epoch_offset_ms

    def loading(self, tenant: str) -> bool:
        """True while a swap that brings the tenant was seen running."""
        return tenant in self._loading

    # ---- beats

    async def _beats(self) -> None:
        while True:
            pause_s = self._beat_s
            try:
                await self._beat()
            except StoreDown as error:
                pause_s, self._outage = RETRY_S, True
                _log().warning("store down, beat not delivered", error=str(error))
                if self._alone and self._admission.fresh:
                    self._admission.renew(self._admission.now() + self._ttl_ms)
            try:
                async with asyncio.timeout(pause_s):
                    await self._dirty.wait()
            except TimeoutError:
                continue
            if pause_s == RETRY_S:
                await asyncio.sleep(RETRY_S)

    async def _beat(self) -> None:
        """One beat; at start, after a lapse and after an outage the gates are read anew before anything is admitted.

        A lapse is one by our clock, or by the store's, which may be stepped: who was no member was told nothing. Nor is
        who has only just become one, by whoever had looked before: so the gates are read for a while.
        """
        self._dirty.clear()
        sent_ms = self._admission.now()
        used = self._admission.used()
        demand = (*self._admission.demand(), *said(self._admission.gateway, self.talks.index.unsaved(), used))
        member = await self._link.beat(self._admission.gateway, demand, ttl_ms=self._ttl_ms)
        self._admission.worked -= used
        away = not member or self._outage or not self._admission.fresh
        self._joined_ms = sent_ms if away else self._joined_ms
        if away or sent_ms - self._joined_ms < UNSEEN_MS:
            world = await self._link.read()
            self._admission.apply(world.gates)
            if away:
                await self._look(world, answer=self._joined.is_set())
                self._outage = False
        self._admission.renew(sent_ms + self._ttl_ms)
        self._joined.set()

    # ---- failed loads

    async def _watch(self) -> None:
        """Follow the cards' after-images; now and then, while calls wait, look at the store's whole view."""
        await self._joined.wait()
        after = "$"
        while True:
            try:
                events = await self._link.events(after=after, limit=200, block_ms=BLOCK_MS)
                if events:
                    after = events[-1].id
                    self._follow([card_of(event) for event in events if event.type == "card"])
                elif self._admission.waiting:
                    await self._look(await self._link.read(), answer=True)
            except StoreDown:
                self._outage = True
                await asyncio.sleep(RETRY_S)

    def _follow(self, cards: Sequence[Card]) -> None:
        """The newest image of each card takes the place of the one before."""
        if cards:
            self._cards = {**self._cards, **{card.name: card for card in cards}}
            self._judge(answer=True)

    async def _look(self, world: World, *, answer: bool) -> None:
        """Raises StoreDown. A store that was rolled back learns of the epochs it lost: below them nobody obeys."""
        self._admission.epoch_offset_ms = world.now_ms - self._admission.now()
        self._cards = dict(world.cards)
        self._judge(answer=answer)
        self._admission.apply({tenant: gate for tenant, gate in world.gates.items() if not gate.open})
        for tenant, epoch in self._admission.ahead(world.gates).items():
            await self._link.report(Report(self.executor, "", tenant, 0, 0, "ahead", "ok", data={"epoch": epoch}))

    def _judge(self, *, answer: bool) -> None:
        """A failure not seen before answers every call that waits for its tenant; who comes later waits for a retry.

        Not one after which it is tried again at once, with more room.
        """
        failed = {tenant: failure for card in self._cards.values() for tenant, failure in card.failed.items()}
        for tenant, failure in failed.items():
            again = failure.crowded and failure.retry_ms <= self._store_ms()
            if answer and not again and self._failed.get(tenant) != failure:
                self._admission.fail(tenant, failure.reason)
        self._failed = failed
        swaps = [card.swap for card in self._cards.values() if card.swap is not None]
        self._loading = frozenset(tenant for swap in swaps if not swap.back for tenant in swap.to)

    # ---- commands

    async def _obey(self) -> None:
        await self._joined.wait()
        after = "0"
        while True:
            try:
                stored = await self._link.outbox(self.executor, after=after, block_ms=BLOCK_MS)
            except StoreDown:
                self._outage = True
                await asyncio.sleep(RETRY_S)
                continue
            for one in stored:
                after = one.id
                await self._handle(one.command)

    async def _handle(self, command: Command) -> None:
        if command.token == 0:
            self._execute(command)  # a word outside any swap: epochs order it and nobody waits for an answer
            return
        record = self._records.setdefault((command.card, command.tenant), _Record())
        identity = (command.token, command.n)
        if record.orders.get(identity) == command:
            answer = record.answers[identity]
            if answer is not None:
                await self._send(answer)
            return
        if identity <= record.mark:  # also one given out twice, by a store that was rolled back
            await self._send(answer_to(command, "refused", f"older than {record.mark[0]}.{record.mark[1]}"))
            return
        if command.token > record.mark[0]:
            record.answers.clear()
            record.orders.clear()
        record.mark = identity
        record.answers[identity], record.orders[identity] = None, command
        outcome = self._execute(command)
        if isinstance(outcome, Report):
            record.answers[identity] = outcome
            await self._send(outcome)
        else:
            task = asyncio.create_task(self._finish(record, command, outcome))
            self._pending[task] = command.tenant
            task.add_done_callback(self._pending.pop)
            task.add_done_callback(self._failed_by_a_bug)

    def _execute(self, command: Command) -> Report | Later:
        """Do what the command says, and what is to be answered, now or once drained."""
        tenant, epoch = command.tenant, command.args.get("epoch")
        if tenant is not None and command.verb in _OF_TALKS:
            return self._about_talks(command, tenant)
        if tenant is None or not isinstance(epoch, int):
            return answer_to(command, "failed", f"a gateway needs a tenant and an epoch for '{command.verb}'")
        mine = self._admission.gate(tenant).epoch
        if command.verb in (Step.CLOSE, Step.OPEN) and epoch < mine:
            return answer_to(command, "refused", f"epoch {epoch} is older than the gate's {mine}", {"epoch": mine})
        match command.verb:
            case Step.CLOSE:
                return self._closed(command, tenant, epoch)
            case Step.DRAIN:
                return lambda: self._drained(command, tenant)
            case "cut":
                cut = self._admission.cut(tenant, str(command.args.get("reason") or "the card is needed elsewhere"))
                return lambda: self._drained(command, tenant, {"ended": cut.ended, "requeued": cut.requeued})
            case Step.OPEN:
                return self._opened(command, tenant, epoch)
            case _:
                return answer_to(command, "failed", f"a gateway does not know '{command.verb}'")

    def _about_talks(self, command: Command, tenant: str) -> Report | Later:
        """What concerns conversations and no gate."""
        if command.verb == TALKS:
            return answer_to(command, "ok", data={"talks": self.talks.told(tenant)})
        if command.verb == RECALL:
            return lambda: self._recalled(command)
        if command.verb == PASSED:
            self.talks.index.passed(tenant, cast("Sequence[str]", command.args["ids"]))
        else:
            told = self.talks.placed if command.verb == PLACED else self.talks.saved
            told(tenant, command.args)
        self._dirty.set()  # what is to be saved by the clock is another thing now
        return answer_to(command, "ok")

    def _closed(self, command: Command, tenant: str, epoch: int) -> Report:
        self.talks.closed(tenant)
        in_flight = self._admission.close(tenant, epoch)
        if in_flight or self.talks.looking(tenant):  # the drain that follows waits for both
            return answer_to(command, "ok", data={"in_flight": in_flight or 1})
        return answer_to(command, "ok", data={"in_flight": 0, "talks": self.talks.told(tenant)})

    def _opened(self, command: Command, tenant: str, epoch: int) -> Report:
        swap = str(command.args.get("swap") or "")
        try:
            self.talks.opened(tenant, command.card, swap, command.args)
        except msgspec.ValidationError as error:
            return answer_to(command, "failed", f"what comes back cannot be read: {error}")
        self._admission.open(tenant, epoch, swap or None)
        for task in [task for task, of in self._pending.items() if of == tenant]:
            task.cancel()  # nobody waits any more for the drain that this ends
        return answer_to(command, "ok")

    async def _drained(self, command: Command, tenant: str, data: Mapping[str, object] | None = None) -> Report:
        """Once nothing of the tenant is in flight any more."""
        await self._admission.drained(tenant)
        await self.talks.looked()
        return answer_to(command, "ok", data={"talks": self.talks.told(tenant)} if data is None else data)

    async def _recalled(self, command: Command) -> Report:
        data, why = await self.talks.recall(command)
        return answer_to(command, "ok" if why is None else "failed", why, data)

    async def _finish(self, record: _Record, command: Command, outcome: Later) -> None:
        answer = await outcome()
        identity = (command.token, command.n)
        if identity in record.answers:
            record.answers[identity] = answer
        await self._send(answer)

    # ---- reports

    async def _send(self, report: Report) -> None:
        """Deliver, however long the store is down: an answer that is lost would leave a swap waiting."""
        while True:
            try:
                return await self._link.report(report)
            except StoreDown:
                await asyncio.sleep(RETRY_S)


_log: Callable[[], structlog.stdlib.BoundLogger] = structlog.get_logger
