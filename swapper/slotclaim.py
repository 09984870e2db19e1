"""One swapper a slot folder: two that steer one router would unload each other's models and tidy each other's files.

Invariant: whoever serves has the folder itself locked, which leaves nothing in it, cannot be removed, and ends with
the process, however that ends. Where there can be no lock (some network file systems) it is said, and swapper serves
without. Changes nothing.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import structlog

from swapper.config import Config
from swapper.errors import ConfigError
from swapper.statefolder import serving_pid

log = structlog.get_logger(__name__)

WAIT_S = 1.0
"""So long a start waits for the lock: one that was killed just now lets go of it a little later than of its state
folder, and a `check` has it for a moment."""
_LOOK_S = 0.02


@contextmanager
def claimed(config: Config) -> Generator[None]:
    """Have the slot folder of every server. Raises ConfigError where another swapper has one. Blocking, WAIT_S."""
    with ExitStack() as stack:
        for server, folder in _folders(config).items():
            try:
                stack.callback(os.close, _locked(folder, WAIT_S))
            except BlockingIOError:
                raise ConfigError([_taken(server, folder)]) from None
            except OSError as error:
                why = (error.strerror or str(error)).lower()
                log.warning("a second swapper on this router would not be noticed", slot_dir=str(folder), reason=why)
        yield


def taken(config: Config) -> list[str]:
    """A sentence for each slot folder that another swapper has; none while a serve runs with this configuration."""
    if serving_pid(config.state_dir) is not None:
        return []
    return [_taken(server, folder) for server, folder in _folders(config).items() if _is_taken(folder)]


def _folders(config: Config) -> Mapping[str, Path]:
    """The slot folders that are there and used, by the server that names each; no two name the same (config/checks)."""
    return {
        name: entry.slot_dir.resolve()
        for name, entry in config.tenants.items()
        if entry.slot_dir is not None and entry.snapshots.strategy != "off" and entry.slot_dir.is_dir()
    }


def _is_taken(folder: Path) -> bool:
    try:
        os.close(_locked(folder, 0.0))
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _locked(folder: Path, wait_s: float) -> int:
    """The lock as a descriptor. Raises BlockingIOError while somebody has it, OSError where there can be none."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except OSError as error:
            if not isinstance(error, BlockingIOError) or time.monotonic() >= deadline:
                os.close(lock)
                raise
        time.sleep(_LOOK_S)


def _taken(server: str, folder: Path) -> str:
    pid = _owner(folder)
    who = "another swapper" if pid is None else f"another swapper, process {pid}"
    return (
        f"tenants.{server}.slot_dir: {folder} is in use by {who}: two on one router would unload each other's models; "
        "stop that one, or give this one a router and a slot folder of its own"
    )


def _owner(folder: Path) -> int | None:
    """Who has the lock, where the kernel's list tells it for sure (proc_locks(5): one line a lock, `maj:min:inode`)."""
    try:
        inode = folder.stat().st_ino
        lines = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    except OSError:
        return None
    words = [line for line in lines if len(line) > 5 and line[1] == "FLOCK" and line[5].endswith(f":{inode}")]
    pids = {int(line[4]) for line in words if line[4].isdecimal()}
    return pids.pop() if len(pids) == 1 and pids != {0} else None
