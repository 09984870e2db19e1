"""What an engine's inspection of a container means, and whose the process is that it names."""

from __future__ import annotations

import os
from typing import Any

import pytest

from workers.control import ExitStatus, Phase
from workers.control.container import Container

ID = "ab" * 32


def document(**state: object) -> dict[str, Any]:
    state = {"Running": True, "Pid": os.getpid(), "StartedAt": "2026-11-30T10:00:00.123456789Z", **state}
    host = {"RestartPolicy": {"Name": "no"}}
    return {"Id": ID, "Name": "/ml", "State": state, "Config": {}, "HostConfig": host}


def test_a_process_that_is_not_in_the_container_is_some_other_of_this_machine() -> None:
    """An engine elsewhere has numbers of its own."""
    seen = Container.of(document())
    assert (seen.process, seen.seen().pids, seen.seen().containers) == (None, (), (ID,))
    assert seen.alive()


@pytest.mark.parametrize(
    ("state", "phase", "why"),
    [
        ({}, Phase.UP, ""),
        ({"Health": {"Status": "healthy"}}, Phase.UP, ""),
        ({"Health": {"Status": "starting"}}, Phase.STARTING, "the health check of the container ml has not passed yet"),
        ({"Health": {"Status": "unhealthy"}}, Phase.STUCK, "the health check of the container ml fails"),
        ({"Paused": True}, Phase.STUCK, "the container ml is paused, and holds what it held"),
        ({"Restarting": True, "ExitCode": 3}, Phase.STARTING, "the container ml ended (3) and is started again"),
        ({"Running": False}, Phase.GONE, ""),
        ({"Running": False, "OOMKilled": True}, Phase.GONE, "it was killed for want of memory"),
        ({"Running": False, "Error": "no such device"}, Phase.GONE, "no such device"),
    ],
)
def test_how_far_it_has_come(state: dict[str, Any], phase: Phase, why: str) -> None:
    seen = Container.of(document(**state)).seen()
    assert (seen.phase, seen.why) == (phase, why)


@pytest.mark.parametrize(
    ("state", "ended"),
    [
        ({}, None),
        ({"Running": False, "ExitCode": 3}, ExitStatus(3, None, 1_796_032_801_000)),
        ({"Running": False, "ExitCode": 137}, ExitStatus(None, 9, 1_796_032_801_000)),
        ({"Running": False, "ExitCode": 255}, ExitStatus(255, None, 1_796_032_801_000)),
        ({"Running": False, "StartedAt": "0001-01-01T00:00:00Z"}, None),
    ],
)
def test_how_its_last_run_ended(state: dict[str, Any], ended: ExitStatus | None) -> None:
    found = Container.of(document(**{"FinishedAt": "2026-11-30T10:00:01.000000001Z", **state}))
    assert found.exit_status() == ended


@pytest.mark.parametrize(
    ("number", "said"), [(9, "ended by SIGKILL"), (34, "ended by SIGRTMIN"), (44, "ended by signal 44")]
)
def test_every_signal_can_be_said(number: int, said: str) -> None:
    assert str(ExitStatus(None, number, 0)) == said
