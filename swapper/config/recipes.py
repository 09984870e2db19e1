"""Recipes as configured: what is wrong with them, and what they become. Looks at the disk for the links of paths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath

from swapper.config.schema import Document, RecipeEntry
from swapper.config.units import show_mib
from swapper.config.yamltext import Loc
from swapper.jobs.environment import doubts
from swapper.jobs.recipes import Param, Recipe, problems


def judged(document: Document) -> Iterator[tuple[Loc, str]]:
    """What is wrong with the recipes of a document, each with its place."""
    for name, entry in document.recipes.items():
        loc: Loc = ("recipes", name)
        for said in problems(name, entry.command, entry.params, entry.roots):
            yield loc, said
        if entry.card is not None and entry.card not in document.cards:
            yield (*loc, "card"), f"there is no card {entry.card!r}; cards are {', '.join(document.cards)}"
        elif isinstance(entry.vram_mib, int):
            rooms = [c.vram_mib - c.reserve_mib for n, c in document.cards.items() if c.vram_mib and _may(entry, n)]
            if len(rooms) == len([n for n in document.cards if _may(entry, n)]) and max(rooms) < entry.vram_mib:
                said = f"{show_mib(entry.vram_mib)} fit no card; the most there is to give is {show_mib(max(rooms))}"
                yield (*loc, "vram"), said


def advice(document: Document, environ: Mapping[str, str]) -> Iterator[str]:
    """What the commands of recipes may lack of the environment, a sentence each."""
    for name, entry in document.recipes.items():
        for said in doubts(entry.command, entry.env, environ):
            yield f"recipes.{name}: {said}"


def _may(entry: RecipeEntry, card: str) -> bool:
    return entry.card in (None, card)


def recipes(document: Document, folder: Path) -> Mapping[str, Recipe]:
    """The recipes of a document that was judged to be right; `folder`: what paths in it are relative to."""
    return {name: _recipe(name, entry, folder) for name, entry in document.recipes.items()}


def _recipe(name: str, entry: RecipeEntry, folder: Path) -> Recipe:
    first, *others = entry.command
    program = PurePath(first).name
    return Recipe(
        name=name,
        command=(str(folder / first) if "/" in first else first, *others),
        params={one: Param.of(one, text) for one, text in entry.params.items()},
        roots=entry.roots,
        card=entry.card,
        vram_mib=entry.vram_mib if isinstance(entry.vram_mib, int) else None,
        max_hold_ms=entry.max_hold_ms,
        grace_ms=entry.grace_ms,
        env=entry.env,
        follows=entry.progress == "ffmpeg" or (entry.progress == "auto" and program == "ffmpeg"),
    )
