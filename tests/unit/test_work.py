"""What a process has done so far is seen from outside, with all below it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from workers.work import MUCH, Work, work_of

READS = (
    "import sys\nfor line in sys.stdin:\n    kept = open(sys.argv[1], 'rb').read()\n    print(len(kept), flush=True)"
)
BELOW = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', sys.argv[2], sys.argv[1]])"


@contextmanager
def reader(path: Path, *, below: bool = False) -> Generator[subprocess.Popen[str]]:
    """It reads the file at each line, and keeps it; `below`: a child of it does."""
    command = [sys.executable, "-c", BELOW, str(path), READS] if below else [sys.executable, "-c", READS, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()
        process.wait(20)


def read_once(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    assert int(process.stdout.readline()) == 4 * MUCH


def grown(tmp_path: Path, *, below: bool) -> tuple[Work, Work]:
    path = tmp_path / "weights"
    path.write_bytes(bytes(4 * MUCH))
    with reader(path, below=below) as process:
        read_once(process)
        before = work_of([process.pid])
        read_once(process)
        after = work_of([process.pid])
    assert before is not None
    assert after is not None
    return before, after


def test_what_it_reads_and_keeps_is_counted(tmp_path: Path) -> None:
    before, after = grown(tmp_path, below=False)
    assert after.bytes - before.bytes >= 4 * MUCH
    assert before.memory >= 4 * MUCH
    assert after.ticks >= before.ticks


def test_so_is_what_processes_below_it_do(tmp_path: Path) -> None:
    before, after = grown(tmp_path, below=True)
    assert after.bytes - before.bytes >= 4 * MUCH


def test_of_a_process_that_is_gone_nothing_is_known() -> None:
    with subprocess.Popen(["true"]) as gone:
        gone.wait(20)
    assert work_of([gone.pid]) is None
    assert work_of([]) is None
