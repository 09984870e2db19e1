"""The state folder of a serve: who has it, which gateway had it before, and whether it is still the one we took.

Invariant: one serve a folder. Whoever has the lock knows that the process before it is dead, with every connection it
had: the kernel lets go of the lock when the last descriptor is closed. A lock file that was removed keeps nobody away,
so a living process that the folder names is asked for as well, before anything is written. The folder may be removed
or replaced under us at any time; then nothing in it is ours, and we touch it no more.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import psutil

from swapper.errors import ConfigError, SwapperError
from workers.control.launcher import boot_id

LOCK_FILE = "serve.lock"
PID_FILE = "serve.pid"
GATEWAY_FILE = "gateway"
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class StateFolder:
    """A folder claimed by this process."""

    def __init__(self, path: Path) -> None:
        """Take it. Raises ConfigError when another serve has it or nobody may write it, SwapperError on a full disk."""
        self.path = path
        self._looks: list[Callable[[], str | None]] = [self._look]
        with writing(path):
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            if serving_pid(path) not in (None, os.getpid()):
                raise _in_use(path)
            self._lock = _locked(path)
            try:
                _pid_file(path).write_text(f"{os.getpid()} {psutil.Process().create_time()}\n")
            except OSError:
                os.close(self._lock)
                raise

    def release(self) -> None:
        """Let another serve have it."""
        try:
            if in_place(self.path / LOCK_FILE, self._lock):
                _pid_file(self.path).unlink(missing_ok=True)
        except OSError:
            return  # nobody may write there any more; whom the file names is dead soon
        finally:
            os.close(self._lock)

    def watch(self, look: Callable[[], str | None]) -> None:
        """What else must stay as it is: `look` says in a sentence what happened to it. The newest is said first."""
        self._looks.insert(0, look)

    def look(self) -> str | None:
        """What happened to the folder, in a sentence; None while it is as it should be. Costs a few stat calls."""
        return next((problem for look in self._looks if (problem := look()) is not None), None)

    def _look(self) -> str | None:
        if in_place(self.path / LOCK_FILE, self._lock):
            return None
        return (
            f"{LOCK_FILE} in the state folder {self.path} was removed or replaced while swapper serves from it: what "
            f"it writes there may be lost, and nothing but {PID_FILE} keeps a second serve away; restart it once no "
            "lease is held"
        )

    def last_gateway(self) -> str | None:
        """The gateway of the process that had the folder before us. It is dead, whatever the store still says of it.

        None as well when the record is a copy's, or another machine's: that gateway may live, and our lock says
        nothing of it. A folder is had again by the same boot, or by the same host after another boot.
        """
        try:
            gateway, host, boot, folder = (self.path / GATEWAY_FILE).read_text().split()
        except (FileNotFoundError, ValueError):
            return None
        here = self._here()
        return gateway if (host == here[0] or boot == here[1]) and folder == here[2] else None

    def record_gateway(self, gateway: str) -> None:
        """Ours, for who comes after us; to be recorded before it joins. Raises as taking the folder does."""
        with writing(self.path):
            (self.path / GATEWAY_FILE).write_text(f"{' '.join((gateway, *self._here()))}\n")

    def _here(self) -> tuple[str, str, str]:
        """Host, boot and the folder's inode, which a copy of it has not."""
        return socket.gethostname(), boot_id(), str(self.path.stat().st_ino)


@contextmanager
def writing(folder: Path) -> Generator[None]:
    """Whatever keeps the block from writing there becomes a sentence: a ConfigError, on a full disk a SwapperError."""
    try:
        yield
    except OSError as error:
        text = f"state_dir: {folder} cannot be used: {reason(error)}"
        raise SwapperError(text) if error.errno in _FULL else ConfigError([text]) from error


def reason(error: OSError) -> str:
    """What went wrong, for a sentence; of a full disk also what to do."""
    said = (error.strerror or str(error)).lower()
    return f"{said}; free some" if error.errno in _FULL else said


def serving_pid(state_dir: Path) -> int | None:
    """The process that serves with this state folder, if it lives."""
    try:
        pid, started = _pid_file(state_dir).read_text().split()
        process = psutil.Process(int(pid))
        same = abs(process.create_time() - float(started)) < 1.0
        return process.pid if same and process.status() != psutil.STATUS_ZOMBIE else None
    except (OSError, ValueError, psutil.Error):
        return None


def _locked(path: Path) -> int:
    lock = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise _in_use(path) from None
    return lock


def _in_use(path: Path) -> ConfigError:
    pid = serving_pid(path)
    who = "another process" if pid is None else f"process {pid}"
    return ConfigError([f"state_dir: {path} is in use by swapper serve, {who}; stop it first"])


def _pid_file(path: Path) -> Path:
    return path / PID_FILE


def in_place(path: Path, descriptor: int) -> bool:
    """Whether a file or folder that we hold open, so that nothing else gets its inode, is still what its path names."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True  # it cannot be told just now
