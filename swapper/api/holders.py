"""Who holds a card's VRAM, as JSON: tenants, leases, and who is foreign.

Invariant: whose a process is was judged in core/foreign.py; nothing here looks at a process.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import cast

from swapper.api.views import Json
from swapper.core import foreign
from swapper.core.foreign import Leased, Process
from swapper.core.types import Card, World

_PROCESS = re.compile(r"pid (?P<pid>\d+)(?: \((?P<name>.*)\))?")


def holders_json(reading: Mapping[str, object], tenants: Collection[str], world: World, card: Card) -> list[Json]:
    """Who holds the card's VRAM: its processes where the probe measures them, else whom it names."""
    leased = foreign.leased_on(world, card)
    if held := foreign.processes(reading):
        return [_held_json(one, tenants, leased) for one in held]
    seen = cast("Sequence[str]", reading.get("holders", ()))
    return [_named_json(one, tenants, leased) for one in seen]


def foreign_mib(reading: Mapping[str, object], world: World, card: Card) -> int:
    """What neither tenants nor leases hold, MiB, as far as the probe tells it of each process."""
    leased = foreign.leased_on(world, card)
    return sum(one.mib or 0 for one in foreign.processes(reading) if foreign.is_foreign(one, leased))


def _named_json(seen: str, tenants: Collection[str], leased: Iterable[Leased]) -> Json:
    """Who holds VRAM, from a reading's word for it: a tenant's id, `pid 12 (ffmpeg)` or `pid 12`, or just a name.

    `foreign` is False for tenants and for the processes that leases name.
    """
    process = _PROCESS.fullmatch(seen)
    pid = None if process is None else int(process["pid"])
    tenant = seen if seen in tenants else None
    lease = next((one.lease for one in leased if pid is not None and one.pid == pid), None)
    return {
        "name": seen if process is None else process["name"] or seen,
        "pid": pid,
        "mib": None,
        "container": None,
        "tenant": tenant,
        "lease": lease,
        "foreign": tenant is None and lease is None,
    }


def _held_json(seen: Process, tenants: Collection[str], leased: Iterable[Leased]) -> Json:
    """The same of a process that a probe measured. A server's own process is nobody's tenant and not foreign."""
    lease = foreign.lease_of(seen, leased)
    return {
        "name": seen.owner or seen.name or f"pid {seen.pid}",
        "pid": seen.pid,
        "mib": seen.mib,
        "container": seen.container,
        "tenant": seen.owner if seen.owner in tenants else None,
        "lease": lease,
        "foreign": seen.owner is None and lease is None,
    }
