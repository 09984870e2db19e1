"""What `swapper check` says of the cards: what their probes see, and what would not work with that.

Invariant: each probe is read once, in bounded time; nothing is started or changed. What a tenant of ours holds already
is no reason for a finding: it leaves when it has to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from swapper.config import Config
from swapper.config.units import show_mib
from swapper.ourselves import Ourselves
from swapper.probes import look, probes_of, totals
from workers.backend import Held, Reading, Unread
from workers.vram.processes import words

_STEP_MIB = 256
"""A reserve is proposed in steps of this."""


@dataclass(frozen=True, slots=True)
class Said:
    """One sentence; an `error` fails, else it costs something."""

    error: bool
    text: str


@dataclass(frozen=True, slots=True)
class Cards:
    """`findings`, and `lines`: what each measured card has, and who holds it now."""

    findings: tuple[Said, ...]
    lines: tuple[str, ...]


async def look_at(config: Config, ours: Ourselves, host: str = "main") -> Cards:
    """Read every card of the host, and judge the configuration by it."""
    readings = await look(probes_of(config, config.spec(), host))
    findings = list(_twice(readings))
    lines: list[str] = []
    for name, reading in readings.items():
        if isinstance(reading, Unread):
            findings.append(Said(True, f"cards.{name}: {reading.why}"))
        elif reading.pool != "declared":
            foreign = await asyncio.to_thread(_foreign, reading.held, ours)
            findings += _judged(config, name, reading, foreign)
            lines.append(_line(name, reading))
    findings += _too_large(config, totals(readings))
    return Cards(tuple(findings), tuple(lines))


def _foreign(held: Iterable[Held], ours: Ourselves) -> tuple[Held, ...]:
    return tuple(one for one in held if ours.whose(one.pid) is None)


def _judged(config: Config, name: str, reading: Reading, foreign: tuple[Held, ...]) -> Iterator[Said]:
    card, where = config.cards[name], f"cards.{name}"
    if reading.note:
        yield Said(False, f"{where}: {reading.note}")
    if card.vram_mib is not None and card.vram_mib > reading.total_mib:
        there = show_mib(reading.total_mib)
        yield Said(True, f"{where}.vram: is more than the {there} it has; write no more, or leave it out")
        return
    whole = (card.vram_mib or reading.total_mib) - card.reserve_mib
    if whole <= 0:
        yield Said(True, f"{where}.reserve: leaves nothing of {show_mib(reading.total_mib)}")
        return
    if reading.pool == "host":
        yield from _of_the_machine(where, reading, whole)
        return
    stays = reading.reserved_mib + sum(one.mib or 0 for one in foreign)
    if reading.total_mib - stays < whole:
        who = [f"the driver keeps {show_mib(reading.reserved_mib)}"] if reading.reserved_mib else []
        who += [f"{word} holds {show_mib(mib)}" for word, mib in _named(foreign) if mib]
        wanted = show_mib(_up(stays + (card.vram_mib or reading.total_mib) - reading.total_mib))
        text = f"{where}.reserve: {' and '.join(who)}, so that the whole card is never free for a lease"
        yield Said(False, f"{text}; write reserve: {wanted.replace(' ', '')}, or end that")


def _of_the_machine(where: str, reading: Reading, whole: int) -> Iterator[Said]:
    if reading.free_mib < whole:
        there, free = show_mib(reading.total_mib), show_mib(reading.free_mib)
        wanted = show_mib(_up(reading.total_mib - reading.free_mib)).replace(" ", "")
        text = f"{where}.reserve: of the machine's {there} {free} are free now; if none of that is a model's"
        yield Said(False, f"{text}, write reserve: {wanted}, for a whole lease waits until the rest is free")


def _named(foreign: Iterable[Held]) -> Iterator[tuple[str, int]]:
    return ((words([one])[0], one.mib or 0) for one in foreign)


def _too_large(config: Config, read: Mapping[str, int]) -> Iterator[Said]:
    """Models that a card cannot hold, where only its probe tells how much it has."""
    spec = config.spec().learned(read)
    for tenant in spec.tenants.values():
        card = spec.cards[tenant.card]
        if card.measured and card.whole_mib and tenant.need_mib > card.whole_mib:
            fits = f"do not fit card {card.name}, which has {show_mib(card.whole_mib)} to give"
            yield Said(True, f"{tenant.id}: {show_mib(tenant.need_mib)} {fits}; write less, or another card")


def _twice(readings: Mapping[str, Reading | Unread]) -> Iterator[Said]:
    """One GPU in two cards, which an index and a UUID do not show."""
    owners: dict[tuple[str, str], str] = {}
    for name, reading in readings.items():
        for kind, gpus in reading.env.items() if isinstance(reading, Reading) else ():
            for gpu in gpus.split(","):
                other = owners.setdefault((kind, gpu), name)
                if other != name:
                    yield Said(True, f"cards.{name}: {gpu} is already in card {other}; a GPU belongs to one card")


def _line(name: str, reading: Reading) -> str:
    pool = {"host": "the machine's memory", "gtt": "the machine's memory, mapped by the GPU"}.get(reading.pool, "VRAM")
    held = "; ".join(f"{word}: {show_mib(mib) if mib else 'not told'}" for word, mib in _named(reading.held))
    free = f"{show_mib(reading.free_mib)} free" if reading.free_mib else "nothing free"
    return f"{name}: {show_mib(reading.total_mib)} of {pool}, {free}" + (f"; held by {held}" if held else "")


def _up(mib: int) -> int:
    return -(-mib // _STEP_MIB) * _STEP_MIB
