"""The gate before a ComfyUI: prompts wait here until its lease is granted, and the lease lasts while they do.

Invariant: a prompt reaches ComfyUI only while the lease is granted. One lease serves all that come until the queue has
been empty for the linger; who holds its page open is no work. When the lease ends otherwise, what waits in ComfyUI's
queue is taken out and put back in the next one, and what runs may end, until the drain limit. What an earlier process
left, a lease or prompts, is found at the start: the same path as any other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import TypeVar

import structlog

from swapper.comfyui.answers import Refusal, broke, no_card, queue_full
from swapper.comfyui.holding import RETRY_S, Holding, either
from swapper.comfyui.line import Line, Place
from swapper.comfyui.renders import DEATHS, Renders
from swapper.core.types import Lease, LeaseState, WorkClass
from swapper.errors import BackendError, BackendGone, StoreDown
from swapper.store.protocol import QueueFull

AGAIN_S = 0.25
"""Between two tries to reach a ComfyUI that is just away."""
LOOK_S = 10.0
"""The queue is looked at so often though nothing was told of it."""
REST_S = 60.0
"""After a lease failed, prompts that nobody waits for (taken out before) ask for the next one so much later."""

log = structlog.stdlib.get_logger(__name__)
AnswerT = TypeVar("AnswerT")


@dataclass(frozen=True, slots=True)
class Limits:
    """`linger_ms`: so long the queue must be empty. `drain_ms`: so long what runs may go on, None: until it ends.

    At most `max_waiting` prompts wait, with `max_bytes` in all.
    """

    linger_ms: int
    drain_ms: Mapping[WorkClass, int] | None
    max_waiting: int = 10_000
    max_bytes: int = 512 << 20


class Gate:
    """See the module text. `client` is this gate's own id at ComfyUI's websocket.

    `failing` tells why ComfyUI cannot be started just now, None: nothing speaks against it.
    """

    def __init__(
        self,
        holding: Holding,
        renders: Renders,
        limits: Limits,
        client: str,
        failing: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._holding = holding
        self._renders = renders
        self._http = renders.http
        self._limits = limits
        self._client = client
        self._failing = failing
        self._line = Line()
        self._word = asyncio.Event()
        self._found: Lease | None = None
        self._work_found = False
        self._klass = WorkClass.NORMAL
        self._rests_until = 0.0
        self._ending: asyncio.Task[None] | None = None

    # ---- for the clients

    @property
    def waiting(self) -> int:
        """How many prompts wait, the one that is being posted among them."""
        return len(self._line)

    def full(self, size: int) -> Refusal | None:
        """Why no further body of `size` bytes may wait."""
        if len(self._line) >= self._limits.max_waiting or self._line.bytes + size > self._limits.max_bytes:
            return queue_full(len(self._line))
        return None

    async def prompt(
        self, raw: bytes, klass: WorkClass, post: Callable[[], Awaitable[tuple[int, bytes, AnswerT]]]
    ) -> AnswerT | Refusal:
        """Wait for the turn of a prompt and post it; `post` gives the status, the body and the answer to pass on.

        Who is cancelled is out of the line; a post that has begun is finished all the same.
        """
        if (refusal := self.full(len(raw))) is not None:
            return refusal
        place = self._line.join(klass, len(raw))
        tries = 0
        try:
            while (refusal := await place.turn()) is None:
                posting = asyncio.create_task(self._post(place, raw, post))
                answer = await asyncio.shield(posting)
                if not isinstance(answer, BackendError):
                    return answer
                tries += not isinstance(answer, BackendGone)
                if tries >= DEATHS:
                    return broke(str(answer))
            return refusal
        finally:
            self._line.leave(place)

    async def _post(
        self, place: Place, raw: bytes, post: Callable[[], Awaitable[tuple[int, bytes, AnswerT]]]
    ) -> AnswerT | BackendError:
        """Its turn in the line ends with this."""
        try:
            status, body, answer = await post()
        except BackendError as error:
            await asyncio.sleep(AGAIN_S)
            self._line.again(place)
            return error
        except BaseException:
            self._line.posted(place)
            raise
        if status == 200:
            self._renders.accepted(raw, body)
        self._line.posted(place)
        self._word.set()
        return answer

    async def forget(self, ids: list[str] | None) -> None:
        """A client takes prompts out of the queue (None: all that wait): those that were taken out go, too."""
        await self._renders.forget(ids)
        self._line.changed.set()

    # ---- the life of its leases

    async def run(self) -> None:
        """Until cancelled."""
        try:
            await self._begin()
            while True:
                await self._wanted()
                lease, adopted = await self._obtained()
                if lease is not None:
                    await self._serve(lease, adopted=adopted)
        finally:
            self._line.refuse(no_card("swapper is stopping; send it again once it runs"))
            await self._cancelled(self._ending)

    async def _begin(self) -> None:
        problem = await asyncio.to_thread(self._renders.taken.load)
        if problem is not None:
            log.error("prompts lost", why=problem)
        while True:
            try:
                self._found = await self._holding.found()
                break
            except StoreDown:
                await asyncio.sleep(RETRY_S)
        with suppress(BackendError):
            self._work_found = await self._http.remaining() > 0

    def _needed(self) -> bool:
        now = asyncio.get_running_loop().time()
        kept = len(self._renders.taken) > 0 and now >= self._rests_until
        return len(self._line) > 0 or kept or self._work_found

    async def _wanted(self) -> None:
        while self._found is None and not self._needed():
            self._line.changed.clear()
            now = asyncio.get_running_loop().time()
            rests = max(self._rests_until - now, 0.0) if len(self._renders.taken) else None
            await either(self._line.changed, limit_s=rests)

    async def _obtained(self) -> tuple[Lease | None, bool]:
        """A granted lease, and whether it is one that was found; None where there is none: whoever waited was told."""
        asked, self._found = self._found, None
        adopted = asked is not None
        if asked is None and (asked := await self._asked()) is None:
            return None, False

        def wanted(state: LeaseState) -> bool:
            urgent = state is LeaseState.QUEUED and self._line.klass.rank < asked.request.klass.rank
            return self._needed() and not (len(self._line) and urgent)  # another one waits in front of others

        lease = await self._holding.settled(asked, wanted, self._line.changed)
        if lease is None or lease.state is LeaseState.GRANTED:
            return lease, adopted
        reason = lease.reason or str(lease.state)
        log.warning("no lease for ComfyUI", lease=lease.id, reason=reason)
        self._refuse(no_card(reason))
        return None, False

    async def _asked(self) -> Lease | None:
        prompts = len(self._line) + len(self._renders.taken)
        try:
            klass = self._line.klass if len(self._line) else self._klass
            answer = await self._holding.ask(klass, max(prompts, 1))
        except StoreDown as down:
            self._refuse(no_card(f"swapper's store does not answer ({down})"))
            return None
        if isinstance(answer, QueueFull):
            self._refuse(queue_full(answer.queued))
            return None
        return answer

    def _refuse(self, refusal: Refusal) -> None:
        self._line.refuse(refusal)
        self._work_found = False
        self._rests_until = asyncio.get_running_loop().time() + REST_S

    async def _serve(self, lease: Lease, *, adopted: bool) -> None:
        await self._cancelled(self._ending)
        follows, lost = asyncio.create_task(self._follow()), asyncio.create_task(self._holding.lost(lease))
        idle = asyncio.create_task(self._idle(worked=adopted))
        try:
            while True:
                done, _ = await asyncio.wait({follows, lost, idle}, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()  # a bug of theirs is ours
                if lost in done or not (len(self._line) or self._line.busy):
                    break
                idle = asyncio.create_task(self._idle(worked=True))
        finally:
            self._line.open = False
            for task in (follows, lost, idle):
                await self._cancelled(task)
        self._work_found = False
        if lost in done:
            await self._leave(lease, lost.result())
        await self._holding.give_back(lease)

    async def _leave(self, lease: Lease, reason: str) -> None:
        """The lease ended under us: what waits is taken out, what runs may end."""
        while self._line.busy:
            self._line.changed.clear()
            await either(self._line.changed)
        try:
            count = await self._renders.take_out()
        except BackendError as error:
            count = 0
            log.warning("the queue of ComfyUI cannot be emptied", error=str(error))
        log.warning("the lease of ComfyUI ended", lease=lease.id, reason=reason, taken_out=count)
        self._rests_until = 0.0
        self._klass = lease.request.klass
        self._ending = asyncio.create_task(self._end_running(lease.request.klass))

    async def _follow(self) -> None:
        """The line is open while ComfyUI is there and has what belongs into its queue."""
        while True:
            with suppress(BackendError):
                async with aclosing(self._http.statuses(self._client)) as statuses:
                    async for _ in statuses:
                        if not self._line.open:
                            await self._renders.restore()
                            self._line.open = True
                        self._word.set()
            self._line.open = False
            self._word.set()
            await asyncio.sleep(AGAIN_S)

    async def _idle(self, *, worked: bool) -> None:
        """Return once nothing was to be done for the linger; at once where there never was."""
        loop = asyncio.get_running_loop()
        since: float | None = None
        while True:
            self._word.clear()
            self._line.changed.clear()
            if await self._at_work():
                worked, since, limit = True, None, LOOK_S
            else:
                since = loop.time() if since is None else since
                limit = since + (self._limits.linger_ms / 1000 if worked else 0.0) - loop.time()
                if limit <= 0:
                    return
            await either(self._word, self._line.changed, limit_s=limit)

    async def _at_work(self) -> bool:
        if (why := self._failing()) is not None and not self._line.open:
            self._line.refuse(no_card(why))
        if len(self._line) or self._line.busy:
            return True
        before = self._renders.posted
        try:
            remaining = await self._http.remaining()
            await self._renders.tidy(remaining, before)
        except BackendGone:
            return bool(self._renders.sent) or len(self._renders.taken) > 0
        except BackendError:  # there, and silent: what it loads may keep it from answering
            return True
        return remaining > 0 or before != self._renders.posted or len(self._renders.taken) > 0

    async def _end_running(self, klass: WorkClass) -> None:
        """Let what runs end by itself until the drain limit, then interrupt it, as often as that is not heard."""
        limits = self._limits.drain_ms
        with suppress(TimeoutError):
            async with asyncio.timeout(None if limits is None else limits[klass] / 1000):
                await self._nothing_runs(None)
        with suppress(BackendError):
            while running := (await self._http.queue()).running:
                log.warning("a prompt is interrupted at the drain limit", prompt=running[0].id)
                await self._http.interrupt()
                with suppress(TimeoutError):
                    await self._nothing_runs(1.0)

    async def _nothing_runs(self, limit_s: float | None) -> None:
        """Until the queue is empty, or ComfyUI gone. Raises TimeoutError."""
        async with asyncio.timeout(limit_s):
            with suppress(BackendError):
                async with aclosing(self._http.statuses(f"{self._client}-end")) as statuses:
                    async for remaining in statuses:
                        if remaining == 0:
                            return

    async def _cancelled(self, task: asyncio.Task[None] | asyncio.Task[str] | None) -> None:
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
