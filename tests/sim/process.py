"""Processes of a simulation: what runs in one dies with it, at any await, and the seams to what outlives it.

Invariant: a killed process has no effect any more: its tasks end, and whatever they try on their way out stops at a
seam (the store, a router). What the other side had already taken in goes on there. The loop numbers its tasks, so that
also what is kept in sets is met in the same order each time.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Mapping
from contextvars import Context, ContextVar
from typing import Any, TypeVar

from tests.support.fake_router import FakeRouter
from tests.support.fake_wire import Answer, Stream
from tests.support.virtual_time import VirtualLoop

T = TypeVar("T")

HOME: ContextVar[Process | None] = ContextVar("HOME", default=None)
_READS = frozenset({"outbox", "inputs", "events"})


class Endless(AssertionError):
    """The same moment never ends."""


class _Task(asyncio.Task[Any]):
    def __init__(self, coro: Coroutine[Any, Any, Any], number: int, **more: Any) -> None:  # noqa: ANN401
        self.number = number
        super().__init__(coro, **more)

    def __hash__(self) -> int:
        return self.number


class SimLoop(VirtualLoop):
    """Virtual time; a task that begins in a process belongs to it."""

    _ROUNDS, _ALL_ROUNDS = 5_000, 500_000

    def __init__(self) -> None:
        super().__init__()
        self._tasks_made = 0
        self._moment, self._rounds, self._all = 0.0, 0, 0
        self.set_task_factory(self._make)

    def _make(self, loop: asyncio.AbstractEventLoop, coro: Any, **more: Any) -> asyncio.Future[Any]:  # noqa: ANN401
        self._tasks_made += 1
        task = _Task(coro, self._tasks_made, loop=loop, **more)
        context: Context | None = more.get("context")
        home = HOME.get() if context is None else context.get(HOME)
        if home is not None:
            home.adopt(task)
        return task

    def _run_once(self) -> None:
        if self.time() != self._moment:
            self._moment, self._rounds = self.time(), 0
        self._rounds += 1
        self._all += 1
        if self._rounds > self._ROUNDS or self._all > self._ALL_ROUNDS:
            told = Endless(f"no end at {self._moment:.3f} s, after {self._all} rounds")
            self._rounds, self._all = 0, 0  # for those who clean up
            raise told
        super()._run_once()  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]


def outside(coro: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A task that belongs to no process."""
    context = Context()
    return asyncio.get_running_loop().create_task(coro, context=context)


class Process:
    """One process. `die_at`: it dies at so many crossings of its seams from now on; `stalled`: none is crossed."""

    def __init__(self, name: str, rng: random.Random, say: Callable[[str], None]) -> None:
        self.name = name
        self.alive = True
        self.die_at: int | None = None
        self.crossings = 0
        self.on_death: list[Callable[[], object]] = []
        self._rng = rng
        self._say = say
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._running = asyncio.Event()
        self._running.set()

    def adopt(self, task: asyncio.Task[Any]) -> None:
        """This task ends with the process."""
        self._tasks[task] = None
        task.add_done_callback(self._ended)
        if not self.alive:
            asyncio.get_running_loop().call_soon(task.cancel)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        del self._tasks[task]
        if not self.alive and not task.cancelled():
            task.exception()  # nobody is there any more to hear of it

    def spawn(self, coro: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run this in the process."""
        context = Context()
        context.run(HOME.set, self)
        return asyncio.get_running_loop().create_task(coro, context=context)

    def stall(self, *, on: bool) -> None:
        """Be slow for a while: nothing gets through a seam."""
        (self._running.clear if on else self._running.set)()

    def kill(self) -> None:
        """Die now."""
        if not self.alive:
            return
        self.alive = False
        self._running.set()
        self._say(f"{self.name} DIES (after {self.crossings} crossings)")
        for tell in self.on_death:
            tell()
        for task in list(self._tasks):
            task.cancel()

    async def buried(self) -> None:
        """Wait until no task of it is left. Raises AssertionError when some do not end."""
        for _ in range(100):
            if not self._tasks:
                return
            for task in list(self._tasks):
                task.cancel()
            await asyncio.sleep(0)
        raise AssertionError(f"tasks of {self.name} do not end: {[task.get_name() for task in self._tasks]}")

    @property
    def tasks(self) -> list[asyncio.Task[Any]]:
        """What runs in it."""
        return list(self._tasks)

    async def cross(self) -> None:
        """Go through a seam, unless this is where it dies."""
        self.crossings += 1
        if self.die_at is not None:
            self.die_at -= 1
            if self.die_at <= 0:
                self.die_at = None
                self.kill()
        if self.alive and not self._running.is_set():
            await self._running.wait()
        if not self.alive:
            raise asyncio.CancelledError(f"{self.name} is dead")

    def lingers(self) -> bool:
        """Whether what was sent before a death still arrives."""
        return self._rng.random() < 0.5


class StoreWire:
    """A process's connection to the store: a call is a task of the store's."""

    def __init__(self, process: Process, store: object) -> None:
        self._process = process
        self._store = store

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        method = getattr(self._store, name)

        async def call(*args: Any, **named: Any) -> Any:  # noqa: ANN401  # whatever the protocol says
            await self._process.cross()
            sent = outside(method(*args, **named))
            try:
                answer = await asyncio.shield(sent)
            except asyncio.CancelledError:
                if name in _READS or not self._process.lingers():
                    sent.cancel()
                sent.add_done_callback(_forget)
                raise
            await self._process.cross()
            return answer

        return call


class RouterWire:
    """A process's connection to a router: a request is a task of the router's, and is given up with the process."""

    def __init__(self, process: Process, router: FakeRouter) -> None:
        self._process = process
        self._router = router

    async def request(
        self, method: str, path: str, query: Mapping[str, str] | None = None, body: bytes = b"", port: str | None = None
    ) -> Answer:
        """As FakeRouter's."""
        await self._process.cross()
        sent = outside(self._router.request(method, path, query, body, port=port))
        answer = await sent
        try:
            await self._process.cross()
        except asyncio.CancelledError:
            if isinstance(answer.body, Stream):
                await answer.body.aclose()
            raise
        return answer


def _forget(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()
