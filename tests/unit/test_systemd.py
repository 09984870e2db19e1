"""Control `systemd` on a systemctl of our own: its words, its refusals, and a manager that is silent."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest

from swapper.errors import BackendDown, BackendError, BackendRefused
from tests.contract.controls import until
from tests.support.fake_systemctl import install
from workers.backend import TenantState
from workers.control import Phase
from workers.control.systemd import SystemdControl
from workers.onoff import OnOff


class Units:
    """The units that the fake knows, and what is wrong with its manager."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "units"

    def has(self, unit: str, script: str = "sleep 1000", **wrong: object) -> None:
        about = {"command": ["sh", "-c", f"exec {script}" if script.startswith("sleep") else script], **wrong}
        (self._folder / f"{unit}.json").write_text(json.dumps(about))

    def manager(self, wrong: str, *, so: bool = True) -> None:
        (self._folder / wrong).touch() if so else (self._folder / wrong).unlink()


class Ordering(SystemdControl):
    """Tells when it orders something."""

    ordered = asyncio.Event()

    async def _order(self, verb: str, limit_s: float, *options: str) -> None:
        self.ordered.set()
        await super()._order(verb, limit_s, *options)


@pytest.fixture
def units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Units:
    monkeypatch.setenv("PATH", f"{install(tmp_path)}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("workers.control.systemd._LOOK_S", 0.1)
    return Units(tmp_path)


async def test_a_name_without_a_suffix_is_a_services(units: Units) -> None:
    units.has("ml.service")
    control = SystemdControl("tenant", "ml")
    await control.ensure()
    assert (await until(control, Phase.UP)).pids == (control.pid(),)
    await control.stop()
    assert await control.problems() == []


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (None, "systemd knows no unit ml.service: correct unit:, or write user: true"),
        ({"masked": True}, "ml.service is masked: systemctl unmask ml.service"),
    ],
)
async def test_a_unit_that_cannot_be_started_is_no_stopped_one(
    units: Units, wrong: dict[str, bool] | None, said: str
) -> None:
    if wrong is not None:
        units.has("ml.service", "sleep 1000", **wrong)
    control = SystemdControl("tenant", "ml")
    seen = await control.look()
    assert (seen.phase, seen.why) == (Phase.MISSING, said)
    with pytest.raises(BackendRefused, match=said):
        await control.ensure()
    await control.stop()
    assert await control.problems() == [said]


async def test_what_swapper_may_not_do_says_how_it_is_allowed(units: Units) -> None:
    units.has("ml.service", denied=True)
    said = r"swapper may not start ml.service: a polkit rule for .* lets its user do it, or use user: true"
    with pytest.raises(BackendRefused, match=said):
        await SystemdControl("tenant", "ml").ensure()


async def test_a_start_that_fails_says_what_systemctl_said(units: Units) -> None:
    units.has("ml.service", result="the control process exited with error code")
    with pytest.raises(BackendRefused, match=r"^systemctl start ml.service: Job for ml.service failed because"):
        await SystemdControl("tenant", "ml").ensure()


async def test_one_that_does_not_end_is_killed_after_its_grace_and_that_is_told(units: Units) -> None:
    units.has("ml.service", "trap '' TERM; echo up; while :; do sleep 0.05; done")
    control = SystemdControl("tenant", "ml")
    await control.ensure()
    while await asyncio.to_thread(control.log_tail, 3) != ["up"]:
        pass
    await control.stop(300)
    assert control.notes() == "ml.service did not end in 0.3 s and was killed"
    assert (await control.look()).phase is Phase.GONE
    assert str(control.exit_status()) == "ended by SIGKILL"


async def test_one_that_is_being_stopped_is_there(units: Units) -> None:
    units.has("ml.service", "trap 'read _ < end; exit 0' TERM; echo up; while :; do sleep 0.05; done")
    os.mkfifo("end")
    control = SystemdControl("tenant", "ml")
    await control.ensure()
    while await asyncio.to_thread(control.log_tail, 3) != ["up"]:
        pass
    stopping = asyncio.ensure_future(control.stop(60_000))
    seen = await until(control, Phase.STOPPING)
    assert seen.why == "ml.service is deactivating (stop-sigterm)"
    assert not stopping.done()
    await asyncio.to_thread(Path("end").write_text, "now\n")
    await stopping
    assert (await control.look()).phase is Phase.GONE


async def test_one_that_crashed_has_failed_and_its_last_words_are_those_of_that_run(units: Units) -> None:
    units.has("ml.service", "echo no card; exit 3")
    control = SystemdControl("tenant", "ml")
    await control.ensure()
    await until(control, Phase.GONE)
    assert (await control.look()).why == "ml.service failed (exit-code)"
    assert (str(control.exit_status()), control.log_tail(3)) == ("exit status 3", ["no card"])
    assert await OnOff("tenant", control, grace_ms=1).observe() == {"tenant": TenantState.FAILED}


async def test_the_end_of_its_main_process_is_told(units: Units, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.control.systemd._LOOK_S", 3600.0)
    units.has("ml.service")
    control = SystemdControl("tenant", "ml")
    await control.ensure()
    pid = control.pid()
    assert pid is not None
    told = control.changes()
    await anext(told)
    change = asyncio.ensure_future(anext(told))
    os.kill(pid, signal.SIGKILL)
    await change
    assert control.alive() is False


async def test_what_somebody_else_does_is_told_and_a_look_that_shows_nothing_new_is_not(
    units: Units, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Looking(SystemdControl):
        looks = 0
        looked = asyncio.Event()

        async def _show(self) -> Mapping[str, str]:
            shown = await super()._show()
            self.looks += 1
            if self.looks == 4:
                self.looked.set()
            return shown

    monkeypatch.setattr("workers.control.systemd._LOOK_S", 0.01)
    units.has("ml.service")
    control = Looking("tenant", "ml")
    told = control.changes()
    await anext(told)
    change = asyncio.ensure_future(anext(told))
    await control.looked.wait()
    assert not change.done()
    await SystemdControl("somebody else", "ml").ensure()
    await change
    assert control.alive() is True
    await control.stop()


async def test_a_manager_that_is_not_there_or_hangs_is_no_stopped_unit(
    units: Units, monkeypatch: pytest.MonkeyPatch
) -> None:
    units.has("ml.service")
    control = SystemdControl("tenant", "ml")
    units.manager("no-manager")
    seen = await control.look()
    assert (seen.phase, control.alive()) == (Phase.UNREACHABLE, None)
    assert "systemd does not answer (System has not been booted with systemd" in seen.why
    with pytest.raises(BackendDown):
        await control.stop()
    units.manager("no-manager", so=False)
    monkeypatch.setattr("workers.control.systemd.ANSWER_S", 0.2)
    units.manager("hangs")
    assert (await control.look()).phase is Phase.UNREACHABLE
    monkeypatch.undo()


async def test_without_systemctl_another_control_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BackendError, match="there is no systemctl here: use control: command, docker or attach"):
        await SystemdControl("tenant", "ml").ensure()


async def test_one_that_its_manager_starts_again_is_there_between_two_attempts_and_can_be_stopped(units: Units) -> None:
    units.has("ml.service", "exit 3", restart_s=60)
    control = SystemdControl("tenant", "ml")
    await control.ensure()
    seen = await until(control, Phase.STARTING)
    assert (seen.why, control.alive(), control.pid()) == ("ml.service is activating (auto-restart)", True, None)
    assert await OnOff("tenant", control, grace_ms=1).observe() == {"tenant": TenantState.LOADING}
    await control.ensure()
    await control.stop()
    assert (await control.look()).phase is Phase.GONE


async def test_one_that_comes_back_after_it_was_killed_is_told_as_another_run(units: Units) -> None:
    units.has("ml.service", restart_s=0)
    control = SystemdControl("tenant", "ml")
    await control.ensure()
    before = await until(control, Phase.UP)
    os.kill(before.pids[0], signal.SIGKILL)
    changes = control.changes()
    while (seen := await control.look()).phase is not Phase.UP or seen.pids == before.pids:
        await anext(changes)
    assert seen.run != before.run
    await control.stop()
    assert (await control.look()).phase is Phase.GONE, "a stop is no end by itself"


async def test_what_came_back_while_its_card_was_given_away_is_told_of(units: Units) -> None:
    units.has("ml.service")
    control = SystemdControl("tenant", "ml")
    backend = OnOff("tenant", control, grace_ms=5_000)
    await backend.load("tenant")
    await backend.release("tenant", limit_ms=1)
    await SystemdControl("somebody else", "ml").ensure()
    assert await backend.end_hung() == "tenant was started by somebody else"
    await control.stop()


async def test_one_that_its_manager_had_to_kill_is_gone_and_that_is_told(units: Units) -> None:
    units.has("ml.service", "trap '' TERM; echo up; while :; do sleep 0.05; done", stop_timeout_s=0.3)
    control = SystemdControl("tenant", "ml", grace_ms=60_000)
    await control.ensure()
    while await asyncio.to_thread(control.log_tail, 3) != ["up"]:
        pass
    await control.stop()
    assert control.notes() == "ml.service did not end in its own TimeoutStopSec, and its manager killed it"
    seen = await control.look()
    assert (seen.phase, seen.why) == (Phase.GONE, "ml.service failed (timeout)")


async def test_one_that_somebody_is_stopping_is_started_after_its_end(units: Units) -> None:
    units.has("ml.service", "trap 'read _ < end; exit 0' TERM; echo up; while :; do sleep 0.05; done")
    os.mkfifo("end")
    control = SystemdControl("tenant", "ml")
    await control.ensure()
    before = await until(control, Phase.UP)
    while await asyncio.to_thread(control.log_tail, 3) != ["up"]:
        pass
    stopping = asyncio.ensure_future(SystemdControl("somebody else", "ml").stop(60_000))
    await until(control, Phase.STOPPING)
    mine = Ordering("tenant", "ml")
    loading = asyncio.ensure_future(OnOff("tenant", mine, grace_ms=1).load("tenant"))
    ordered = asyncio.ensure_future(mine.ordered.wait())
    await asyncio.wait({loading, ordered}, return_when=asyncio.FIRST_COMPLETED)
    ordered.cancel()
    await asyncio.to_thread(Path("end").write_text, "now\n")
    await asyncio.gather(stopping, loading, return_exceptions=True)
    assert loading.exception() is None
    assert (await until(control, Phase.UP)).run != before.run
    again = asyncio.ensure_future(control.stop())
    await asyncio.to_thread(Path("end").write_text, "now\n")
    await again


async def test_a_file_that_was_changed_is_a_problem_and_hides_no_reason(units: Units) -> None:
    units.has("ml.service", changed=True, result="the control process exited with error code")
    control = SystemdControl("tenant", "ml", user=True)
    said = "the file of ml.service was changed, and systemd goes by what it was before: systemctl --user daemon-reload"
    assert await control.problems() == [said]
    with pytest.raises(BackendRefused, match=r"^systemctl start ml.service: Job for ml.service failed because"):
        await control.ensure()


async def test_what_swapper_may_not_stop_is_not_believed_gone(units: Units) -> None:
    units.has("ml.service")
    control = SystemdControl("tenant", "ml")
    await control.ensure()
    units.has("ml.service", denied=True)
    with pytest.raises(BackendRefused, match=r"swapper may not stop ml.service: a polkit rule"):
        await control.stop()
    assert (await control.look()).phase is Phase.UP
    units.has("ml.service")
    await control.stop()
