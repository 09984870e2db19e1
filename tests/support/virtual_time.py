"""A loop whose clock jumps: when nothing is ready it is at once the time of whatever is due next.

Invariant: no real time passes but that of the work itself, and what would run in a thread runs at once, in its place,
so that the same program does the same each time. Where nothing is due, everybody waits for ever: `Stuck` says so.
"""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar, TypeVarTuple, Unpack

P = ParamSpec("P")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Stuck(Exception):
    """Nothing is due."""


class _Jumping(selectors.DefaultSelector):
    """Says what is ready now; where that is nothing, moves the clock on by what it was to wait."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is not None:
            self.now += max(timeout, 0.0)
            return []
        raise Stuck("everybody waits, and nothing is due")


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time, which begins at 0."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Seconds since it began."""
        return self._jumping.now

    def run_in_executor(self, executor: object, func: Callable[[Unpack[Ts]], T], *args: *Ts) -> asyncio.Future[T]:
        """Done here and now."""
        del executor
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # as a thread would hand it over
            future.set_exception(error)
        return future


def virtual(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run an async test in a virtual loop of its own."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(test(*args, **kwargs))

    return run
