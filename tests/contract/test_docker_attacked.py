"""Control `docker` on a real engine while others meddle: renamed, made anew, removed, paused, killed, stopped."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from typing import Any

import psutil
import pytest
from docker.errors import APIError

from swapper.errors import BackendDown, BackendError
from tests.contract.controls import Docker, until
from tests.support.dockerd import DEAF, Dockerd
from workers.backend import TenantState
from workers.control import Phase
from workers.control.docker import DockerControl
from workers.onoff import OnOff


async def up(control: DockerControl) -> int:
    """Its first process."""
    await control.ensure()
    await until(control, Phase.UP)
    pid = control.pid()
    assert pid is not None
    return pid


async def spoken(control: DockerControl, line: str) -> None:
    """Wait until it has said so."""
    while line not in (await asyncio.to_thread(control.log_tail, 10) or []):
        pass


async def test_one_that_is_renamed_while_it_runs_is_there_and_is_what_a_release_stops(
    mine: Dockerd, docker: Docker
) -> None:
    mine.create("it")
    control = docker(mine)
    backend = OnOff("tenant", control, grace_ms=5_000)
    pid = await up(control)
    mine.api.rename("it", "that")
    seen = await control.look()
    assert (seen.phase, seen.pids, control.alive()) == (Phase.UP, (pid,), True)
    assert seen.why == "the container that was started as it is called that now: write that name as container:"
    assert await backend.observe() == {"tenant": TenantState.LOADED}
    await backend.release("tenant", limit_ms=1)
    assert not psutil.pid_exists(pid)
    assert (await control.look()).phase is Phase.MISSING, "one that holds nothing is no more than its name"


async def test_one_of_before_that_runs_on_beside_the_one_that_has_its_name_now_is_there_and_is_stopped(
    mine: Dockerd, docker: Docker
) -> None:
    mine.create("it")
    control = docker(mine)
    pid = await up(control)
    mine.api.rename("it", "before")
    second = mine.create("it")
    assert (await control.look()).pids == (pid,)
    await control.stop()
    assert not psutil.pid_exists(pid)
    await up(control)
    assert (await control.look()).containers == (second,)


async def test_of_several_that_match_none_counts_as_gone_while_one_may_run(mine: Dockerd, docker: Docker) -> None:
    labels = {"com.docker.compose.project": "media", "com.docker.compose.service": "ml"}
    for name in ("media-ml-1", "media-ml-2"):
        mine.create(name, labels=labels)
        mine.api.start(name)
    control = docker(mine, "media/ml")
    backend = OnOff("tenant", control, grace_ms=5_000)
    seen = await control.look()
    assert (seen.phase, control.alive()) == (Phase.UNREACHABLE, None)
    assert seen.why.startswith("several containers are media/ml of Compose")
    assert await backend.observe() == {"tenant": TenantState.UNREACHABLE}
    with pytest.raises(BackendError, match="several containers"):
        await backend.release("tenant", limit_ms=1)


async def test_one_that_is_removed_while_it_is_stopped_is_gone(mine: Dockerd, docker: Docker) -> None:
    mine.create("it", DEAF)
    control = docker(mine)
    pid = await up(control)
    await spoken(control, "up")
    stopping = asyncio.ensure_future(control.stop(60_000))
    removing = asyncio.to_thread(mine.api.remove_container, "it", force=True)
    await asyncio.gather(stopping, removing)
    assert not psutil.pid_exists(pid)
    assert (await control.look()).phase is Phase.MISSING


async def test_one_that_is_paused_while_it_is_stopped_is_ended_all_the_same(mine: Dockerd, docker: Docker) -> None:
    mine.create("it", DEAF)
    control = docker(mine)
    pid = await up(control)
    await spoken(control, "up")
    stopping = asyncio.ensure_future(control.stop(1_000))
    with suppress(APIError):  # it was quicker
        await asyncio.to_thread(mine.api.pause, "it")
    await stopping
    assert not psutil.pid_exists(pid)
    assert (await control.look()).phase is Phase.GONE


async def test_one_that_somebody_stops_by_hand_is_gone_and_its_load_brings_it_back(
    mine: Dockerd, docker: Docker
) -> None:
    mine.create("it", restart="always")
    control = docker(mine)
    backend = OnOff("tenant", control, grace_ms=5_000)
    await up(control)
    await asyncio.to_thread(mine.api.stop, "it", 5)
    await until(control, Phase.GONE)
    assert await backend.observe() == {"tenant": TenantState.UNLOADED}
    assert await backend.end_hung() is None
    await backend.load("tenant")


@pytest.mark.parametrize("restart", ["always", "unless-stopped", "on-failure"])
async def test_one_whose_policy_starts_it_again_is_another_run_and_a_stop_ends_that(
    mine: Dockerd, docker: Docker, restart: str
) -> None:
    mine.create("it", restart=restart)
    control = docker(mine)
    pid = await up(control)
    before = (await control.look()).run
    os.kill(pid, signal.SIGKILL)
    changes = control.changes()
    while (seen := await control.look()).phase is not Phase.UP or seen.run == before:
        assert seen.phase in (Phase.UP, Phase.STARTING), seen
        await anext(changes)
    await control.stop()
    assert (await control.look()).phase is Phase.GONE
    assert mine.state("it")["Running"] is False


async def test_one_between_two_attempts_of_its_policy_is_there_and_can_be_stopped(
    mine: Dockerd, docker: Docker
) -> None:
    mine.create("it", "exit 3", restart="always")
    control = docker(mine)
    await control.ensure()
    await until(control, Phase.STARTING)
    await control.stop()
    assert ((await control.look()).phase, mine.state("it")["Restarting"]) == (Phase.GONE, False)


async def test_an_engine_that_dies_during_a_stop_says_nothing_and_the_next_stop_ends_it(
    own: Dockerd, docker: Docker
) -> None:
    own.create("it", DEAF)
    control = docker(own)
    backend = OnOff("tenant", control, grace_ms=60_000)
    pid = await up(control)
    await spoken(control, "up")
    stopping = asyncio.ensure_future(backend.release("tenant", limit_ms=1))
    os.kill(pid, 0)
    await asyncio.to_thread(own.kill)
    with pytest.raises(BackendDown, match="does not answer"):
        await stopping
    assert await backend.observe() == {"tenant": TenantState.UNREACHABLE}
    assert psutil.pid_exists(pid)
    await asyncio.to_thread(own.start)
    changes = control.changes()
    while (await control.look()).phase is Phase.UNREACHABLE:
        await anext(changes)
    await control.stop(100)
    assert (await control.look()).phase is Phase.GONE
    assert not psutil.pid_exists(pid)


async def test_an_engine_that_fails_to_look_is_no_container_that_is_missing(
    mine: Dockerd, docker: Docker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while its storage is broken: it answers, and with no container."""
    mine.create("it")
    control = docker(mine)
    await up(control)

    def broken(_: object, client: Any) -> object:  # noqa: ANN401
        return client.create_container_from_config({}, "it")

    monkeypatch.setattr(DockerControl, "_inspected", broken)
    seen = await control.look()
    assert (seen.phase, control.alive()) == (Phase.UNREACHABLE, None), seen
    monkeypatch.undo()
    assert (await control.look()).phase is Phase.UP
