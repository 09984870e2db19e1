"""What left a card stays in the page cache while a lease has the card, as far as nobody else needs the memory."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from workers.pagecache import PageCache, missing
from workers.vram.unified import HostMemory, Unread

MIB = 1 << 20
SIZE = 20 * MIB


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A file that is on the disk and not in memory."""
    path = tmp_path / "model.gguf"
    path.write_bytes(os.urandom(SIZE))
    push_out(path)
    if not missing(path):
        pytest.skip("files of this file system never leave memory")
    return path


def push_out(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cache(path: Path, free_mib: int = 100_000, *, floor_mib: int = 1024) -> PageCache:
    async def files(tenant: str) -> Sequence[Path]:
        return (path,) if tenant == "llama/med" else ()

    return PageCache(files, memory=lambda: HostMemory(200_000, free_mib), floor_mib=floor_mib, look_s=0.01)


async def round_of(one: PageCache) -> None:
    async with one.rounds:
        await one.rounds.wait()


async def test_what_left_is_brought_in_again_once_the_card_is_held(model: Path) -> None:
    one = cache(model)
    one.left("gpu0", "llama/med")
    await asyncio.sleep(0)
    assert missing(model)
    one.held("gpu0")
    await round_of(one)
    assert missing(model) == []
    push_out(model)
    await round_of(one)
    await round_of(one)
    assert missing(model) == []
    await one.close()


async def test_a_load_on_the_card_ends_it(model: Path) -> None:
    one = cache(model)
    one.left("gpu0", "llama/med")
    one.held("gpu0")
    await round_of(one)
    one.comes("gpu0")
    push_out(model)
    one.held("gpu0")  # for somebody else: nobody left since
    await asyncio.sleep(0.05)
    assert missing(model)


async def test_nothing_is_read_that_would_take_the_memory_below_the_floor(model: Path) -> None:
    for free_mib, brought in ((1024 + 19, False), (1024 + 21, True)):
        one = cache(model, free_mib)
        one.left("gpu0", "llama/med")
        one.held("gpu0")
        await round_of(one)
        assert (missing(model) == []) is brought
        await one.close()


async def test_where_the_memory_cannot_be_read_nothing_is(model: Path) -> None:
    async def files(_: str) -> Sequence[Path]:
        return (model,)

    one = PageCache(files, memory=lambda: Unread("no /proc"), look_s=0.01)
    one.left("gpu0", "llama/med")
    one.held("gpu0")
    await round_of(one)
    assert missing(model)
    await one.close()


async def test_a_file_that_is_gone_ends_nothing(model: Path) -> None:
    one = cache(model.with_name("gone"))
    one.left("gpu0", "llama/med")
    one.held("gpu0")
    await round_of(one)
    await round_of(one)
    await one.close()


async def test_a_file_that_becomes_shorter_meanwhile_ends_nothing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def longer(_fd: int) -> SimpleNamespace:
        return SimpleNamespace(st_size=2 * SIZE)

    monkeypatch.setattr("workers.pagecache.os.fstat", longer)
    one = cache(model)
    one.left("gpu0", "llama/med")
    one.held("gpu0")
    async with asyncio.timeout(10):
        await round_of(one)
        await round_of(one)
    await one.close()


def test_of_a_file_that_is_partly_in_memory_the_rest_is_missing(model: Path) -> None:
    with model.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no reading ahead
        os.pread(file.fileno(), 8 * MIB, 8 * MIB)
    assert [at for at, _ in missing(model)] == [0, 16 * MIB]
    assert missing(model)[-1] == (16 * MIB, 4 * MIB)
