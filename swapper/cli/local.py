"""`swapper check` on this machine: the programs, folders and space a configuration relies on, before they are needed.

Invariant: looks, and changes nothing.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator

from yarl import URL

from swapper.config import Config, TenantEntry
from swapper.config.served import LLAMA
from swapper.errors import BackendError
from workers.llama.argv import long_names
from workers.llama.slots import Keep, SlotFolder

Said = tuple[bool, str]
"""Whether it is an error, and a sentence with the mend."""


def relied_on(config: Config, server: str, entry: TenantEntry) -> Iterator[Said]:
    """What of a server's entry this machine does not have."""
    if entry.control == "command":
        if (problem := _program(config, entry.command[0])) is not None:
            yield True, f"tenants.{server}.command: {problem}; install it, or write its whole path"
        yield from _other_port(server, entry)
        if entry.kind == "none" and entry.evict != "never":
            text = "nothing starts it the first time: it is brought back only where it was before"
            yield False, f"tenants.{server}: {text}; start it yourself, or write evict: never to have it started"
    if entry.slot_dir is not None and entry.snapshots.strategy != "off":
        yield from _slot_dir(server, entry)


def relied_on_by_recipes(config: Config) -> Iterator[Said]:
    """What of the recipes would fail only once they are submitted."""
    for name, recipe in config.document.recipes.items():
        if (problem := _program(config, recipe.command[0])) is not None:
            yield True, f"recipes.{name}.command: {problem}; install it, or write its whole path"
        for root in recipe.roots:
            if not os.path.isdir(root):
                yield True, f"recipes.{name}.roots: {root} is not a folder here; create it, or correct the path"


def _program(config: Config, program: str) -> str | None:
    if shutil.which(str(config.folder / program) if "/" in program else program) is None:
        return f"{program} is not a program that can be started here"
    return None


def _other_port(server: str, entry: TenantEntry) -> Iterator[Said]:
    """A command that listens elsewhere than `url` says: it would be waited for until the load's limit."""
    if entry.url is None:
        return
    words = long_names(entry.command) if entry.kind in LLAMA else list(entry.command)
    ports = [value for name, value in itertools.pairwise(words) if name == "--port"]
    wanted = URL(entry.url).port
    if ports and ports[-1].isdigit() and int(ports[-1]) != wanted:
        text = f"its command listens on port {ports[-1]}, and url is {entry.url}"
        yield False, f"tenants.{server}: {text}: write the same port in both, unless something passes it on"


def _slot_dir(server: str, entry: TenantEntry) -> Iterator[Said]:
    folder = entry.slot_dir
    if folder is None:
        return
    if not folder.is_dir():
        yield True, f"tenants.{server}.slot_dir: {folder} is not a folder here; create it"
        return
    try:
        SlotFolder(folder).check_space(Keep())
    except (BackendError, OSError) as error:
        needed = "each lease would fail for it" if entry.snapshots.required else "conversations would come back cold"
        text = f"tenants.{server}.slot_dir: {error}, and {needed}"
        yield entry.snapshots.required, f"{text}; free some space, or choose another disk"
