"""The state folder of a serve: who has it, which gateway had it before, and whether it is still the one we took.

Invariant: one serve a folder. Whoever has the lock knows that the process before it is dead, with every connection it
had: the kernel lets go of the lock when the last descriptor is closed. The folder may be removed or replaced under us
at any time; then nothing in it is ours, and we touch it no more.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from pathlib import Path

import psutil

from swapper.errors import ConfigError

LOCK_FILE = "serve.lock"
PID_FILE = "serve.pid"
GATEWAY_FILE = "gateway"


class StateFolder:
    """A folder claimed by this process. `gone` is set once `look` found that it is ours no more."""

    def __init__(self, path: Path) -> None:
        """Take it. Raises ConfigError when another serve has it."""
        self.path = path
        self.gone = asyncio.Event()
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = _locked(path)
        self._files = {path / LOCK_FILE: os.fstat(self._lock)}
        _pid_file(path).write_text(f"{os.getpid()} {psutil.Process().create_time()}\n")

    def release(self) -> None:
        """Let another serve have it."""
        if self.look() is None:
            _pid_file(self.path).unlink(missing_ok=True)
        os.close(self._lock)

    def watch(self, path: Path) -> None:
        """Something in it that must stay the same file or folder for as long as we serve."""
        self._files[path] = path.stat()

    def look(self) -> str | None:
        """What happened to the folder, in a sentence; None while it is as it should be. Costs a few stat calls."""
        lost = next((path for path, facts in self._files.items() if not _same(path, facts)), None)
        if lost is None:
            return None
        self.gone.set()
        return (
            f"the state folder {self.path} was removed or replaced while swapper serves from it ({lost.name} is not "
            "the one it had): it goes on as far as open connections to the store reach, and all it knows ends with it; "
            "restart it once no lease is held"
        )

    def last_gateway(self) -> str | None:
        """The gateway of the process that had the folder before us. It is dead, whatever the store still says of it."""
        try:
            return (self.path / GATEWAY_FILE).read_text().strip() or None
        except FileNotFoundError:
            return None

    def record_gateway(self, gateway: str) -> None:
        """Ours, for who comes after us; to be recorded before it joins."""
        (self.path / GATEWAY_FILE).write_text(f"{gateway}\n")


def serving_pid(state_dir: Path) -> int | None:
    """The process that serves with this state folder, if it lives."""
    try:
        pid, started = _pid_file(state_dir).read_text().split()
        process = psutil.Process(int(pid))
        return process.pid if abs(process.create_time() - float(started)) < 1.0 else None
    except (OSError, ValueError, psutil.Error):
        return None


def _locked(path: Path) -> int:
    lock = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        pid = serving_pid(path)
        who = "another process" if pid is None else f"process {pid}"
        raise ConfigError([f"state_dir: {path} is in use by swapper serve, {who}; stop it first"]) from None
    return lock


def _pid_file(path: Path) -> Path:
    return path / PID_FILE


def _same(path: Path, facts: os.stat_result) -> bool:
    try:
        return os.path.samestat(path.stat(), facts)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True  # it cannot be told just now
