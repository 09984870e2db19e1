"""What `swapper serve` says of itself when it serves: a line to a person at a terminal, a record to a log."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest

from swapper.cli.serve import greeting
from swapper.config import loads

CONFIG = """
listen: 127.0.0.1:0
state_dir: state
cards: {gpu0: {probe: declared, vram: 24GiB}}
tenants: {}
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "swapper.yaml"
    path.write_text(CONFIG)
    return path


def _first_line(path: Path, stderr: int, said: IO[str]) -> str:
    """The first line a serve writes to `stderr`, which is read at `said`; it is stopped then."""
    command = [sys.executable, "-m", "swapper", "serve", "-c", str(path)]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=stderr) as serving:
        os.close(stderr)
        line = said.readline()
        serving.terminate()
        assert serving.wait(30) == 0
    return line


def test_on_a_terminal_one_line_says_where_it_is_and_what_to_try(path: Path) -> None:
    ours, theirs = pty.openpty()
    with open(ours, encoding="utf-8") as terminal:
        line = _first_line(path, theirs, terminal)
    url = line.split()[4].rstrip(":")
    assert url.startswith("http://127.0.0.1:")
    assert f"serves at {url}: card gpu0, no tenants; ready; try: curl -s {url}/api/status" in line
    assert not line.startswith("{")


def test_elsewhere_it_is_a_record_of_the_log(path: Path) -> None:
    ours, theirs = os.pipe()
    with open(ours, encoding="utf-8") as pipe:
        record = json.loads(_first_line(path, theirs, pipe))
    assert (record["event"], record["cards"], record["tenants"]) == ("serving", ["gpu0"], [])


def test_of_many_tenants_five_are_named_and_a_key_is_asked_for_where_one_is_needed(tmp_path: Path) -> None:
    models = ", ".join(f"m{number}: {{vram: 1GiB}}" for number in range(7))
    traits = (
        f"kind: llama-router, card: gpu0, url: 'http://127.0.0.1:9', snapshots: {{strategy: off}}, models: {{{models}}}"
    )
    text = CONFIG.replace("tenants: {}", f"tenants: {{llama: {{{traits}}}}}")
    spec = loads(text, folder=tmp_path, environ={}, name="swapper.yaml", path=None).spec()
    line = greeting("http://h:1", spec, with_key=True)
    assert "tenants llama/m0, llama/m1, llama/m2, llama/m3, llama/m4 and 2 more; ready" in line
    assert "curl -s -H 'Authorization: Bearer KEY' http://h:1/api/status" in line
