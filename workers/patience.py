"""How long a load is waited for: as long as something moves, however slow; and not when nobody wants it any more.

Invariant: one rule for every kind. Progress is what the server tells of its load, and what its processes read and take
of memory. A log that grows and CPU time are weaker signs, of who computes as well as of who turns in circles: they
count for some times as long as no sign at all. Nothing here ends a process; the verb that waits does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from swapper.errors import BackendError, BackendStalled
from workers.work import MUCH, Work, work_of

T = TypeVar("T")

LOOK_S = 1.0
"""So often it is looked whether anything moves."""
STALL_S = 120.0
"""Without any sign, where processes can be seen: a disk that spins up, or a network that comes back, takes less."""
TURNING = 10
ANSWERING = 3
"""A first answer takes the processor for less long than a load may."""

GIVEN_UP: ContextVar[asyncio.Event | None] = ContextVar("GIVEN_UP", default=None)
"""Set once nobody wants the load under way any more: a newer command takes its tenant away."""


@dataclass(frozen=True, slots=True)
class Signs:
    """One look. `told`: steps of the load that the server told of. `said`: bytes of its log.

    `work` None: no process of it can be seen.
    """

    told: int = 0
    said: int = 0
    work: Work | None = None


def wanted(what: str) -> None:
    """Raises BackendError where the load under way is given up."""
    given_up = GIVEN_UP.get()
    if given_up is not None and given_up.is_set():
        raise BackendError(f"the load of {what} was given up: nobody waits for it any more")


async def signs_of(log: Path | None, pids: tuple[int, ...], told: int = 0) -> Signs:
    """By a log, and by processes of this machine with all below them."""
    work = await asyncio.to_thread(work_of, pids) if pids else None
    return Signs(told, log_size(log), work)


def log_size(path: Path | None) -> int:
    """Bytes in a log; 0 where there is none."""
    try:
        return path.stat().st_size if path is not None else 0
    except OSError:
        return 0


class Patience:
    """One wait for `what`. `blind_s`: seconds without a word where no process can be seen, `stall_s`: where one can.

    `answers`: it is loaded, and its first answer is waited for. `turning`: so many times as long there may be weak
    signs only.
    """

    def __init__(
        self,
        what: str,
        signs: Callable[[], Awaitable[Signs]],
        *,
        blind_s: float,
        stall_s: float = STALL_S,
        answers: bool = False,
        turning: int | None = None,
    ) -> None:
        self._what = what
        self._doing = "its first answer" if answers else "loading"
        self._signs = signs
        self._blind_s = blind_s
        self._stall_s = min(stall_s, blind_s)
        self._turning = turning or (ANSWERING if answers else TURNING)
        self._look_s = min(LOOK_S, self._stall_s / 4)
        self._mark: Signs | None = None
        self._last = Signs()
        self._seen = False
        self._looked_at = self._moved_at = self._stirred_at = _now()

    async def look(self) -> None:
        """Look, at most once in LOOK_S, so that a short load is not held up by it; see `wanted`.

        Raises BackendStalled once nothing has moved for too long.
        """
        wanted(self._what)
        if _now() - self._looked_at < self._look_s:
            return
        signs = await self._signs()
        self._looked_at = _now()
        self._judge(signs)

    def _judge(self, signs: Signs) -> None:
        now = self._looked_at
        self._seen = self._seen or signs.work is not None
        if self._mark is None:
            self._mark = self._last = signs
        work, mark, last = signs.work or Work(), self._mark.work or Work(), self._last.work or Work()
        if signs.told > self._mark.told or work.bytes - mark.bytes >= MUCH or work.memory - mark.memory >= MUCH:
            self._mark, self._moved_at = signs, now
        if signs.said != self._last.said or work.ticks > last.ticks or work.bytes > last.bytes:
            self._stirred_at = now
        self._last = signs
        limit_s = self._stall_s if self._seen else self._blind_s
        if now - max(self._moved_at, self._stirred_at) >= limit_s:
            self._give_up(limit_s, "it neither reads nor computes" if self._seen else "nothing is heard of it")
        if now - self._moved_at >= limit_s * self._turning:
            self._give_up(limit_s * self._turning, "its processes are busy, and neither read nor take memory")

    def _give_up(self, after_s: float, why: str) -> None:
        raise BackendStalled(f"{self._what} makes no progress in {self._doing} for {after_s:g} s: {why}")

    async def over(self, call: Coroutine[None, None, T]) -> T:
        """Await one call of the server's for as long as something moves; it is cancelled when nothing does."""
        task = asyncio.create_task(call)
        try:
            while not (await asyncio.wait({task}, timeout=self._look_s))[0]:
                await self.look()
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError, BackendError):
                    await task
            elif not task.cancelled():
                task.exception()  # looked at: we may have been cut off in the moment in which it failed


def _now() -> float:
    return asyncio.get_running_loop().time()
