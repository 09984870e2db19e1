"""A state folder that cannot be written: what is done is seen and told in a sentence, and never an accident."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from swapper.errors import BackendDown, BackendError
from tests.support import fake_kinds
from tests.support.fake_control import FakeControl
from tests.unit.test_kinds_whole import running, sglang, vllm
from workers.backend import TenantState
from workers.comfyui.marker import Marker
from workers.control import Phase, Seen
from workers.onoff import OnOff, Times

NAME = "immich-ml"


def on_off(control: FakeControl, away: Path) -> OnOff:
    return OnOff(NAME, control, grace_ms=1_000, away=away, times=Times(0.05, 0.05))


async def test_a_release_that_cannot_be_written_down_is_one_and_is_remembered_while_this_process_lives(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").touch()
    control = FakeControl(Phase.UP)
    backend = on_off(control, tmp_path / "file" / "released.json")
    said = await backend.release(NAME, limit_ms=1)
    assert said is not None
    assert said.startswith(f"{tmp_path}/file/released.json cannot be written (File exists): a reboot that brings")
    assert control.seen.phase is Phase.GONE
    control.show(Seen(Phase.UP, came_back=True))
    told = await backend.end_hung()
    assert told is not None
    assert told.startswith("immich-ml came back by itself")


async def test_nothing_is_started_that_would_still_count_as_released(tmp_path: Path) -> None:
    away = tmp_path / "released.json"
    control = FakeControl(Phase.UP)
    backend = on_off(control, away)
    await backend.release(NAME, limit_ms=1)
    away.unlink()
    away.mkdir()
    with pytest.raises(BackendError, match=r"released.json cannot be removed \(Is a directory\)"):
        await backend.load(NAME)
    assert "ensure" not in control.orders
    away.rmdir()
    await backend.load(NAME)
    assert control.orders[-1] == "ensure"


async def test_what_somebody_else_started_is_told_once_though_it_cannot_be_written_down(tmp_path: Path) -> None:
    away = tmp_path / "released.json"
    control = FakeControl(Phase.UP)
    backend = on_off(control, away)
    await backend.release(NAME, limit_ms=1)
    away.unlink()
    away.mkdir()
    control.show(Seen(Phase.UP))
    told = await backend.end_hung()
    assert told is not None
    assert "was started by somebody else" in told
    assert "cannot be removed (Is a directory)" in told
    assert await backend.end_hung() is None


def test_a_mark_of_a_comfyui_that_cannot_be_written_is_one_here_and_is_written_once_it_can(tmp_path: Path) -> None:
    (tmp_path / "it").touch()
    path = tmp_path / "it" / "loaded.json"
    marker = Marker(path)
    with pytest.raises(BackendDown, match=r"it/loaded.json cannot be written: File exists"):
        marker.note("1", loaded=True)
    assert (marker.loaded("1"), marker.last) == (True, True)
    (tmp_path / "it").unlink()
    marker.note("1", loaded=True)
    assert Marker(path).loaded("1") is True


def test_a_mark_of_a_comfyui_that_cannot_be_removed_is_forgotten_here(tmp_path: Path) -> None:
    marker = Marker(tmp_path / "loaded.json")
    marker.note("1", loaded=True)
    (tmp_path / "loaded.json").unlink()
    (tmp_path / "loaded.json").mkdir()
    with pytest.raises(BackendDown, match=r"loaded.json cannot be removed: Is a directory"):
        marker.forget()
    assert (marker.loaded("1"), marker.last) == (None, False)


def away(folder: Path) -> None:
    """The file cannot be written any more."""
    (folder / "released.json").unlink(missing_ok=True)
    (folder / "released.json.new").mkdir()


def stuck(folder: Path) -> None:
    """Nor can it be removed."""
    (folder / "released.json").unlink(missing_ok=True)
    (folder / "released.json").mkdir()


async def test_a_vllm_that_is_awake_is_there_though_its_mark_cannot_be_removed(tmp_path: Path) -> None:
    fake = fake_kinds.Vllm("m")
    backend = vllm(fake, tmp_path)
    async with running(fake, backend):
        (tmp_path / "waking").mkdir()
        assert await backend.observe() == {"s": TenantState.LOADED}
        with pytest.raises(BackendDown, match=r"waking cannot be removed"):
            await backend.release("s", limit_ms=60_000)


@pytest.mark.parametrize("accident", [away, stuck])
async def test_without_its_mark_nothing_of_sglang_is_released(tmp_path: Path, accident: Callable[[Path], None]) -> None:
    fake = fake_kinds.Sglang("m")
    backend = sglang(fake, tmp_path)
    async with running(fake, backend):
        accident(tmp_path)
        with pytest.raises(BackendDown, match="so nothing was released"):
            await backend.release("s", limit_ms=60_000)
        assert "POST /release_memory_occupation" not in fake.posts()
        assert await backend.observe() == {"s": TenantState.LOADED}


async def test_without_its_mark_nothing_of_sglang_is_resumed(tmp_path: Path) -> None:
    fake = fake_kinds.Sglang("m")
    backend = sglang(fake, tmp_path)
    async with running(fake, backend):
        await backend.release("s", limit_ms=60_000)
        (tmp_path / "released.json.new").mkdir()
        with pytest.raises(BackendDown, match="so nothing was resumed"):
            await backend.load("s")
        (tmp_path / "released.json.new").rmdir()
        await backend.load("s")
        assert (fake.dead, fake.computed) == (False, ["m"])
