"""A serve and its state folder: what a killed one leaves there, and what becomes of one whose folder is taken away."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import psutil
import pytest
from structlog.testing import capture_logs

from swapper import statefolder, watches
from swapper.app import Running, running
from swapper.config import Config, loads
from swapper.errors import ConfigError, SwapperError
from swapper.statefolder import GATEWAY_FILE, LOCK_FILE, PID_FILE, StateFolder, serving_pid
from swapper.store import embedded, kept
from swapper.store.embedded import Embedded
from swapper.store.kept import Kept
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
    _record(config.state_dir, gateway)


def _record(state_dir: Path, gateway: str) -> None:
    folder = StateFolder(state_dir)
    folder.record_gateway(gateway)
    folder.release()


def _last_gateway(state_dir: Path) -> str | None:
    folder = StateFolder(state_dir)
    try:
        return folder.last_gateway()
    finally:
        folder.release()


async def test_the_gateway_of_a_killed_one_is_no_member_any_more_when_the_next_serves(config: Config) -> None:
    await _left_by_a_killed_one(config, "g_dead")
    async with running(config) as server:
        (alive,) = (await server.store.read()).gateways
        assert alive != "g_dead"
        assert (config.state_dir / GATEWAY_FILE).read_text().split()[0] == alive


async def test_the_gateways_of_other_hosts_stay_members(config: Config) -> None:
    await _left_by_a_killed_one(config, "g_elsewhere")
    (config.state_dir / GATEWAY_FILE).unlink()
    async with running(config) as server:
        assert "g_elsewhere" in (await server.store.read()).gateways


@pytest.mark.parametrize(
    ("host", "boot", "whose"),
    [
        ("elsewhere", "another", None),
        ("here", "another", "g_1"),
        ("renamed", "this", "g_1"),
        ("here", "this", "g_1"),
    ],
)
def test_a_recorded_gateway_is_dead_for_sure_only_if_it_was_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, boot: str, whose: str | None
) -> None:
    with monkeypatch.context() as then:
        then.setattr("socket.gethostname", lambda: host)
        then.setattr(statefolder, "boot_id", lambda: boot)
        _record(tmp_path, "g_1")
    monkeypatch.setattr("socket.gethostname", lambda: "here")
    monkeypatch.setattr(statefolder, "boot_id", lambda: "this")
    assert _last_gateway(tmp_path) == whose


def test_the_gateway_of_a_folder_that_ours_is_a_copy_of_may_live(tmp_path: Path) -> None:
    _record(tmp_path / "first", "g_1")
    shutil.copytree(tmp_path / "first", tmp_path / "copy")
    assert _last_gateway(tmp_path / "copy") is None
    assert _last_gateway(tmp_path / "first") == "g_1"


@pytest.mark.parametrize("text", ["", "g_1\n", "\0\0\0\0"])
def test_a_record_that_was_cut_short_names_nobody(tmp_path: Path, text: str) -> None:
    (tmp_path / GATEWAY_FILE).write_text(text)
    assert _last_gateway(tmp_path) is None


async def test_with_the_lock_file_removed_a_second_serve_is_refused_and_changes_nothing(config: Config) -> None:
    async with running(config) as first, first.unless_failed():
        before, number = _store_of(config), (config.state_dir / PID_FILE).read_text()
        (config.state_dir / LOCK_FILE).unlink()
        (config.folder / "swapper.yaml").write_text(CONFIG)
        command = [sys.executable, "-m", "swapper", "serve", "-c", str(config.folder / "swapper.yaml")]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2, done.stderr
        assert f"in use by swapper serve, process {os.getpid()}" in done.stderr
        assert not (config.state_dir / LOCK_FILE).exists()
        assert (config.state_dir / PID_FILE).read_text() == number
        assert _store_of(config) == before


async def test_a_store_that_another_keeps_is_let_alone_though_every_sign_of_it_was_removed(config: Config) -> None:
    async with running(config) as first, first.unless_failed():
        before = _store_of(config)
        for sign in (LOCK_FILE, PID_FILE):
            (config.state_dir / sign).unlink()
        with pytest.raises(ConfigError, match="another process keeps the store"):
            async with running(config):
                pass
        assert _store_of(config) == before
        assert (await first.store.read()).queued == 0


async def test_a_store_is_started_again_though_the_lock_file_is_gone(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(config) as server, server.unless_failed():
        (config.state_dir / LOCK_FILE).unlink()
        started, start = asyncio.Event(), embedded.start

        async def noted(state_dir: Path) -> Embedded:
            found = await start(state_dir)
            started.set()
            return found

        monkeypatch.setattr(embedded, "start", noted)
        psutil.Process(_store_of(config).pid).kill()
        await started.wait()
        assert _store_of(config).pid


async def test_with_its_store_stopped_it_is_not_ready_until_it_runs_on(config: Config) -> None:
    async with running(config) as server, aiohttp.ClientSession() as session:
        store = psutil.Process(_store_of(config).pid)
        store.suspend()
        try:
            async with session.get(f"{server.url}/ready") as answer:
                assert answer.status == 503
                assert "the store did not answer within 1 s" in (await answer.json())["reasons"]
        finally:
            store.resume()
        async with session.get(f"{server.url}/ready") as answer:
            assert "the store did not answer within 1 s" not in (await answer.json())["reasons"]


@pytest.mark.parametrize(
    ("number", "kind", "said"),
    [
        (errno.EROFS, ConfigError, "state_dir: .* cannot be used: read-only file system$"),
        (errno.EACCES, ConfigError, "cannot be used: permission denied$"),
        (errno.ENOSPC, SwapperError, "cannot be used: no space left on device; free some$"),
    ],
)
def test_a_folder_that_cannot_be_written_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[SwapperError], said: str
) -> None:
    def refuse(*_how: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as then:
        then.setattr("os.open", refuse)
        with pytest.raises(SwapperError, match=said) as raised:
            StateFolder(tmp_path)
    assert type(raised.value) is kind
    StateFolder(tmp_path).release()


@pytest.mark.parametrize("name", [PID_FILE, GATEWAY_FILE])
async def test_a_start_that_cannot_write_who_it_is_is_a_sentence(
    config: Config, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    write = Path.write_text

    def refuse(self: Path, text: str) -> int:
        if self.name == name:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        return write(self, text)

    monkeypatch.setattr(Path, "write_text", refuse)
    with pytest.raises(SwapperError, match="cannot be used: disk quota exceeded; free some"):
        async with running(config):
            pass
    assert embedded.running(config.state_dir) is None


async def test_marks_that_cannot_be_written_are_a_sentence(config: Config) -> None:
    (config.state_dir / "marks" / "main.jsonl.new").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"state_dir: .* cannot be used: is a directory"):
        async with running(config):
            pass


async def test_a_store_that_cannot_be_started_on_a_full_disk_is_a_sentence(config: Config) -> None:
    full = config.state_dir / "store" / "address.new"
    full.parent.mkdir(parents=True)
    full.symlink_to("/dev/full")
    with pytest.raises(SwapperError, match="no space left on device; free some") as raised:
        async with running(config):
            pass
    assert type(raised.value) is SwapperError, "of which the command makes exit status 1"
    assert embedded.running(config.state_dir) is None
    full.unlink()
    async with running(config):
        pass


async def test_a_disk_that_fills_under_a_serve_ends_it_not_and_is_told_once(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "RETRY_S", 0.01)
    tries, start = asyncio.Semaphore(0), embedded.start

    async def noted(state_dir: Path) -> Embedded:
        try:
            return await start(state_dir)
        finally:
            tries.release()

    async with running(config) as server, server.unless_failed():
        monkeypatch.setattr(embedded, "start", noted)
        full = config.state_dir / "store" / "address.new"
        full.symlink_to("/dev/full")
        with capture_logs() as logs:
            psutil.Process(_store_of(config).pid).kill()
            for _ in range(3):
                await tries.acquire()
            (told,) = [line for line in logs if "does not start" in line["event"]]
            assert "no space left on device; free some" in told["error"]
            full.unlink()
            while embedded.running(config.state_dir) is None:
                await tries.acquire()
        assert (await server.store.read()).queued == 0


async def test_who_keeps_no_store_ends_none(tmp_path: Path) -> None:
    await embedded.start(tmp_path)
    await Kept(tmp_path).stop()
    assert await embedded.stop(tmp_path), "it was there until now"


async def test_where_folders_cannot_be_locked_the_store_is_kept_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_file: int, _how: int) -> None:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    monkeypatch.setattr(kept, "fcntl", SimpleNamespace(flock=refuse, LOCK_EX=2, LOCK_NB=4))
    keeper = Kept(tmp_path)
    await keeper.start()
    assert keeper.lost() is None
    await keeper.stop()
    assert embedded.running(tmp_path) is None


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
        while not alerts:  # the next look is never far
            if events := await vanished.eye.events(after=after, limit=100, block_ms=5_000):
                after = events[-1].id
            alerts = [json.loads(event.data) for event in events if event.type == "alert"]
        assert [(alert["card"], alert["text"]) for alert in alerts] == [("gpu0", problem)]


async def test_it_is_said_once_though_nobody_asks(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watches, "LOOK_S", 0.01)
    looks, enough = list[str | None](), asyncio.Event()
    look = StateFolder.look

    def noted(self: StateFolder) -> str | None:
        looks.append(look(self))
        if len([said for said in looks if said]) >= 3:
            enough.set()
        return looks[-1]

    monkeypatch.setattr(StateFolder, "look", noted)
    async with _serving_from_a_folder_that_vanished(config) as vanished:
        await enough.wait()
        events = await vanished.eye.events(after="0", limit=100, block_ms=1)
        assert len([event for event in events if event.type == "alert"]) == 1


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


def test_a_serve_that_was_killed_and_not_yet_buried_serves_no_more(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "3600"]) as dead:
        (tmp_path / PID_FILE).write_text(f"{dead.pid} {psutil.Process(dead.pid).create_time()}\n")
        assert serving_pid(tmp_path) == dead.pid
        dead.kill()
        os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)
        assert serving_pid(tmp_path) is None
