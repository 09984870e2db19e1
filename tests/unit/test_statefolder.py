"""A serve and its state folder: what a killed one leaves there, and what becomes of one whose folder is taken away."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import psutil
import pytest

from swapper.app import Running, running
from swapper.config import Config, loads
from swapper.errors import SwapperError
from swapper.statefolder import GATEWAY_FILE, StateFolder, serving_pid
from swapper.store import embedded
from swapper.store.embedded import Embedded
from swapper.store.redis import RedisStore

CONFIG = """
listen: 127.0.0.1:0
state_dir: state
cards: {gpu0: {probe: declared, vram: 24GiB}}
tenants: {}
"""
AN_HOUR_MS = 3_600_000


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return loads(CONFIG, folder=tmp_path, environ={}, name="swapper.yaml", path=tmp_path / "swapper.yaml")


def _store_of(config: Config) -> Embedded:
    found = embedded.running(config.state_dir)
    assert found is not None
    return found


def _ended(process: psutil.Process) -> bool:
    """Whether it is gone; where nobody reaps orphans it stays a zombie."""
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


async def _left_by_a_killed_one(config: Config, gateway: str) -> None:
    """A live membership that would run for another hour, and the record of whose it was."""
    store = await RedisStore.open((await embedded.start(config.state_dir)).url)
    await store.beat(gateway, (), ttl_ms=AN_HOUR_MS)
    await store.close()
    (config.state_dir / GATEWAY_FILE).write_text(f"{gateway}\n")


async def test_the_gateway_of_a_killed_one_is_no_member_any_more_when_the_next_serves(config: Config) -> None:
    await _left_by_a_killed_one(config, "g_dead")
    async with running(config) as server:
        (alive,) = (await server.store.read()).gateways
        assert alive != "g_dead"
        assert (config.state_dir / GATEWAY_FILE).read_text().strip() == alive


async def test_the_gateways_of_other_hosts_stay_members(config: Config) -> None:
    await _left_by_a_killed_one(config, "g_elsewhere")
    (config.state_dir / GATEWAY_FILE).unlink()
    async with running(config) as server:
        assert "g_elsewhere" in (await server.store.read()).gateways


@dataclass
class Vanished:
    """A serve whose state folder is gone. `eye` is a store client with connections from before."""

    server: Running
    store: psutil.Process
    eye: RedisStore


@asynccontextmanager
async def _serving_from_a_folder_that_vanished(config: Config) -> AsyncGenerator[Vanished]:
    async with running(config) as server:
        found = _store_of(config)
        eye = await RedisStore.open(found.url)
        await eye.events(after="0", limit=1, block_ms=1)
        shutil.rmtree(config.state_dir)
        try:
            yield Vanished(server, psutil.Process(found.pid), eye)
        finally:
            await eye.close()


async def test_without_its_folder_it_works_on_and_takes_its_store_along_when_it_stops(config: Config) -> None:
    async with _serving_from_a_folder_that_vanished(config) as vanished:
        (_gateway,) = (await vanished.eye.read()).gateways
    assert _ended(vanished.store)
    assert not config.state_dir.exists()


async def test_without_its_folder_it_says_so_when_asked_and_once_as_an_alert(config: Config) -> None:
    async with _serving_from_a_folder_that_vanished(config) as vanished, aiohttp.ClientSession() as session:
        async with session.get(f"{vanished.server.url}/ready") as answer:
            (problem,) = [text for text in (await answer.json())["reasons"] if "state folder" in text]
        assert f"{config.state_dir} was removed or replaced" in problem
        after, alerts = "0", list[dict[str, object]]()
        while not alerts:  # it was noticed above at the latest; the alert is on its way
            if events := await vanished.eye.events(after=after, limit=100, block_ms=5_000):
                after = events[-1].id
            alerts = [json.loads(event.data) for event in events if event.type == "alert"]
        assert [(alert["card"], alert["text"]) for alert in alerts] == [("gpu0", problem)]


async def test_it_is_noticed_with_a_beat_though_nobody_asks(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[StateFolder] = []
    look = StateFolder.look

    def noted(self: StateFolder) -> str | None:
        looked.append(self)
        return look(self)

    monkeypatch.setattr(StateFolder, "look", noted)
    async with _serving_from_a_folder_that_vanished(config):
        await asyncio.wait_for(looked[0].gone.wait(), 20)


async def test_a_store_that_dies_without_its_folder_ends_serve_and_none_comes_up_empty(config: Config) -> None:
    async def serve() -> None:
        async with _serving_from_a_folder_that_vanished(config) as vanished, vanished.server.unless_failed():
            vanished.store.kill()
            await asyncio.Event().wait()

    with pytest.raises(SwapperError, match="embedded store ended and cannot be started again: the state folder"):
        await serve()
    assert not config.state_dir.exists()


async def test_who_has_the_folder_anew_is_not_harmed_when_the_first_stops(config: Config) -> None:
    async with AsyncExitStack() as stack:
        async with _serving_from_a_folder_that_vanished(config) as first:
            second = await stack.enter_async_context(running(config))
            theirs = _store_of(config)
        assert _ended(first.store)
        assert _store_of(config) == theirs
        assert serving_pid(config.state_dir) == os.getpid()
        assert (await second.store.read()).queued == 0
    assert embedded.running(config.state_dir) is None
