"""Two swappers on one router: the second is refused, whatever its state folder; who is dead keeps nobody away."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from swapper import slotclaim
from swapper.app import running
from swapper.config import Config, loads
from swapper.errors import ConfigError
from swapper.slotclaim import claimed, taken
from swapper.statefolder import StateFolder
from tests.unit.test_cli import swapper

HOLD = """
import sys
from pathlib import Path
from swapper.config import load
from swapper.slotclaim import claimed
with claimed(load(Path(sys.argv[1]), {})):
    print("held", flush=True)
    sys.stdin.read()
"""


def config(folder: Path, state: str, *, strategy: str = "auto") -> Config:
    (folder / "slots").mkdir(exist_ok=True)
    entry = f"""{{
    kind: llama-router, card: gpu0, url: http://127.0.0.1:9, slot_dir: slots, snapshots: {{strategy: {strategy}}},
    models: {{MODEL: {{vram: 6GiB}}}}}}"""
    text = f"""
listen: 127.0.0.1:0
state_dir: {state}
cards: {{gpu0: {{vram: 24GiB}}}}
tenants:
  llama: {entry.replace("MODEL", "med")}
"""
    path = folder / f"{state}.yaml"
    path.write_text(text)
    return loads(text, folder=folder, environ={}, name=path.name, path=path)


def held(config: Config) -> subprocess.Popen[str]:
    """A process that has the slot folder until its standard input is closed."""
    command = [sys.executable, "-c", HOLD, str(config.path)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    return holder


async def test_a_second_serve_on_the_router_is_refused_in_one_sentence_until_the_first_has_ended(
    tmp_path: Path,
) -> None:
    first, second = config(tmp_path, "one"), config(tmp_path, "two")
    async with running(first):
        with pytest.raises(ConfigError) as caught:
            async with running(second):
                pass
        [said] = caught.value.problems
        who = f"another swapper, process {os.getpid()}: two on one router would unload each other's models"
        assert said.startswith(f"tenants.llama.slot_dir: {tmp_path / 'slots'} is in use by {who}")
        assert not (tmp_path / "two" / "store").exists()
    async with running(second):
        pass


def test_one_that_was_killed_keeps_nobody_away(tmp_path: Path) -> None:
    holder = held(config(tmp_path, "one"))
    second = config(tmp_path, "two")
    with pytest.raises(ConfigError), claimed(second):
        pass
    holder.kill()
    with claimed(second):  # at once: nobody has asked for its exit status yet
        assert list((tmp_path / "slots").iterdir()) == []
    holder.communicate()


def test_a_process_started_meanwhile_does_not_keep_the_folder(tmp_path: Path) -> None:
    with claimed(config(tmp_path, "one")):
        started = subprocess.Popen(["cat"], stdin=subprocess.PIPE, close_fds=False)
    with claimed(config(tmp_path, "two")):
        started.communicate()


def test_where_nothing_is_saved_no_folder_is_claimed(tmp_path: Path) -> None:
    with claimed(config(tmp_path, "one")), claimed(config(tmp_path, "two", strategy="off")):
        pass


def test_where_no_lock_can_be_had_it_is_said_and_swapper_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_lock: int, _how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with capture_logs() as logs, claimed(config(tmp_path, "one")):
        pass
    [said] = logs
    assert (said["log_level"], said["slot_dir"]) == ("warning", str(tmp_path / "slots"))
    assert said["event"] == "a second swapper on this router would not be noticed"
    assert taken(config(tmp_path, "one")) == []


async def test_check_tells_of_another_and_not_of_the_serve_it_is_asked_about(tmp_path: Path) -> None:
    one, two = config(tmp_path, "one"), config(tmp_path, "two")
    assert taken(two) == []
    holder = held(one)
    shown = await swapper("check", "-c", str(two.path))
    assert (
        f"error: tenants.llama.slot_dir: {tmp_path / 'slots'} is in use by another swapper, process {holder.pid}"
        in (shown.stdout)
    )
    folder = StateFolder(two.state_dir)
    assert taken(two) == []
    folder.release()
    holder.communicate()
    assert taken(two) == []


def test_a_check_that_looks_just_now_keeps_no_serve_from_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = config(tmp_path, "one")
    looking = os.open(tmp_path / "slots", os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_EX)

    def seen_enough(_pause: float) -> None:
        os.close(looking)

    monkeypatch.setattr(slotclaim.time, "sleep", seen_enough)
    with claimed(one):
        pass
