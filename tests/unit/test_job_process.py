"""A job's process and its files: what has ended is seen to have, and what is left of it is named or gone."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from pathlib import Path

import pytest

from workers.control import launcher
from workers.control.command import CommandControl
from workers.jobs import JobProcess, Place, ever_running, still_running, temporary
from workers.vram.holders import Holder

LONG = "日本の映画 " * 30


async def begins(pid: int, started: int) -> bool:
    """Whoever it is."""
    del pid, started
    return True


def process(tmp_path: Path, *outputs: str) -> JobProcess:
    return JobProcess("job", tmp_path / "job", {name: str(tmp_path / name) for name in outputs})


@pytest.mark.parametrize(
    ("final", "kind"),
    [
        ("x" * 251 + ".mkv", ".mkv"),
        (LONG[:82] + ".mkv", ".mkv"),
        ("x" * 100 + "." + "y" * 150, ""),
        ("." + "x" * 254, ""),
    ],
)
def test_however_long_the_name_of_an_output_is_it_can_be_written_until_then(
    tmp_path: Path, final: str, kind: str
) -> None:
    written = temporary(str(tmp_path / final), "jb_01M8QNWM5200G32A5H0QHRP5NE")
    written.touch()
    assert written.name.startswith(".")
    assert written.name.endswith(kind)


def test_two_long_names_that_begin_alike_are_not_written_to_one_file(tmp_path: Path) -> None:
    ones = {temporary(str(tmp_path / ("x" * 240 + end)), "jb_01M8QNWM5200G32A5H0QHRP5NE") for end in ("a", "b")}
    assert len(ones) == 2


def test_a_folder_in_place_of_an_output_is_removed_with_what_is_in_it(tmp_path: Path) -> None:
    job = process(tmp_path, "out")
    written = temporary(str(tmp_path / "out"), "job")
    (written / "deeper").mkdir(parents=True)
    assert job.publish() == f"it ended with exit status 0 and left no {tmp_path}/out"
    job.discard()
    assert list(tmp_path.iterdir()) == []


def test_a_link_in_place_of_an_output_is_removed_and_not_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    temporary(str(tmp_path / "out"), "job").symlink_to(tmp_path / "other")
    process(tmp_path, "out").discard()
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_of_two_outputs_none_gets_its_name_where_one_cannot(tmp_path: Path) -> None:
    job = process(tmp_path, "one", "two")
    (tmp_path / "job").mkdir()
    for name in ("one", "two"):
        temporary(str(tmp_path / name), "job").touch()
    (tmp_path / "two").mkdir()
    said = f"{tmp_path}/two has become a folder, so its output could not be put there; it lies in {tmp_path}/.two.job"
    assert job.publish() == said
    job.discard()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job", "two"]


def _watched(patch: pytest.MonkeyPatch, fails: str = "") -> list[str]:
    """What is made sure to be on the disk and what gets a name, in order; making sure of `fails` fails."""
    happened: list[str] = []
    replaces, syncs = Path.replace, os.fsync

    def replace(path: Path, final: Path) -> Path:
        happened.append(f"name {final.name}")
        return replaces(path, final)

    def fsync(fd: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{fd}")).name
        if name == fails:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        happened.append(f"sync {name}")
        syncs(fd)

    patch.setattr(Path, "replace", replace)
    patch.setattr(os, "fsync", fsync)
    return happened


def test_an_output_is_on_the_disk_before_it_has_its_name_and_the_name_is_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = process(tmp_path, "out")
    (tmp_path / "job").mkdir()
    temporary(str(tmp_path / "out"), "job").write_text("x")
    happened = _watched(monkeypatch)
    assert job.publish() is None
    assert happened == ["sync .out.job", "sync job", "name out", f"sync {tmp_path.name}"]


def test_one_that_the_disk_does_not_take_gets_no_name_and_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = process(tmp_path, "out")
    temporary(str(tmp_path / "out"), "job").write_text("x")
    _watched(monkeypatch, fails=".out.job")
    said = f"{tmp_path}/.out.job: its output could not be written to the disk: No space left on device"
    assert job.publish() == said
    assert list(tmp_path.iterdir()) == []


async def test_one_that_is_not_to_begin_leaves_no_record_and_may_be_started_later(tmp_path: Path) -> None:
    job, seen = process(tmp_path), list[tuple[int, int]]()

    async def no(pid: int, started: int) -> bool:
        assert launcher.lives(pid, started)
        seen.append((pid, started))
        return False

    touch, place = ["touch", str(tmp_path / "begun")], Place("ls_1", "gpu0")
    assert not await job.start(touch, dict(os.environ), place, no, follows=False)
    assert not job.begun
    assert ever_running(tmp_path) == []
    assert await job.start(touch, dict(os.environ), place, begins, follows=False)
    await job.ended()
    assert (tmp_path / "begun").exists()
    assert not launcher.lives(*seen[0])


async def test_whoever_leaves_before_it_is_to_begin_leaves_nothing_that_waits(tmp_path: Path) -> None:
    job, waits = process(tmp_path), asyncio.get_running_loop().create_future()

    async def hangs(pid: int, started: int) -> bool:
        waits.set_result((pid, started))
        await asyncio.Event().wait()
        return True

    touch = ["touch", str(tmp_path / "begun")]
    starting = asyncio.create_task(job.start(touch, dict(os.environ), Place("ls_1", "gpu0"), hangs, follows=False))
    pid, started = await waits
    holder, gone = Holder(pid, started), asyncio.Event()
    holder.wake_on_exit(gone)
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    await gone.wait()
    holder.close()
    assert not job.begun
    assert not (tmp_path / "begun").exists()


async def test_one_of_which_anything_is_on_record_is_not_started_by_who_has_not_seen_that(tmp_path: Path) -> None:
    touch = ["sh", "-c", f"echo x >> {tmp_path}/begun"]
    first, asked = process(tmp_path), 0
    await first.start(touch, dict(os.environ), Place("ls_1", "gpu0"), begins, follows=False)
    await first.ended()
    control = CommandControl("jb_1", touch, tmp_path / "job")

    async def never(pid: int, started: int) -> bool:
        nonlocal asked
        asked += 1
        return bool(pid and started)

    assert await control.start_once(never, log_bytes=1 << 20)
    assert (asked, (tmp_path / "begun").read_text()) == (0, "x\n")


async def test_its_environment_is_what_it_is_given_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANN_KEY", "secret")
    job = process(tmp_path)
    env = {"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8"}
    await job.start(["env"], env, Place("ls_1", "gpu0"), begins, follows=False)
    await job.ended()
    assert sorted(job.log_tail(9)) == sorted(f"{name}={value}" for name, value in env.items())


async def test_what_a_job_left_behind_is_still_said_to_run(tmp_path: Path) -> None:
    job = process(tmp_path)
    words = ["sh", "-c", "sleep 600 & echo $!"]
    await job.start(words, dict(os.environ), Place("ls_1", "gpu0"), begins, follows=False)
    await job.ended()
    assert still_running(tmp_path, "gpu0", ()) == (f"pid {job.log_tail(1)[0]} (job job)",)
    await job.end(0)
    assert still_running(tmp_path, "gpu0", ()) == ()


async def test_one_whose_record_is_removed_meanwhile_has_not_ended_for_that(tmp_path: Path) -> None:
    job = process(tmp_path)
    await job.start(["sleep", "4"], dict(os.environ), Place("ls_1", "gpu0"), begins, follows=False)
    recorded = job.recorded()
    assert recorded is not None
    ended = asyncio.create_task(job.ended())
    await asyncio.sleep(0)
    while (tmp_path / "job").exists():  # its launcher may just open the log
        shutil.rmtree(tmp_path / "job", ignore_errors=True)
    assert await ended is None
    assert not launcher.lives(*recorded)
