"""`vacate`: prove that a card is free before it is given on.

Invariant: `ok` only when the probe itself showed the MiB asked for, every departed holder was seen gone and nothing of
ours ran under a lease that does not stay, at the same look; memory that cannot be read is never free. It changes
nothing; it may be cancelled at any time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import msgspec

from workers.backend import Held, Reading, Unread
from workers.observe import Sight
from workers.vram.holders import Holder
from workers.vram.processes import words

POLL_S = 0.02
"""Between looks during the first `EAGER_S` seconds; afterwards the pause doubles up to `SLOW_POLL_S`."""
EAGER_S = 2.0
SLOW_POLL_S = 0.25


class Left(msgspec.Struct, frozen=True):
    """One who left (core.types.Departed). `started`: when its process did, clock ticks since boot; None: not known."""

    lease: str
    label: str
    pid: int | None
    free_ms: int
    started: int | None = None


class Holding(msgspec.Struct, frozen=True):
    """A granted partial lease: the MiB it was promised are in what is needed, whether it uses them or not."""

    vram_mib: int
    pid: int | None = None
    started: int | None = None
    tenant: str | None = None

    @property
    def named(self) -> bool:
        """Whether it is known who uses it."""
        return self.pid is not None or self.tenant is not None

    def is_of(self, held: Held) -> bool:
        """Whether a process is its tenant's, or the one it named, or below that."""
        if self.tenant is not None and held.owner == self.tenant:
            return True
        return any(pid == self.pid and self.started in (None, started) for pid, started in held.line)


class VacateArgs(msgspec.Struct, frozen=True):
    """Arguments of the verb. `now_ms` is the store's time at the order, the clock `free_ms` belongs to.

    `arriving`: tenants that come next; what one of them that is there already uses is free for them. `leaving`: those
    that must be seen gone. `holding`: partial leases that stay; what they use of their promise is free for it. `stays`:
    the ids of all leases that do.
    """

    need_mib: int
    limit_ms: int
    departed: tuple[Left, ...] = ()
    now_ms: int | None = None
    arriving: tuple[str, ...] = ()
    leaving: tuple[str, ...] = ()
    holding: tuple[Holding, ...] = ()
    stays: tuple[str, ...] = ()


Remaining = Callable[[str, Collection[str]], Sequence[str]]
"""What we run on a card under other leases than those given, in words. Blocking."""


def nothing(card: str, stays: Collection[str]) -> Sequence[str]:
    """Remaining where we run nothing."""
    del card, stays
    return ()


@dataclass(frozen=True, slots=True)
class Vacated:
    """How it ended: `holders` (pids, tenants, labels) are who was still there, empty when the card is free.

    `unread`: why the memory could not be read at the last look, None where it could; then nothing counts as free.
    """

    free: bool
    free_mib: int
    holders: tuple[str, ...]
    unread: str | None = None
    stay: tuple[str, ...] = ()
    """Tenants that must be gone and hold VRAM still."""


@dataclass(frozen=True, slots=True)
class _Leaving:
    """A departed holder: its process where it named one, else the moment (loop time, s) we stop waiting for it."""

    label: str
    process: Holder | None
    free_at: float

    def gone(self, now: float) -> bool:
        return now >= self.free_at if self.process is None else not self.process.alive


async def vacate(sight: Sight, card: str, args: VacateArgs, remaining_of: Remaining = nothing) -> Vacated:
    """Look until the card is free, at most `limit_ms`. Raises what the probe raises."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    deadline = started + args.limit_ms / 1000
    pause = POLL_S
    exited = asyncio.Event()
    with ExitStack() as stack:
        leaving = _leaving(stack, args, started, exited)
        sight.linger(card, (holder.process for holder in leaving if holder.process))
        while True:
            ours = await asyncio.to_thread(remaining_of, card, args.stays)
            seen = await _look(sight, card, leaving, args)
            now = loop.time()
            remaining = [holder for holder in leaving if not holder.gone(now)]
            gone = not (remaining or seen.stay or ours)
            if seen.unread is None and seen.free_mib >= args.need_mib and gone:
                sight.linger(card, ())
                return Vacated(True, seen.free_mib, ())
            if now >= deadline:
                sight.linger(card, (holder.process for holder in remaining if holder.process))
                named = dict.fromkeys((*seen.holders, *seen.stay))
                who = (*_names(tuple(named), remaining), *ours)
                return Vacated(False, seen.free_mib, who, seen.unread, seen.stay)
            await _pause(exited, min(pause, deadline - now))
            if now - started > EAGER_S:
                pause = min(pause * 2, SLOW_POLL_S)


def _leaving(stack: ExitStack, args: VacateArgs, started: float, exited: asyncio.Event) -> Sequence[_Leaving]:
    now_ms = time.time_ns() // 1_000_000 if args.now_ms is None else args.now_ms
    leaving: list[_Leaving] = []
    for departed in args.departed:
        process = None if departed.pid is None else Holder(departed.pid, departed.started)
        if process is not None:
            stack.callback(process.close)
            process.wake_on_exit(exited)
        label = departed.label or departed.lease
        leaving.append(_Leaving(label, process, started + (departed.free_ms - now_ms) / 1000))
    return leaving


async def _look(sight: Sight, card: str, leaving: Sequence[_Leaving], args: VacateArgs) -> Vacated:
    """One look, what those who come have already being free for them; not yet a proof."""
    processes = [holder.process for holder in leaving if holder.process]
    others = {tenant: state for tenant, state in (await sight.on_card(card)).items() if tenant not in args.arriving}
    stay = tuple(tenant for tenant, state in others.items() if tenant in args.leaving and state.holds_vram)
    reading = await sight.reading(card, others, processes)
    if isinstance(reading, Unread):
        return Vacated(False, 0, (), reading.why, stay)
    return Vacated(False, *_but_for(args, reading), stay=stay)


def _but_for(args: VacateArgs, reading: Reading) -> tuple[int, tuple[str, ...]]:
    """MiB free for who comes and stays, and who holds the rest.

    A measured card counts also what they have already, and its processes tell how much that is. Of a lease that named
    no process it is what nobody else is known to hold, up to what it was promised.
    """
    theirs = [one for one in reading.held if one.owner in args.arriving]
    free = reading.free_mib + _mib(theirs)
    for lease in (one for one in args.holding if one.named):
        used = [one for one in reading.held if one not in theirs and lease.is_of(one)]
        free += min(lease.vram_mib, _mib(used))
        theirs += used
    promised = sum(lease.vram_mib for lease in args.holding if not lease.named)
    departed = {left.pid for left in args.departed}
    unknown = [
        one
        for one in reading.held
        if one not in theirs and one.owner is None and departed.isdisjoint({one.pid, *(pid for pid, _ in one.line)})
    ]
    if promised:
        free += min(promised, _mib(unknown))
    return free, words(one for one in reading.held if one not in theirs) if theirs else reading.holders


def _mib(held: Iterable[Held]) -> int:
    return sum(one.mib or 0 for one in held)


async def _pause(exited: asyncio.Event, seconds: float) -> None:
    exited.clear()
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await exited.wait()


def _names(seen: Sequence[str], remaining: Sequence[_Leaving]) -> tuple[str, ...]:
    """Everyone the probe named, then those it cannot see, by the label of their lease."""
    unseen = (
        f"{holder.label} (pid {holder.process.pid})" if holder.process else holder.label
        for holder in remaining
        if holder.process is None or not any(f"pid {holder.process.pid} " in f"{name} " for name in seen)
    )
    return (*seen, *unseen)
