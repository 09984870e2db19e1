"""Each process is stopped (SIGSTOP) for a while and goes on: nobody healthy is taken for dead by our own gap."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

import psutil
import pytest
import redis

from tests.support.jobs import job
from tests.support.matrix import (
    BACK_S,
    Client,
    Held,
    back,
    child_of,
    eventually,
    granted,
    in_turn,
    router_of,
    sent_to,
    suspended,
)

NEXT_BEAT_S = 3.8
"""With less left of its five seconds a lease is beaten for, a third of its time after the last beat."""


@pytest.fixture
def server(living: Held) -> Iterator[Held]:
    with in_turn(living) as server:
        yield server


@pytest.mark.parametrize("stopped", ["swapper", "store"])
def test_a_job_that_beats_outlives_a_stop_longer_than_its_ttl(server: Held, stopped: str) -> None:
    """The shortest stop that matters: it begins right before a beat and ends once the lease's time has passed."""
    with job(server) as holder:
        due = holder.expiry()
        eventually(lambda: (due - datetime.now(UTC)).total_seconds() < NEXT_BEAT_S, "it is about to beat")
        victim = psutil.Process(server.pid) if stopped == "swapper" else server.store()
        with suspended(victim):
            eventually(lambda: datetime.now(UTC) > due, "the lease's time has passed")
        eventually(lambda: holder.expiry() > due, "it is heard again, or was given time")
        eventually(lambda: holder.expiry() > datetime.now(UTC), "and goes on")
        assert holder.lives()


def test_a_store_paused_in_the_middle_of_a_swap_for_longer_than_a_call_may_take(server: Held) -> None:
    store = redis.Redis(unix_socket_path=str(server.state_dir / "store" / "socket"))
    with Client(server) as client:
        server.hold_at("before commit release")
        asked = client.lease("paused")
        server.held()
        store.execute_command("CLIENT", "PAUSE", "6000", "ALL")  # pyright: ignore[reportUnknownMemberType]
        store.close()
        server.hold_at()
        server.go_on()
        client.release(granted(asked)).result(BACK_S)


@pytest.mark.parametrize("victim", ["router", "child"])
@pytest.mark.parametrize("verb", ["save", "load", "restore"])
def test_a_router_or_a_model_stopped_amid_a_verb_and_gone_on_costs_nothing_but_time(
    server: Held, victim: str, verb: str
) -> None:
    with Client(server) as client:
        server.hold_at(f"before {verb}" if verb == "save" else "none")
        asked = client.lease(f"{victim} {verb}")
        if verb != "save":
            lease = granted(asked)
            server.hold_at(f"before {verb}")
            client.release(lease)
        server.held()
        server.hold_at()
        router = router_of(server)
        loads = (victim, verb) == ("child", "load")  # there is no process before that verb
        if loads:
            server.go_on()
        with suspended(router if victim == "router" else child_of(router)) as stopped:
            if not loads:
                server.go_on()
                sent_to(stopped)
        if verb == "save":
            client.release(granted(asked)).result(BACK_S)
        back(server, "llama/alpha")
