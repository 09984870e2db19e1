"""The card changes hands among containers: a llama-server, one that is only started and stopped, one that stays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from swapper.demo.models import make_models
from tests.support.contained import contain, image
from tests.support.dockerd import DEAF, Dockerd, needed
from tests.support.matrix import eventually
from tests.support.plain import PlainServer
from tests.support.router import RealRouter
from tests.support.server import Json, Server

STORY = "once upon a time there was a card that changed hands; " * 12


@pytest.fixture(scope="module")
def engine() -> Iterator[Dockerd]:
    needed()
    engine = Dockerd()
    try:
        engine.start().busybox()
        image(engine)
        yield engine
    finally:
        engine.stop()


@pytest.fixture
def server(tmp_path: Path, engine: Dockerd) -> Iterator[Server]:
    """A serve over three containers, of which `ml` and `frigate` run already."""
    model = make_models(tmp_path / "models", ["alpha"])["alpha"]
    plain = PlainServer(tmp_path / "plain", model)
    contain(engine, "chat", plain.command, model.parent, plain.slot_dir)
    engine.create("ml", DEAF)
    engine.create("frigate")
    engine.api.start("ml")
    server = Server(tmp_path / "swapper", RealRouter(tmp_path / "none", {}), {}, slot_dir=plain.slot_dir)
    server.env = {"DOCKER_HOST": engine.url}
    server.config.write_text(
        f"""
listen: 127.0.0.1:{server.port}
state_dir: {server.state_dir}
cards: {{gpu0: {{probe: declared, vram: 24GiB}}}}
tenants:
  chat:
    kind: llama-server
    control: docker
    container: chat
    card: gpu0
    url: {plain.url}
    slot_dir: {plain.slot_dir}
    models: {{alpha: {{vram: 8GiB, default: true}}}}
  ml: {{kind: none, control: docker, container: ml, card: gpu0, vram: 4GiB, grace: 1s}}
  frigate: {{kind: none, control: docker, container: frigate, card: gpu0, vram: 2GiB, evict: never}}
"""
    )
    try:
        server.start()
        yield server
    finally:
        server.stop()
        for one in engine.api.containers(all=True):
            engine.api.remove_container(one["Id"], force=True)


def loaded(server: Server) -> set[str]:
    tenants = cast("list[Json]", server.get("/api/status")["tenants"])
    return {str(one["id"]) for one in tenants if one["state"] == "loaded"}


def at_rest(server: Server, *tenants: str) -> None:
    def look() -> bool:
        (card,) = cast("list[Json]", server.get("/api/status")["cards"])
        residents = set(cast("list[str]", card["residents"]))
        return card["phase"] == "steady" and residents | {"frigate"} == loaded(server) == set(tenants)

    eventually(look, f"{tenants} at rest")


def test_a_lease_stops_what_may_leave_and_all_of_it_is_back_afterwards(server: Server, engine: Dockerd) -> None:
    at_rest(server, "chat", "ml", "frigate")
    first = cast("list[Json]", server.chat("alpha", STORY)["choices"])[0]["message"]
    before = {name: engine.state(name)["Pid"] for name in ("chat", "ml", "frigate")}
    lease = server.lease("render", wait=30)
    assert lease["state"] == "granted"
    assert [engine.state(name)["Running"] for name in ("chat", "ml", "frigate")] == [False, False, True]
    server.release(lease)
    at_rest(server, "chat", "ml", "frigate")
    assert engine.state("frigate")["Pid"] == before["frigate"]
    assert engine.state("ml")["Pid"] != before["ml"]
    answer = server.chat("alpha", STORY, cast("dict[str, str]", first)["content"], "And then?")
    assert cast("dict[str, int]", answer["timings"])["cache_n"] > 0.9 * len(STORY)
    (out,) = (swap for swap in server.swaps() if swap["to"] == [])
    steps = cast("list[Json]", out["steps"])
    (said,) = (str(step["detail"]) for step in steps if step["step"] == "release" and step["tenant"] == "ml")
    assert said.startswith("the container ml did not end on SIGTERM and was killed after 1 s")


def tried(server: Server, engine: Dockerd, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "swapper", "snapshots", "test", "alpha", "-c", str(server.config)]
    return subprocess.run(
        [*command, "--tokens", "1500", "--json"],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"DOCKER_HOST": engine.url} | env,
    )


def test_each_strategy_is_tried_on_a_server_in_a_container_that_is_started_for_it_and_stopped(
    server: Server, engine: Dockerd
) -> None:
    at_rest(server, "chat", "ml", "frigate")
    first = cast("list[Json]", server.chat("alpha", STORY)["choices"])[0]["message"]
    result = tried(server, engine)
    assert result.returncode == 0, (result.stdout, result.stderr)
    report = json.loads(result.stdout)
    found = {one["strategy"]: one["result"] for one in report["strategies"]}
    assert (report["ok"], found) == (True, {"slots": "warm", "rewind": "warm", "replay": "warm"})
    at_rest(server, "chat", "ml", "frigate")
    answer = server.chat("alpha", STORY, cast("dict[str, str]", first)["content"], "And then?")
    assert cast("dict[str, int]", answer["timings"])["cache_n"] > 0.9 * len(STORY)
    log = engine.api.logs("chat").decode()
    assert log.count("listening on") == 1 + 5 + 1, "before it, in it, and after it"


def test_a_container_that_somebody_else_started_is_not_used_for_the_test(server: Server, engine: Dockerd) -> None:
    at_rest(server, "chat", "ml", "frigate")
    lease = server.lease("window", wait=60)
    engine.api.start("chat")
    pid = engine.state("chat")["Pid"]
    result = tried(server, engine, SWAPPER_LEASE=str(lease["id"]), SWAPPER_TOKEN=str(lease["token"]))
    assert result.returncode == 1, (result.stdout, result.stderr)
    assert f"the server of chat (process {pid}) runs though its card is lent to this test" in result.stderr
    assert engine.state("chat")["Pid"] == pid
    engine.api.stop("chat")
    server.release(lease)
    at_rest(server, "chat", "ml", "frigate")


def test_a_name_that_nobody_serves_is_no_model(server: Server) -> None:
    at_rest(server, "chat", "ml", "frigate")
    assert [one["id"] for one in cast("list[Json]", server.get("/v1/models")["data"])] == ["alpha"]


def test_what_somebody_stops_is_brought_back(server: Server, engine: Dockerd) -> None:
    at_rest(server, "chat", "ml", "frigate")
    for name in ("ml", "frigate"):
        engine.api.kill(name)
    at_rest(server, "chat", "ml", "frigate")
    assert all(engine.state(name)["Running"] for name in ("ml", "frigate"))


def test_what_an_engine_brings_back_into_a_lease_is_stopped_again(server: Server, engine: Dockerd) -> None:
    engine.api.update_container("ml", restart_policy={"Name": "always"})
    at_rest(server, "chat", "ml", "frigate")
    lease = server.lease("render", wait=30)
    engine.kill()
    engine.start()
    said = "ml came back by itself though its card was given away: stopped again"
    eventually(lambda: any(said in text for text in server.alerts()), said)
    assert engine.state("ml")["Running"] is False
    server.release(lease)
    at_rest(server, "chat", "ml", "frigate")
