"""The status says how a model's conversations are kept, where they are, and what is read twice; so does the CLI."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest
from click.testing import CliRunner

from swapper.cli import cli
from swapper.core.commit import Commit, Committed
from swapper.core.conversations import Keeping
from swapper.core.types import Card
from swapper.snapshots.conversation import Kept
from swapper.snapshots.index import Index
from tests.support.api import SPEC, Served, served
from tests.unit.index_doubles import answer
from tests.unit.test_api_status import SWAP

MED = "llama/med"
WHY = "strategy slots was seen to fail for this model, build and preset: read again: 0 of 900 prompt tokens"


@pytest.fixture
async def api() -> AsyncGenerator[Served]:
    async with served() as running:
        running.ctx.n_slots = {MED: 2}
        yield running


async def told(api: Served, *options: str) -> str:
    command = ["status", *options, "--url", api.url]
    result = await asyncio.to_thread(CliRunner().invoke, cli, command, prog_name="swapper")
    assert result.exit_code == 0, result.output
    return result.stdout


async def keep(api: Served, keeping: Keeping) -> None:
    version = (await api.store.read()).cards.get("gpu0", Card("gpu0")).version
    card = Card("gpu0", version=version, keeping={MED: keeping})
    assert await api.store.commit(Commit(cards=(card,))) == Committed()


async def med(api: Served) -> dict[str, object]:
    return json.loads(await told(api, "--json"))["tenants"][0]


async def test_the_strategy_is_not_known_before_an_agent_has_said_it(api: Served) -> None:
    assert (await med(api))["strategy"] is None
    await keep(api, Keeping(("rewind", "replay")))
    assert (await med(api))["strategy"] == "rewind"
    assert "rewind" in await told(api)


async def test_a_strategy_that_was_seen_to_fail_is_named_with_what_was_seen(api: Served) -> None:
    await keep(api, Keeping(("slots", "replay"), demoted={"slots": WHY}))
    found = await med(api)
    assert (found["strategy"], found["demoted"]) == ("replay", {"slots": WHY})
    assert f"{MED}: {WHY}" in await told(api)


async def test_where_nothing_is_kept_the_strategy_is_off(api: Served) -> None:
    api.ctx.spec = replace(SPEC, tenants={MED: replace(SPEC.tenants[MED], save=False)})
    assert (await med(api))["strategy"] == "off"


async def test_conversations_are_counted_by_where_they_are(api: Served) -> None:
    index = api.ctx.index
    await api.commit_card(Card("gpu0", residents=(MED,)))
    for letters in ("ab", "cd", "ef"):
        answer(index, letters, tenant=MED)
    first, second, _ = index.talks(MED)
    index.stored(MED, Kept("a.kv", first.id, first.links, first.tokens))
    index.lost(MED, second.id, "it was gone")
    index.stored(MED, Kept("b.kv", second.id, second.links, second.tokens))
    index.lost(MED, second.id, "it was gone")
    assert (await med(api))["places"] == {"server": 1, "disk": 1, "cold": 1}
    assert "1 in the server, 1 on disk, 1 cold" in await told(api)


async def test_what_the_last_swap_carried_is_told_while_the_gateway_knows_of_none(api: Served) -> None:
    assert await api.store.commit(Commit(swaps=(SWAP,))) == Committed()
    assert "1 (4096 tokens) in the last swap" in await told(api)


def _evicting(index: Index) -> None:
    answer(index, "abcd", tenant=MED)
    answer(index, "abcde", tenant=MED)


async def test_what_is_read_twice_is_told_with_its_cause_and_with_what_to_do(api: Served) -> None:
    _evicting(api.ctx.index)
    found = await med(api)
    tokens = found["prompt_tokens"]
    assert tokens == {"cached": 0, "processed": 9_000, "reread": {"evicted from the RAM cache": 4_000}}
    assert str(found["advice"]).endswith("raise --cache-ram, or parallel (now 2)")
    shown = await told(api)
    assert f"{MED}: of 9,000 prompt tokens were read again: 4,000 evicted from the RAM cache" in shown
    assert str(found["advice"]) in shown
