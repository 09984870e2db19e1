"""The wall clock is stepped under serve and its store: a promised duration lasts as long as it was promised.

A job that beats keeps its lease, one that was left alone does not, a drain goes on, a swap comes to its end.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import cast

import psutil
import pytest

from swapper.demo.models import make_models
from tests.support.clock import Clock
from tests.support.jobs import job
from tests.support.matrix import (
    BACK_S,
    STORY,
    Client,
    Held,
    accounted,
    back,
    cache_n,
    child_of,
    eventually,
    granted,
    suspended,
    warm,
)
from tests.support.router import RealRouter
from tests.support.server import Json

STEP_S = 2 * 60 * 60
"""More than max_hold, than any drain, any rest and any ttl."""
FLOOR_S, GRACE_S = 30, 30
"""What a lease lives at least after a step; how long an expired holder keeps its card when it named no process."""
STEPS = pytest.mark.parametrize("step_s", [STEP_S, -STEP_S], ids=["ahead", "back"])


@pytest.fixture(scope="module")
def clock(tmp_path_factory: pytest.TempPathFactory) -> Clock:
    return Clock(tmp_path_factory.mktemp("clock"))


@pytest.fixture
def server(tmp_path: Path, clock: Clock) -> Iterator[Held]:
    router = RealRouter(tmp_path / "router", make_models(tmp_path, ["alpha"]))
    server = Held(tmp_path / "swapper", router, {"alpha": "{vram: 8GiB, default: true}"})
    server.env = {**server.env, **clock.env}
    router.start()
    try:
        clock.step(0)
        server.start()
        back(server, "llama/alpha")
        server.chat("alpha", STORY)
        yield server
    finally:
        server.stop()
        router.stop()


def now(server: Held) -> datetime:
    return datetime.fromisoformat(str(server.get("/api/status")["now"]))


def step(server: Held, clock: Clock, seconds: int) -> None:
    """Step the clock; returns once serve has said so."""
    said = len(server.alerts())
    before = now(server)
    clock.step(seconds)
    eventually(lambda: abs((now(server) - before).total_seconds()) > STEP_S / 2, "the store's clock is stepped")
    eventually(lambda: len(server.alerts()) > said, "the step is told")
    assert "the store's clock was stepped" in server.alerts()[-1]


@STEPS
def test_a_clock_that_is_stepped_costs_no_job_its_lease_and_no_swap_its_end(
    server: Held, clock: Clock, step_s: int
) -> None:
    with job(server) as holder:
        step(server, clock, step_s)
        eventually(lambda: now(server) < holder.expiry(), "it is heard again, or was given time")
        assert holder.lives()
    warm(server)
    with Client(server) as client:
        server.hold_at("before commit release")
        asked = client.lease("amid")
        server.held()
        clock.step(0)
        server.hold_at()
        server.go_on()
        lease = granted(asked)
        server.hold_at("before commit restore")
        released = client.release(lease)
        server.held()
        clock.step(step_s)
        server.hold_at()
        server.go_on()
        released.result(BACK_S)
        warm(server)
    assert {lease["state"] for lease in accounted(server)} == {"released"}
    assert len(server.alerts()) == 3


def test_a_lease_that_was_left_alone_ends_by_its_ttl_though_the_clock_was_stepped_back(
    server: Held, clock: Clock
) -> None:
    with Client(server) as client:
        left = granted(client.lease("left alone", ttl_s=5))
        step(server, clock, -STEP_S)
        at, path = time.monotonic(), f"/api/leases/{left['id']}"
        eventually(lambda: _state(server, path) != "granted", "its lease ends", limit_s=40)
        assert _state(server, path) == "expired"
        assert time.monotonic() - at < FLOOR_S + 3
        following = client.lease("next").result(GRACE_S + 10)
        assert following["state"] == "granted"
        client.release(following).result(BACK_S)
    back(server, "llama/alpha")


def _state(server: Held, path: str) -> str:
    return str(server.get(path)["state"])


@STEPS
def test_a_drain_that_runs_waits_for_its_calls_whatever_the_clock_does(server: Held, clock: Clock, step_s: int) -> None:
    with Client(server) as client, ThreadPoolExecutor(1) as pool:
        with suspended(child_of(psutil.Process(server.router.pid))):
            call = pool.submit(server.chat, "alpha", STORY)
            eventually(lambda: any(d["running"] for d in _list(server, "demand")), "the call runs")
            asked = client.lease("next")
            eventually(lambda: _list(server, "cards")[0]["phase"] == "drain", "the card drains")
            step(server, clock, step_s)
            assert _list(server, "cards")[0]["phase"] == "drain"
            assert not call.done()
        assert cache_n(call.result(BACK_S)), "it was not ended"
        client.release(granted(asked)).result(BACK_S)
    warm(server)
    assert not any(swap["forced"] for swap in server.swaps())


def _list(server: Held, what: str) -> list[Json]:
    return cast("list[Json]", server.get("/api/status")[what])
