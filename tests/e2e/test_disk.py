"""No room under the state folder: nothing is decided until there is some, and all that was goes on then."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from swapper.store import embedded
from tests.support.disk import SmallDisk
from tests.support.matrix import (
    BACK_S,
    STORY,
    Client,
    Held,
    accounted,
    back,
    eventually,
    granted,
    status_of,
    warm,
)
from tests.support.server import serving


@pytest.fixture
def server(tmp_path: Path) -> Held:
    return Held.of_alpha(tmp_path)


@pytest.fixture
def disk(server: Held) -> Iterator[SmallDisk]:
    """The state folder's; the server runs on it."""

    def writers() -> list[psutil.Process]:
        store = embedded.running(server.state_dir)
        return [psutil.Process(pid) for pid in (server.pid, *([store.pid] if store else []))]

    disk = SmallDisk(server.state_dir, 32, writers)
    try:
        with serving(server):
            back(server, "llama/alpha")
            server.chat("alpha", STORY)
            yield disk
    finally:
        disk.close()


def test_without_room_for_the_state_residents_serve_nothing_moves_and_all_goes_on_once_there_is_some(
    server: Held, disk: SmallDisk
) -> None:
    with Client(server) as client:
        server.hold_at("before commit save")
        asked = client.lease("amid")
        server.held()
        disk.fill()
        server.hold_at()
        server.go_on()
        eventually(lambda: status_of(lambda: server.lease("too early")) == 503, "the store is down")
        disk.empty()
        lease = granted(asked)
        disk.fill()
        eventually(lambda: status_of(lambda: server.lease("too early")) == 503, "the store is down")
        disk.empty()
        client.release(lease).result(BACK_S)
        given_up(server)
        warm(server)
        disk.fill()
        eventually(lambda: status_of(lambda: server.lease("too early")) == 503, "the store is down")
        assert server.chat("alpha", STORY)["choices"], "residents keep serving"
        disk.empty()
        eventually(lambda: server.get("/ready"), "it is ready again")
        given_up(server)
        warm(server)
    assert all(lease["ended_at"] for lease in accounted(server))


def given_up(server: Held) -> None:
    """Those asked for too early that were acknowledged after all are taken back by their client."""

    def look() -> bool:
        open_ = [lease for lease in accounted(server) if not lease["ended_at"]]
        for lease in open_:
            token = f"?token={lease['token']}" if lease["token"] else ""
            status_of(lambda lease=lease, token=token: server.delete(f"/api/leases/{lease['id']}{token}"))
        return not open_

    eventually(look, "no lease is left")
