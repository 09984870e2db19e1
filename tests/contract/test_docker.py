"""Control `docker` on a real engine: names and services, pauses, health, restart policies, and an engine that goes."""

from __future__ import annotations

import asyncio

import psutil
import pytest

from swapper.errors import BackendDown, BackendError, BackendRefused
from tests.contract.controls import Docker, until
from tests.support.dockerd import DEAF, LIVING, Dockerd
from workers.backend import TenantState
from workers.control import ExitStatus, Phase
from workers.control.docker import DockerControl
from workers.onoff import OnOff


async def up(control: DockerControl) -> None:
    await control.ensure()
    await until(control, Phase.UP)


async def test_a_container_is_found_by_its_name_its_id_and_its_service(mine: Dockerd, docker: Docker) -> None:
    labels = {"com.docker.compose.project": "media", "com.docker.compose.service": "ml"}
    made_id = mine.create("it", labels=labels)
    for word in ("it", made_id, made_id[:12], "media/ml"):
        control = docker(mine, word)
        await up(control)
        assert (await control.look()).containers == (made_id,)
        await control.stop()
        assert mine.state("it")["Running"] is False


async def test_of_several_that_match_each_is_named_and_none_is_touched(mine: Dockerd, docker: Docker) -> None:
    labels = {"com.docker.compose.project": "media", "com.docker.compose.service": "ml"}
    for name in ("media-ml-1", "media-ml-2"):
        mine.create(name, labels=labels)
    control = docker(mine, "media/ml")
    said = "several containers are media/ml of Compose: media-ml-1, media-ml-2; write the name of the one that is meant"
    with pytest.raises(BackendRefused, match=said):
        await control.ensure()
    assert [mine.state(name)["Status"] for name in ("media-ml-1", "media-ml-2")] == ["created", "created"]
    assert (await control.look()).why.startswith("several containers")


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("nobody", "there is no container nobody: create it"),
        ("0123456789ab", "the container 0123456789ab was removed: write its name, which outlives that"),
        ("media/ml", "there is no container of the service ml in the Compose project media: docker compose -p media"),
    ],
)
async def test_one_that_is_not_there_is_a_sentence_that_says_what_to_do(
    mine: Dockerd, docker: Docker, word: str, said: str
) -> None:
    control = docker(mine, word)
    seen = await control.look()
    assert (seen.phase, control.alive()) == (Phase.MISSING, False)
    assert said in seen.why
    with pytest.raises(BackendRefused, match=said):
        await control.ensure()
    await control.stop()
    assert [seen.why] == await control.problems()


async def test_one_made_anew_under_its_name_is_it_and_one_known_by_its_id_is_gone(
    mine: Dockerd, docker: Docker
) -> None:
    first = mine.create("it")
    named, known = docker(mine), docker(mine, first)
    await up(named)
    mine.api.remove_container("it", force=True)
    second = mine.create("it")
    await up(named)
    assert (await named.look()).containers == (second,)
    assert (await known.look()).phase is Phase.MISSING


async def test_its_first_process_is_its_own_and_ends_with_it(mine: Dockerd, docker: Docker) -> None:
    mine.create("it")
    control = docker(mine)
    await up(control)
    pid = control.pid()
    assert pid == mine.state("it")["Pid"]
    assert (await control.look()).pids == (pid,)
    await control.stop()
    assert pid is not None
    assert not psutil.pid_exists(pid)
    assert control.exit_status() == ExitStatus(0, None, control.exit_status().ended_ms)  # pyright: ignore[reportOptionalMemberAccess]


async def test_a_stop_waits_as_long_as_the_container_itself_wants_to_be_waited_for(
    mine: Dockerd, docker: Docker
) -> None:
    slow = "trap 'sleep 1.5; exit 0' TERM; echo up; while :; do sleep 0.05; done"
    mine.create("it", slow, stop_timeout=30)
    mine.create("hasty", slow)
    for name, status, noted in (("it", 0, None), ("hasty", 137, note("hasty", "SIGTERM", 1))):
        control = docker(mine, name)
        await up(control)
        await spoken(control, "up")
        await control.stop(100)
        assert (mine.state(name)["ExitCode"], control.notes()) == (status, noted)


def note(name: str, signal: str, seconds: int) -> str:
    return (
        f"the container {name} did not end on {signal} and was killed after {seconds} s: its first process does not "
        "handle it (init: true, or a stop_signal that it does, spares the wait)"
    )


async def spoken(control: DockerControl, line: str) -> None:
    """Wait until it has said so."""
    while line not in (await asyncio.to_thread(control.log_tail, 10) or []):
        pass


async def test_a_first_process_that_does_not_hear_is_killed_and_that_is_told(mine: Dockerd, docker: Docker) -> None:
    mine.create("it", DEAF)
    control = docker(mine)
    await up(control)
    await spoken(control, "up")
    await control.stop(1_000)
    assert control.notes() == note("it", "SIGTERM", 1)
    assert control.exit_status() is not None
    assert str(control.exit_status()) == "ended by SIGKILL"
    await up(control)
    mine.api.kill("it")
    await until(control, Phase.GONE)
    await control.stop(1_000)
    assert control.notes() is None, "it was not this stop that killed it"


async def test_a_paused_one_is_there_and_is_neither_left_nor_killed_for_it(mine: Dockerd, docker: Docker) -> None:
    mine.create("it")
    control = docker(mine)
    await up(control)
    await spoken(control, "up")
    mine.api.pause("it")
    seen = await until(control, Phase.STUCK)
    assert (seen.why, control.alive()) == ("the container it is paused, and holds what it held", True)
    await control.stop(20_000)
    assert (mine.state("it")["Running"], mine.state("it")["ExitCode"]) == (False, 0), "it heard TERM"
    await up(control)
    mine.api.pause("it")
    await control.ensure()
    assert (await control.look()).phase is Phase.UP


async def test_with_a_health_check_it_is_up_once_that_passes(mine: Dockerd, docker: Docker) -> None:
    check = {"test": ["CMD-SHELL", "test -e /well || (echo not well; false)"], "interval": 50_000_000, "retries": 600}
    mine.create("it", f"{LIVING}", healthcheck={**check, "timeout": 5_000_000_000})
    backend = OnOff("tenant", docker(mine), grace_ms=5_000)
    loading = asyncio.ensure_future(backend.load("tenant"))
    async for _ in backend.changes():
        if (await backend.observe())["tenant"] is TenantState.LOADING:
            break
    assert not loading.done()
    await in_it(mine, "touch /well")
    await loading
    assert await backend.observe() == {"tenant": TenantState.LOADED}


async def test_a_load_of_one_that_is_unhealthy_says_what_its_check_said_and_stops_it(
    mine: Dockerd, docker: Docker
) -> None:
    check = {"test": ["CMD-SHELL", "echo no card; false"], "interval": 50_000_000, "retries": 1}
    mine.create("it", healthcheck={**check, "timeout": 5_000_000_000})
    backend = OnOff("tenant", docker(mine), grace_ms=5_000)
    with pytest.raises(BackendError, match="does not work: the health check of the container it fails: no card"):
        await backend.load("tenant")
    assert await backend.observe() == {"tenant": TenantState.UNLOADED}


async def in_it(engine: Dockerd, script: str) -> None:
    made = engine.api.exec_create("it", ["sh", "-c", script])
    await asyncio.to_thread(engine.api.exec_start, made["Id"])


async def test_the_log_is_that_of_the_last_run(mine: Dockerd, docker: Docker) -> None:
    mine.create("it", "test -e /again && { echo no card; exit 3; }; touch /again; echo the first run")
    control = docker(mine)
    for said in ("the first run", "no card"):
        await control.ensure()
        await until(control, Phase.GONE)
        assert await asyncio.to_thread(control.log_tail, 5) == [said]
    assert await OnOff("tenant", control, grace_ms=5_000).observe() == {"tenant": TenantState.FAILED}


async def test_one_that_cannot_be_started_says_why_in_the_engines_words(mine: Dockerd, docker: Docker) -> None:
    mine.create("it", ["/no/such/program"])
    with pytest.raises(BackendRefused, match=r"it cannot be started: .*no such file"):
        await docker(mine).ensure()


async def test_its_end_is_told_and_not_looked_for(mine: Dockerd, docker: Docker) -> None:
    mine.create("it")
    control = docker(mine)
    await up(control)
    told = control.changes()
    await anext(told)
    for act in (mine.api.kill, mine.api.start, mine.api.pause, mine.api.unpause):
        change = asyncio.ensure_future(anext(told))
        await asyncio.to_thread(act, "it")
        await change
    assert control.alive() is True


async def test_who_asks_without_waiting_knows_of_an_end_once_it_was_told(mine: Dockerd, docker: Docker) -> None:
    mine.create("it", "read line; exit 4", stdin_open=True)
    control = docker(mine)
    await up(control)
    told = control.changes()
    await anext(told)
    mine.api.kill("it")
    while control.exit_status() is None:
        await anext(told)
    assert (control.alive(), control.pid(), str(control.exit_status())) == (False, None, "ended by SIGKILL")


async def test_one_that_restarts_always_stays_stopped_until_its_engine_begins_anew_and_is_stopped_again(
    own: Dockerd, docker: Docker
) -> None:
    own.create("it", restart="always")
    control = docker(own)
    backend = OnOff("tenant", control, grace_ms=5_000)
    await backend.load("tenant")
    await backend.release("tenant", limit_ms=1)
    assert (await control.look()).phase is Phase.GONE
    await again(own, control)
    seen = await until(control, Phase.UP)
    assert seen.came_back
    assert await backend.observe() == {"tenant": TenantState.LOADED}
    assert await backend.end_hung() == "tenant came back by itself though its card was given away: stopped again"
    assert (await control.look()).phase is Phase.GONE
    await backend.load("tenant")
    await again(own, control)
    assert not (await until(control, Phase.UP)).came_back, "its card is its own"
    assert await backend.end_hung() is None


async def again(engine: Dockerd, control: DockerControl) -> None:
    """The engine is killed and starts anew, and the control has seen both."""
    await asyncio.to_thread(engine.kill)
    await until(control, Phase.UNREACHABLE)
    await asyncio.to_thread(engine.start)


async def test_what_an_engine_that_is_gone_ran_counts_as_there_until_it_is_back(own: Dockerd, docker: Docker) -> None:
    own.create("it", restart="always")
    control = docker(own)
    backend = OnOff("tenant", control, grace_ms=5_000)
    await backend.load("tenant")
    await asyncio.to_thread(own.kill)
    seen = await until(control, Phase.UNREACHABLE)
    assert "does not answer: start it (systemctl start docker), or set DOCKER_HOST" in seen.why
    assert await backend.observe() == {"tenant": TenantState.UNREACHABLE}
    assert control.alive() is None
    for act in (control.ensure(), control.stop()):
        with pytest.raises(BackendDown, match="does not answer"):
            await act
    await asyncio.to_thread(own.start)
    await until(control, Phase.UP)


async def test_an_engine_that_hangs_is_no_stopped_container_and_keeps_nobody_waiting_for_long(
    own: Dockerd, docker: Docker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.control.engine.ANSWER_S", 1)
    own.create("it")
    control = docker(own)
    await up(control)
    own.pause()
    try:
        seen = await control.look()
        assert (seen.phase, control.alive()) == (Phase.UNREACHABLE, None)
        assert "no answer in time" in seen.why
    finally:
        own.go_on()
    assert (await until(control, Phase.UP)).why == ""
