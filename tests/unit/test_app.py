"""A whole swapper in one process: who may have a state folder, and what becomes of it when a part of it ends."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest

from swapper import backends
from swapper.app import Running, running
from swapper.config import Config, load
from swapper.demo.server import LlamaServer
from swapper.demo.stage import Stage
from swapper.errors import BackendError, ConfigError, SwapperError
from swapper.statefolder import LOCK_FILE, PID_FILE, serving_pid
from swapper.store import embedded

CONFIG = """
listen: 127.0.0.1:0
state_dir: state
cards: {gpu0: {probe: declared, vram: 24GiB}}
tenants: {}
"""
SERVE_WITH_A_PART_THAT_DIES = """
import importlib, sys
from swapper.cli import main
module, owner, name = sys.argv.pop(1).split()
async def die(self):
    raise ValueError("a bug")
setattr(getattr(importlib.import_module(module), owner), name, die)
main()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "swapper.yaml"
    path.write_text(CONFIG)
    return path


@pytest.fixture
def config(path: Path) -> Config:
    return load(path, {})


async def test_a_second_swapper_on_a_state_folder_is_refused_and_the_store_stays(config: Config) -> None:
    async with running(config) as first:
        with pytest.raises(ConfigError, match=f"in use by swapper serve, process {serving_pid(config.state_dir)}"):
            async with running(config):
                pass
        assert (await first.store.read()).queued == 0
        assert serving_pid(config.state_dir) is not None
    assert embedded.running(config.state_dir) is None


async def test_a_second_swapper_for_the_same_host_in_one_store_is_refused_though_they_share_nothing_else(
    config: Config, tmp_path: Path
) -> None:
    async with running(config):
        server = embedded.running(config.state_dir)
        assert server is not None
        (tmp_path / "second").mkdir()
        other = tmp_path / "second" / "swapper.yaml"
        other.write_text(f"{CONFIG}redis: {server.url}\n")
        with pytest.raises(
            ConfigError, match=rf"^host main: another agent .*process {os.getpid()} on .*; stop that one"
        ):
            async with running(load(other, {})):
                pass
    async with running(config):
        pass


async def test_of_two_that_start_together_one_has_the_folder(config: Config) -> None:
    async def start(stack: AsyncExitStack) -> Running:
        return await stack.enter_async_context(running(config))

    async with AsyncExitStack() as one, AsyncExitStack() as two:
        started = await asyncio.gather(start(one), start(two), return_exceptions=True)
        (server,) = [result for result in started if isinstance(result, Running)]
        (refused,) = [result for result in started if not isinstance(result, Running)]
        assert isinstance(refused, ConfigError)
        assert (await server.store.read()).queued == 0


async def test_one_that_has_not_written_its_number_yet_has_the_folder_all_the_same(config: Config) -> None:
    async with running(config):
        (config.state_dir / PID_FILE).unlink()
        with pytest.raises(ConfigError, match="in use by swapper serve, another process"):
            async with running(config):
                pass


async def test_a_folder_left_by_a_killed_one_can_be_had_again(config: Config) -> None:
    config.state_dir.mkdir()
    (config.state_dir / LOCK_FILE).touch()
    (config.state_dir / PID_FILE).write_text("4194304 1000.0\n")
    for _ in range(2):
        async with running(config):
            assert serving_pid(config.state_dir) is not None


@pytest.mark.parametrize(
    "part",
    [
        "workers.agent Agent run",
        "swapper.coordinator Coordinator run",
        "swapper.gateway.member Member _obey",
        "swapper.gateway.member Member _beat",
    ],
)
def test_when_a_part_dies_serve_stops_cleanly_with_status_1(path: Path, part: str) -> None:
    command = [sys.executable, "-c", SERVE_WITH_A_PART_THAT_DIES, part, "serve", "-c", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "ended by itself" in done.stderr
    assert "a bug" in done.stderr
    assert embedded.running(path.parent / "state") is None
    assert not (path.parent / "state" / PID_FILE).exists()


async def test_the_demo_ends_with_the_reason_when_a_part_dies(config: Config, tmp_path: Path) -> None:
    on = Stage(tmp_path, LlamaServer((), "", portable=True), "http://127.0.0.1:9", config)

    async def show() -> None:
        async with on.swapper() as server:
            server.failed.set_result("the agent ended by itself: a bug")
            await asyncio.Event().wait()

    with pytest.raises(SwapperError, match="the agent ended by itself: a bug"):
        await show()
    assert embedded.running(config.state_dir) is None


async def test_a_router_is_told_its_servers_name_by_which_strangers_in_it_are_called(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traits = "kind: llama-router, card: gpu0, url: 'http://127.0.0.1:9', snapshots: {strategy: off}"
    path.write_text(CONFIG.replace("tenants: {}", f"tenants: {{llama: {{{traits}, models: {{med: {{vram: 1GiB}}}}}}}}"))

    def router(url: str, *, tenants: dict[str, str], server: str, **_rest: object) -> None:
        raise BackendError(f"{server} at {url} has {tenants}")

    monkeypatch.setattr(backends, "LlamaRouter", router)
    with pytest.raises(BackendError, match=r"^llama at http://127\.0\.0\.1:9 has \{'llama/med': 'med'\}$"):
        async with running(load(path, {})):
            pass


async def test_a_cancellation_from_elsewhere_stays_one(config: Config) -> None:
    entered = asyncio.Event()

    async def held() -> None:
        async with running(config) as server, server.unless_failed():
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(held())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_what_its_store_takes_is_in_its_metrics(config: Config) -> None:
    async with running(config) as server, aiohttp.ClientSession(server.url) as http:
        async with http.post("/api/leases", json={"card": "gpu0"}) as got:
            assert got.status == 201
        async with http.get("/metrics") as got:
            assert 'swapper_store_seconds_count{op="enqueue"} 1.0' in (await got.text()).splitlines()


async def test_an_engine_that_is_away_ends_no_serve_and_is_left_to_the_agent(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nobody.sock")
    frigate = "{kind: none, control: docker, container: frigate, card: gpu0, vram: 2GiB, evict: never}"
    path.write_text(CONFIG.replace("tenants: {}", f"tenants: {{frigate: {frigate}}}"))
    async with (
        running(load(path, {})) as server,
        aiohttp.ClientSession() as session,
        session.get(server.url + "/health") as answer,
    ):
        assert answer.status == 200
