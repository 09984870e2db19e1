"""Who holds a card's VRAM, as JSON: tenants, leases, and who is foreign.

Invariant: judged from what a probe read and what the store says of leases, at one moment; nothing here looks at a
process. A process is a lease's if it, or one of those it descends from, is the one the lease names.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from swapper.api.views import Json
from swapper.core.types import Card, World

_PROCESS = re.compile(r"pid (?P<pid>\d+)(?: \((?P<name>.*)\))?")


def holders_json(reading: Mapping[str, object], tenants: Collection[str], world: World, card: Card) -> list[Json]:
    """Who holds the card's VRAM: its processes where the probe measures them, else whom it names."""
    leased = _leased(world, card)
    if held := cast("Sequence[Mapping[str, object]]", reading.get("held", ())):
        return [held_json(one, tenants=tenants, leased=leased) for one in held]
    seen = cast("Sequence[str]", reading.get("holders", ()))
    return [holder_json(one, tenants=tenants, leased=leased) for one in seen]


def foreign_mib(reading: Mapping[str, object], tenants: Collection[str], world: World, card: Card) -> int:
    """What neither tenants nor leases hold, MiB, as far as the probe tells it of each process."""
    found = holders_json(reading, tenants, world, card)
    return sum(cast("int | None", one["mib"]) or 0 for one in found if one["foreign"])


def _leased(world: World, card: Card) -> list[Leased]:
    """The processes that leases of the card name, also those of leases that ended and whose memory may still go."""
    named = [
        Leased(lease.id, lease.request.holder_pid, lease.request.holder_started)
        for lease in world.leases.values()
        if lease.card == card.name and lease.request.holder_pid is not None
    ]
    return [*named, *(Leased(gone.lease, gone.pid, gone.started) for gone in card.departed if gone.pid is not None)]


@dataclass(frozen=True, slots=True)
class Leased:
    """A process that a lease names, also one that ended and whose memory may still go. `started`: see `Hold`."""

    lease: str
    pid: int
    started: int | None = None


def holder_json(seen: str, *, tenants: Collection[str], leased: Iterable[Leased]) -> Json:
    """Who holds VRAM, from a reading's word for it: a tenant's id, `pid 12 (ffmpeg)` or `pid 12`, or just a name.

    `foreign` is False for tenants and for the processes that leases name (`leased`).
    """
    process = _PROCESS.fullmatch(seen)
    pid = None if process is None else int(process["pid"])
    tenant = seen if seen in tenants else None
    lease = next((one.lease for one in leased if one.pid == pid), None)
    return {
        "name": seen if process is None else process["name"] or seen,
        "pid": pid,
        "mib": None,
        "container": None,
        "tenant": tenant,
        "lease": lease,
        "foreign": tenant is None and lease is None,
    }


def held_json(seen: Mapping[str, object], *, tenants: Collection[str], leased: Iterable[Leased]) -> Json:
    """The same of a process that a probe measured (`workers.backend.Held` as a report carries it).

    It is a lease's if it, or one of those it descends from, is the process the lease names. A server's own process is
    nobody's tenant and not foreign.
    """
    pid, owner = cast("int", seen["pid"]), cast("str | None", seen.get("owner"))
    containers = cast("Sequence[str]", seen.get("containers", ()))
    line = [(pid, None), *((one[0], one[1]) for one in cast("Sequence[Sequence[int]]", seen.get("line", ())))]
    lease = next((one.lease for one in leased if any(_is(one, *step) for step in line)), None)
    return {
        "name": owner or cast("str | None", seen.get("name")) or f"pid {pid}",
        "pid": pid,
        "mib": seen.get("mib"),
        "container": containers[-1] if containers else None,
        "tenant": owner if owner in tenants else None,
        "lease": lease,
        "foreign": owner is None and lease is None,
    }


def _is(leased: Leased, pid: int, started: int | None) -> bool:
    return leased.pid == pid and (leased.started is None or started is None or leased.started == started)
