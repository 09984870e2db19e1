"""The demo's folder: it vanishes with the demo, and so does all that was started from it, even when the demo is killed.

Invariant: the demo holds the folder's lock for as long as it lives; who else gets that lock may end what the folder's
records name, and remove it. That is the guard, a small process that waits for the lock, and, should it have been
killed as well, the next demo. A folder without a lock is nobody's business, so the lock is the last thing removed.
What cannot be cleared is told, and keeps no demo from its show.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

from swapper.errors import SwapperError

PREFIX = "swapper-demo-"
STATE = "state"
SERVER = "llama"
STOP_MS = 5_000
LAUNCH_S = 10.0
"""So long a start under way is waited for: it records its server within milliseconds, unless its disk hangs."""
_POLL_S = 0.02
_LOCK = "demo.lock"


@contextmanager
def vanishing_folder() -> Generator[Path]:
    """A folder of our own. When the block ends normally whoever started something in it has ended it already.

    Where it cannot be removed then, its guard tries again, and says what is in the way.
    """
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
        with suppress(OSError):
            _remove(folder)
        os.close(lock)
        guard.wait()


async def clear_dead() -> list[str]:
    """Clear what earlier demos of this user left; a sentence for each such folder, cleared or not."""
    return [said for folder in _demos() if (said := await _clear_if_dead(folder)) is not None]


async def _clear_if_dead(folder: Path) -> str | None:
    lock = _opened(folder)
    if lock is None:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        await _clear(folder)
        return f"an earlier demo had left {folder}: its processes are ended, the folder is removed"
    except BlockingIOError:
        return None  # that demo lives, or somebody clears it just now
    except (SwapperError, OSError) as error:
        return f"an earlier demo had left {folder}, which cannot be cleared: {error}"
    finally:
        os.close(lock)


def _demos() -> list[Path]:
    return sorted(Path(tempfile.gettempdir()).glob(f"{PREFIX}*"))


async def _clear(folder: Path) -> None:
    """End what the folder's records name, and remove it; only for who has its lock."""
    from swapper.store import embedded  # imported late: the guard that waits stays small
    from workers.control.command import CommandControl

    server = folder / STATE / "servers" / SERVER
    async with _no_more_starts(server):
        await CommandControl(SERVER, (), server).stop(STOP_MS)
        await embedded.stop(folder / STATE)
        await asyncio.to_thread(_remove, folder)


def _remove(folder: Path) -> None:
    """All of it, as far as it can be; its lock only once nothing else is left. Raises OSError when something stays."""
    failed: list[OSError] = []
    for entry in folder.iterdir():
        try:
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif entry.name != _LOCK:
                entry.unlink()
        except OSError as error:
            failed.append(error)
    if failed:
        raise failed[0]
    shutil.rmtree(folder)


@asynccontextmanager
async def _no_more_starts(server: Path) -> AsyncGenerator[None]:
    """Have the launcher's lock: what a start under way was about to record is recorded then, and no other begins.

    Raises SwapperError when that start does not end.
    """
    try:
        lock = os.open(server / "lock", os.O_RDWR)
    except FileNotFoundError:
        yield
        return
    try:
        if not await _had(lock, LAUNCH_S):
            raise SwapperError(f"a start of its server still runs after {LAUNCH_S:g} s")
        yield
    finally:
        os.close(lock)


async def _had(lock: int, limit_s: float) -> bool:
    """Wait for it, at most `limit_s`."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + limit_s
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if loop.time() >= deadline:
                return False
        await asyncio.sleep(_POLL_S)


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
    """Be the guard: wait until the demo is gone; if its folder is still there, all of it is cleared.

    A caller that reads the demo's standard error to the end has waited for this as well.
    """
    lock = _opened(folder)
    if lock is None:
        return
    fcntl.flock(lock, fcntl.LOCK_EX)
    if not (folder / _LOCK).exists():
        return
    _tell(f"swapper demo is gone and its folder is not; ending what it started and removing {folder}")
    try:
        asyncio.run(_clear(folder))
    except (SwapperError, OSError) as error:
        _tell(f"{folder} cannot be cleared: {error}; the next demo tries again")


def _tell(text: str) -> None:
    with suppress(OSError):  # nobody may read it any more
        print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
