"""The launcher: starts one command so that it outlives whoever asked, and writes down how it ended.

    python -m workers.control.launcher RECORD_DIR [--once LOG_BYTES] -- COMMAND [ARGUMENT...]

Invariant: no command of ours runs unrecorded. The child waits at a pipe until the record (pid, start time, boot id,
session, argv) is durable; if the launcher dies before that, the pipe closes and the child ends without having begun.
At most one child per folder lives: who starts holds the folder's lock and looks first. In RECORD_DIR: record.json, log
and log.1, lock, exit.PID.START.json. Standard library only (it is run with `-I -S` to stay small and quick).

With `--once` nothing is started where anything was before, and the child, once it is there, is told of with one line,
{"pid": N, "waits": TICKS}, TICKS being its start; it begins when a byte comes on standard input, and where that ends
instead it does not begin and is not recorded. Its log is kept below LOG_BYTES, but for what comes within a second.

It answers on its standard output with one line of JSON, {"pid": N, "started": true|false} or {"error": "..."}, and
then lets go of it. TERM and INT are passed on to the child. It exits with 0 once the child's exit status is on disk,
with 1 when nothing could be started.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import signal
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import BinaryIO, NoReturn, cast

LOG_LIMIT = 10 << 20
"""Bytes of log at which a start begins a new file."""

LOOK_S = 1.0
"""Between looks at the length of a log that is kept short; ten times as often while it grows fast."""

_MARK = b"\n[swapper: %d bytes are left out here; of a log over %d bytes its beginning and its end are kept]\n"
_MARKED = re.compile(rb"\n\[swapper: (\d+) bytes are left out here; of a log over \d+ bytes [a-z ]+\]\n")
_MARK_BYTES = 200
_PASSED_ON = (signal.SIGTERM, signal.SIGINT)
_WAITED_FOR = (*_PASSED_ON, signal.SIGCHLD)


def boot_id() -> str:
    """Which boot of this machine it is: a pid of another one means nothing."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def stat_of(pid: int) -> tuple[str, int, int, int] | None:
    """(state letter, process group, session, start in clock ticks since boot); None without such a process.

    Source: proc_pid_stat(5), fields 3, 5, 6 and 22; the name before them may contain spaces and parentheses.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return fields[0], int(fields[2]), int(fields[3]), int(fields[19])


def lives(pid: int, started: int) -> bool:
    """True while this very process runs; a zombie does not."""
    stat = stat_of(pid)
    return stat is not None and stat[3] == started and stat[0] not in "ZX"


def read_record(folder: Path) -> dict[str, object] | None:
    """The record in a folder: pid, started (ticks), boot, session, argv; None when nothing was started there."""
    try:
        record: object = json.loads((folder / "record.json").read_text())
    except (FileNotFoundError, ValueError):
        return None
    return cast("dict[str, object]", record) if isinstance(record, dict) else None


def recorded_alive(record: dict[str, object] | None) -> bool:
    """Whether the process of a record runs."""
    if record is None or record.get("boot") != boot_id():
        return False
    return lives(cast("int", record["pid"]), cast("int", record["started"]))


def exit_file(folder: Path, record: dict[str, object]) -> Path:
    """Where the exit status of the recorded process is written."""
    return folder / f"exit.{record['pid']}.{record['started']}.json"


def log_parts(limit: int) -> tuple[int, int]:
    """Bytes of the beginning and of the end that are kept of a log which became longer than `limit`."""
    return limit // 8, limit // 2


def main(arguments: list[str]) -> int:
    """Run the launcher; see the module text."""
    once = arguments[1:2] == ["--once"]
    command = arguments[3 if once else 1 :]
    if len(command) < 2 or command[0] != "--":
        usage = "RECORD_DIR [--once LOG_BYTES] -- COMMAND [ARGUMENT...]"
        print(f"usage: python -m workers.control.launcher {usage}", file=sys.stderr)
        return 2
    folder, argv, limit = Path(arguments[0]).absolute(), command[1:], int(arguments[2]) if once else None
    _lead_a_session()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED_FOR)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            record = read_record(folder)
            if record is not None and (once or recorded_alive(record)):
                _answer(pid=record["pid"], started=False)
                return 0
            record = _start(folder, argv, asks=once)
            if record is None:
                return 1
    except OSError as error:
        _answer(error=f"{error.strerror or error}: {error.filename or argv[0]}")
        return 1
    _answer(pid=record["pid"], started=True)
    _let_go(folder)
    return _wait(folder, record, limit)


def _lead_a_session() -> None:
    """`stop` ends the session, so it must be nobody else's (the leader of a shell's job cannot leave it: fork)."""
    if os.getsid(0) == os.getpid():
        return
    if os.getpgrp() == os.getpid():
        ahead = os.fork()
        if ahead:
            os._exit(os.waitstatus_to_exitcode(os.waitpid(ahead, 0)[1]))
    os.setsid()


@contextlib.contextmanager
def _locked(folder: Path) -> Generator[None]:
    fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _start(folder: Path, argv: list[str], *, asks: bool) -> dict[str, object] | None:
    """Fork, record, let the child go on; returns the record. Raises OSError when it could not be started.

    `asks`: whether it is to begin; None where it is not.
    """
    for left in folder.glob("exit.*.json"):
        left.unlink()
    log = _open_log(folder)
    gate, opener = os.pipe()
    failure, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(opener)
        _become(gate, told, log, argv)
    for fd in (gate, told, log):
        os.close(fd)
    try:
        record, started = _record_of(pid, argv)
        if asks and not _is_to_begin(pid, started):
            os.close(opener)
            os.waitpid(pid, 0)
            return None
        _write(folder / "record.json", record)
        os.write(opener, b"+")
    except OSError:
        os.close(opener)
        os.waitpid(pid, 0)
        raise
    os.close(opener)
    with open(failure, "rb") as answer:
        reason = answer.read()
    if reason:
        _record_exit(folder, record, os.waitpid(pid, 0)[1])
        raise OSError(int(reason), os.strerror(int(reason)), argv[0])
    return record


def _record_of(pid: int, argv: list[str]) -> tuple[dict[str, object], int]:
    """What is written down of a child, and when it began, in ticks of the kernel's clock."""
    stat = stat_of(pid)
    assert stat is not None, "a child is there until it was waited for"
    return {"pid": pid, "started": stat[3], "boot": boot_id(), "session": os.getsid(0), "argv": argv}, stat[3]


def _is_to_begin(pid: int, started: int) -> bool:
    _answer(pid=pid, waits=started)
    return bool(os.read(0, 1))


def _become(gate: int, told: int, log: int, argv: list[str]) -> NoReturn:
    """In the child: wait until we are recorded, then become the command (in a process group of its own)."""
    status = 125
    try:
        os.setpgid(0, 0)
        if os.read(gate, 1):
            status = 127
            null = os.open(os.devnull, os.O_RDONLY)
            for fd, onto in ((null, 0), (log, 1), (log, 2)):
                os.dup2(fd, onto)
            for number in (*_WAITED_FOR, signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            os.execvp(argv[0], argv)
    except OSError as error:
        os.write(told, str(error.errno).encode())
    finally:
        os._exit(status)


def _wait(folder: Path, record: dict[str, object], limit: int | None) -> int:
    """Pass signals on until the child has ended, then write down how. `limit`: bytes of its log, None for none."""
    pid, size, pause = cast("int", record["pid"]), 0, LOOK_S
    while True:
        number = signal.sigwait(_WAITED_FOR) if limit is None else _within(pause)
        if limit is not None:
            before, size = size, shortened(folder / "log", limit)
            pause = LOOK_S if size - before < limit // 8 else LOOK_S / 10
        if number is not None and number != signal.SIGCHLD:
            os.kill(pid, number)
            continue
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            _record_exit(folder, record, status)
            return 0


def _within(seconds: float) -> int | None:
    """The next signal; None where none comes."""
    told = signal.sigtimedwait(_WAITED_FOR, seconds)
    return None if told is None else told.si_signo


def shortened(log: Path, limit: int) -> int:
    """Its length, once its middle was taken out where it was longer than it may be.

    Whoever writes appends, and goes on at the new end; what comes while it is being cut may be lost with the middle.
    """
    try:
        with log.open("r+b") as file:
            if os.fstat(file.fileno()).st_size > limit:
                fcntl.flock(file, fcntl.LOCK_EX)
            size = os.fstat(file.fileno()).st_size
            return size if size <= limit else _cut(file, size, limit)
    except OSError:
        return 0


def _cut(file: BinaryIO, size: int, limit: int) -> int:
    head, tail = log_parts(limit)
    gone, marked = left_out(file, head)
    file.seek(size - tail)
    end = file.read(tail)
    gone += os.fstat(file.fileno()).st_size - tail - head - marked
    mark = _MARK % (gone, limit)
    file.seek(head)
    file.write(mark + end)
    file.flush()
    file.truncate(head + len(mark) + len(end))
    return head + len(mark) + len(end)


def left_out(file: BinaryIO, head: int) -> tuple[int, int]:
    """Bytes that a log lacks after its first `head` ones, and the length of the line that says so there; or 0, 0."""
    file.seek(head)
    found = _MARKED.match(file.read(_MARK_BYTES))
    return (int(found[1]), len(found[0])) if found else (0, 0)


def _record_exit(folder: Path, record: dict[str, object], status: int) -> None:
    code = os.waitstatus_to_exitcode(status)
    ended: dict[str, object] = {
        "code": code if code >= 0 else None,
        "signal": -code if code < 0 else None,
        "ended_ms": time.time_ns() // 1_000_000,
    }
    _write(exit_file(folder, record), ended)


def _open_log(folder: Path) -> int:
    path = folder / "log"
    if path.exists() and path.stat().st_size > LOG_LIMIT:
        path.replace(folder / "log.1")
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def _let_go(folder: Path) -> None:
    """Close the starter's pipe; what the launcher itself might have to say goes to the log from now on."""
    log = _open_log(folder)
    for onto in (1, 2):
        os.dup2(log, onto)
    os.close(log)


def _answer(**said: object) -> None:
    """To whoever started us, who may be gone already."""
    with contextlib.suppress(OSError):
        os.write(1, json.dumps(said).encode() + b"\n")


def _write(path: Path, content: dict[str, object]) -> None:
    """Durable when this returns, and never half there."""
    fresh = path.with_name(path.name + ".new")
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
