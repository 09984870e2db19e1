"""An agent's marks on disk: for every (card, tenant) the newest command begun here, and what the last ones came to.

Invariant: a command's start is durable before its first effect, so that after any crash an older command is still
recognised as old, and each of those begun side by side with the newest as one to execute again until it is answered.
Results and the place in the outbox are written without a sync: losing them only means that an idempotent verb runs
again. After anything that could not be written, the next write is the whole log anew, from memory. It touches one
file, which it owns alone (flock), and nothing else: once its lock is not where it was, the folder may be another's.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import xxhash

from swapper.core.orders import Command, Report
from swapper.errors import ConfigError
from workers.owner import owner_of

REPORTS_KEPT = 32
"""Reports remembered per (card, tenant), all of the newest token: more than one swap waits for from one tenant."""

COMPACT_BYTES = 4 << 20
"""The log is written anew while in use once it is longer than this, and twice what it was when last compacted."""

Lane = tuple[str, str | None]
Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Fresh:
    """Newer than everything begun on its lane: execute it. Its start is on disk."""


@dataclass(frozen=True, slots=True)
class Repeat:
    """Begun before. `report` is its recorded answer; None: the result was never recorded, execute it again."""

    report: Report | None


@dataclass(frozen=True, slots=True)
class Old:
    """Older than the mark of its lane: refuse it. `mark` is that newer (token, n)."""

    mark: Pair


class _Begun(msgspec.Struct, tag="begun", frozen=True, omit_defaults=True):
    """The mark of a lane is (token, n); `open` are the n of the token that are begun and unanswered, None: just `n`."""

    card: str
    tenant: str | None
    token: int
    n: int
    open: tuple[int, ...] | None = None


class _Done(msgspec.Struct, tag="done", frozen=True, omit_defaults=True):
    """`of`: which command was answered, as `_content` tells; empty where that was not recorded."""

    report: Report
    of: str = ""


class _Read(msgspec.Struct, tag="read", frozen=True):
    id: str


_Line = _Begun | _Done | _Read


@dataclass(slots=True)
class _LaneRecord:
    """`open`: what was begun with the mark, side by side, and is not answered; `done`: what was answered.

    All of it has the mark's token: what an older one came to says nothing of what is so now.
    """

    mark: Pair = (0, 0)
    open: set[Pair] = field(default_factory=set[Pair])
    done: dict[Pair, _Done] = field(default_factory=dict[Pair, _Done])

    def answer(self, command: Command) -> Report | None:
        """A store that was rolled back gives a pair out a second time: only the very command is answered."""
        done = self.done.get((command.token, command.n))
        same = done is not None and done.report.verb == command.verb and done.of in ("", _content(command))
        return done.report if done is not None and same else None

    def verdict(self, command: Command) -> Fresh | Repeat | Old:
        pair, report = (command.token, command.n), self.answer(command)
        if report is not None or pair in self.open:
            return Repeat(report)
        return Fresh() if pair > self.mark else Old(self.mark)


class Marks:
    """The marks of one agent, for any thread.

    `begin` waits for the disk, `finish` and `advance` where they are allowed to, the rest never does.
    `_writing` is held by whoever writes the file, `_guard` only while the tables in memory are touched.
    """

    def __init__(self, path: Path, fd: int, lock_fd: int) -> None:
        self._path = path
        self._fd = fd
        self._lock_fd = lock_fd
        self._size = 0
        self._compacted = 0
        self._behind = False  # the file lacks something that is known here
        self._lanes: dict[Lane, _LaneRecord] = {}
        self._outbox: str | None = None
        self.owner = ""
        """Who has these marks: the same after every restart, another where they were lost or copied."""
        self._floor = 0
        self._writing = threading.Lock()
        self._guard = threading.Lock()
        self._encode = msgspec.json.Encoder().encode

    @classmethod
    def open(cls, path: Path) -> Marks:
        """Read what the last run left (a torn last line is dropped) and write it anew, compacted.

        Raises ConfigError when another agent has the file, OSError when the folder cannot be written.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        lock_fd = os.open(_lock_of(path), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            marks = cls(path, -1, lock_fd)
            marks.owner = owner_of(lock_fd, lost=not path.exists())
            marks._replay(path.read_bytes() if path.exists() else b"")
            marks._compact()
        except BlockingIOError:
            os.close(lock_fd)
            raise ConfigError([f"{path}: another agent uses these marks; give each agent its own state_dir"]) from None
        except BaseException:
            os.close(lock_fd)
            raise
        return marks

    @property
    def path(self) -> Path:
        """The file."""
        return self._path

    @property
    def floor(self) -> int:
        """Commands up to this token are not ours: another was the agent when they were ordered."""
        with self._guard:
            return self._floor

    def raise_floor(self, token: int) -> None:
        """From now on commands up to `token` are old here, whatever they came to when they were ours."""
        with self._guard:
            self._floor = max(self._floor, token)

    @property
    def highest_token(self) -> int:
        """The highest token of any command begun here; 0 when there was none."""
        with self._guard:
            return max((record.mark[0] for record in self._lanes.values()), default=0)

    def carried_out(self, card: str) -> Pair:
        """The newest (token, n) up to which every command of that token begun on the card was answered, else (0, 0).

        One of an earlier token that is still open belongs to a swap that is over: nobody waits for what it does. All
        up to the floor is over, too.
        """
        with self._guard:
            lanes = [record for (on, _), record in self._lanes.items() if on == card]
            token, n = max((record.mark for record in lanes), default=(0, 0))
            unanswered = (m for record in lanes for of, m in record.open if of == token)
            carried_out = (token, min(unanswered, default=n + 1) - 1)
            return max(carried_out, (self._floor + 1, 0)) if self._floor else carried_out

    @property
    def outbox(self) -> str | None:
        """The outbox entry up to which everything was answered; None before the first."""
        return self._outbox

    def mark(self, card: str, tenant: str | None) -> Pair:
        """The newest (token, n) begun for the tenant on the card; (0, 0) when there was none."""
        with self._guard:
            return self._lanes.get((card, tenant), _LaneRecord()).mark

    def answer(self, command: Command) -> Report | None:
        """The recorded answer to exactly this command, if there is one."""
        with self._guard:
            record = self._lanes.get((command.card, command.tenant))
            return record.answer(command) if record and command.token > self._floor else None

    def last(self, card: str, tenant: str | None) -> Report | None:
        """The recorded answer to the newest command of a lane that has one."""
        with self._guard:
            record = self._lanes.get((card, tenant))
            return record.done[max(record.done)].report if record and record.done else None

    def verdict(self, command: Command) -> Fresh | Repeat | Old:
        """What `begin` would decide now; nothing is marked."""
        with self._guard:
            return self._verdict(command)

    def _verdict(self, command: Command) -> Fresh | Repeat | Old:
        if command.token <= self._floor:
            return Old((self._floor, 0))
        record = self._lanes.get((command.card, command.tenant))
        return record.verdict(command) if record else Fresh()

    def begin(self, command: Command) -> Fresh | Repeat | Old:
        """Decide what to do with a command; `Fresh` is returned once the new mark is durable.

        Raises OSError when it cannot be made so: then the command is not begun.
        """
        return self.begin_all([command])[0]

    def begin_all(self, commands: Sequence[Command]) -> list[Fresh | Repeat | Old]:
        """`begin` for commands of one lane and token that run side by side: one sync for all of them."""
        lane, token = (commands[0].card, commands[0].tenant), commands[0].token
        with self._writing:
            with self._guard:
                record = self._lanes.setdefault(lane, _LaneRecord())
                verdicts = [self._verdict(command) for command in commands]
            fresh = [c.n for c, verdict in zip(commands, verdicts, strict=True) if isinstance(verdict, Fresh)]
            if fresh:
                again = [c.n for c, verdict in zip(commands, verdicts, strict=True) if verdict == Repeat(None)]
                begun = _Begun(*lane, token, max(fresh), (*again, *fresh) if fresh[1:] or again else None)
                with self._failing():
                    self._check_lock()
                    if self._behind or not _same(self._path, self._fd):
                        self._compact()
                    self._append(begun)
                    os.fdatasync(self._fd)
                with self._guard:
                    _enter(record, begun)
            return verdicts

    def finish(self, report: Report, *, of: Command | None = None, wait: bool = True) -> bool:
        """Record the answer of a command; False where that must `wait` for the disk and may not.

        Raises OSError when it could not be written; it is known here all the same.
        """
        return self._note(_Done(report, "" if of is None else _content(of)), wait=wait)

    def advance(self, outbox_id: str, *, wait: bool = True) -> bool:
        """Everything up to this outbox entry is answered: the next run reads on from here. False as for `finish`."""
        return self._note(_Read(outbox_id), wait=wait)

    def _note(self, line: _Done | _Read, *, wait: bool) -> bool:
        """Known here even when it could not be written."""
        if not self._writing.acquire(blocking=wait):
            return False
        try:
            long = self._size > max(COMPACT_BYTES, 2 * self._compacted)
            if (long or self._behind) and not wait:
                return False
            with self._guard:
                self._enter(line)
            if not self._behind:
                with self._failing():
                    self._append(line)
            if long or self._behind:
                self._compact()
        finally:
            self._writing.release()
        return True

    def close(self) -> None:
        """Give the file up to the next agent."""
        with self._writing:
            os.close(self._fd)
            os.close(self._lock_fd)

    def _enter(self, line: _Line) -> None:
        """Take a line of the log into the tables: marks only rise."""
        match line:
            case _Begun(card=card, tenant=tenant):
                _enter(self._lanes.setdefault((card, tenant), _LaneRecord()), line)
            case _Done(report=report):
                _remember(self._lanes.setdefault((report.card, report.tenant), _LaneRecord()), line)
            case _Read(id=outbox_id):
                self._outbox = outbox_id

    @contextmanager
    def _failing(self) -> Generator[None]:
        """What fails here may be half written, or written and not synced: nothing is added to the file as it is."""
        try:
            yield
        except OSError:
            self._behind = True
            raise

    def _check_lock(self) -> None:
        if not _same(_lock_of(self._path), self._lock_fd):
            raise OSError(errno.ESTALE, "the folder or its lock file was taken away; start this agent again")

    def _append(self, line: _Line) -> None:
        data = self._encode(line) + b"\n"
        done = 0
        try:
            while done < len(data):
                done += os.write(self._fd, data[done:])
        except OSError:
            os.ftruncate(self._fd, self._size)
            raise
        self._size += len(data)

    def _replay(self, content: bytes) -> None:
        """Take in every readable line; one that is not was torn by a crash, and is left out."""
        decode = msgspec.json.Decoder(_Line).decode
        for raw in content.split(b"\n"):
            with suppress(msgspec.DecodeError, UnicodeDecodeError):
                self._enter(decode(raw))

    def _lines(self) -> Iterator[_Line]:
        for (card, tenant), record in self._lanes.items():
            yield _Begun(card, tenant, *record.mark, tuple(sorted(n for _, n in record.open)))
            yield from record.done.values()
        if self._outbox is not None:
            yield _Read(self._outbox)

    def _compact(self) -> None:
        """Write the log anew from what is known here. When that fails it is left as it was."""
        self._check_lock()
        data = b"".join(self._encode(line) + b"\n" for line in self._lines())
        fresh = self._path.with_name(self._path.name + ".new")
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            os.fsync(fd)
            fresh.replace(self._path)
        except BaseException:
            os.close(fd)
            with suppress(OSError):
                fresh.unlink()
            raise
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._size, self._compacted = fd, len(data), len(data)
        with self._failing():
            _sync_folder(self._path.parent)
        self._behind = False


def _enter(record: _LaneRecord, begun: _Begun) -> None:
    mark = (begun.token, begun.n)
    if mark[0] > record.mark[0]:
        record.done = {}
    if mark >= record.mark:
        ns = (begun.n,) if begun.open is None else begun.open
        record.mark = mark
        record.open = {(begun.token, n) for n in ns if (begun.token, n) not in record.done}


def _content(command: Command) -> str:
    """What a command asks for, beyond its place in the order."""
    return xxhash.xxh3_64_hexdigest(msgspec.json.encode((command.verb, command.args), order="sorted"))


def _remember(record: _LaneRecord, done: _Done) -> None:
    pair = (done.report.token, done.report.n)
    if pair[0] < record.mark[0]:
        return
    if pair[0] > record.mark[0]:
        record.done = {}
    if pair > record.mark:
        record.mark, record.open = pair, set()
    record.open.discard(pair)
    record.done[pair] = done
    while len(record.done) > REPORTS_KEPT:
        del record.done[min(record.done)]


def _lock_of(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def _same(path: Path, fd: int) -> bool:
    """Whether the path still names what is open."""
    with suppress(FileNotFoundError, NotADirectoryError):
        return os.path.samestat(os.stat(path), os.fstat(fd))
    return False


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
