"""The demo's folder: who may clear it, and when. The store in it is a real one."""

from __future__ import annotations

import asyncio
import fcntl
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from swapper.demo.folder import SERVER, STATE, clear_dead, vanishing_folder
from swapper.errors import BackendError
from workers.control.command import CommandControl

DEMO = """
import asyncio, os, sys
from swapper.demo import folder
from swapper.store import embedded
from workers.control.command import CommandControl
async def play():
    with folder.vanishing_folder() as mine:
        store = await embedded.start(mine / folder.STATE)
        server = CommandControl(folder.SERVER, ["sleep", "600"], mine / folder.STATE / "servers" / folder.SERVER)
        await server.ensure()
        print(mine, store.pid, server.pid(), *children(), flush=True)
        if sys.argv[1] == "alone":
            os.kill(children()[0], 9)
        os.kill(os.getpid(), 9)
def children():
    import psutil
    return [child.pid for child in psutil.Process().children() if "swapper.demo.folder" in child.cmdline()]
asyncio.run(play())
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)


def _killed_demo(how: str) -> tuple[Path, list[int], str]:
    """Folder and processes of a demo that was killed, once nobody writes to its standard error any more, and that."""
    done = subprocess.run([sys.executable, "-c", DEMO, how], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == -9, done.stderr
    folder, *pids = done.stdout.split()
    return Path(folder), [int(pid) for pid in pids], done.stderr


def _alive(pid: int) -> bool:
    """Whether it lives on; one that is about to vanish is waited for."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    with open(process):
        ending = select.poll()
        ending.register(process, select.POLLIN)
        return not ending.poll(500)


def test_a_killed_demo_leaves_no_process_and_no_folder() -> None:
    folder, pids, said = _killed_demo("guarded")
    assert not folder.exists()
    assert len(pids) == 3
    assert not any(map(_alive, pids))
    assert f"removing {folder}" in said


async def test_what_a_demo_left_that_was_killed_with_its_guard_is_cleared_by_the_next() -> None:
    folder, pids, _ = await asyncio.to_thread(_killed_demo, "alone")
    assert [_alive(pid) for pid in pids] == [True, True, False]
    assert await clear_dead() == [folder]
    assert not folder.exists()
    assert not any(map(_alive, pids))


async def test_a_server_that_is_just_being_started_is_waited_for_and_ended_too() -> None:
    folder, pids, _ = await asyncio.to_thread(_killed_demo, "alone")
    with (folder / STATE / "servers" / SERVER / "lock").open("r+") as launcher:
        fcntl.flock(launcher, fcntl.LOCK_EX)
        clearing = asyncio.create_task(asyncio.to_thread(asyncio.run, clear_dead()))
        done, _ = await asyncio.wait({clearing}, timeout=0.5)
        assert not done, "what the launcher is about to record would be missed"
    assert await clearing == [folder]
    assert not any(map(_alive, pids))


async def test_a_demo_that_lives_is_left_alone() -> None:
    with vanishing_folder() as folder:
        assert await clear_dead() == []
        assert folder.is_dir()
    assert not folder.exists()


async def test_a_folder_without_a_lock_is_nobodys_business(tmp_path: Path) -> None:
    (tmp_path / "swapper-demo-other").mkdir()
    assert await clear_dead() == []
    assert (tmp_path / "swapper-demo-other").is_dir()


async def test_a_process_that_hangs_does_not_keep_the_next_demo_from_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _, _ = await asyncio.to_thread(_killed_demo, "alone")

    async def hangs(self: CommandControl, grace_ms: int = 0) -> None:
        raise BackendError("it does not end")

    with monkeypatch.context() as patch:
        patch.setattr(CommandControl, "stop", hangs)
        assert await clear_dead() == []
    assert await clear_dead() == [folder]
