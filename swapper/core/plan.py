"""The swap plan: which step follows which, what each needs, and into which slots conversations go.

Pure: plain functions over the nouns of types.py. The order of the steps is the one list `Step`.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from swapper.core.spec import Spec
from swapper.core.types import Card, Step, StepOutcome, Swap

UNKNOWN_MIB = 1 << 40


@dataclass(frozen=True, slots=True)
class Candidate:
    """A snapshot an agent offers for restoring; `refused` says why it must not be."""

    snapshot: str
    slot: int
    tokens: int
    bytes: int
    strategy: str
    refused: str | None
    id: str = ""
    links: tuple[str, ...] = ()
    used_ms: int = 0


def next_step(swap: Swap, step: Step) -> Step | None:
    """The step after `step`, or None when the swap has reached its end."""
    if step is Step.OPEN or swap.tends is not None or (step is Step.VACATE and not swap.to):
        return None
    steps = list(Step)
    return steps[steps.index(step) + 1]


def arriving(swap: Swap) -> tuple[str, ...]:
    """The tenants that come, without those whose load failed in this swap."""
    failed = {r.tenant for r in swap.steps if r.step is Step.LOAD and r.outcome is StepOutcome.FAILED}
    return tuple(t for t in swap.to if t not in failed)


def first_step(leaving: Sequence[str]) -> Step:
    """Nothing to send away: start with the proof that the VRAM is free."""
    return Step.CLOSE if leaving else Step.VACATE


def capacity(spec: Spec, card: str) -> int:
    """MiB a whole lease gets: total - reserve - needs of the tenants that are never evicted."""
    of_card = spec.cards[card]
    never = sum(t.need_mib for t in spec.tenants.values() if t.card == card and t.evict_never)
    return of_card.total_mib - of_card.reserve_mib - never


def needs(spec: Spec, tenants: Iterable[str]) -> int:
    """MiB the tenants need together; one that left the configuration counts nothing, nor one whose lease counts."""
    return sum(spec.tenants[t].need_mib for t in tenants if t in spec.tenants and not spec.tenants[t].by_lease)


def held(card: Card) -> int:
    """MiB promised to partial leases."""
    return sum(hold.vram_mib or 0 for hold in card.holds)


def owed(spec: Spec, card: Card) -> tuple[str, ...]:
    """Who comes back after a lease: the residents, and those still owed from before who fit beside them.

    Not one that is there by a lease of its own.
    """
    room = capacity(spec, card.name) - sum(_evictable(spec, t) for t in card.residents)
    kept: list[str] = []
    for tenant in card.return_to or ():
        if tenant in card.residents:
            kept.append(tenant)
        elif _evictable(spec, tenant) <= room:
            kept.append(tenant)
            room -= _evictable(spec, tenant)
    return tuple(dict.fromkeys(t for t in (*kept, *card.residents) if not by_lease(spec, t)))


def by_lease(spec: Spec, tenant: str) -> bool:
    """Whether it is on a card only inside a lease of its own."""
    configured = spec.tenants.get(tenant)
    return configured is not None and configured.by_lease


def _evictable(spec: Spec, tenant: str) -> int:
    configured = spec.tenants.get(tenant)
    counts = configured is not None and not (configured.evict_never or configured.by_lease)
    return configured.need_mib if configured is not None and counts else 0


def vacate_need(spec: Spec, card: Card, swap: Swap) -> int:
    """MiB that must be seen free before the swap may go on: what comes, plus what partial leases were promised.

    All of it for who comes by a whole lease, also where it comes back into one. More than any card has while nobody
    knows how much this one has.
    """
    if not spec.cards[card.name].total_mib:
        return UNKNOWN_MIB
    if card.whole is not None and (swap.grants or card.whole.tenant in swap.to):
        return capacity(spec, card.name)
    return needs(spec, swap.to) + held(card)


def snapshot_name(tenant: str, token: int, part: int | str) -> str:
    """A fresh file name, readable, unique, and safe for llama-server (one component of letters, digits, `-_.`).

    `part` tells the conversations of one swap apart: the slot's number, or another word of letters and digits. The
    tenant's name is cut at 80 characters; one that loses something by that, or by being made safe, has a checksum of
    the whole behind it, since two of one swap (`m:Q4` and `m/Q4`) must not share a file.
    """
    readable = re.sub(r"[^A-Za-z0-9_-]+", "-", tenant).strip("-")[:80]
    if not re.fullmatch(r"\w{1,40}(/\w{1,39})?", tenant, re.ASCII):
        readable = f"{readable}-{zlib.crc32(tenant.encode()):08x}".strip("-")
    return f"{readable}.{token:x}.{part}.kv"


@dataclass(frozen=True, slots=True)
class Room:
    """What a loaded model has room for: so many slots, and `tokens` in all together where they share a cache."""

    slots: int
    tokens: int | None = None


def choose_slots(candidates: Sequence[Candidate], room: Room) -> list[tuple[Candidate, int]]:
    """As many conversations as there is room for, in the order given (newest first), each in its own slot if free."""
    n_slots, left = room.slots, room.tokens
    chosen: list[Candidate] = []
    for c in candidates:
        if c.refused is not None or len(chosen) == n_slots or (left is not None and c.tokens > left):
            continue
        chosen.append(c)
        left = None if left is None else left - c.tokens
    taken = {c.slot: c for c in reversed(chosen) if c.slot < n_slots}
    free = [slot for slot in range(n_slots) if slot not in taken]
    return [(c, c.slot) if taken.get(c.slot) is c else (c, free.pop(0)) for c in chosen]
