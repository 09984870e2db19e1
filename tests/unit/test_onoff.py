"""Kind `none`: a tenant that is only started and stopped is there while anything of it runs."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from swapper.errors import BackendDown, BackendError, BackendRefused, BackendStalled
from tests.support.fake_control import FakeControl
from workers.backend import Owners, SaveArgs, SaveUnsupported, TenantState
from workers.control import ExitStatus, Phase, Seen
from workers.control.command import CommandControl
from workers.control.process import WatchedProcess
from workers.onoff import OnOff, Times

NAME = "immich-ml"


def backend_on(control: FakeControl, *, away: Path | None = None, keep_up: bool = False) -> OnOff:
    return OnOff(NAME, control, grace_ms=7_000, away=away, keep_up=keep_up, times=Times(0.05, 0.05))


async def state(backend: OnOff) -> TenantState:
    return (await backend.observe())[NAME]


async def test_a_process_is_there_from_its_load_until_its_release_and_is_told_of_as_its_own(tmp_path: Path) -> None:
    control = CommandControl(NAME, ["sleep", "1000"], tmp_path / "process", cwd=tmp_path)
    backend = OnOff(NAME, WatchedProcess(control), grace_ms=5_000)
    await backend.start()
    assert (await state(backend), control.pid()) == (TenantState.UNLOADED, None)
    loaded = await backend.load(NAME)
    pid = control.pid()
    assert pid is not None
    assert (await state(backend), backend.processes(), loaded.n_slots) == (
        TenantState.LOADED,
        Owners({pid: NAME}, {}),
        0,
    )
    await backend.load(NAME)
    assert control.pid() == pid, "what runs is left as it is"
    await backend.release(NAME, limit_ms=0)
    assert (await state(backend), control.pid(), backend.processes()) == (TenantState.UNLOADED, None, Owners())
    await backend.release(NAME, limit_ms=0)


async def test_the_end_of_its_process_is_told_at_once(tmp_path: Path) -> None:
    control = CommandControl(NAME, ["sh", "-c", "read line < go; exit 3"], tmp_path / "process", cwd=tmp_path)
    backend = OnOff(NAME, WatchedProcess(control), grace_ms=5_000)
    os.mkfifo(tmp_path / "go")
    await backend.load(NAME)
    changes = backend.changes()
    await anext(changes)
    told = asyncio.ensure_future(anext(changes))
    (tmp_path / "go").write_text("on\n")
    await told
    while (seen := await state(backend)) is not TenantState.FAILED:
        assert seen is TenantState.UNLOADED, "its exit status is not written yet"


@pytest.mark.parametrize(
    ("phase", "expected"),
    [
        (Phase.MISSING, TenantState.STOPPED),
        (Phase.GONE, TenantState.UNLOADED),
        (Phase.STARTING, TenantState.LOADING),
        (Phase.UP, TenantState.LOADED),
        (Phase.STUCK, TenantState.UNREACHABLE),
        (Phase.STOPPING, TenantState.UNREACHABLE),
        (Phase.UNREACHABLE, TenantState.UNREACHABLE),
    ],
)
async def test_whatever_may_run_counts_as_there(phase: Phase, expected: TenantState) -> None:
    assert await state(backend_on(FakeControl(phase))) is expected


async def test_one_that_ended_badly_by_itself_has_failed_and_one_that_was_stopped_has_not() -> None:
    control = FakeControl(Phase.UP)
    backend = backend_on(control)
    control.ended = ExitStatus(None, 9, 0)
    control.show(Seen(Phase.GONE))
    assert await state(backend) is TenantState.FAILED
    await backend.load(NAME)
    await backend.release(NAME, limit_ms=0)
    assert await state(backend) is TenantState.UNLOADED


async def test_a_load_waits_until_it_is_up_however_long_it_is_on_its_way() -> None:
    control = FakeControl()
    control.obeys = False
    backend = OnOff(NAME, control, grace_ms=1)
    control.show(Seen(Phase.STARTING, "its health check has not passed yet"))
    loading = asyncio.ensure_future(backend.load(NAME))
    for _ in range(3):
        await asyncio.sleep(0)
        control.show(Seen(Phase.STARTING))
    assert not loading.done()
    control.show(Seen(Phase.UP))
    await loading


async def test_a_load_that_does_not_come_up_says_why() -> None:
    control = FakeControl(Phase.STARTING)
    control.obeys = False
    backend = backend_on(control)
    control.show(Seen(Phase.STARTING, "its health check has not passed yet"))
    quiet = r"immich-ml makes no progress in loading for 0.05 s: .*: its health check has not passed yet"
    with pytest.raises(BackendStalled, match=quiet):
        await backend.load(NAME)
    control.show(Seen(Phase.STUCK, "its health check fails: no card"))
    with pytest.raises(BackendError, match="immich-ml was started and does not work: its health check fails: no card"):
        await backend.load(NAME)
    control.ended, control.log = ExitStatus(3, None, 0), ["CUDA error", "  out of memory"]
    control.show(Seen(Phase.GONE))
    with pytest.raises(BackendError, match=r"ended before it was up \(exit status 3\): CUDA error; out of memory"):
        await backend.load(NAME)


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.STUCK])
async def test_what_did_not_come_up_does_not_stay_and_is_started_anew_the_next_time(phase: Phase) -> None:
    control = FakeControl()
    backend = backend_on(control)
    control.comes_up_as = phase
    with pytest.raises(BackendError, match=r"immich-ml (makes no progress|was started and does not work)"):
        await backend.load(NAME)
    assert await state(backend) is TenantState.UNLOADED
    control.comes_up_as = Phase.UP
    await backend.load(NAME)
    assert control.orders == ["ensure", "stop 7000", "ensure"]


async def test_a_start_that_nobody_answered_in_time_is_not_left_on_its_way() -> None:
    class Slow(FakeControl):
        async def ensure(self) -> None:
            await super().ensure()
            raise BackendDown("systemctl start has no answer in 120 s")

    control = Slow()
    control.comes_up_as = Phase.STARTING
    backend = backend_on(control)
    with pytest.raises(BackendDown, match="no answer in 120 s"):
        await backend.load(NAME)
    assert (control.orders, await state(backend)) == (["ensure", "stop 7000"], TenantState.UNLOADED)


async def test_what_did_not_come_up_and_is_never_evicted_is_left_as_it_is() -> None:
    control = FakeControl()
    control.comes_up_as = Phase.STUCK
    with pytest.raises(BackendError, match="does not work"):
        await backend_on(control, keep_up=True).load(NAME)
    assert control.orders == ["ensure"]


async def test_a_release_ends_when_it_is_seen_gone_and_not_with_the_answer() -> None:
    control = FakeControl(Phase.UP)
    control.obeys = False
    backend = OnOff(NAME, control, grace_ms=7_000)
    leaving = asyncio.ensure_future(backend.release(NAME, limit_ms=1))
    await asyncio.sleep(0)
    control.show(Seen(Phase.STOPPING))
    assert not leaving.done()
    control.note = "its first process did not answer TERM"
    control.show(Seen(Phase.GONE))
    assert await leaving == "its first process did not answer TERM"
    assert control.orders == ["stop 7000"], "its own grace counts"


async def test_what_stays_after_it_was_stopped_is_an_error_that_says_what_is_seen() -> None:
    control = FakeControl(Phase.UP)
    control.obeys = False
    with pytest.raises(BackendError, match="immich-ml was stopped and is still there: it is seen as up"):
        await backend_on(control).release(NAME, limit_ms=1)


async def test_it_has_no_conversations() -> None:
    backend = backend_on(FakeControl(Phase.UP))
    quiesced = await backend.quiesce(NAME)
    assert (quiesced.slots, quiesced.gone) == ((), False)
    with pytest.raises(SaveUnsupported):
        await backend.save(NAME, SaveArgs(0, "name"))
    with pytest.raises(BackendRefused):
        await backend.restore(NAME, "name", 0)


async def test_one_that_is_never_evicted_is_started_where_it_does_not_run_and_never_stopped() -> None:
    control = FakeControl()
    backend = backend_on(control, keep_up=True)
    await backend.start()
    assert await state(backend) is TenantState.LOADED
    with pytest.raises(BackendRefused, match="immich-ml has evict: never"):
        await backend.release(NAME, limit_ms=1)
    control.show(Seen(Phase.UP, came_back=True))
    assert await backend.end_hung() is None
    assert control.orders == ["ensure"]


async def test_what_was_released_and_comes_back_by_itself_is_stopped_again() -> None:
    control = FakeControl(Phase.UP)
    backend = backend_on(control)
    control.show(Seen(Phase.UP, came_back=True))
    assert await backend.end_hung() is None, "it was not released"
    await backend.release(NAME, limit_ms=1)
    assert await backend.end_hung() is None
    control.show(Seen(Phase.UP, came_back=True))
    said = await backend.end_hung()
    assert said == "immich-ml came back by itself though its card was given away: stopped again"
    assert control.orders == ["stop 7000", "stop 7000"]
    await backend.load(NAME)
    control.show(Seen(Phase.UP, came_back=True))
    assert await backend.end_hung() is None, "it was asked for"


async def test_what_a_new_boot_brings_back_is_stopped_again(tmp_path: Path) -> None:
    control, away = FakeControl(Phase.UP), tmp_path / "immich-ml" / "away.json"
    await backend_on(control, away=away).release(NAME, limit_ms=1)
    away.write_text(json.dumps({"boot": "an earlier one"}))
    later = backend_on(control, away=away)
    control.show(Seen(Phase.UP))
    assert await later.end_hung() is not None
    assert control.orders == ["stop 7000", "stop 7000"]


async def test_what_somebody_starts_is_told_once_and_left_to_him(tmp_path: Path) -> None:
    control = FakeControl(Phase.UP)
    backend = backend_on(control, away=tmp_path / "away.json")
    await backend.release(NAME, limit_ms=1)
    control.show(Seen(Phase.UP, "a HorizontalPodAutoscaler may have done it"))
    said = await backend.end_hung()
    assert said == "immich-ml was started by somebody else: a HorizontalPodAutoscaler may have done it"
    assert await backend.end_hung() is None
    assert control.orders == ["stop 7000"]
    later = backend_on(control, away=tmp_path / "away.json")
    assert await later.end_hung() is None


async def test_nothing_is_started_or_stopped_past_the_fence() -> None:
    control = FakeControl()

    async def fence() -> None:
        raise BackendRefused("another agent has this host")

    backend, kept = backend_on(control), backend_on(control, keep_up=True)
    for one in (backend, kept):
        one.fenced(fence)
    for act in (backend.load(NAME), backend.release(NAME, limit_ms=1), kept.start()):
        with pytest.raises(BackendRefused, match="another agent"):
            await act
    assert control.orders == []


async def test_it_answers_for_itself_alone() -> None:
    with pytest.raises(BackendRefused, match="'other' is no tenant here, immich-ml is"):
        await backend_on(FakeControl()).load("other")
