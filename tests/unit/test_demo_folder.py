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

from swapper.demo import folder as demo_folder
from swapper.demo.folder import SERVER, STATE, clear_dead, main, vanishing_folder
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
    (said,) = await clear_dead()
    assert said == f"an earlier demo had left {folder}: its processes are ended, the folder is removed"
    assert not folder.exists()
    assert not any(map(_alive, pids))


async def test_a_server_that_is_just_being_started_is_waited_for_and_ended_too() -> None:
    folder, pids, _ = await asyncio.to_thread(_killed_demo, "alone")
    with (folder / STATE / "servers" / SERVER / "lock").open("r+") as launcher:
        fcntl.flock(launcher, fcntl.LOCK_EX)
        clearing = asyncio.create_task(clear_dead())
        done, _ = await asyncio.wait({clearing}, timeout=0.5)
        assert not done, "what the launcher is about to record would be missed"
    (said,) = await clearing
    assert "the folder is removed" in said
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

    async def hangs(self: CommandControl, grace_ms: int | None = None) -> None:
        raise BackendError("it does not end")

    with monkeypatch.context() as patch:
        patch.setattr(CommandControl, "stop", hangs)
        (said,) = await clear_dead()
        assert said == f"an earlier demo had left {folder}, which cannot be cleared: it does not end"
        assert folder.is_dir()
    await clear_dead()
    assert not folder.exists()


async def test_a_start_that_hangs_does_not_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_folder, "LAUNCH_S", 0.1)
    folder, _, _ = await asyncio.to_thread(_killed_demo, "alone")
    with (folder / STATE / "servers" / SERVER / "lock").open("r+") as launcher:
        fcntl.flock(launcher, fcntl.LOCK_EX)
        (said,) = await clear_dead()
        assert said.endswith("cannot be cleared: a start of its server still runs after 0.1 s")
    await clear_dead()
    assert not folder.exists()


async def test_a_file_that_may_not_be_opened_does_not_either() -> None:
    folder, _, _ = await asyncio.to_thread(_killed_demo, "alone")
    lock = folder / STATE / "servers" / SERVER / "lock"
    lock.unlink()
    lock.mkdir()  # no permission at all keeps root away, this does
    (said,) = await clear_dead()
    assert "cannot be cleared: " in said
    assert str(lock) in said
    lock.rmdir()
    await clear_dead()
    assert not folder.exists()


async def test_what_could_not_be_removed_is_still_known_to_the_next_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _, _ = await asyncio.to_thread(_killed_demo, "alone")

    def busy(path: Path) -> None:
        raise OSError(f"{path} is busy")

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", busy)
        (said,) = await clear_dead()
        assert said.endswith(f"cannot be cleared: {folder / STATE} is busy")
    (said,) = await clear_dead()
    assert "the folder is removed" in said
    assert not folder.exists()


def test_of_a_demo_that_ended_well_and_could_not_remove_its_folder_nobody_says_it_was_killed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def busy(path: Path) -> None:
        raise OSError(f"{path} is busy")

    with monkeypatch.context() as patch, vanishing_folder() as folder:
        patch.setattr(demo_folder, "_remove", busy)
    said = capfd.readouterr().err
    assert said == f"swapper demo is gone and its folder is not; ending what it started and removing {folder}\n"
    assert not folder.exists(), "its guard, another process, could"


def test_a_guard_that_cannot_clear_the_folder_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "demo.lock").touch()
    (tmp_path / STATE).mkdir()

    def busy(path: Path) -> None:
        raise OSError(f"{path} is busy")

    monkeypatch.setattr("shutil.rmtree", busy)
    main(tmp_path)
    told = capfd.readouterr().err.splitlines()
    assert told[1:] == [f"{tmp_path} cannot be cleared: {tmp_path / STATE} is busy; the next demo tries again"]


def test_a_guard_whose_standard_error_nobody_reads_clears_all_the_same(tmp_path: Path) -> None:
    folder = tmp_path / "swapper-demo-dead"
    folder.mkdir()
    (folder / "demo.lock").touch()
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as nobody:
        subprocess.run([sys.executable, "-m", "swapper.demo.folder", str(folder)], stderr=nobody, check=False)
    assert not folder.exists()
