"""`swapper serve` as a container's first process: orphans are reaped, signals and the end pass through."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import psutil
import pytest

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare (util-linux)"
)
SERVED = """
import os, select, sys, time
from swapper.cli.first import stand_first
stand_first()
assert os.getpid() != 1 and os.getppid() == 1
"""
LEAVES_AN_ORPHAN = """
told, telling = os.pipe()
if os.fork() == 0:
    orphan = os.fork()
    if orphan == 0:
        while os.getppid() != 1:
            os.sched_yield()
        os._exit(0)
    os.write(telling, str(orphan).encode())
    os._exit(0)
os.wait()
orphan = int(os.read(told, 20))
until = time.monotonic() + 20
while os.path.exists(f"/proc/{orphan}"):
    assert time.monotonic() < until, "a zombie stays"
    os.sched_yield()
print("reaped")
"""
CONFIG = "listen: 127.0.0.1:0\nstate_dir: state\ncards: {gpu0: {vram: 24GiB}}\ntenants: {}\n"


@contextmanager
def first(*command: str, folder: Path, stderr: IO[bytes] | None = None) -> Generator[subprocess.Popen[str]]:
    """A command as pid 1 of a namespace of its own."""
    inside = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable, *command]
    with subprocess.Popen(inside, cwd=folder, stdout=subprocess.PIPE, stderr=stderr, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def pid_of_the_first(process: subprocess.Popen[str]) -> int:
    [one] = psutil.Process(process.pid).children()
    return one.pid


def test_whom_nobody_waits_for_is_reaped(tmp_path: Path) -> None:
    with first("-c", SERVED + LEAVES_AN_ORPHAN, folder=tmp_path) as process:
        assert process.communicate(timeout=30)[0] == "reaped\n"


@pytest.mark.parametrize(("end", "status"), [("sys.exit(7)", 7), ("os.kill(os.getpid(), 9)", 137)])
def test_it_ends_as_serve_ends(end: str, status: int, tmp_path: Path) -> None:
    with first("-c", SERVED + end, folder=tmp_path) as process:
        assert process.wait(30) == status


def test_a_stop_of_the_container_stops_serve_in_order(tmp_path: Path) -> None:
    (tmp_path / "swapper.yaml").write_text(CONFIG)
    with (
        (tmp_path / "log").open("w+b") as log,
        first("-m", "swapper", "serve", "-c", "swapper.yaml", folder=tmp_path, stderr=log) as process,
    ):
        with (tmp_path / "log").open() as said:
            while '"serving"' not in (line := said.readline()):
                assert process.poll() is None, line
        assert (tmp_path / "state" / "serve.pid").read_text().split()[0] != "1"
        os.kill(pid_of_the_first(process), signal.SIGTERM)
        assert process.wait(60) == 0
    assert "stopping; residents stay as they are" in (tmp_path / "log").read_text()


def test_where_it_is_not_the_first_process_nothing_is_between() -> None:
    ask = (
        "from swapper.cli.first import stand_first; import os; a = os.getpid(); stand_first(); print(a == os.getpid())"
    )
    assert subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout == "True\n"
