"""`swapper snapshots`: what is saved, for people and for programs, and what is deleted when."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from swapper.cli import cli
from swapper.cli.common import ago, size
from tests.support.api import Served, served
from tests.unit.test_api_snapshots import LATER, Saved


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    return Saved(tmp_path / "slots")


@pytest.fixture
async def api(saved: Saved) -> AsyncGenerator[Served]:
    async with served() as running:
        running.ctx.shelves = {"llama": saved.shelf}
        yield running


async def swapper(api: Served, *args: str, said: str | None = None) -> Result:
    command = ["snapshots", *args, "--url", api.url]
    return await asyncio.to_thread(CliRunner().invoke, cli, command, said, prog_name="swapper")


async def test_a_list_says_of_each_what_it_is_and_whether_it_can_come_back(saved: Saved, api: Served) -> None:
    assert (await swapper(api, "list")).output == "nothing is saved\n"
    assert (await swapper(api, "list", "med")).output == "nothing is saved of med\n"
    saved.save("a.kv")
    asleep = (await swapper(api, "list")).output
    assert "a.kv" in asleep
    assert "100 B" in asleep
    assert "yes, as far as its file tells: the model does not run" in asleep
    saved.running = LATER
    assert "no: saved under another llama-server build (b1, now b2)" in (await swapper(api, "list", "med")).output
    programs = json.loads((await swapper(api, "list", "--json")).stdout)
    assert [item["id"] for item in programs["items"]] == ["a.kv"]


async def test_a_list_that_is_cut_says_so(saved: Saved, api: Served) -> None:
    saved.save("a.kv")
    saved.save("b.kv")
    assert (await swapper(api, "list", "--limit", "1")).stderr == "and more: --limit 1 was reached\n"


async def test_a_conversation_is_listed_once_by_its_newest_snapshot_and_with_all_its_older_copies(
    saved: Saved, api: Served
) -> None:
    saved.save("old.kv", hours_ago=3, links=("a" * 32,))
    saved.save("new.kv", hours_ago=2, links=("a" * 32, "b" * 32))
    saved.save("other.kv", hours_ago=1)
    shown = (await swapper(api, "list")).output
    assert ("old.kv" in shown, "new.kv" in shown, "other.kv" in shown) == (False, True, True)
    (old,) = [line for line in (await swapper(api, "list", "--all")).output.splitlines() if "old.kv" in line]
    assert old.rstrip().endswith("; an older copy of new.kv")
    assert "; an older copy of new.kv" in (await swapper(api, "show", "old.kv")).output
    programs = json.loads((await swapper(api, "list", "--all", "--json")).stdout)
    assert [(item["id"], item["newer"]) for item in programs["items"]] == [
        ("other.kv", None), ("new.kv", None), ("old.kv", "new.kv"),
    ]  # fmt: skip
    cut = await swapper(api, "list", "--limit", "2")
    assert cut.stderr == ""  # the older copy is not what is left out


async def test_one_is_shown_with_all_that_it_was_saved_under(saved: Saved, api: Served) -> None:
    saved.save("a.kv")
    shown = (await swapper(api, "show", "a.kv")).output
    assert "a.kv: 50 tokens, 100 B" in shown
    assert "used: never, or nobody knows" in shown
    assert "n_ctx_slot: 4096" in shown
    missing = await swapper(api, "show", "b.kv")
    assert (missing.exit_code, missing.stderr) == (1, "Error: There is no snapshot 'b.kv'.\n")


async def test_a_prune_says_what_went_and_why(saved: Saved, api: Served) -> None:
    assert (await swapper(api, "prune")).output == "nothing had to go\n"
    saved.save("old.kv", hours_ago=30)
    pruned = (await swapper(api, "prune")).output
    assert pruned.endswith("old.kv (100 B): older than 24 h\n1 saved conversation deleted, 100 B freed\n")


async def test_a_purge_asks_nobody_by_itself(saved: Saved, api: Served) -> None:
    saved.save("a.kv")
    refused = await swapper(api, "purge")
    assert (refused.exit_code, "say --yes" in refused.stderr) == (1, True)
    assert saved.folder.size("a.kv") == 100
    done = await swapper(api, "purge", "med", "--yes")
    assert done.output.endswith("1 saved conversation deleted, 100 B freed\n")
    assert saved.folder.size("a.kv") is None


async def test_a_purge_on_a_terminal_takes_no_for_an_answer(
    saved: Saved, api: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swapper.cli.snapshots.on_a_terminal", lambda: True)
    saved.save("a.kv")
    refused = await swapper(api, "purge", said="n\n")
    assert refused.exit_code == 1
    assert "Delete 1 saved conversation (100 B) for good?" in refused.stderr
    assert saved.folder.size("a.kv") == 100
    assert (await swapper(api, "purge", said="y\n")).exit_code == 0
    assert saved.folder.size("a.kv") is None


@pytest.mark.parametrize(
    ("seconds", "said"), [(5, "5 s"), (600, "10 min"), (7_300, "2 h"), (400_000, "4 d"), (-5, "0 s")]
)
def test_an_age_is_told_in_the_unit_that_suits_it(seconds: int, said: str) -> None:
    now = datetime.now(UTC)
    assert ago((now - timedelta(seconds=seconds)).isoformat(), now) == said


@pytest.mark.parametrize(
    ("count", "said"), [(100, "100 B"), (262 << 20, "262 MiB"), (1536, "1.5 KiB"), (5 << 30, "5 GiB")]
)
def test_bytes_are_told_in_the_unit_that_suits_them(count: int, said: str) -> None:
    assert size(count) == said
