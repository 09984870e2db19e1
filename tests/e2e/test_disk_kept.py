"""Trouble with the slot folder: where conversations are required nothing is unloaded; else it is said what is cold.

A disk that fills amid a save is in test_disk_slots.py; here are the floor and the folder itself, gone or slow.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import psutil
import pytest

from swapper.demo.models import make_models
from tests.support.disk import PAGE, SmallDisk
from tests.support.matrix import (
    BACK_S,
    STORY,
    Client,
    Held,
    back,
    cache_n,
    child_of,
    eventually,
    granted,
    sent_to,
    suspended,
    warm,
)
from tests.support.router import RealRouter
from tests.support.server import ALPHA, Json

FLOOR = 512 << 20
"""With less room than this nothing is saved."""
GONE = "No such file or directory"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_models(tmp_path_factory.mktemp("models"), ["alpha"])


@pytest.fixture
def make(tmp_path: Path, models: dict[str, Path]) -> Iterator[Callable[[str], Held]]:
    """A serve with these settings of its snapshots, whose resident has the story."""
    running = list[Held]()

    def make(snapshots: str) -> Held:
        server = Held(tmp_path / "swapper", RealRouter(tmp_path / "router", models), ALPHA, snapshots=snapshots)
        running.append(server)
        server.router.start()
        server.start()
        back(server, "llama/alpha")
        server.chat("alpha", STORY)
        return server

    yield make
    for server in running:
        server.stop()
        server.router.stop()


@contextmanager
def folder_away(server: Held) -> Generator[Path]:
    """The slot folder is not where it was within the block."""
    folder = server.router.slot_dir
    apart = folder.with_name("apart")
    folder.rename(apart)
    try:
        yield folder
    finally:
        if folder.exists():
            for path in folder.iterdir():
                path.rename(apart / path.name)
            folder.rmdir()
        apart.rename(folder)


def last_swap(server: Held) -> Json:
    return next(swap for swap in server.swaps() if swap["outcome"])


def told(swap: Json) -> list[Json]:
    return cast("list[Json]", swap["conversations"])


def nothing_was_unloaded(server: Held, child: psutil.Process, why: str) -> None:
    """A lease that was refused for this reason left the resident in its process, with its conversation."""
    assert server.lease("job", wait=30)["state"] == "failed"
    (failed,) = cast("list[Json]", server.get("/api/leases?limit=1")["items"])
    assert why in str(failed["reason"])
    back(server, "llama/alpha")
    assert last_swap(server)["outcome"] == "compensated"
    assert child.is_running()
    assert cache_n(server.chat("alpha", STORY)) >= len(STORY), "it is where it was"


def test_where_they_are_required_a_disk_below_its_floor_unloads_nothing(make: Callable[[str], Held]) -> None:
    server = make("{required: true}")
    disk = SmallDisk(server.router.slot_dir, (FLOOR >> 20) + 64, lambda: psutil.Process(server.router.pid).children())
    try:
        if not disk.mounted:
            pytest.skip("no small disk may be mounted here")
        child = child_of(psutil.Process(server.router.pid))
        disk.leave(FLOOR - PAGE)
        nothing_was_unloaded(server, child, "511 MiB free, the floor is 512 MiB: nothing is saved")
        disk.empty()
        hand_over(server)
        assert not child.is_running()
        warm(server)
    finally:
        disk.close()


def test_where_they_are_required_a_folder_that_is_gone_unloads_nothing(make: Callable[[str], Held]) -> None:
    server = make("{required: true}")
    child = child_of(psutil.Process(server.router.pid))
    with folder_away(server) as folder:
        nothing_was_unloaded(server, child, f"slot_dir {folder} cannot be used: {GONE}")
    hand_over(server)
    assert not child.is_running()
    warm(server)


def hand_over(server: Held) -> Json:
    """Out and back; what the swap out said."""
    with Client(server) as client:
        lease = granted(client.lease("job"))
        client.release(lease).result(BACK_S)
    back(server, "llama/alpha")
    return server.get(f"/api/swaps/{lease['swap_id']}")


def test_a_folder_that_is_gone_at_the_save_costs_the_conversation_and_says_so(make: Callable[[str], Held]) -> None:
    server = make("{}")
    with Client(server) as client:
        with folder_away(server) as folder:
            lease = granted(client.lease("job"))
            (lost,) = told(server.get(f"/api/swaps/{lease['swap_id']}"))
            assert (lost["saved"], lost["result"]) == (False, "cold")
            assert lost["reason"] == f"slot_dir {folder} cannot be used: {GONE}"
            assert any(str(lost["reason"]) in text for text in server.alerts())
        client.release(lease).result(BACK_S)
    back(server, "llama/alpha")
    assert cache_n(server.chat("alpha", STORY)) < len(STORY)
    assert [talk["saved"] for talk in told(hand_over(server))] == [True], "the folder is there again"
    warm(server)


def test_a_folder_that_is_gone_at_the_load_is_made_again_and_the_conversation_is_read_again_before_anybody_asks(
    make: Callable[[str], Held],
) -> None:
    server = make("{}")
    with Client(server) as client:
        lease = granted(client.lease("job"))
        with folder_away(server):
            client.release(lease).result(BACK_S)
            back(server, "llama/alpha")
            lost, again = told(last_swap(server))
            assert (lost["strategy"], lost["restored"], lost["result"]) == ("slots", False, "cold")
            assert str(lost["reason"]).startswith("its snapshot is gone")
            assert again["strategy"] == "replay"
            eventually(lambda: told(last_swap(server))[1]["restored"], "it was read again")
            assert cache_n(server.chat("alpha", STORY)) >= len(STORY)


def test_a_slow_disk_is_waited_for_and_nothing_is_lost(make: Callable[[str], Held]) -> None:
    server = make("{}")
    child = child_of(psutil.Process(server.router.pid))
    with Client(server) as client:
        server.hold_at("asking save")
        asked = client.lease("patient")
        assert server.held() == "asking save"
        with suspended(child):
            server.hold_at()
            server.go_on()
            sent_to(child)
            (card,) = cast("list[Json]", server.get("/api/status")["cards"])
            assert card["phase"] == "save"
            assert not asked.done()
        lease = granted(asked)
        (saved,) = told(server.get(f"/api/swaps/{lease['swap_id']}"))
        assert saved["saved"] is True
        client.release(lease).result(BACK_S)
    warm(server)


def test_a_process_that_dies_over_its_save_costs_the_conversation_and_that_is_said(make: Callable[[str], Held]) -> None:
    server = make("{}")
    child = child_of(psutil.Process(server.router.pid))
    with Client(server) as client:
        server.hold_at("asking save")
        asked = client.lease("patient")
        assert server.held() == "asking save"
        with suspended(child):
            server.hold_at()
            server.go_on()
            sent_to(child)
            child.kill()
        lease = granted(asked)
        (lost,) = told(server.get(f"/api/swaps/{lease['swap_id']}"))
        assert (lost["saved"], lost["result"]) == (False, "cold")
        assert any(str(lost["reason"]) in text for text in server.alerts())
        client.release(lease).result(BACK_S)
    back(server, "llama/alpha")
    assert server.chat("alpha", STORY)["choices"]
