"""`swapper demo` as a newcomer runs it: a process of its own, judged by what it prints and by what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

MARK = "SWAPPER_TEST_DEMO"
END_S = 30.0


@contextmanager
def demo(folder: Path, *options: str) -> Generator[subprocess.Popen[str]]:
    """The command, with its temporary files in `folder` and a mark that all it starts inherits."""
    process = subprocess.Popen(
        [sys.executable, "-m", "swapper", "demo", *options],
        env={**os.environ, "TMPDIR": str(folder), MARK: str(folder)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)


def _told(process: subprocess.Popen[str], until: str) -> list[str]:
    """Its progress up to the line that contains `until`."""
    assert process.stderr is not None
    lines: list[str] = []
    for line in process.stderr:
        lines.append(line.strip())
        if until in line:
            return lines
    raise AssertionError("\n".join(["the demo ended early:", *lines]))


def _left_behind(folder: Path) -> list[str]:
    """Processes that carry the mark of this run, and files in its temporary folder."""
    alive: list[str] = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == str(folder):
                alive.append(f"{process.pid} {process.name()}")
        except psutil.Error:
            continue
    return alive + [str(path) for path in folder.iterdir()]


@pytest.mark.timeout(240)
def test_both_conversations_come_back_warm_and_nothing_stays_behind(tmp_path: Path) -> None:
    with demo(tmp_path, "--json", "--keep") as process:
        told = _told(process, until="Ctrl-C")
        assert process.stdout is not None
        result: dict[str, Any] = json.loads(process.stdout.readline())
        url = next(line for line in told if line.startswith("swapper at ")).split()[2].rstrip(",")
        with urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
            assert answer.read() == b"OK"
        process.send_signal(signal.SIGINT)
        assert process.wait(END_S) == 0
    curls = [line for line in told if line.startswith("curl ")]
    assert len(curls) == 4
    assert curls[-1] == f"curl -s -X DELETE '{url}/api/leases/ID?token=TOKEN'", "how to give the card back"
    assert f"kill {process.pid}" in told[-1]
    _assert_warm(result)
    assert _left_behind(tmp_path) == []


def _assert_warm(result: dict[str, Any]) -> None:
    """What the contract says of `swapper demo --json`."""
    assert result["ok"] is True
    talks: list[dict[str, Any]] = result["conversations"]
    assert [talk["result"] for talk in talks] == ["warm", "warm"]
    assert all(talk["cache_n"] >= 0.99 * talk["tokens_saved"] for talk in talks)
    assert 7_500 < sum(talk["tokens_saved"] for talk in talks) < 8_500
    assert all(talk["bytes"] > 1_000_000 and talk["strategy"] == "slots" for talk in talks)
    assert 10 * sum(talk["ttft_ms"] for talk in talks) <= sum(talk["reread_ttft_ms"] for talk in talks)
    out, back = result["handover"]["out"], result["handover"]["back"]
    assert [step["step"] for step in out["steps"]] == ["close", "drain", "save", "release", "vacate"]
    assert [step["step"] for step in back["steps"]][-3:] == ["load", "restore", "open"]
    assert (out["outcome"], back["outcome"]) == ("done", "done")
    assert [talk["result"] for talk in back["conversations"]] == ["warm", "warm"]
    assert result["lease"]["token"] > 0
    assert result["lease"]["wait_ms"] > 0
    assert result["llama_server"]["version"]


@pytest.mark.parametrize("moment", ["starting the store", "conversation 1", "the job works"])
def test_an_interrupted_demo_leaves_no_process_and_no_file(tmp_path: Path, moment: str) -> None:
    (tmp_path / "swapper-demo-before").mkdir()
    (tmp_path / "swapper-demo-before" / "demo.lock").touch()  # one before it was killed, and its guard
    with demo(tmp_path) as process:
        _told(process, until=moment)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)  # impatience does no harm
        assert process.wait(END_S) == 128 + signal.SIGINT
    assert _left_behind(tmp_path) == []


@pytest.mark.parametrize("moment", ["starting the store", "conversation 1", "the job works"])
def test_a_killed_demo_leaves_no_process_and_no_file_either(tmp_path: Path, moment: str) -> None:
    with demo(tmp_path) as process:
        _told(process, until=moment)
        process.kill()
        assert process.stderr is not None
        said = process.stderr.read()  # ends when nobody of it has anything to say any more
    assert "swapper demo is gone and its folder is not" in said
    assert _left_behind(tmp_path) == []
