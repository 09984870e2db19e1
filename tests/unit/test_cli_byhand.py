"""`swapper load|unload|vacate|pin|unpin` and the client's methods beneath them, against the served API."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

from swapper.cli import byhand as commands
from swapper.client import SwapperClient
from swapper.core.byhand import queued_swap
from swapper.core.commit import Commit, Committed
from swapper.core.errand import Verb
from swapper.core.types import Card, Hold, Step, StepOutcome, StepRecord
from tests.support.api import Served
from tests.unit.test_api_byhand import MED, ODD, end_next, errands, front
from tests.unit.test_cli import swapper


def at(api: Served) -> dict[str, str | None]:
    return {"SWAPPER_URL": api.url}


@pytest.mark.parametrize(
    ("words", "asked", "line"),
    [
        (("load", "org/m:Q4"), (Verb.LOAD, (ODD,), None, False), f"gpu0: {ODD} in in 5 ms"),
        (("unload", "gpt-4o", "--drain", "1m"), (Verb.UNLOAD, (MED,), 60_000, False), f"gpu0: {MED} out in 5 ms"),
        (("vacate", "gpu0", "--force"), (Verb.VACATE, (), None, True), "gpu0 is proved free"),
        (("pin", "llama/med"), (Verb.PIN, (MED,), None, False), "gpu0 is proved free"),
        (("unpin", "llama"), (Verb.UNPIN, (MED, ODD), None, False), "gpu0 is proved free"),
    ],
    ids=["load", "unload", "vacate", "pin", "unpin"],
)
async def test_each_is_asked_for_waited_for_and_told_in_one_line(
    words: tuple[str, ...], asked: tuple[object, ...], line: str
) -> None:
    async with front() as (api, _):
        ending = asyncio.create_task(end_next(api))
        result = await swapper(*words, env=at(api))
        errand = await ending
        assert (errand.verb, errand.tenants, errand.drain_ms, errand.force) == asked
        assert (result.exit_code, result.stdout) == (0, f"{line}\n")


async def test_where_nothing_moved_it_is_told_why() -> None:
    async with front() as (api, _):
        ending = asyncio.create_task(end_next(api, reason="llama/med is pinned"))
        assert (await swapper("pin", "med", env=at(api))).stdout == "llama/med is pinned\n"
        await ending


async def test_json_is_the_swap_as_it_ended() -> None:
    async with front() as (api, _):
        ending = asyncio.create_task(end_next(api))
        result = await swapper("load", "med", "--json", env=at(api))
        errand = await ending
        found = json.loads(result.stdout)
        assert (found["id"], found["outcome"], found["to"]) == (errand.id, "done", [MED])


async def test_what_takes_longer_says_why_and_what_is_not_waited_for_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "_LOOK_S", 0.05)
    async with front() as (api, _):
        await api.commit_card(Card("gpu0", holds=(Hold("ls_1", "encode", None, None, granted=True),)))
        result = await swapper("load", "med", "--wait", "0.2s", env=at(api))
        assert result.exit_code == 75
        assert result.stdout == ""
        progress, end = result.stderr.splitlines()
        assert progress == "load llama/med waits: gpu0 is held by ls_1 (encode)"
        (errand,) = await errands(api)
        assert end == f"Error: {errand.id} is not done yet, and goes on: {progress}"


async def test_with_no_wait_at_all_the_id_is_told_and_that_is_well() -> None:
    async with front() as (api, _):
        result = await swapper("unload", "med", "--wait", "0", env=at(api))
        (errand,) = await errands(api)
        assert result.exit_code == 0
        assert result.stdout.startswith(f"{errand.id}: unload llama/med waits")


async def test_what_ends_otherwise_is_an_error_in_one_sentence_with_the_servers_own_words() -> None:
    async with front() as (api, _):
        asking = asyncio.create_task(swapper("load", "med", env=at(api)))
        after = "0"
        while not await errands(api):
            after = (await api.store.events(after=after, limit=9, block_ms=5_000))[-1].id
        (errand,) = await errands(api)
        step = StepRecord(Step.LOAD, MED, 0, 4, outcome=StepOutcome.FAILED, detail="tensor 'output' is missing")
        why = "llama/med could not be loaded"
        swap = replace(queued_swap(errand), outcome="compensated", reason=why, ended_ms=errand.asked_ms, steps=(step,))
        assert await api.store.commit(Commit(swaps=(swap,), over=(errand.id,))) == Committed()
        result = await asking
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr.splitlines()[-1] == (
            f"Error: {why}: tensor 'output' is missing; `swapper swaps {errand.id}` shows its steps"
        )


async def test_an_unknown_name_is_answered_with_one_that_is_near() -> None:
    async with front() as (api, _):
        result = await swapper("load", "mde", env=at(api))
        assert (result.exit_code, result.stderr) == (1, "Error: model not found: 'mde'; did you mean med?\n")
        result = await swapper("vacate", "gpu", env=at(api))
        assert (result.exit_code, "did you mean gpu" in result.stderr) == (1, True)


async def test_who_may_not_is_told_how_to_give_another_key() -> None:
    async with front("ann") as (api, _):
        result = await swapper("vacate", "gpu0", "--key", "ann-secret", env=at(api))
        assert result.exit_code == 1
        assert "has no scope 'admin'; give another key with --key" in result.stderr


async def test_status_shows_pins_who_is_kept_off_and_what_waits() -> None:
    async with front() as (api, _):
        hold = Hold("ls_1", "encode", None, None, granted=True)
        await api.commit_card(Card("gpu0", pinned=(MED,), unused=(ODD,), holds=(hold,)))
        await swapper("load", "med", "--wait", "0", env=at(api))
        out = (await swapper("status", env=at(api))).stdout
        lines = {line.split()[0]: line for line in out.splitlines() if line.strip()}
        assert lines[MED].rstrip().endswith("default, pinned")
        assert lines[ODD].rstrip().endswith("kept off until asked for")
        assert "by hand: load llama/med waits: gpu0 is held by ls_1 (encode)" in out


async def test_swaps_and_explain_find_one_that_has_not_begun() -> None:
    async with front() as (api, _):
        await api.commit_card(Card("gpu0", holds=(Hold("ls_1", "encode", None, None, granted=True),)))
        await swapper("load", "med", "--wait", "0", env=at(api))
        (errand,) = await errands(api)
        shown = (await swapper("swaps", errand.id, env=at(api))).stdout
        assert f"{errand.id} on gpu0: queued; cause: manual" in shown
        said = (await swapper("explain", errand.id, env=at(api))).stdout
        assert "queued" in said
        assert "gpu0 is held by ls_1 (encode)" in said


async def test_the_client_waits_as_long_as_it_is_told() -> None:
    async with front() as (api, _), SwapperClient(api.url) as client:
        asked = await client.unload("org/m:Q4", drain_s=0.5, wait_s=0.01)
        assert (asked["outcome"], [e.drain_ms for e in await errands(api)]) == (None, [500])
        ending = asyncio.create_task(end_next(api))
        assert (await client.swap(asked["swap_id"], wait_s=30))["outcome"] == "done"
        await ending
        ending = asyncio.create_task(end_next(api))
        assert (await client.pin("llama/med", wait_s=30))["outcome"] == "done"
        await ending
