"""Where conversations are is told truly in each phase: while their model serves, while it is away, after a restart."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from click.testing import CliRunner

from swapper.cli import cli
from swapper.core.types import Card, Step, Swap
from swapper.snapshots.conversation import Kept, Place
from swapper.snapshots.copies import newer
from swapper.snapshots.index import Index
from swapper.snapshots.manifest import Manifest
from tests.support.api import Served, served
from tests.unit.index_doubles import answer, chat
from tests.unit.test_api_snapshots import NOW, Saved

MED = "llama/med"


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    return Saved(tmp_path / "slots")


@pytest.fixture
async def api(saved: Saved) -> AsyncGenerator[Served]:
    async with served() as running:
        running.ctx.shelves = {"llama": saved.shelf}
        yield running


def links(letters: str) -> tuple[str, ...]:
    """What a manifest tells of a chat."""
    return tuple(link.hex() for link in chat(letters).links[-8:])


async def card(api: Served, *residents: str, swap: Swap | None = None) -> None:
    version = (await api.store.read()).cards.get("gpu0", Card("gpu0")).version
    await api.commit_card(Card("gpu0", residents=residents, version=version, swap=swap))


async def counted(api: Served) -> tuple[int, int, int]:
    """In the server, on disk, cold: as the status, the card and /metrics say it alike."""
    async with aiohttp.ClientSession(api.url) as http:
        async with http.get("/api/status") as got:
            said = (await got.json())["tenants"][0]["places"]
        async with http.get("/api/cards/gpu0") as got:
            assert (await got.json())["tenants"][0]["places"] == said
        async with http.get("/metrics") as got:
            lines = (await got.text()).splitlines()
    for place, number in said.items():
        assert f'swapper_conversations{{model="{MED}",place="{place}"}} {number:.1f}' in lines
    return said["server"], said["disk"], said["cold"]


async def test_a_model_that_is_away_has_on_disk_what_was_saved_of_it_and_nothing_in_the_server(
    saved: Saved, api: Served
) -> None:
    answer(api.ctx.index, "abc", tenant=MED)
    answer(api.ctx.index, "xyz", tenant=MED)
    saved.save("one.kv", links=links("abc"))
    await card(api, MED)
    assert await counted(api) == (2, 0, 0)
    leaving = Swap("sw_1", "gpu0", "lease ls_1", 1, (MED,), (), Step.SAVE, 0, 0)
    await card(api, MED, swap=leaving)
    assert await counted(api) == (2, 0, 0)
    await card(api, swap=replace(leaving, stage=Step.VACATE))
    assert await counted(api) == (0, 1, 1)
    await card(api)
    assert await counted(api) == (0, 1, 1)
    command = ["status", "--url", api.url]
    shown = await asyncio.to_thread(CliRunner().invoke, cli, command, prog_name="swapper")
    assert "1 on disk, 1 cold" in shown.stdout


async def test_a_process_that_was_started_while_its_model_is_away_finds_what_is_on_disk(
    saved: Saved, api: Served
) -> None:
    saved.save("one.kv", links=links("abc"))
    saved.save("two.kv", links=links("xyz"))
    saved.save("other.kv", tenant="llama/gone")
    assert await counted(api) == (0, 2, 0)


async def test_the_saved_state_may_be_older_or_newer_than_what_is_known(saved: Saved, api: Served) -> None:
    """After a crash of the server, say, or where its last request is kept over a restart."""
    answer(api.ctx.index, "abcde", tenant=MED)
    answer(api.ctx.index, "xyz", tenant=MED)
    saved.save("one.kv", links=links("abc"))
    saved.save("two.kv", links=links("xyzuv"))
    assert await counted(api) == (0, 2, 0)


async def test_older_copies_are_no_conversations_of_their_own(saved: Saved, api: Served) -> None:
    saved.save("old.kv", links=links("abc"), hours_ago=3)
    saved.save("new.kv", links=links("abcde"), hours_ago=2)
    assert await counted(api) == (0, 1, 0)
    api.ctx.index.kept(MED, [Kept(f"{said}.kv", links(said)[-1], links(said), 50) for said in ("abc", "abcde")])
    await card(api, MED)
    assert await counted(api) == (0, 1, 0)


async def test_of_a_folder_that_cannot_be_read_nothing_could_come_back(saved: Saved, api: Served) -> None:
    answer(api.ctx.index, "abc", tenant=MED)
    saved.save("one.kv", links=links("abc"))
    shutil.rmtree(saved.folder.path)
    assert await counted(api) == (0, 0, 1)


def manifest(name: str, letters: str, saved_ms: int, tenant: str = MED) -> Manifest:
    told = links(letters)
    return Manifest(name, tenant, NOW, 0, 50, 100, saved_ms, id=told[-1], links=told)


def test_a_copy_has_its_newest_one_also_over_several_turns_and_a_branch_is_none() -> None:
    first = manifest("a.kv", "abc", 1)
    second = manifest("b.kv", "abcdefghi", 2)
    third = manifest("c.kv", "abcdefghijklmno", 3)
    again = manifest("d.kv", "abcdefghijklmno", 4)
    assert newer([first, second]) == {"a.kv": "b.kv"}
    assert newer([first, third]) == {}  # further back than a manifest tells
    assert newer([first, second, third, again]) == {"a.kv": "d.kv", "b.kv": "d.kv", "c.kv": "d.kv"}
    assert newer([manifest("x.kv", "abXY", 1), manifest("y.kv", "abcd", 2)]) == {}


def test_conversations_of_two_models_and_those_that_nobody_knows_are_never_copies() -> None:
    there = [manifest("a.kv", "abc", 1), manifest("b.kv", "abc", 2, "llama/big")]
    unknown = [replace(there[0], snapshot=f"{n}.kv", id="", links=()) for n in range(2)]
    assert newer([*there, *unknown]) == {}


def test_the_index_counts_an_older_copy_still_where_its_conversation_is_not_known() -> None:
    index = Index()
    index.kept(MED, [Kept("old.kv", links("abc")[-1], links("abc"), 50)])
    assert index.places(MED)[Place.DISK] == 1
