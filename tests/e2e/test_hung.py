"""A process is stopped for good (SIGSTOP): it lives and hangs. Ours is ended, and its model is there again."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import psutil
import pytest

from swapper.demo.models import make_models
from tests.support.matrix import STORY, Held, back, child_of, eventually, router_of, status_of, with_its_own_router
from tests.support.plain import with_its_own_server
from tests.support.server import Server

BACK_S = 75.0
"""Half a minute of silence, its end by KILL, and a new start."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Held]:
    with with_its_own_router(tmp_path) as server:
        back(server, "llama/alpha")
        yield server


def hang(process: psutil.Process) -> None:
    process.send_signal(signal.SIGSTOP)
    eventually(lambda: process.status() == psutil.STATUS_STOPPED, "it is stopped")


def problems(server: Server) -> list[str]:
    return cast("list[str]", server.get("/api/status")["problems"])


def test_a_models_process_that_hangs_is_a_problem_and_then_ended_and_its_model_comes_back(server: Held) -> None:
    server.chat("alpha", STORY)
    child = child_of(router_of(server))
    hang(child)
    eventually(lambda: "the server of llama/alpha does not answer" in problems(server), "it is told")
    assert status_of(lambda: server.get("/ready")) == 503
    lease = server.lease("beside a hung model", wait=60)
    assert lease["state"] == "granted", lease
    assert not child.is_running()
    server.release(lease)
    back(server, "llama/alpha", limit_s=BACK_S)
    assert any(f"alpha (process {child.pid}) lived and answered nothing" in text for text in server.alerts())
    assert server.get("/ready")


def test_a_router_that_hangs_while_the_card_is_held_is_started_anew_and_the_model_comes_back(server: Held) -> None:
    lease = server.lease("job", wait=30)
    router = router_of(server)
    hang(router)
    server.release(lease)
    back(server, "llama/alpha", limit_s=BACK_S)
    assert router_of(server) != router
    assert any("lived and did not answer for 30 s: started anew" in text for text in server.alerts())
    assert not problems(server)


def test_a_router_that_goes_on_in_time_is_left_alone(server: Held) -> None:
    router = router_of(server)
    hang(router)
    eventually(lambda: "the server of llama/alpha does not answer" in problems(server), "it is told")
    os.kill(router.pid, signal.SIGCONT)
    back(server, "llama/alpha")
    assert router_of(server) == router


def test_a_plain_server_that_hangs_is_ended_and_started_anew(tmp_path: Path) -> None:
    model = make_models(tmp_path, ["alpha"])["alpha"]
    with with_its_own_server(tmp_path, model, program=("-m", "tests.support.impatient")) as server:
        process = server.process()
        hang(process)
        eventually(lambda: "the server of chat does not answer" in problems(server), "it is told")
        eventually(lambda: not process.is_running(), "it is ended, though it heeds no TERM")
        back(server, "chat", limit_s=BACK_S)
        assert server.process() != process
        said = f"chat (process {process.pid}) lived and answered nothing for 4 s: ended, to be started anew"
        assert said in server.alerts()
        assert server.chat("chat", STORY)["choices"]
