"""The probe of each configured card: what reads how much VRAM it has, and who holds it.

Invariant: only made here; what a probe may do is in `workers.vram`. `look` reads each once, in bounded time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from typing import cast

from swapper.config import Config
from swapper.config.schema import CardEntry
from swapper.core.spec import CardSpec, Spec
from workers.backend import Owners, Probe, Reading, Unread
from workers.vram.amdgpu import Amdgpu
from workers.vram.declared import Declared
from workers.vram.nvml import Nvml
from workers.vram.unified import Unified

_NONE: Mapping[str, str | None] = {"CUDA_VISIBLE_DEVICES": None, "HIP_VISIBLE_DEVICES": None}


def probes_of(config: Config, spec: Spec, host: str) -> Mapping[str, Probe]:
    """By card name, those of one host."""
    here = (card for card in spec.cards.values() if card.host == host)
    return {card.name: _probe(config.cards[card.name], card, spec) for card in here}


async def look(probes: Mapping[str, Probe], owners: Owners | None = None) -> Mapping[str, Reading | Unread]:
    """One reading of each card, with nobody's tenants counted as there."""
    found = await asyncio.gather(*(probe.read({}, (), owners or Owners()) for probe in probes.values()))
    return dict(zip(probes, found, strict=True))


async def held_by(probe: Probe, tenant: str, owners: Owners) -> int | None:
    """MiB that the processes of a tenant have; None where its driver, or who reads it, cannot tell.

    Also where a process has some that cannot be seen from here: it may be the tenant's.
    """
    if not (owners.pids or owners.containers):
        return None
    reading = await probe.read({}, (), owners)
    if isinstance(reading, Unread) or reading.pool in ("declared", "host") or reading.note is not None:
        return None
    mine = [one.mib for one in reading.held if one.owner == tenant]
    if None in mine or any(one.owner is None and not one.line for one in reading.held):
        return None
    return sum(mib for mib in mine if mib is not None)


def totals(readings: Mapping[str, Reading | Unread]) -> Mapping[str, int]:
    """What was read of each card, MiB."""
    return {card: one.total_mib for card, one in readings.items() if isinstance(one, Reading)}


def device_variables(card: CardEntry) -> Mapping[str, str | None]:
    """What a holder's process needs to see this card only, as far as the configuration tells; its probe knows better.

    An index of the `nvml` probe is a place on the bus, by which CUDA numbers GPUs only where it is told so; that of
    the `amdgpu` probe tells nothing of HIP's order.
    """
    devices = ",".join(card.gpus) or None
    match card.read_by:
        case "nvml":
            by_place = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if card.index else {}
            return {**_NONE, **by_place, "CUDA_VISIBLE_DEVICES": devices}
        case "amdgpu":
            return _NONE
        case _:
            return {"CUDA_VISIBLE_DEVICES": devices, "HIP_VISIBLE_DEVICES": devices}


class Devices(Mapping[str, Mapping[str, str | None]]):
    """The device variables of each card by name: as its probe last told them, else as far as they are configured."""

    def __init__(
        self, cards: Mapping[str, CardEntry], readings: Callable[[], Mapping[str, Mapping[str, object]]]
    ) -> None:
        self._cards = cards
        self._readings = readings

    def __getitem__(self, card: str) -> Mapping[str, str | None]:
        read = cast("Mapping[str, str]", self._readings().get(card, {}).get("env") or {})
        return {**_NONE, **read} if read else device_variables(self._cards[card])

    def __iter__(self) -> Iterator[str]:
        return iter(self._cards)

    def __len__(self) -> int:
        return len(self._cards)


def _probe(entry: CardEntry, card: CardSpec, spec: Spec) -> Probe:
    match entry.read_by:
        case "nvml":
            return Nvml(entry.gpus)
        case "amdgpu":
            return Amdgpu(entry.gpus)
        case "unified":
            return Unified()
        case "declared":
            needs = {tenant.id: tenant.need_mib for tenant in spec.tenants.values()}
            return Declared(card.total_mib, card.reserve_mib, needs)
