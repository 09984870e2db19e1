"""The wall clock is stepped under serve and its store: a job that beats keeps its lease, a swap comes to its end."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from swapper.demo.models import make_models
from tests.support.clock import Clock
from tests.support.jobs import job
from tests.support.matrix import BACK_S, STORY, Client, Held, accounted, back, eventually, granted, warm
from tests.support.router import RealRouter

STEP_S = 50 * 60
"""Less than max_hold, which a lease may not outlast by the wall clock either."""


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


@pytest.mark.parametrize("step_s", [STEP_S, -STEP_S], ids=["ahead", "back"])
def test_a_clock_that_is_stepped_costs_no_job_its_lease_and_no_swap_its_end(
    server: Held, clock: Clock, step_s: int
) -> None:
    with job(server) as holder:
        before = now(server)
        clock.step(step_s)
        eventually(lambda: abs((now(server) - before).total_seconds()) > STEP_S / 2, "the store's clock is stepped")
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
