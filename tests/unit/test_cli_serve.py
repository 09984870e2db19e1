"""What `swapper serve` says of itself when it serves: a line to a person at a terminal, a record to a log."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest

from swapper.cli.arrival import OBSERVED_S, Arrivals, observed, watch
from swapper.cli.serve import greeting
from swapper.config import loads
from swapper.core.spec import Spec
from swapper.core.turn import Seen
from swapper.core.types import Gate, World
from swapper.demo.models import make_models
from swapper.errors import StoreDown
from tests.support.fake_server import FakeServer
from tests.support.virtual_time import virtual

CONFIG = """
listen: 127.0.0.1:0
state_dir: state
cards: {gpu0: {probe: declared, vram: 24GiB}}
tenants: {}
"""


def _with_defaults(folder: Path, url: str = "http://127.0.0.1:9") -> Spec:
    models = "{a: {vram: 1GiB, default: true}, b: {vram: 1GiB, default: true}, c: {vram: 1GiB}}"
    traits = f"kind: llama-router, card: gpu0, url: '{url}', snapshots: {{strategy: off}}, models: {models}"
    text = CONFIG.replace("tenants: {}", f"tenants: {{llama: {{{traits}}}}}")
    (folder / "defaults.yaml").write_text(text)
    return loads(text, folder=folder, environ={}).spec()


def _world(**gates: bool) -> World:
    return World(0, {}, {}, gates={f"llama/{name}": Gate(1, open=opened) for name, opened in gates.items()})


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
    line = greeting("http://h:1", spec, (), with_key=True)
    assert "tenants llama/m0, llama/m1, llama/m2, llama/m3, llama/m4 and 2 more; ready" in line
    assert "curl -s -H 'Authorization: Bearer KEY' http://h:1/api/status" in line


def test_what_is_loaded_at_start_and_not_there_yet_stands_in_the_line_instead_of_ready(tmp_path: Path) -> None:
    line = greeting("http://h:1", _with_defaults(tmp_path), ("llama/a", "llama/b"), with_key=False)
    assert "; not loaded yet: llama/a, llama/b (calls for it wait); try:" in line
    assert "ready" not in line


def test_a_model_is_said_to_be_there_once_when_it_is_loaded_and_its_gate_is_open(tmp_path: Path) -> None:
    arrivals = Arrivals(_with_defaults(tmp_path))
    assert arrivals.absent == ["llama/a", "llama/b"]
    loaded = {"llama/a": "loaded", "llama/b": "loading", "llama/c": "loaded"}
    assert arrivals.look(_world(a=False, c=True), loaded) == []
    assert arrivals.look(_world(a=True, b=True), {**loaded, "llama/a": "unloaded"}) == []
    assert arrivals.look(_world(a=True, b=True), loaded) == ["llama/a is loaded and answers"]
    assert arrivals.absent == ["llama/b"]
    assert arrivals.look(_world(a=True, b=True), {"llama/b": "sleeping"}) == ["llama/b is loaded and answers"]
    assert arrivals.look(_world(a=True, b=True), loaded) == []


@virtual
async def test_it_is_looked_for_until_all_are_there_though_the_store_is_away_for_a_while(tmp_path: Path) -> None:
    worlds: list[World | StoreDown] = [_world(a=True), StoreDown("gone"), _world(a=True), _world(a=True, b=True)]

    class Store:
        async def read(self) -> World:
            found = worlds.pop(0)
            if isinstance(found, StoreDown):
                raise found
            return found

    seen = Seen(states={"llama/a": "loaded", "llama/b": "loaded"})
    said: list[str] = []
    await watch(Arrivals(_with_defaults(tmp_path)), Store(), seen, said.append)
    assert said == ["llama/a is loaded and answers", "llama/b is loaded and answers"]
    assert worlds == []


@virtual
async def test_the_first_line_waits_for_what_was_loaded_before_but_not_for_ever(tmp_path: Path) -> None:
    spec, seen, loop = _with_defaults(tmp_path), Seen(), asyncio.get_running_loop()
    begun = loop.time()
    await observed(spec, seen)
    assert loop.time() - begun == pytest.approx(OBSERVED_S)
    loop.call_later(0.3, seen.states.update, dict.fromkeys(spec.tenants, "loaded"))
    begun = loop.time()
    await observed(spec, seen)
    assert loop.time() - begun == pytest.approx(0.3, abs=0.05)


def test_a_serve_says_what_it_still_loads_and_when_each_is_there(tmp_path: Path) -> None:
    gguf = make_models(tmp_path, ["alpha"])["alpha"]
    router = FakeServer(tmp_path / "router", dict.fromkeys("abc", gguf)).start()
    _with_defaults(tmp_path, router.url)
    command = [sys.executable, "-m", "swapper", "serve", "-c", str(tmp_path / "defaults.yaml")]
    try:
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as serving:
            try:
                assert serving.stderr is not None
                records = map(json.loads, serving.stderr)
                absent = next(record for record in records if record["event"] == "serving")["not_loaded_yet"]
                wanted = {f"{name} is loaded and answers" for name in absent}
                while wanted:
                    wanted.discard(next(records)["event"])
            finally:
                serving.terminate()
    finally:
        router.stop()
    assert absent == ["llama/a", "llama/b"]
