"""Control `command`: a server started by us, through the launcher, and adopted when we come back.

Invariant: at most one process per folder (the launcher's lock), known by pid, start time and boot id, so that a reused
pid is never signalled. Ending it ends its whole session: its children, and what it left behind when it crashed.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import psutil

from swapper.errors import BackendDown, BackendError, BackendRefused
from workers.control import GRACE_MS, ExitStatus, launcher

START_S = 30.0
"""How long the launcher may take to answer (it waits for the disk and for another starter)."""
KILL_S = 10.0
"""How long a killed process may take to vanish."""

_POLL_S = 0.01
_SLOW_POLL_S = 0.05
_LEFTOVER_MS = 2_000
_EXIT_WRITTEN_S = 2.0
_TAIL_BYTES = 256 << 10
_ANSWER_BYTES = 64 << 10
_LAUNCHER = (sys.executable, "-I", "-S", launcher.__file__)


@dataclass(frozen=True, slots=True)
class _Process:
    """The recorded process; `session` is the launcher's pid."""

    pid: int
    started: int
    session: int


@dataclass(frozen=True, slots=True)
class _Held:
    """A launcher whose child waits. `waits`: when that was started, clock ticks since boot."""

    launcher: subprocess.Popen[bytes]
    pid: int
    waits: int | None


class CommandControl:
    """The process of the server `name`; relative paths are relative to `cwd`.

    `env` adds to our own environment, or is all of it where `whole`.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        folder: Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        *,
        grace_ms: int = GRACE_MS,
        whole: bool = False,
    ) -> None:
        self._name = name
        self._grace_ms = grace_ms
        self._argv = tuple(argv)
        self._folder = folder.absolute()
        self._env = dict(env or {})
        self._whole = whole
        self._cwd = cwd
        self._lock = asyncio.Lock()

    async def ensure(self) -> None:
        """Adopt the recorded process if it lives, else start one. Raises BackendError when it cannot be started."""
        async with self._lock:
            await self._ensure()

    async def start_once(self, named: Callable[[int, int], Awaitable[bool]], *, log_bytes: int) -> bool:
        """Start it, unless anything ever was in its folder; False where it is not to begin, and nothing is on record.

        Its process waits until `named`, given its pid and start (clock ticks since boot), says whether it is to.
        Its log is kept below `log_bytes`. Raises BackendError when it cannot be started, and what `named` raises.
        """
        async with self._lock:
            held = await _whatever_comes(asyncio.to_thread(self._hold, log_bytes))
            if held.waits is None:
                _let_go(held.launcher)
                return True
            try:
                begins = await named(held.pid, held.waits)
            except BaseException:
                _let_go(held.launcher)
                raise
            if begins:
                await _finished(asyncio.to_thread(self._begin, held))
            else:
                _let_go(held.launcher)
            return begins

    async def stop(self, grace_ms: int | None = None) -> None:
        """TERM to the process group, after its grace KILL to all of the session; returns once all are gone.

        Raises BackendError when a process survives KILL (it hangs in the kernel).
        """
        async with self._lock:
            await self._stop(self._grace_ms if grace_ms is None else grace_ms)

    async def restart(self, grace_ms: int | None = None) -> None:
        """End it and start it anew."""
        async with self._lock:
            await self._stop(self._grace_ms if grace_ms is None else grace_ms)
            await self._ensure()

    def alive(self) -> bool | None:
        """Whether the recorded process runs; None while its record cannot be read."""
        try:
            return self._pid() is not None
        except BackendError:
            return None

    def pid(self) -> int | None:
        """The process id while it runs; None also while its record cannot be read."""
        with suppress(BackendError):
            return self._pid()
        return None

    def _pid(self) -> int | None:
        process = self._recorded()
        return process.pid if process and launcher.lives(process.pid, process.started) else None

    def left(self) -> list[int]:
        """What lives of its process and of what that started. Blocking, some ms where the process itself is gone."""
        process = self._recorded()
        return [] if process is None else _session(process)

    def exit_status(self) -> ExitStatus | None:
        """How the last process ended; None while it runs, and when its launcher was killed before it could write."""
        try:
            record = launcher.read_record(self._folder)
            if record is None:
                return None
            ended = cast("dict[str, int]", json.loads(launcher.exit_file(self._folder, record).read_text()))
        except (OSError, ValueError):
            return None
        return ExitStatus(ended["code"], ended["signal"], ended["ended_ms"])

    def log_tail(self, n: int) -> list[str] | None:
        """The last `n` lines (of the last 256 KiB), oldest first; empty before the first start. None: unreadable."""
        try:
            with self.log_path().open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
                return log.read().decode(errors="replace").splitlines()[-n:]
        except FileNotFoundError:
            return []
        except OSError:
            return None

    def log_path(self) -> Path:
        """Where it writes what it says, also before the first start."""
        return self._folder / "log"

    async def _ensure(self) -> None:
        if self._pid() is None:
            await self._stop(_LEFTOVER_MS)
            await _finished(asyncio.to_thread(self._launch))

    def _launch(self) -> None:
        """Start the launcher and wait for its answer; another starter's process counts as ours."""
        started = self._spawn()
        with _pipe(started):
            self._heard(started)

    def _hold(self, log_bytes: int) -> _Held:
        """Start the launcher, which asks whether its child is to begin; `waits` None: something is on record there."""
        started = self._spawn("--once", str(log_bytes), stdin=subprocess.PIPE)
        try:
            answer = self._heard(started)
        except BackendError:
            _let_go(started)
            raise
        return _Held(started, cast("int", answer["pid"]), cast("int | None", answer.get("waits")))

    def _begin(self, held: _Held) -> None:
        """Its child is to begin; returns once it has."""
        assert held.launcher.stdin is not None
        try:
            held.launcher.stdin.write(b"+")
            held.launcher.stdin.flush()
            self._heard(held.launcher)
        except BrokenPipeError:
            raise BackendRefused(f"{self._name} cannot be started: its launcher ended before its time") from None
        finally:
            _let_go(held.launcher)

    def _spawn(self, *options: str, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
        program = [*_LAUNCHER, str(self._folder), *options, "--", *self._argv]
        try:
            started = subprocess.Popen(
                program,
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd=self._cwd,
                env=self._env if self._whole else os.environ | self._env,
                start_new_session=True,
            )
        except OSError as error:
            raise BackendRefused(f"{self._name} cannot be started in {self._cwd}: {error.strerror}") from error
        # Waits for the launcher for as long as we live, so that none of them stays behind as a zombie.
        threading.Thread(target=started.wait, name=f"launcher of {self._name}", daemon=True).start()
        return started

    def _heard(self, started: subprocess.Popen[bytes]) -> Mapping[str, object]:
        """The next line of a launcher."""
        pipe = _pipe(started)
        answered, _, _ = select.select([pipe], [], [], START_S)
        line = os.read(pipe.fileno(), _ANSWER_BYTES) if answered else None
        if line is None:
            raise BackendDown(self._gave_up(started))
        try:
            answer = cast("dict[str, object]", json.loads(line))
        except ValueError:
            answer = {"error": f"its launcher ended without a word; does {self._folder} have room and may be written?"}
        if "error" in answer:
            raise BackendRefused(f"{self._name} cannot be started: {answer['error']}")
        return answer

    def _gave_up(self, started: subprocess.Popen[bytes]) -> str:
        """End a launcher that stays silent, with what it may have begun: the next one must find nobody in its way."""
        deadline = time.monotonic() + KILL_S
        while (left := _all_of(started.pid)) and time.monotonic() < deadline:
            started.kill()  # first: what it has not let go ends unbegun
            for pid in left:
                if pid != started.pid:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            time.sleep(_POLL_S)
        hangs = f", which did not help: process {', '.join(map(str, left))} hangs in the kernel" if left else ""
        see = f"see whether the disk of {self._folder} answers, and who has its file lock"
        return f"{self._name} cannot be started: its launcher was silent for {START_S:g} s and was ended{hangs}; {see}"

    def _recorded(self) -> _Process | None:
        """The process of the record, alive or not; None without a record of this boot."""
        try:
            record = launcher.read_record(self._folder)
        except OSError as error:
            said = f"{error.filename} cannot be read: {error.strerror}, and nobody else knows whether {self._name} runs"
            raise BackendRefused(f"{said}: mend it, or remove it where nothing of {self._name} runs") from error
        if record is None or record.get("boot") != launcher.boot_id():
            return None
        pid, started, session = (cast("int", record[key]) for key in ("pid", "started", "session"))
        return _Process(pid, started, session)

    async def _stop(self, grace_ms: int) -> None:
        process = self._recorded()
        if process is None or not await asyncio.to_thread(_session, process):
            return
        if not await _terminated(process, grace_ms / 1000):
            await asyncio.to_thread(_signal, process, signal.SIGKILL)
            if not await _until(lambda: not _session(process), KILL_S):
                left = ", ".join(map(str, _session(process)))
                raise BackendError(f"{self._name}: process {left} survived KILL; it hangs in the kernel")
        await _until(lambda: not _runs(process.session), _EXIT_WRITTEN_S)


async def _whatever_comes(work: Coroutine[None, None, _Held]) -> _Held:
    """As `await work`; whoever cancels it leaves nothing that waits."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        with suppress(BackendError):
            _let_go(task.result().launcher)
        raise


def _pipe(started: subprocess.Popen[bytes]) -> IO[bytes]:
    assert started.stdout is not None
    return started.stdout


def _let_go(started: subprocess.Popen[bytes]) -> None:
    """Close its pipes: a child that still waits ends without having begun."""
    for pipe in (started.stdin, started.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()


async def _finished(work: Coroutine[None, None, None]) -> None:
    """As `await work`, but whoever cancels it waits until it is over: what it started is on record then."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        with suppress(BackendError):
            task.result()
        raise


async def _terminated(process: _Process, grace_s: float) -> bool:
    """TERM to all, and once more to those that the process leaves behind; False when some are left after `grace_s`."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + grace_s
    await asyncio.to_thread(_signal, process, signal.SIGTERM)
    if not await _until(lambda: not launcher.lives(process.pid, process.started), grace_s):
        return False
    await asyncio.to_thread(_signal, process, signal.SIGTERM)
    return await _until(lambda: not _session(process), max(0.0, deadline - loop.time()))


def _session(process: _Process) -> list[int]:
    """The living processes of its session, the launcher excepted."""
    if launcher.lives(process.pid, process.started):
        return [process.pid]
    return [pid for pid, *_ in _members(process)]


def _members(process: _Process) -> list[tuple[int, int]]:
    """(pid, process group) of all in the session but the launcher; a session's id is not reused while it lasts."""
    return [(pid, group) for pid, group in _all_of(process.session).items() if pid != process.session]


def _all_of(session: int) -> dict[int, int]:
    """Pid and process group of all that live in a session."""
    stats = ((pid, launcher.stat_of(pid)) for pid in psutil.pids())
    return {pid: stat[1] for pid, stat in stats if stat and stat[2] == session and stat[0] not in "ZX"}


def _runs(pid: int) -> bool:
    stat = launcher.stat_of(pid)
    return stat is not None and stat[0] not in "ZX"


def _signal(process: _Process, number: signal.Signals) -> None:
    members = _members(process)
    with suppress(ProcessLookupError):
        if any(group == process.pid for _, group in members):
            os.killpg(process.pid, number)
    for pid, group in members:
        if group != process.pid:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


async def _until(done: Callable[[], bool], limit_s: float) -> bool:
    """Look until it is done, at most `limit_s`."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    while not await asyncio.to_thread(done):
        waited = loop.time() - began
        if waited >= limit_s:
            return False
        await asyncio.sleep(_POLL_S if waited < 1 else _SLOW_POLL_S)
    return True
