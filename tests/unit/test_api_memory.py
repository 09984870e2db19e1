"""What status, metrics and the command say of needs, of who is over one, and of who is foreign."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from swapper.core import clock
from swapper.core.commit import Commit, Committed
from swapper.core.types import Card, World
from swapper.core.watched import Intruder, NeedFrom, Overrun
from tests.support.api import Served, served
from tests.unit.test_api_metrics import scraped
from tests.unit.test_cli import swapper

MED = "llama/med"
INTRUDER = Intruder(4242, 7, 10_700, 1_900_000_000_000, "python", "c" * 64)


@pytest.fixture
async def api() -> AsyncGenerator[Served]:
    async with served() as running:
        yield running


async def troubled(api: Served) -> None:
    over = Overrun(21_000, 1_900_000_000_000)
    card = Card("gpu0", intruders=(INTRUDER,), overruns={MED: over, "llama/old": over})
    assert await api.store.commit(Commit(cards=(card,))) == Committed()
    api.live.cards["gpu0"] = {
        "pool": "vram",
        "held": [
            {"pid": 7, "mib": 20_000, "line": [[7, 1]], "owner": MED},
            {"pid": 8, "mib": 1000, "line": [[8, 1]], "owner": MED},
        ],
    }


async def status(api: Served) -> dict[str, Any]:
    async with aiohttp.ClientSession(api.url) as http, http.get("/api/status") as answer:
        return await answer.json()


async def test_needs_with_their_source_what_is_taken_and_who_is_over_or_foreign_are_told(api: Served) -> None:
    await troubled(api)
    found = await status(api)
    (card,) = [card for card in found["cards"] if card["name"] == "gpu0"]
    assert card["foreign"] == [
        {
            "pid": 4242,
            "name": "python",
            "container": "c" * 64,
            "mib": 10_700,
            "since": "2030-03-17T17:46:40.000Z",
            "explain": "pid 4242 (python in container cccccccccccc) holds 10,700 MiB of gpu0 since "
            "2030-03-17 17:46:40 UTC and is neither a tenant's nor a lease's",
        }
    ]
    (med,) = [tenant for tenant in found["tenants"] if tenant["id"] == MED]
    assert (med["need_from"], med["used_mib"], med["over_need"]["mib"]) == ("declared", 21_000, 21_000)
    assert med["over_need"]["explain"] in found["problems"]
    assert card["foreign"][0]["explain"] in found["problems"]


async def test_the_command_says_it_too(api: Served) -> None:
    await troubled(api)
    tenants = {**api.ctx.spec.tenants, MED: replace(api.ctx.spec.tenants[MED], need_from=NeedFrom.ESTIMATED)}
    api.ctx.spec = replace(api.ctx.spec, tenants=tenants)
    shown = await swapper("status", "--url", api.url)
    assert "estimated" in shown.stdout
    assert "warning: pid 4242 (python in container cccccccccccc) holds 10,700 MiB of gpu0" in shown.stderr
    assert f"warning: {MED} takes 21,000 MiB of gpu0" in shown.stderr


async def test_metrics_have_what_is_needed_and_what_is_taken_where_that_is_measured(api: Served) -> None:
    await troubled(api)
    found = await scraped(api)
    name = 'swapper_tenant_vram_bytes{{kind="{}",tenant="{}"}}'
    assert found[name.format("need", MED)] == api.ctx.spec.tenants[MED].need_mib << 20
    assert found[name.format("used", MED)] == 21_000 << 20
    others = [tenant for tenant in api.ctx.spec.tenants if tenant != MED]
    assert others
    assert all(name.format("need", tenant) in found for tenant in others)
    assert not any(name.format("used", tenant) in found for tenant in others)


def test_a_step_of_the_clock_moves_what_was_seen_along(api: Served) -> None:
    card = Card("gpu0", intruders=(INTRUDER,), overruns={MED: Overrun(1, 5000, acted_ms=6000)})
    moved = clock.moved(World(1_900_000_100_000, {"gpu0": card}, {}), api.ctx.spec, -1000)
    assert moved is not None
    assert moved.cards[0].intruders[0].since_ms == INTRUDER.since_ms - 1000
    assert moved.cards[0].overruns[MED] == Overrun(1, 4000, acted_ms=5000)
