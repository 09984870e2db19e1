"""The agent of one host: reads its outbox, has every command carried out in order, and answers through the store.

Invariant: a command is executed only while this agent has the claim on its host, and when it is newer than the mark of
its (card, tenant), or equal to it and not yet answered; every command read gets an answer, which is delivered however
long the store is away. A command whose mark cannot be written fails and changes nothing. It reaches the coordinator
only through its Link, so that it runs in the coordinator's process or in one of its own alike.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Protocol, TypeVar

import structlog

from swapper.core.orders import Command, Report, answer_to
from swapper.core.types import Step
from swapper.errors import StoreDown
from workers.backend import Backend, Probe
from workers.claim import OBEYED, Claim, ClaimLost
from workers.claim import Link as ClaimLink
from workers.hostram import HostRam
from workers.lanes import WAITING, Lanes, Stored
from workers.marks import Fresh, Marks, Old, Pair, Repeat
from workers.observe import Sight, TenantPlace
from workers.pagecache import PageCache
from workers.supervise import Crash, kept_running, supervised, until_stored
from workers.vacate import Remaining, nothing
from workers.verbs import Outcome, Verbs, left_behind
from workers.vram.holders import Holder
from workers.watch import Watch

BLOCK_MS = 5_000
"""One blocking read of the outbox."""

log = structlog.stdlib.get_logger(__name__)

_CHANGING = frozenset({str(Step.RELEASE), str(Step.LOAD)})


T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)


class Write(Protocol[T_contra]):
    """A line for the marks, as `Marks.finish` takes it."""

    def __call__(self, what: T_contra, /, *, wait: bool = True) -> bool:
        """False where it must wait and may not."""
        ...


class Link(ClaimLink, Protocol):
    """The agent's whole view of the store."""

    async def outbox(self, executor: str, *, after: str, block_ms: int) -> Sequence[Stored]:
        """Commands after the id given (`0`: all that is retained); empty after `block_ms`. Raises StoreDown."""
        ...

    async def report(self, *reports: Report) -> None:
        """Tell the coordinator, in this order and at once. Raises StoreDown."""
        ...


class Agent:
    """See the module text. `backends` go by server name, `probes` by card name; `remaining` as in workers/vacate.py.

    Backends, marks and `page_cache` belong to whoever made them: `close` stops the agent's work and leaves them open.
    """

    def __init__(
        self,
        host: str,
        link: Link,
        backends: Mapping[str, Backend],
        tenants: Mapping[str, TenantPlace],
        probes: Mapping[str, Probe],
        marks: Marks,
        page_cache: PageCache | None = None,
        ram: HostRam | None = None,
        remaining: Remaining = nothing,
    ) -> None:
        self.executor = f"agent:{host}"
        self._link = link
        self._marks = marks
        sight = Sight(backends, tenants, probes)
        self._sight = sight
        for card in probes:  # who kept a card before this agent was started anew may keep it still
            left = left_behind(marks.last(card, None))
            sight.linger(card, (Holder(pid, started) for pid, started in left))
        self._verbs = Verbs(backends, sight, ram, remaining)
        self._claim = Claim(link, self.executor, marks)
        for backend in backends.values():
            backend.fenced(self._claim.fence)
        self.watch = Watch(backends, sight, marks.carried_out, self._volunteer)
        self._page_cache = page_cache
        self._lanes = Lanes(self)
        self._after = marks.outbox or "0"
        self._unanswered: dict[str, bool] = {}
        self._greeted = asyncio.Event()
        self._must_greet = True
        self._running: asyncio.Task[None] | None = None

    async def sure(self) -> None:
        """Return while this host is surely ours: see `Claim.sure`."""
        await self._claim.sure()

    @property
    def owner(self) -> str:
        """Whose the marks are: the same in each run on them, and in no other."""
        return self._marks.owner

    async def claim(self) -> None:
        """Have the host before anything of it is touched. Raises ConfigError where another agent has it, StoreDown."""
        await self._claim.take()

    async def run(self) -> None:
        """The agent's supervisor: works until `close` or cancellation, through crashes of its own loops.

        Raises ClaimLost when another agent has the host.
        """
        self._running = asyncio.create_task(self._work(), name=self.executor)
        try:
            await asyncio.shield(self._running)
        except asyncio.CancelledError:
            me = asyncio.current_task()
            if me is not None and me.cancelling():
                await self.close()
                raise

    async def close(self) -> None:
        """Stop at once; commands in progress stay unanswered and run again when the agent returns."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        await self._claim.give_up()

    async def _work(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._claim.keep())
                group.create_task(kept_running("read the outbox", self._read_on))
                group.create_task(kept_running("watch the servers", self._watch_on))
        except* ClaimLost as lost:
            raise lost.exceptions[0] from None
        finally:
            await self._lanes.close()

    async def _read_on(self) -> None:
        await self._claim.sure()
        while True:
            for stored in await until_stored("read the outbox", self._next_commands):
                self._after = stored.id
                self._unanswered[stored.id] = True
                self._lanes.put(stored)

    async def _next_commands(self) -> Sequence[Stored]:
        try:
            if self._must_greet:
                await self._link.report(self._news("hello", {}))
                self._must_greet = False
                if self._greeted.is_set():
                    self.watch.again()
                self._greeted.set()
            return await self._link.outbox(self.executor, after=self._after, block_ms=BLOCK_MS)
        except StoreDown:
            self._must_greet = True
            raise

    async def _watch_on(self) -> None:
        await self._greeted.wait()
        await self.watch.run()

    async def _volunteer(self, seen: Mapping[str, object]) -> None:
        await self._deliver(self._news("observed", seen))

    def _news(self, verb: str, data: Mapping[str, object]) -> Report:
        """The highest token begun here goes along: a store that was rolled back must not give it out again."""
        data = {**data, "mark": self._marks.highest_token}
        return Report(self.executor, card="", tenant=None, token=0, n=0, verb=verb, outcome="ok", data=data)

    async def _deliver(self, *reports: Report) -> None:
        await until_stored(f"report {reports[-1].verb}", lambda: self._link.report(*reports))

    # What lanes need of their owner (lanes.Executor).

    def recorded(self, command: Command) -> Report | None:
        """The answer on record, if the command was answered before."""
        return self._marks.answer(command)

    async def begin(self, commands: Sequence[Command]) -> bool:
        """Mark commands of one lane and token together; False: each is to be tried again by itself, in order."""
        return await supervised("write the marks", self._unmarked(commands)) is None

    async def execute(self, command: Command) -> Report:
        """Mark, carry out, record: the whole life of one command."""
        if self._page_cache is not None and command.verb == Step.LOAD:
            self._page_cache.comes(command.card)
        with self._undisturbed(command):
            outcome = await supervised(f"{command.verb} {command.tenant or command.card}", self._carry_out(command))
        if isinstance(outcome, Report):
            return outcome
        if isinstance(outcome, Crash):
            outcome = Outcome(False, outcome.text)
        report = answer_to(
            command,
            "ok" if outcome.ok else "failed",
            detail=outcome.detail,
            backend_ms=outcome.backend_ms,
            data=outcome.data,
        )
        await self._record(command, report)
        if self._page_cache is not None and outcome.ok:
            self._note_for(self._page_cache, command)
        return report

    def _note_for(self, page_cache: PageCache, done: Command) -> None:
        if done.verb == Step.RELEASE and done.tenant is not None:
            page_cache.left(done.card, done.tenant)
        elif done.verb == Step.VACATE:
            page_cache.held(done.card)

    async def refuse(self, command: Command, newer: Pair) -> Report:
        """The answer to a command that a newer one has overtaken; recorded if it had begun."""
        report = _refused(command, newer)
        if self._marks.mark(command.card, command.tenant) >= (command.token, command.n):
            await self._record(command, report)
        return report

    async def settle(self, stored: Stored, report: Report) -> None:
        """Deliver the answer, then move the place in the outbox up to the first entry still unanswered."""
        delivered = await supervised(f"report {report.verb}", self._answer(report))
        if isinstance(delivered, Crash):  # what it was to go with cannot be told; the answer can
            delivered = await supervised(f"report {report.verb} alone", self._deliver(report))
        self._unanswered[stored.id] = isinstance(delivered, Crash)
        reached = None
        while self._unanswered and not (waiting := next(iter(self._unanswered.items())))[1]:
            reached = waiting[0]
            del self._unanswered[reached]
        if reached is not None:
            await supervised("write the marks", self._write(self._marks.advance, reached))

    async def _carry_out(self, command: Command) -> Outcome | Report:
        await self._claim.sure()
        OBEYED.set(command.token)
        match self._marks.verdict(command):
            case Repeat(report) if report is not None:
                return report
            case Old(mark):
                return _refused(command, mark)
            case Fresh() if command.verb in WAITING:
                return await self._while_marking(command)
            case Fresh() if unmarked := await self._unmarked([command]):
                return unmarked
            case Fresh() | Repeat():
                pass
        if not self._claim.surely_ours:  # marking it took longer than the claim lasts
            return await self._carry_out(command)
        return await self._verbs.run(command)

    async def _while_marking(self, command: Command) -> Outcome:
        """A verb without effects need not wait for its mark, only its answer must."""
        marking = asyncio.create_task(self._unmarked([command]))
        try:
            outcome = await self._verbs.run(command)
        finally:
            unmarked = await marking
        return unmarked or outcome

    async def _unmarked(self, commands: Sequence[Command]) -> Outcome | None:
        """None once they are marked; else what each comes to: unmarked, it could change something a second time."""
        try:
            verdicts = await asyncio.to_thread(self._marks.begin_all, commands)
        except OSError as error:
            self._tell(error)
            why = f"{self._marks.path} cannot be written, and until it can this agent changes nothing"
            return Outcome(False, f"{why}: {error.strerror or error}")
        if any(isinstance(verdict, Old) for verdict in verdicts):
            return Outcome(False, "a newer command was answered while this one was being marked")
        return None

    def _undisturbed(self, command: Command) -> AbstractContextManager[None]:
        """While a verb changes a server, its steps are no reason for a look: one comes with the answer."""
        server = self._changed(command)
        return nullcontext() if server is None else self.watch.undisturbed(server)

    async def _answer(self, report: Report) -> None:
        """With the answer goes what the verb changed, so that no older observation outlives a finished swap."""
        server = self._changed(report)
        if server is None:
            await self._deliver(report)
            return
        async with self.watch.telling(server) as seen:
            await self._deliver(*(self._news("observed", picture) for picture in seen), report)

    def _changed(self, what: Command | Report) -> str | None:
        """The server that a verb changes."""
        return self._sight.server_of(what.tenant or "") if what.verb in _CHANGING else None

    async def _record(self, command: Command, report: Report) -> None:
        """A result that cannot be written is still delivered: without it the verb only runs once more."""
        await supervised("write the marks", self._write(partial(self._marks.finish, of=command), report))

    async def _write(self, write: Write[T], what: T) -> None:
        """At once where nothing has to wait for the disk, else in a thread. What fails is written later."""
        try:
            if not write(what, wait=False):
                await asyncio.to_thread(write, what)
        except OSError as error:
            self._tell(error)

    def _tell(self, error: OSError) -> None:
        log.warning("the marks cannot be written", path=str(self._marks.path), error=str(error))


def _refused(command: Command, newer: Pair) -> Report:
    """Where a newer *token* is the reason, `mark` tells it: a store that was rolled back must go on above it."""
    token, n = newer
    data = {"mark": token} if token > command.token else {}
    if n == 0:
        detail = f"ordered before this agent had the host, of which token {token} was the last"
        return answer_to(command, "refused", detail=detail, data=data)
    return answer_to(command, "refused", detail=f"overtaken by command {n} of token {token}", data=data)
