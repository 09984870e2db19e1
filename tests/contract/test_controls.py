"""What holds for every way of starting and stopping: on a process, a container, a unit, a Deployment."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tests.contract.controls import DockerRig, KubernetesRig, ProcessRig, Rig, SystemdRig, until
from tests.support.fake_kube import FakeKube
from tests.support.fake_systemctl import install
from workers.control import Phase, Watched

Make = Callable[[], Watched]
CONTROLS = ("process", "docker", "systemd", "kubernetes")


@pytest.fixture(params=CONTROLS)
async def rig(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    match request.param:
        case "process":
            made: Rig = ProcessRig(tmp_path)
        case "systemd":
            monkeypatch.setenv("PATH", f"{install(tmp_path)}:{os.environ['PATH']}")
            made = SystemdRig(tmp_path)
        case "kubernetes":
            made = KubernetesRig(await FakeKube().start())
        case _:
            made = DockerRig(request.getfixturevalue("engine"), "contract-it")
    yield made
    await made.remove()


@pytest.fixture
async def make(rig: Rig) -> AsyncIterator[Make]:
    """Makes controls of the same thing; what runs is stopped at the end."""
    all_made: list[Watched] = []

    def one() -> Watched:
        all_made.append(rig.control())
        return all_made[-1]

    yield one
    await one().stop(0)
    for control in all_made:
        await control.close()


async def test_it_runs_from_its_start_to_its_stop_and_both_may_be_asked_for_twice(make: Make) -> None:
    control = make()
    assert ((await control.look()).phase, control.alive()) == (Phase.GONE, False)
    await control.stop()
    await control.ensure()
    seen = await until(control, Phase.UP)
    assert seen.run
    assert control.alive()
    await control.ensure()
    assert (await control.look()).run == seen.run, "what runs is left as it is"
    await control.stop()
    assert ((await control.look()).phase, control.alive(), control.pid()) == (Phase.GONE, False, None)
    await control.stop()


async def test_whoever_comes_next_finds_what_runs(make: Make) -> None:
    first = make()
    await first.ensure()
    seen = await until(first, Phase.UP)
    later = make()
    found = await later.look()
    assert found == seen
    assert later.pid() == first.pid()
    await later.ensure()
    assert (await later.look()).run == seen.run
    await later.stop()
    assert (await first.look()).phase is Phase.GONE


async def test_a_restart_is_another_run(make: Make) -> None:
    control = make()
    await control.ensure()
    before = await until(control, Phase.UP)
    await control.restart()
    assert (await until(control, Phase.UP)).run != before.run


async def test_what_somebody_else_starts_and_ends_is_seen_and_told(make: Make, rig: Rig) -> None:
    control = make()
    assert (await control.look()).phase is Phase.GONE
    await rig.begin()
    await until(control, Phase.UP)
    gone = asyncio.ensure_future(until(control, Phase.GONE))
    await rig.end()
    await gone
    assert control.alive() is False


async def test_its_processes_are_named_where_they_are_of_this_machine(make: Make) -> None:
    control = make()
    assert (await control.look()).pids == ()
    await control.ensure()
    seen = await until(control, Phase.UP)
    assert seen.pids or seen.containers
    assert control.pid() in (*seen.pids, None)


async def test_a_look_at_what_runs_nowhere_changes_nothing(make: Make) -> None:
    control = make()
    for _ in range(3):
        assert (await control.look()).phase is Phase.GONE
    assert control.notes() is None
