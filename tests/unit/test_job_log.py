"""A job's log has a bound: its beginning and its end are kept, and what is missing is said, also to who follows it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import pytest

from workers import joblog
from workers.control import launcher
from workers.control.command import CommandControl
from workers.jobs import LOG_BYTES, JobProcess

LIMIT = 64 << 10
WORDY = "i=0; while [ $i -lt 20000 ]; do i=$((i+1)); echo line $i; done"


async def begins(pid: int, started: int) -> bool:
    """Whoever it is."""
    del pid, started
    return True


async def until(happened: Callable[[], bool]) -> None:
    """Files tell nobody when they change."""
    async with asyncio.timeout(20):
        while True:
            if happened():
                return
            await asyncio.sleep(0.02)


async def ended(control: CommandControl) -> None:
    await until(lambda: control.exit_status() is not None)


@pytest.fixture
async def wordy(tmp_path: Path) -> AsyncGenerator[CommandControl]:
    """It says much, waits for a word, and says much again."""
    os.mkfifo(fifo := tmp_path / "more")
    control = CommandControl("job", ["sh", "-c", f"{WORDY}; read word <{fifo}; {WORDY}; echo last"], tmp_path / "job")
    yield control
    await control.stop(0)


def lines(first: int, last: int) -> bytes:
    return b"".join(b"line %d\n" % number for number in range(first, last + 1))


def long_lines(first: int, last: int) -> bytes:
    return b"".join(b"line %090d\n" % number for number in range(first, last + 1))


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """One that was cut twice, of which everything is told by its numbers."""
    path = tmp_path / "log"
    with path.open("ab") as writes:
        for begin in range(1, 400_000, 100_000):
            writes.write(long_lines(begin, begin + 99_999))
            writes.flush()
            launcher.shortened(path, LOG_BYTES)
    return path


async def test_one_that_says_too_much_is_cut_while_it_runs_and_its_beginning_and_end_stay(
    wordy: CommandControl, tmp_path: Path
) -> None:
    control = wordy
    await control.start_once(begins, log_bytes=LIMIT)
    await until(lambda: b"bytes are left out here" in control.log_path().read_bytes())
    assert control.alive()
    await asyncio.to_thread((tmp_path / "more").write_text, "go\n")
    await ended(control)
    said = control.log_path().read_bytes()
    assert len(said) <= LIMIT
    assert said.startswith(lines(1, 500))
    assert said.endswith(lines(19_000, 20_000) + b"last\n")
    assert said.count(b"bytes are left out here; of a log over 65536 bytes its beginning and its end are kept]") == 1


@pytest.mark.parametrize("act", ["it is followed", "it is over"])
async def test_one_whose_launcher_was_killed_is_cut_by_who_follows_it(tmp_path: Path, act: str) -> None:
    job = JobProcess("jb_1", tmp_path / "jb_1", {})
    job.log_path().parent.mkdir()
    with job.log_path().open("wb") as log:
        log.truncate(LOG_BYTES + 1)
    if act == "it is over":
        await job.end(0)
    else:
        job.progress()
    assert job.log_path().stat().st_size < LOG_BYTES


async def test_one_that_says_little_is_left_as_it_is(tmp_path: Path) -> None:
    control = CommandControl("job", ["sh", "-c", "echo one; echo two"], tmp_path / "job")
    await control.start_once(begins, log_bytes=LIMIT)
    await ended(control)
    assert control.log_path().read_bytes() == b"one\ntwo\n"


def test_read_from_the_beginning_it_says_how_much_is_missing(log: Path) -> None:
    text, at = b"", 0
    while (found := joblog.read(log, at, most=1 << 20))[0]:
        chunk, at = found
        text += chunk
    assert text == log.read_bytes()
    whole = long_lines(1, 400_000)
    head, _ = launcher.log_parts(LOG_BYTES)
    beginning, _, rest = text.partition(b"\n[swapper: ")
    gone, _, end = rest.partition(b" bytes are left out here; of a log over 16777216 bytes ")
    end = end.partition(b"\n")[2]
    assert beginning == whole[:head]
    assert end == whole[-len(end) :]
    assert head + int(gone) + len(end) == at == len(whole)


def test_who_follows_it_gets_nothing_twice_though_it_was_cut_meanwhile(tmp_path: Path) -> None:
    path, text, at = tmp_path / "log", b"", 0
    whole = long_lines(1, 400_000)
    with path.open("ab") as writes:
        for begin in range(0, len(whole), 3 << 20):
            writes.write(whole[begin : begin + (3 << 20)])
            writes.flush()
            launcher.shortened(path, LOG_BYTES)
            while (found := joblog.read(path, at, most=1 << 20))[0]:
                chunk, at = found
                text += chunk
    assert text == whole
    assert path.stat().st_size <= LOG_BYTES


def test_who_comes_back_late_is_told_what_is_missing_and_goes_on_at_the_end(log: Path) -> None:
    head, _ = launcher.log_parts(LOG_BYTES)
    mark, at = joblog.read(log, head + 5, most=1 << 20)
    assert mark.startswith(b"\n[swapper: ")
    whole = long_lines(1, 400_000)
    assert joblog.read(log, at, most=10)[0] == whole[at : at + 10]
    assert joblog.read(log, len(whole), most=10) == (b"", len(whole))


def test_one_that_is_not_there_says_nothing(tmp_path: Path) -> None:
    assert joblog.read(tmp_path / "log", 7, most=10) == (b"", 7)
