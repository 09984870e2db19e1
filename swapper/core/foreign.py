"""Whose a process that holds VRAM is: a tenant's, a lease's, or nobody's, which is foreign. Pure.

Invariant: judged from what a probe read and what the store says of leases, at one moment. A process is a lease's if it,
or one of those it descends from, is the one the lease names, by its pid and its start. A granted lease that names no
process has whatever is nobody else's, but what was told of as foreign before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from swapper.core.types import Card, World


@dataclass(frozen=True, slots=True)
class Process:
    """A process that a probe measured (`workers.backend.Held` as a report carries it).

    `mib` None: its driver does not tell. `line`: (pid, start) of it, its parent, and so on up; none where it cannot be
    seen from the host's agent. `owner`: a tenant, or a server whose tenant it may become; None: none of these.
    """

    pid: int
    mib: int | None
    name: str | None
    line: tuple[tuple[int, int], ...]
    container: str | None
    owner: str | None

    @property
    def started(self) -> int | None:
        """Clock ticks since boot; None where it cannot be seen."""
        return next((start for pid, start in self.line if pid == self.pid), None)


@dataclass(frozen=True, slots=True)
class Leased:
    """A process that a lease names, also one that ended and whose memory may still go. `started`: see `Hold`.

    `pid` None: the lease names none. `strangers`: (pid, start) of those that are not its own then.
    """

    lease: str
    pid: int | None
    started: int | None = None
    strangers: frozenset[tuple[int, int | None]] = frozenset()


def processes(reading: Mapping[str, object]) -> tuple[Process, ...]:
    """The processes of a reading; none where its probe does not measure them."""
    return tuple(map(_process, cast("Sequence[Mapping[str, object]]", reading.get("held", ()))))


def _process(held: Mapping[str, object]) -> Process:
    containers = cast("Sequence[str]", held.get("containers", ()))
    line = cast("Sequence[Sequence[int]]", held.get("line", ()))
    return Process(
        cast("int", held["pid"]),
        cast("int | None", held.get("mib")),
        cast("str | None", held.get("name")),
        tuple((pid, started) for pid, started in line),
        containers[-1] if containers else None,
        cast("str | None", held.get("owner")),
    )


def leased_on(world: World, card: Card) -> list[Leased]:
    """The processes that leases of the card name, also those of leases that ended and whose memory may still go."""
    named = [
        Leased(lease.id, lease.request.holder_pid, lease.request.holder_started)
        for lease in world.leases.values()
        if lease.card == card.name and lease.request.holder_pid is not None
    ]
    left = [Leased(gone.lease, gone.pid, gone.started) for gone in card.departed if gone.pid is not None]
    strangers = frozenset((one.pid, one.started) for one in card.intruders)
    silent = (hold for hold in card.holds if hold.granted and hold.pid is None and hold.tenant is None)
    return [*named, *left, *(Leased(hold.lease, None, strangers=strangers) for hold in silent)]


def lease_of(process: Process, leased: Iterable[Leased]) -> str | None:
    """The lease whose process it is, or descends from; of what is nobody else's, the one that names no process."""
    line, known = ((process.pid, None), *process.line), tuple(leased)
    by_name = next((one.lease for one in known if any(_is(one, *step) for step in line)), None)
    if by_name is not None or process.owner is not None:
        return by_name
    key = (process.pid, process.started)
    return next((one.lease for one in known if one.pid is None and key not in one.strangers), None)


def is_foreign(process: Process, leased: Iterable[Leased]) -> bool:
    """Neither a server's or tenant's nor a lease's."""
    return process.owner is None and lease_of(process, leased) is None


def _is(leased: Leased, pid: int, started: int | None) -> bool:
    return leased.pid == pid and (leased.started is None or started is None or leased.started == started)
