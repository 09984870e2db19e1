"""The backend of a ComfyUI on the one of the tests, a process: what is loaded, and when its VRAM is free again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from swapper.errors import BackendError, BackendGone, BackendRefused, BackendStalled
from tests.support.comfyprocess import ROOT, ComfyProcess, prompt
from workers.backend import SaveArgs, SaveUnsupported, TenantState
from workers.comfyui.server import ComfyUI, Limits
from workers.control.attach import AttachControl
from workers.control.command import CommandControl
from workers.control.process import WatchedProcess

QUICK = Limits(settle_s=0.3, trust_s=0.3)
ME = "comfyui"


@pytest.fixture
def comfy(tmp_path: Path) -> Iterator[ComfyProcess]:
    found = ComfyProcess(tmp_path / "comfy")
    yield found
    found.stop()


class Ours:
    """Backends of one that is started by its command, as each new process of the product would make them."""

    def __init__(self, comfy: ComfyProcess, folder: Path) -> None:
        self.comfy = comfy
        self.folder = folder
        self.control = CommandControl(ME, comfy.command, folder / "servers", cwd=ROOT)

    def backend(self, *, seen: bool = True, limits: Limits = QUICK) -> ComfyUI:
        held = self.comfy.held_mib if seen else None
        control = WatchedProcess(self.control)
        marker = self.folder / "marker"
        return ComfyUI(self.comfy.url, tenant=ME, control=control, marker=marker, held_mib=held, limits=limits)


@pytest.fixture
async def ours(comfy: ComfyProcess, tmp_path: Path) -> AsyncIterator[Ours]:
    found = Ours(comfy, tmp_path)
    yield found
    await found.control.stop()


@pytest.fixture
async def backend(ours: Ours) -> AsyncIterator[ComfyUI]:
    found = ours.backend()
    yield found
    await found.close()


def attached(comfy: ComfyProcess, folder: Path, *, seen: bool = True) -> ComfyUI:
    held = comfy.held_mib if seen else None
    control, marker = WatchedProcess(AttachControl(ME)), folder / "marker"
    return ComfyUI(comfy.url, tenant=ME, control=control, ours=False, marker=marker, held_mib=held, limits=QUICK)


async def run_one(comfy: ComfyProcess) -> None:
    """A whole prompt, so that its models are there."""
    told = await asyncio.to_thread(comfy.post, "/prompt", prompt())
    await asyncio.to_thread(comfy.until, lambda state: told["prompt_id"] in state["done"])


async def state(backend: ComfyUI) -> TenantState:
    return (await backend.observe())[ME]


async def test_a_load_starts_it_and_a_release_frees_it_and_lets_it_run(
    comfy: ComfyProcess, backend: ComfyUI, ours: Ours
) -> None:
    assert await state(backend) is TenantState.UNLOADED
    await backend.load(ME)
    pid = ours.control.pid()
    assert await state(backend) is TenantState.LOADED, "from the load on, though no prompt has come"
    await run_one(comfy)
    assert comfy.vram_mib() > 12_000
    assert await backend.release(ME, limit_ms=5_000) is None
    assert comfy.vram_mib() < 1_024
    assert await state(backend) is TenantState.UNLOADED
    assert ours.control.pid() == pid
    assert backend.processes().pids == {pid: ME}


async def test_a_release_ends_only_once_the_vram_is_free_whatever_free_answered(
    comfy: ComfyProcess, ours: Ours
) -> None:
    backend = ours.backend(limits=Limits(settle_s=20))
    try:
        await backend.load(ME)
        await run_one(comfy)
        comfy.tell(free_s=1.0)
        await backend.release(ME, limit_ms=5_000)
        assert comfy.vram_mib() < 1_024
    finally:
        await backend.close()


async def test_vram_that_free_leaves_is_given_back_by_a_restart(
    comfy: ComfyProcess, backend: ComfyUI, ours: Ours
) -> None:
    await backend.load(ME)
    await run_one(comfy)
    before = ours.control.pid()
    comfy.tell(keeps_mib=9_000)
    said = await backend.release(ME, limit_ms=5_000)
    assert said == "comfyui kept 9000 MiB of VRAM after /free: restarted"
    assert ours.control.pid() not in (None, before)
    assert comfy.vram_mib() < 1_024
    await asyncio.to_thread(comfy.wait_ready)
    assert await state(backend) is TenantState.UNLOADED


async def test_vram_that_stays_after_a_restart_too_is_an_error_with_both_figures(ours: Ours) -> None:
    figures = iter([9_000, 9_000, 9_000, 9_000, 9_000])

    async def held() -> int:
        return next(figures, 2_000)

    control, marker = WatchedProcess(ours.control), ours.folder / "marker"
    limits = Limits(settle_s=0.3)
    backend = ComfyUI(ours.comfy.url, tenant=ME, control=control, marker=marker, held_mib=held, limits=limits)
    try:
        await backend.load(ME)
        with pytest.raises(BackendError, match="kept 9000 MiB of VRAM after /free, and 2000 MiB after a restart"):
            await backend.release(ME, limit_ms=5_000)
    finally:
        await backend.close()


async def test_of_an_attached_one_it_is_said_that_somebody_else_must_restart_it(
    comfy: ComfyProcess, tmp_path: Path
) -> None:
    comfy.start()
    backend = attached(comfy, tmp_path)
    try:
        await backend.load(ME)
        await run_one(comfy)
        comfy.tell(keeps_mib=9_000)
        with pytest.raises(BackendRefused, match=r"kept 9000 MiB .* is attached: restart it where it was started"):
            await backend.release(ME, limit_ms=5_000)
    finally:
        await backend.close()


async def test_where_nobody_sees_the_vram_the_free_is_believed_once_it_is_idle(
    comfy: ComfyProcess, tmp_path: Path
) -> None:
    comfy.start()
    backend = attached(comfy, tmp_path, seen=False)
    try:
        await backend.load(ME)
        await run_one(comfy)
        comfy.tell(keeps_mib=9_000)
        assert await backend.release(ME, limit_ms=5_000) is None
        assert await state(backend) is TenantState.UNLOADED, "else it would be sent away again and again"
    finally:
        await backend.close()


async def test_where_nobody_sees_the_vram_one_of_ours_that_says_it_keeps_it_is_restarted(
    comfy: ComfyProcess, ours: Ours
) -> None:
    backend = ours.backend(seen=False)
    try:
        await backend.load(ME)
        await run_one(comfy)
        comfy.tell(keeps_mib=9_000)
        assert await backend.release(ME, limit_ms=5_000) == "comfyui kept 8700 MiB of VRAM after /free: restarted"
        assert await state(backend) in (TenantState.LOADING, TenantState.UNLOADED)
    finally:
        await backend.close()


async def test_a_release_waits_for_the_prompts_that_are_there(comfy: ComfyProcess, backend: ComfyUI) -> None:
    comfy.from_the_start(hold=True)
    await backend.load(ME)
    await asyncio.to_thread(comfy.post, "/prompt", prompt())
    await asyncio.to_thread(comfy.until, lambda state: state["running"])
    with pytest.raises(BackendError, match="still has 1 prompt in its queue; end them in its UI"):
        await backend.release(ME, limit_ms=200)
    assert "POST /free" not in comfy.state()["calls"], "it would be done between two prompts"
    quiet = asyncio.create_task(backend.quiesce(ME, limit_ms=20_000))
    comfy.tick(3)
    assert not (await quiet).gone
    assert comfy.state()["done"]


async def test_prompts_that_came_past_us_make_it_loaded_until_it_is_freed(comfy: ComfyProcess, tmp_path: Path) -> None:
    comfy.start()
    backend = attached(comfy, tmp_path, seen=False)
    try:
        assert await state(backend) is TenantState.UNLOADED
        comfy.tell(hold=True)
        await asyncio.to_thread(comfy.post, "/prompt", prompt())
        assert await state(backend) is TenantState.LOADED
        comfy.tell(hold=False)
        await asyncio.to_thread(comfy.until, lambda state: state["done"])
        assert await state(backend) is TenantState.LOADED, "its models are still there"
        await backend.release(ME, limit_ms=5_000)
        assert await state(backend) is TenantState.UNLOADED
    finally:
        await backend.close()


@pytest.mark.parametrize("seen", [True, False])
async def test_who_comes_new_to_one_that_is_loaded_sees_it(comfy: ComfyProcess, tmp_path: Path, seen: bool) -> None:
    comfy.start()
    await run_one(comfy)
    backend = attached(comfy, tmp_path, seen=seen)
    try:
        assert await state(backend) is TenantState.LOADED
    finally:
        await backend.close()


async def test_the_next_process_of_ours_knows_that_it_was_loaded(comfy: ComfyProcess, ours: Ours) -> None:
    first = ours.backend(seen=False)
    await first.load(ME)
    await first.close()
    second = ours.backend(seen=False)
    try:
        assert await state(second) is TenantState.LOADED
        comfy.kill()
        async with asyncio.timeout(10):
            while await state(second) is not TenantState.FAILED:  # how it ended is written a moment later
                await anext(aiter(second.changes()))
        await ours.control.ensure()
        await asyncio.to_thread(comfy.wait_ready)
        assert await state(second) is TenantState.UNLOADED, "the new process has loaded nothing"
    finally:
        await second.close()


async def test_one_that_is_attached_and_not_there_is_stopped_and_cannot_be_loaded(
    comfy: ComfyProcess, tmp_path: Path
) -> None:
    backend = attached(comfy, tmp_path)
    try:
        assert await state(backend) is TenantState.STOPPED
        with pytest.raises(BackendGone, match="not swapper's to start"):
            await backend.load(ME)
        assert (await backend.quiesce(ME, limit_ms=1_000)).gone
    finally:
        await backend.close()


async def test_one_that_ends_at_its_start_is_told_with_its_own_words(tmp_path: Path) -> None:
    control = CommandControl(ME, ["sh", "-c", "echo no module named torch; exit 3"], tmp_path / "servers")
    backend = ComfyUI("http://127.0.0.1:9", tenant=ME, control=WatchedProcess(control), marker=tmp_path / "marker")
    try:
        with pytest.raises(BackendError, match=r"ended before it answered \(exit status 3\): no module named torch"):
            await backend.load(ME)
    finally:
        await backend.close()
        await control.stop()


async def test_one_that_does_not_come_to_answer_is_ended_and_the_next_load_starts_it_anew(tmp_path: Path) -> None:
    control = CommandControl(ME, ["sleep", "1000"], tmp_path / "servers")
    limits = Limits(load_s=0.2)
    watched, marker = WatchedProcess(control), tmp_path / "marker"
    backend = ComfyUI("http://127.0.0.1:9", tenant=ME, control=watched, marker=marker, limits=limits)
    try:
        with pytest.raises(BackendStalled, match=r"comfyui makes no progress in loading for 0.2 s: it neither"):
            await backend.load(ME)
        assert (control.pid(), await state(backend)) == (None, TenantState.UNLOADED)
    finally:
        await backend.close()
        await control.stop()


async def test_one_that_hangs_all_the_time_it_has_to_become_idle_is_started_anew(
    comfy: ComfyProcess, backend: ComfyUI, ours: Ours, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.comfyui.http.LIMIT_S", 0.1)
    await backend.load(ME)
    before = ours.control.pid()
    comfy.tell(silent=True)
    assert (await backend.quiesce(ME, limit_ms=500)).gone
    assert ours.control.pid() not in (None, before)


async def test_an_attached_one_that_was_silent_all_the_time_is_not_said_to_have_prompts(
    comfy: ComfyProcess, backend: ComfyUI, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.comfyui.http.LIMIT_S", 0.1)
    await backend.load(ME)
    comfy.tell(silent=True)
    other = attached(comfy, tmp_path / "other")
    try:
        with pytest.raises(BackendError, match=r"comfyui has not answered for 0.5 s, so nobody knows"):
            await other.quiesce(ME, limit_ms=500)
    finally:
        await other.close()


async def test_one_that_answers_nothing_is_unreachable_and_counts_as_there(
    comfy: ComfyProcess, backend: ComfyUI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.comfyui.http.LIMIT_S", 0.2)
    await backend.load(ME)
    comfy.tell(silent=True)
    assert (await state(backend)).holds_vram


async def test_every_change_of_its_queue_is_told(comfy: ComfyProcess, backend: ComfyUI) -> None:
    await backend.load(ME)
    comfy.tell(hold=True)
    changes = aiter(backend.changes())
    await anext(changes)
    while not any(client.startswith("swapper-") for client in comfy.state()["clients"]):
        await anext(changes)
    async with asyncio.timeout(10):
        for _ in range(5):  # the first may be taken for what was told before
            await asyncio.to_thread(comfy.post, "/prompt", prompt())
            await anext(changes)


async def test_it_has_no_conversations(backend: ComfyUI) -> None:
    with pytest.raises(SaveUnsupported):
        await backend.save(ME, SaveArgs(0, "x"))
    with pytest.raises(BackendRefused):
        await backend.restore(ME, "x", 0)


async def test_the_fence_is_asked_before_anything_changes(comfy: ComfyProcess, backend: ComfyUI) -> None:
    async def fence() -> None:
        raise BackendError("another agent has this host")

    await backend.load(ME)
    await run_one(comfy)
    backend.fenced(fence)
    with pytest.raises(BackendError, match="another agent"):
        await backend.release(ME, limit_ms=1_000)
    comfy.kill()
    with pytest.raises(BackendError, match="another agent"):
        await backend.load(ME)
    assert comfy.vram_mib() == 0, "it was not started"


async def test_a_mark_that_cannot_be_written_hides_nobody_and_is_told_with_the_release(
    ours: Ours, backend: ComfyUI, tmp_path: Path
) -> None:
    await backend.load(ME)
    await run_one(ours.comfy)
    (tmp_path / "marker").unlink()
    (tmp_path / "marker.new").mkdir()
    assert await state(backend) is TenantState.LOADED
    said = await backend.release(ME, limit_ms=10_000)
    assert said is not None
    assert f"{tmp_path}/marker cannot be written: Is a directory; after a restart swapper may not know" in said
    assert await state(backend) is TenantState.UNLOADED


async def test_one_that_cannot_be_marked_as_loaded_is_not(ours: Ours, backend: ComfyUI, tmp_path: Path) -> None:
    (tmp_path / "marker.new").mkdir()
    with pytest.raises(BackendError, match="marker cannot be written: Is a directory"):
        await backend.load(ME)
    assert ours.control.pid() is None
