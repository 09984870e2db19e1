"""The demo's folder: it vanishes with the demo, and so does all that was started from it, even when the demo is killed.

Invariant: the demo holds the folder's lock for as long as it lives; who else gets that lock may end what the folder's
records name, and remove it. That is the guard, a small process that waits for the lock, and, should it have been
killed as well, the next demo. A folder without a lock is nobody's business.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from swapper.errors import SwapperError

PREFIX = "swapper-demo-"
STATE = "state"
SERVER = "llama"
STOP_MS = 5_000
_LOCK = "demo.lock"


@contextmanager
def vanishing_folder() -> Generator[Path]:
    """A folder of our own. When the block ends normally whoever started something in it has ended it already."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    try:
        lock = _claim(folder)
        guard = subprocess.Popen(
            [sys.executable, "-m", "swapper.demo.folder", str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)
        guard.wait()


async def clear_dead() -> list[Path]:
    """Clear what killed demos of this user left; the folders removed."""
    cleared: list[Path] = []
    for folder in _demos():
        lock = _opened(folder)
        if lock is None:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            await _clear(folder)
            cleared.append(folder)
        except (BlockingIOError, SwapperError):
            continue  # that demo lives, somebody clears it just now, or a process of it hangs
        finally:
            os.close(lock)
    return cleared


def _demos() -> list[Path]:
    return sorted(Path(tempfile.gettempdir()).glob(f"{PREFIX}*"))


async def _clear(folder: Path) -> None:
    """End what the folder's records name, and remove it; only for who has its lock."""
    from swapper.store import embedded  # imported late: the guard that waits stays small
    from workers.control.command import CommandControl

    server = folder / STATE / "servers" / SERVER
    with _no_more_starts(server):
        await CommandControl(SERVER, (), server).stop(STOP_MS)
        await embedded.stop(folder / STATE)
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _no_more_starts(server: Path) -> Generator[None]:
    """Have the launcher's lock: what a start under way was about to record is recorded then, and no other begins."""
    try:
        lock = os.open(server / "lock", os.O_RDWR)
    except FileNotFoundError:
        yield
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _claim(folder: Path) -> int:
    """The lock as a descriptor. It gets its name only once it is held, so that nobody finds it free meanwhile."""
    fresh = folder / f"{_LOCK}.new"
    lock = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    fresh.rename(folder / _LOCK)
    return lock


def _opened(folder: Path) -> int | None:
    """The lock file of a demo of ours, not locked yet."""
    try:
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            return None
        return os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return None


def main(folder: Path) -> None:
    """Be the guard: wait until the demo is gone; if its folder is still there it was killed, and all of it is cleared.

    A caller that reads the demo's standard error to the end has waited for this as well.
    """
    lock = _opened(folder)
    if lock is None:
        return
    fcntl.flock(lock, fcntl.LOCK_EX)
    if (folder / _LOCK).exists():
        print(f"swapper demo was killed; ending its servers and removing {folder}", file=sys.stderr)
        asyncio.run(_clear(folder))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
