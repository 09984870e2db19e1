"""What a tenant needs of its card, as far as the file must say it, and what is done once it takes more.

Invariant: pure over the document; gives every problem at once, as (path, sentence). A need may be left out only of a
model whose file tells what it will take about, on a card whose probe tells later what it took.
"""

from __future__ import annotations

from collections.abc import Iterator

from swapper.config.schema import CardEntry, Document, TenantEntry
from swapper.config.served import LLAMA, served
from swapper.config.units import show_mib
from swapper.config.yamltext import Loc

Said = tuple[Loc, str]

MEASURES = frozenset({"nvml", "amdgpu"})
"""Probes that tell what each process has."""


def check(document: Document, name: str, entry: TenantEntry) -> Iterator[Said]:
    """Problems of the tenants of one server."""
    card = document.cards.get(entry.card)
    room = (card.vram_mib or 0) - card.reserve_mib if card is not None else 0
    for found in served(name, entry):
        loc, one = found.loc, found.entry
        if one.vram_mib is None and not learnable(entry, card):
            yield loc, "needs vram: what it takes on the card when loaded, contexts included, like vram: 19.5GiB"
        elif isinstance(one.vram_mib, int) and 0 < room < one.vram_mib:
            said = f"{show_mib(one.vram_mib)} do not fit card {entry.card}, which has {show_mib(room)} to give"
            yield (*loc, "vram"), said
        if (one.on_over or entry.on_over) != "alert":
            place = loc if one.on_over else ("tenants", name)
            yield from _on_over(entry, card, one.vram_mib, (*place, "on_over"))


def learnable(entry: TenantEntry, card: CardEntry | None) -> bool:
    """Whether the need of its tenants may be left out."""
    return entry.kind in LLAMA and card is not None and card.read_by in MEASURES


def _on_over(entry: TenantEntry, card: CardEntry | None, vram: int | str | None, loc: Loc) -> Iterator[Said]:
    if entry.evict == "never":
        yield loc, "cannot be restart or evict beside evict: never; write alert"
    elif entry.kind == "comfyui":
        yield loc, "cannot be restart or evict: it is on its card inside a lease, which ends it; write alert"
    elif not isinstance(vram, int):
        yield loc, "does nothing without vram: SIZE, the need that is watched; write that, or remove on_over"
    elif card is not None and card.read_by not in MEASURES:
        said = f"does nothing on card {entry.card}, whose probe does not tell what a tenant takes"
        yield loc, f"{said}; write probe: nvml or amdgpu there, or remove on_over"
