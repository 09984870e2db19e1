"""Control `command`: one process per folder, recorded before it begins, adopted afterwards, ended whole."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from swapper.errors import BackendDown, BackendRefused
from workers.control import Control, Phase, launcher
from workers.control.attach import AttachControl
from workers.control.command import CommandControl, ExitStatus
from workers.control.process import WatchedProcess

Make = Callable[..., CommandControl]


@pytest.fixture
async def make(tmp_path: Path) -> AsyncGenerator[Make]:
    """Makes controls of one folder; whatever runs in it is killed at the end."""

    def control(script: str, *, env: dict[str, str] | None = None) -> CommandControl:
        return CommandControl("llama", ["sh", "-c", script], tmp_path / "llama", env, tmp_path)

    yield control
    await control("").stop(0)


class Fifo:
    """A named pipe in the folder a child starts in; both ends stay open here, so that opening it never blocks."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)

    async def said(self) -> str:
        """What a child wrote, when it is there."""
        there = asyncio.Event()
        asyncio.get_running_loop().add_reader(self.fd, there.set)
        await there.wait()
        asyncio.get_running_loop().remove_reader(self.fd)
        return os.read(self.fd, 4096).decode().strip()

    def tell(self, line: str) -> None:
        os.write(self.fd, f"{line}\n".encode())


@pytest.fixture
def fifo(tmp_path: Path) -> Iterator[Fifo]:
    """The pipe `fifo`."""
    fifo = Fifo(tmp_path / "fifo")
    yield fifo
    os.close(fifo.fd)


async def ended(pid: int) -> None:
    """Wait until a process that need not be ours is gone."""
    with suppress(psutil.NoSuchProcess):
        await asyncio.to_thread(lambda: psutil.Process(pid).wait(20))


def runs(pid: int) -> bool:
    stat = launcher.stat_of(pid)
    return stat is not None and stat[0] not in "ZX"


def pid_of(control: CommandControl) -> int:
    pid = control.pid()
    assert pid is not None
    return pid


def session_of(control: CommandControl) -> int:
    return os.getsid(pid_of(control))


async def test_the_first_ensure_starts_it_and_the_next_finds_it(make: Make) -> None:
    control = make("exec sleep 1000")
    assert (control.alive(), control.pid(), control.log_tail(5)) == (False, None, [])
    await control.ensure()
    pid = pid_of(control)
    await control.ensure()
    assert (control.alive(), control.pid()) == (True, pid)


async def test_it_runs_in_a_session_and_a_group_of_its_own_without_input(make: Make, fifo: Fifo) -> None:
    control = make("readlink /proc/self/fd/0 > fifo; exec sleep 1000")
    await control.ensure()
    assert await fifo.said() == "/dev/null"
    pid = pid_of(control)
    assert os.getpgid(pid) == pid
    assert os.getsid(pid) not in (pid, os.getsid(0))


async def test_everything_it_says_is_in_its_log(make: Make, fifo: Fifo) -> None:
    control = make("seq 1 9; echo $WHO >&2; echo done > fifo; exec sleep 1000", env={"WHO": "ann"})
    await control.ensure()
    await fifo.said()
    assert control.log_tail(3) == ["8", "9", "ann"]
    assert control.log_path().read_text().endswith("8\n9\nann\n")


async def test_many_starters_at_once_end_up_with_one_process(make: Make, fifo: Fifo) -> None:
    controls = [make("echo $$ >> begun; exec sleep 1000") for _ in range(4)]
    await asyncio.gather(*(control.ensure() for control in controls))
    assert len({control.pid() for control in controls}) == 1
    alone = psutil.Process(session_of(controls[0])).children()
    assert [child.pid for child in alone] == [controls[0].pid()]


async def test_kill_9_of_the_starter_leaves_it_running_to_be_adopted(make: Make, tmp_path: Path) -> None:
    program = (
        "import asyncio, signal, sys; from pathlib import Path\n"
        "from workers.control.command import CommandControl\n"
        "control = CommandControl('llama', ['sleep', '1000'], Path(sys.argv[1]))\n"
        "asyncio.run(control.ensure())\n"
        "print(control.pid(), flush=True)\n"
        "signal.pause()"
    )
    starter = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, str(tmp_path / "llama"), stdout=subprocess.PIPE
    )
    assert starter.stdout is not None
    pid = int(await starter.stdout.readline())
    starter.kill()
    await starter.wait()

    control = make("exit 1")
    await control.ensure()
    assert control.pid() == pid
    await control.stop()
    assert not runs(pid)
    assert control.exit_status() is not None


async def test_stop_asks_first_and_returns_with_everything_gone(make: Make, fifo: Fifo) -> None:
    control = make("trap 'exit 3' TERM; echo up > fifo; while :; do sleep 1000 & wait; done")
    await control.ensure()
    await fifo.said()
    session, pid = session_of(control), pid_of(control)
    await control.stop()
    status = control.exit_status()
    assert status is not None
    assert (status.code, status.signal, str(status)) == (3, None, "exit status 3")
    assert not control.alive()
    assert not runs(pid)
    assert not [p for p in psutil.pids() if (stat := launcher.stat_of(p)) and stat[2] == session and runs(p)]
    await control.stop()


async def test_a_child_that_ignores_term_is_killed_after_the_grace(make: Make, fifo: Fifo) -> None:
    control = make("trap '' TERM; echo up > fifo; while :; do sleep 1000; done")
    await control.ensure()
    await fifo.said()
    await control.stop(grace_ms=50)
    status = control.exit_status()
    assert status is not None
    assert (status.signal, str(status)) == (signal.SIGKILL, "ended by SIGKILL")


async def test_restart_ends_the_old_process_before_the_new_one_begins(make: Make) -> None:
    control = make("exec sleep 1000")
    await control.ensure()
    old = pid_of(control)
    await control.restart()
    assert control.alive()
    assert control.pid() != old
    assert not runs(old)
    assert control.exit_status() is None


async def test_how_it_ended_by_itself_is_on_disk(make: Make, fifo: Fifo) -> None:
    control = make("read go < fifo; exit 7")
    await control.ensure()
    session = session_of(control)
    fifo.tell("go")
    await ended(session)
    status = control.exit_status()
    assert isinstance(status, ExitStatus)
    assert status.code == 7
    assert status.ended_ms > 1_600_000_000_000


async def test_a_term_to_the_launcher_reaches_the_child(make: Make, fifo: Fifo) -> None:
    control = make("trap 'exit 5' TERM; echo up > fifo; while :; do sleep 1000 & wait; done")
    await control.ensure()
    await fifo.said()
    session = session_of(control)
    os.kill(session, signal.SIGTERM)
    await ended(session)
    assert control.exit_status() == ExitStatus(5, None, cast("ExitStatus", control.exit_status()).ended_ms)


async def test_without_its_launcher_it_is_still_known_and_still_ended(make: Make, fifo: Fifo) -> None:
    control = make("echo up > fifo; exec sleep 1000")
    await control.ensure()
    await fifo.said()
    session, pid = session_of(control), pid_of(control)
    os.kill(session, signal.SIGKILL)
    await ended(session)
    await control.ensure()
    assert control.pid() == pid
    await control.stop()
    assert not control.alive()
    assert control.exit_status() is None


async def test_what_a_killed_server_left_behind_is_ended_before_the_next_start(make: Make, fifo: Fifo) -> None:
    control = make("sleep 1000 & echo $! > fifo; wait")
    await control.ensure()
    orphan = int(await fifo.said())
    killed = pid_of(control)
    os.kill(killed, signal.SIGKILL)
    await ended(killed)
    await control.ensure()
    assert not runs(orphan)
    assert int(await fifo.said()) != orphan


async def test_a_command_that_does_not_exist_is_told_in_a_sentence(tmp_path: Path) -> None:
    control = CommandControl("llama", ["./llama-server"], tmp_path / "llama", cwd=tmp_path)
    with pytest.raises(BackendRefused, match=r"llama cannot be started: No such file or directory: ./llama-server"):
        await control.ensure()
    assert control.pid() is None
    status = control.exit_status()
    assert status is not None
    assert status.code == 127


async def test_a_folder_to_start_in_that_does_not_exist_is_told_in_a_sentence(tmp_path: Path) -> None:
    control = CommandControl("llama", ["true"], tmp_path / "llama", cwd=tmp_path / "none")
    with pytest.raises(BackendRefused, match=r"llama cannot be started in .*none: No such file"):
        await control.ensure()


async def test_a_launcher_that_says_nothing_is_ended_with_what_it_began_and_the_next_start_works(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for a lock that somebody holds; a child of another such waits in the same session."""
    monkeypatch.setattr("workers.control.command.START_S", 0.3)
    control, launched = make("exec sleep 1000"), list[int]()

    class Told(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **more: Any) -> None:  # noqa: ANN401
            super().__init__(*arguments, **more)
            launched.append(self.pid)

    (tmp_path / "llama").mkdir()
    with (tmp_path / "llama" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        monkeypatch.setattr("workers.control.command.subprocess.Popen", Told)
        said = (
            r"^llama cannot be started: its launcher was silent for 0.3 s and was ended; see whether the disk of .*lock"
        )
        with pytest.raises(BackendDown, match=said):
            await control.ensure()
        assert not runs(launched[0])
    monkeypatch.undo()
    await control.ensure()
    assert control.alive()


async def test_what_a_silent_launcher_had_begun_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stands still after its child has begun."""
    stuck = tmp_path / "stuck.py"
    stuck.write_text(
        "import signal, sys; from workers.control import launcher\n"
        "launcher._answer = lambda **said: signal.pause()\n"
        "launcher.main(sys.argv[1:])"
    )
    monkeypatch.setattr("workers.control.command.START_S", 2.0)
    monkeypatch.setattr("workers.control.command._LAUNCHER", (sys.executable, str(stuck)))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    control = CommandControl("llama", ["sleep", "1000"], tmp_path / "llama")
    with pytest.raises(BackendDown, match="was silent for 2 s and was ended; see"):
        await control.ensure()
    record = launcher.read_record(tmp_path / "llama")
    assert record is not None, "it had begun"
    assert not runs(cast("int", record["pid"]))
    assert not control.alive()


async def test_a_launcher_that_ends_without_a_word_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = CommandControl("llama", ["sleep", "1000"], tmp_path / "llama")
    for word in ("", '{"pid": 1'):
        monkeypatch.setattr("workers.control.command._LAUNCHER", (sys.executable, "-c", f"print({word!r}, end='')"))
        with pytest.raises(
            BackendRefused, match=r"^llama cannot be started: its launcher ended without a word; does .*"
        ):
            await control.ensure()


async def test_a_record_that_cannot_be_read_starts_nothing_and_is_a_sentence(make: Make, tmp_path: Path) -> None:
    (tmp_path / "llama" / "record.json").mkdir(parents=True)
    for act in (make("touch begun").ensure(), make("").stop()):
        with pytest.raises(BackendRefused, match=r"record.json cannot be read: Is a directory"):
            await act
    assert (make("").alive(), make("").pid(), make("").exit_status()) == (None, None, None)
    assert (await WatchedProcess(make("")).look()).phase is Phase.UNREACHABLE
    (tmp_path / "llama" / "record.json").rmdir()
    assert not (tmp_path / "begun").exists()


@pytest.mark.parametrize("change", [{"started": 1}, {"boot": "another"}])
async def test_a_reused_pid_is_neither_adopted_nor_signalled(
    make: Make, tmp_path: Path, change: dict[str, object]
) -> None:
    control = make("exec sleep 1000")
    stranger = await asyncio.create_subprocess_exec("cat", stdin=subprocess.PIPE, start_new_session=True)
    stat = launcher.stat_of(stranger.pid)
    assert stat is not None
    record: dict[str, object] = {"pid": stranger.pid, "started": stat[3], "boot": launcher.boot_id()}
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "record.json").write_text(json.dumps(record | {"session": 1 << 30} | change))
    assert not control.alive()
    await control.stop(0)
    await control.ensure()
    assert control.pid() != stranger.pid
    assert stranger.returncode is None
    stranger.kill()
    await stranger.wait()


@pytest.mark.parametrize("death", ["os.kill(os.getpid(), 9)", "(_ for _ in ()).throw(OSError(28, 'disk full'))"])
async def test_a_child_whose_record_was_never_written_never_begins(tmp_path: Path, death: str) -> None:
    """The launcher dies, or the disk is full, between the fork and the record."""
    program = (
        "import os, sys; from workers.control import launcher\n"
        f"launcher._write = lambda path, content: {death}\n"
        "sys.exit(launcher.main(sys.argv[1:]))"
    )
    arguments = (str(tmp_path / "llama"), "--", "touch", str(tmp_path / "begun"))
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, *arguments, stdout=subprocess.PIPE)
    # The child has the pipe too: its end is reached when both have ended.
    await process.communicate()
    assert process.returncode != 0
    assert not (tmp_path / "begun").exists()
    assert launcher.read_record(tmp_path / "llama") is None


async def test_a_log_of_more_than_10_mib_is_put_aside_at_the_next_start(make: Make, tmp_path: Path) -> None:
    control = make("echo fresh")
    (tmp_path / "llama").mkdir()
    with (tmp_path / "llama" / "log").open("wb") as log:
        log.truncate(launcher.LOG_LIMIT + 1)
    await control.ensure()
    await control.stop()
    assert (tmp_path / "llama" / "log.1").stat().st_size == launcher.LOG_LIMIT + 1
    assert (tmp_path / "llama" / "log").stat().st_size < 100


def test_the_launcher_says_how_it_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    assert launcher.main(["somewhere"]) == 2
    assert "usage:" in capsys.readouterr().err


async def test_what_is_attached_is_never_started_or_stopped() -> None:
    control: Control = AttachControl("llama")
    await control.ensure()
    assert (control.alive(), control.pid(), control.log_tail(5), control.log_path()) == (None, None, None, None)
    with pytest.raises(BackendRefused, match="llama is attached"):
        await control.stop()
    with pytest.raises(BackendRefused, match="llama is attached"):
        await control.restart()


async def test_a_start_that_is_cancelled_is_on_record_when_that_is_over(
    make: Make, fifo: Fifo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else whoever gives up and stops it finds nothing, and the process begins afterwards."""
    control, begun, go_on = make("exec cat fifo"), asyncio.Event(), threading.Event()
    loop, launch = asyncio.get_running_loop(), control._launch  # pyright: ignore[reportPrivateUsage]

    def late() -> None:
        loop.call_soon_threadsafe(begun.set)
        go_on.wait()
        launch()

    monkeypatch.setattr(control, "_launch", late)
    starting = asyncio.create_task(control.ensure())
    await begun.wait()
    starting.cancel()
    stopping = asyncio.create_task(control.stop())
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await stopping
    ended = control.exit_status()
    assert ended is not None, "it was started"
    assert ended.signal == signal.SIGTERM
