"""A job's process: started once, found again after a restart, followed to its end, its output put into place.

Invariant: a job's command is started at most once: who finds its record never starts it again. What it writes under a
temporary name, in the folder of the final one, gets that name only after exit status 0, and is removed otherwise. From
before it begins until nothing of it runs any more, `.running` beside its folder has a file that says on which card and
under which lease. Touches these and its outputs.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import cast

import msgspec
import structlog
import xxhash

from swapper.errors import BackendError
from workers.control import ExitStatus, launcher
from workers.control.command import CommandControl
from workers.vram.holders import Holder

LOG_BYTES = 16 << 20
"""A log that is longer keeps its beginning and its end."""
_RUNNING = ".running"
_PUBLISHING = "publishing"
_PROGRESS = "progress"
_EXIT_WRITTEN_S = 2.0
_LOOK_S = 0.02
_DURATION = re.compile(rb"Duration: (\d+):(\d+):(\d+(?:\.\d+)?)")
_OUT_TIME = re.compile(rb"out_time_us=(\d+)")
_HEAD, _TAIL = 64 << 10, 4 << 10
_LONGEST, _LONGEST_SUFFIX = 255, 32
"""Bytes of a file's name, as Linux has it, and of what tells its kind."""
log = structlog.stdlib.get_logger(__name__)


Named = Callable[[int, int], Awaitable[bool]]
"""Is given a process (pid, start in clock ticks) that waits; says whether it is to begin."""


class Place(msgspec.Struct, frozen=True):
    """Where a job runs, as `.running` has it, and the final paths of what it writes."""

    lease: str
    card: str
    outputs: tuple[str, ...] = ()


class JobProcess:
    """The process of job `name`, which writes `outputs` (final paths, by parameter). `folder`: its own, for ever."""

    def __init__(self, name: str, folder: Path, outputs: Mapping[str, str]) -> None:
        self._name = name
        self._folder = folder
        self._running = folder.parent / _RUNNING / name
        self._outputs = {Path(final): temporary(final, name) for final in outputs.values()}

    @property
    def begun(self) -> bool:
        """Whether it was started, whatever became of it."""
        return launcher.read_record(self._folder) is not None

    def recorded(self) -> tuple[int, int] | None:
        """Its process (pid, start in clock ticks), alive or not; None where none of this boot is on record."""
        record = launcher.read_record(self._folder)
        if record is None or record.get("boot") != launcher.boot_id():
            return None
        return cast("int", record["pid"]), cast("int", record["started"])

    def pid(self) -> int | None:
        """Its process while it runs."""
        return self._control().pid()

    async def start(
        self, argv: Sequence[str], env: Mapping[str, str], place: Place, named: Named, *, follows: bool
    ) -> bool:
        """Start it; False where `named`, given its process before that begins, says that it is not to.

        `env` is all of its environment. `follows`: it is ffmpeg, and is to tell its progress. Raises BackendError when
        it cannot run.
        """
        assert not self.begun, "a job runs once"
        try:
            await asyncio.to_thread(self._make_ready, place)
        except OSError as error:
            raise BackendError(f"{self._name} cannot be started: {error.filename}: {error.strerror}") from error
        words = (argv[0], "-progress", str(self._folder / _PROGRESS), "-nostats", *argv[1:]) if follows else argv
        try:
            return await self._control(words, env).start_once(named, log_bytes=LOG_BYTES)
        finally:
            if not self.begun:
                self._nothing_runs()

    def _make_ready(self, place: Place) -> None:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._running.parent.mkdir(exist_ok=True, mode=0o700)
        fresh = self._running.with_name(f"{self._running.name}.new")
        fresh.write_bytes(msgspec.json.encode(msgspec.structs.replace(place, outputs=tuple(map(str, self._outputs)))))
        fresh.replace(self._running)

    async def ended(self) -> ExitStatus | None:
        """Wait until it has ended: how, None where nobody saw it (its launcher was killed as well)."""
        recorded, exit_seen = self.recorded(), asyncio.Event()
        if recorded is not None and launcher.lives(*recorded):
            holder = Holder(recorded[0])
            holder.wake_on_exit(exit_seen)
            try:
                while launcher.lives(*recorded):  # also where somebody has removed its record meanwhile
                    with suppress(TimeoutError):
                        async with asyncio.timeout(1.0):
                            await exit_seen.wait()
            finally:
                holder.close()
        for _ in range(round(_EXIT_WRITTEN_S / _LOOK_S)):  # its launcher writes it down a moment later
            if (status := self._control().exit_status()) is not None:
                return status
            await asyncio.sleep(_LOOK_S)
        return None

    async def end(self, grace_ms: int) -> None:
        """TERM, after `grace_ms` KILL, to all that it started, also what it left behind. Returns once they are gone."""
        await self._control().stop(grace_ms)
        await asyncio.to_thread(self._nothing_runs)

    def _nothing_runs(self) -> None:
        launcher.shortened(self.log_path(), LOG_BYTES)
        with suppress(OSError):  # a file that stays says nothing while nothing runs
            self._running.unlink(missing_ok=True)

    def left(self) -> list[int]:
        """What runs of it and of what it started. Blocking."""
        return self._control().left()

    def publish(self) -> str | None:
        """It ended well: its outputs get their names. What is wrong, in words, or None. Blocking; may be repeated.

        What cannot be put into place is whole all the same, and stays where it was written. A name is given to what is
        on the disk, and is itself on the disk when this returns.
        """
        marker = self._folder / _PUBLISHING
        again = marker.exists()
        for final, written in self._outputs.items():
            if not (written.is_file() or again):
                self.discard()
                return f"it ended with exit status 0 and left no {final}"
            if final.is_dir():
                return f"{final} has become a folder, so its output could not be put there; it lies in {written}"
        for written in self._outputs.values():
            try:
                _sync(written)
            except OSError as error:
                self.discard()
                return f"{written}: its output could not be written to the disk: {error.strerror}"
        with suppress(OSError):  # without it only a death between here and the end is told as a failure
            marker.touch()
            _sync(self._folder)
        try:
            for final, written in self._outputs.items():
                with suppress(FileNotFoundError):  # it got its name before we were killed
                    written.replace(final)
        except OSError as error:
            place = f"{error.filename2}: its output could not be put there: {error.strerror}"
            return f"{place}; it lies in {error.filename}"
        for folder in {final.parent for final in self._outputs}:
            try:
                _sync(folder)
            except OSError as error:
                log.warning("a power cut may take a job's output", job=self._name, path=str(folder), why=error.strerror)
        return None

    def discard(self) -> None:
        """Nothing of it is to stay under a name that somebody might take for its output. Blocking; may be repeated.

        What cannot be removed stays under its hidden name, which says whose it was, and is told in the log.
        """
        if not (self._folder / _PUBLISHING).exists():
            for written in self._outputs.values():
                try:
                    if written.is_dir() and not written.is_symlink():
                        shutil.rmtree(written)
                    else:
                        written.unlink(missing_ok=True)
                except OSError as error:
                    log.warning("what a job wrote stays", job=self._name, path=str(written), why=error.strerror)

    def progress(self) -> float | None:
        """How far it is, 0 to 1, by what ffmpeg tells; None where it does not. Blocking.

        Its log is cut where that is due, for its launcher may have been killed.
        """
        launcher.shortened(self.log_path(), LOG_BYTES)
        told, said = _end_of(self._folder / _PROGRESS, _TAIL), _begin_of(self._folder / "log", _HEAD)
        times, length = _OUT_TIME.findall(told), _DURATION.search(said)
        if not times or length is None:
            return None
        hours, minutes, seconds = (float(part) for part in length.groups())
        whole = hours * 3600 + minutes * 60 + seconds
        return min(int(times[-1]) / 1e6 / whole, 1.0) if whole > 0 else None

    def log_tail(self, n: int) -> list[str]:
        """The last `n` lines it wrote, oldest first."""
        return self._control().log_tail(n) or []

    def log_path(self) -> Path:
        """The file of what it says."""
        return self._folder / "log"

    def _control(self, argv: Sequence[str] = (), env: Mapping[str, str] | None = None) -> CommandControl:
        return CommandControl(self._name, argv, self._folder, env, self._folder if argv else None, whole=True)


def still_running(folder: Path, card: str, stays: Collection[str]) -> tuple[str, ...]:
    """The jobs of `folder` of which something runs on a card under none of the leases that stay, in words. Blocking."""
    found: list[str] = []
    for path in _files(folder / _RUNNING):
        try:
            place = msgspec.json.decode(path.read_bytes(), type=Place)
        except (OSError, msgspec.MsgspecError):
            continue
        if place.card == card and place.lease not in stays:
            pids = JobProcess(path.name, folder / path.name, {}).left()
            found += [f"pid {pid} (job {path.name})" for pid in pids]
    return tuple(found)


def forgotten(folder: Path, name: str) -> JobProcess:
    """A job that no store knows any more, with the outputs that it was started with. Blocking."""
    outputs: tuple[str, ...] = ()
    with suppress(OSError, msgspec.MsgspecError):
        outputs = msgspec.json.decode((folder / _RUNNING / name).read_bytes(), type=Place).outputs
    return JobProcess(name, folder / name, {final: final for final in outputs})


def ever_running(folder: Path) -> list[str]:
    """The jobs of `folder` that ran and of which nobody has seen since that nothing runs any more. Blocking."""
    return [path.name for path in _files(folder / _RUNNING)]


def _files(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.suffix != ".new")
    except FileNotFoundError:
        return []


def temporary(final: str, name: str) -> Path:
    """Where a job writes until it has ended well: in the same folder, hidden, of the same kind.

    A name that would become longer than a file's may be is cut, and told from its like by a digest.
    """
    path = Path(final)
    if len(os.fsencode(hidden := f".{path.stem}.{name}{path.suffix}")) <= _LONGEST:
        return path.with_name(hidden)
    suffix = path.suffix if len(os.fsencode(path.suffix)) <= _LONGEST_SUFFIX else ""
    end = f"~{xxhash.xxh64_hexdigest(os.fsencode(path.name))}.{name}{suffix}"
    begin = os.fsencode(path.stem)[: _LONGEST - 1 - len(os.fsencode(end))].decode(errors="ignore")
    return path.with_name(f".{begin}{end}")


def in_temporary(params: Mapping[str, str], outputs: Mapping[str, str], name: str) -> dict[str, str]:
    """The parameters with each output's temporary name in its place."""
    return {**params, **{one: str(temporary(final, name)) for one, final in outputs.items()}}


def _sync(path: Path) -> None:
    """Have the disk keep it as it is; what is not there, or may not be opened by us, is left as it is."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, PermissionError):
        return
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _begin_of(path: Path, most: int) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(most)
    except OSError:
        return b""


def _end_of(path: Path, most: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - most))
            return file.read()
    except OSError:
        return b""
