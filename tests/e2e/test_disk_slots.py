"""No room in the slot folder: what could not be saved whole is stated cold, and whatever lies there is complete."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import psutil
import pytest

from swapper.snapshots.manifest import MANIFEST_SUFFIX
from tests.support.disk import PAGE, SmallDisk
from tests.support.matrix import (
    BACK_S,
    STORY,
    Client,
    Held,
    accounted,
    back,
    cache_n,
    eventually,
    granted,
    warm,
)
from tests.support.server import Json, serving

FLOOR = 512 << 20
"""With less room than this nothing is saved."""


@pytest.fixture
def server(tmp_path: Path) -> Held:
    return Held.of_alpha(tmp_path)


@pytest.fixture
def disk(server: Held) -> Iterator[SmallDisk]:
    """The slot folder's; the story was saved on it once and is back from there."""
    disk = SmallDisk(server.router.slot_dir, (FLOOR >> 20) + 64, lambda: psutil.Process(server.router.pid).children())
    try:
        with serving(server):
            back(server, "llama/alpha")
            server.chat("alpha", STORY)
            hand_over(server)
            warm(server)
            yield disk
            warm(server)
            assert all(talk["saved"] for talk in told(server, hand_over(server))), "there is room again"
            warm(server)
            assert {lease["state"] for lease in accounted(server)} == {"released"}
    finally:
        disk.close()


def hand_over(server: Held) -> Json:
    """Out and back; the lease."""
    with Client(server) as client:
        lease = granted(client.lease("job"))
        client.release(lease).result(BACK_S)
    back(server, "llama/alpha")
    return lease


def told(server: Held, lease: Json) -> list[Json]:
    """What the swap out for a lease says of its conversations."""
    return cast("list[Json]", server.get(f"/api/swaps/{lease['swap_id']}")["conversations"])


def saved(server: Held) -> dict[str, int]:
    """The slot files and their bytes."""
    files = {path.name: path.stat().st_size for path in server.router.slot_dir.iterdir()}
    return {name: size for name, size in files.items() if not name.endswith(MANIFEST_SUFFIX)}


def complete(server: Held) -> bool:
    """Whether each file of the slot folder has its manifest, and each manifest its file."""
    files = {path.name for path in server.router.slot_dir.iterdir()}
    return files == {f"{name}{suffix}" for name in saved(server) for suffix in ("", MANIFEST_SUFFIX)}


def filled_amid_a_save(server: Held, disk: SmallDisk, pages: int, kept: int) -> None:
    """The next save finds so many pages, though there was room until it was asked for.

    `kept`: bytes of the files that were there before it. What its first try left is written over, so that is room too.
    """
    assert server.held() == "before save"
    disk.empty()
    server.go_on()
    assert server.held() == "asking save"
    disk.leave((pages - pages_of(sum(saved(server).values()) - kept)) * PAGE)
    server.go_on()


def pages_of(size: int) -> int:
    return -(-size // PAGE)


def needs_a_mount(disk: SmallDisk) -> None:
    if not disk.mounted:
        pytest.skip("no small disk may be mounted here")


@pytest.mark.parametrize(
    ("room", "why"),
    [
        ("none", "Unable to save slot"),
        ("all but its last page", "bytes on disk, llama-server wrote"),  # it does not look whether the last write went
        ("its file's", "No space left on device"),
    ],
)
def test_a_disk_that_fills_amid_a_save_leaves_no_half_of_it_and_the_copy_before_it_comes_back(
    server: Held, disk: SmallDisk, room: str, why: str
) -> None:
    (size,) = saved(server).values()
    pages = {"none": 0, "all but its last page": pages_of(size) - 1, "its file's": pages_of(size)}[room]
    if room == "its file's":
        needs_a_mount(disk)
    with Client(server) as client:
        server.hold_at("before save", "asking save")
        asked = client.lease("amid")
        for _ in range(2):  # it is tried again once
            filled_amid_a_save(server, disk, pages, kept=size)
        server.hold_at()
        lease = granted(asked)
        (lost,) = told(server, lease)
        assert (lost["saved"], lost["result"]) == (False, "cold")
        assert why in str(lost["reason"])
        if disk.mounted and room != "its file's":
            assert f"({server.router.slot_dir} has 0 MiB free)" in str(lost["reason"])
        assert any(str(lost["reason"]) in text for text in server.alerts())
        eventually(lambda: complete(server), "what was not finished is gone")
        disk.empty()
        client.release(lease).result(BACK_S)
        back(server, "llama/alpha")


def test_below_the_floor_nothing_is_saved_and_at_it_everything(server: Held, disk: SmallDisk) -> None:
    needs_a_mount(disk)
    with Client(server) as client:
        before = saved(server)
        disk.leave(FLOOR - PAGE)
        lease = granted(client.lease("below"))
        (lost,) = told(server, lease)
        assert (lost["saved"], lost["result"]) == (False, "cold")
        assert "511 MiB free, the floor is 512 MiB: nothing is saved" in str(lost["reason"])
        assert saved(server) == before
        client.release(lease).result(BACK_S)
        warm(server)
        disk.leave(FLOOR)
        lease = granted(client.lease("at"))
        assert [talk["saved"] for talk in told(server, lease)] == [True]
        client.release(lease).result(BACK_S)


def test_a_save_whose_digest_finds_no_room_comes_back_all_the_same(server: Held, disk: SmallDisk) -> None:
    needs_a_mount(disk)
    (size,) = saved(server).values()
    with Client(server) as client:
        server.hold_at("before save", "asking save")
        asked = client.lease("amid")
        filled_amid_a_save(server, disk, pages_of(size) + 1, kept=size)
        server.hold_at()
        lease = granted(asked)
        assert [talk["saved"] for talk in told(server, lease)] == [True]
        eventually(lambda: "no digest could be written" in server.log_path.read_text(), "its digest found no room")
        client.release(lease).result(BACK_S)
        back(server, "llama/alpha")
        assert cache_n(server.chat("alpha", STORY)) >= len(STORY)
        assert len(saved(server)) == 2, "the copy before it stays while it is not on the disk for certain"
        assert complete(server)
        disk.empty()
