"""What a process and its folders hold at one moment, and what has grown between two such moments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True)
class Footprint:
    """Counts, and sizes in bytes. `store_bytes`: the store's data in memory; `files` and `file_bytes`: on disk."""

    fds: int
    connections: int
    threads: int
    rss: int
    store_fds: int
    store_rss: int
    state_files: int
    state_bytes: int
    slot_files: int
    slot_bytes: int


def footprint(serve: psutil.Process, store: psutil.Process, state_dir: Path, slot_dir: Path) -> Footprint:
    """What they hold now."""
    state, slots = _files(state_dir), _files(slot_dir)
    return Footprint(
        fds=serve.num_fds(),
        connections=len(serve.net_connections("all")),
        threads=serve.num_threads(),
        rss=serve.memory_info().rss,
        store_fds=store.num_fds(),
        store_rss=store.memory_info().rss,
        state_files=len(state),
        state_bytes=sum(state.values()),
        slot_files=len(slots),
        slot_bytes=sum(slots.values()),
    )


def _files(folder: Path) -> dict[Path, int]:
    """Files and their sizes; one that goes meanwhile is not there."""
    found: dict[Path, int] = {}
    for path in folder.rglob("*"):
        try:
            if path.is_file():
                found[path] = path.stat().st_size
        except FileNotFoundError:
            continue
    return found


def grown(before: Footprint, after: Footprint, allowed: Mapping[str, int]) -> list[str]:
    """What grew by more than is allowed (0 where nothing is said), in words."""
    was, now = asdict(before), asdict(after)
    more = {name: now[name] - was[name] for name in was}
    return [f"{name} grew by {by:,} to {now[name]:,}" for name, by in more.items() if by > allowed.get(name, 0)]
