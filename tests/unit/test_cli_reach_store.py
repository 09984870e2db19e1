"""`swapper check` says what a power cut, a kill or a full memory would take from a store of one's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from swapper.cli.reach_store import judged, reach_store
from tests.support.valkey import valkey
from tests.unit.test_cli import CONFIG, swapper

TAMED = "rename-command CONFIG ''"
FULL = ("maxmemory 100mb", "maxmemory-policy allkeys-lru")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ((), []),
        (("appendonly no",), ["after a kill or a power cut leases that somebody holds are forgotten"]),
        (("appendfsync everysec",), ["(appendfsync everysec): a power cut takes back what it acknowledged last"]),
        (FULL, ["(maxmemory-policy allkeys-lru), leases too; set maxmemory-policy noeviction"]),
        ((TAMED,), []),
        ((TAMED, "appendonly no", *FULL), ["writes no log", "throws away what it holds"]),
    ],
)
async def test_what_its_settings_cost_is_said_also_where_it_does_not_tell_them_all(
    changed: tuple[str, ...], said: list[str], tmp_path: Path
) -> None:
    async with valkey(tmp_path, *changed) as (_, url):
        found = await reach_store(url)
    assert len(found) == len(said)
    assert [words for words, text in zip(said, found, strict=True) if words not in text] == []


def test_an_eviction_that_never_comes_and_what_is_not_told_are_not_judged() -> None:
    assert judged({"maxmemory-policy": "allkeys-lru", "maxmemory": "0"}) == []
    assert judged({}) == []


async def test_a_store_that_is_away_is_said_to_be_by_who_reaches_it(tmp_path: Path) -> None:
    assert await reach_store(f"unix://{tmp_path}/nobody") == []


async def test_check_warns_and_fails_not(tmp_path: Path) -> None:
    async with valkey(tmp_path, "appendfsync everysec") as (_, url):
        (tmp_path / "swapper.yaml").write_text(CONFIG.format(port=9292) + f"redis: {url}\n")
        result = await swapper("check", "-c", str(tmp_path / "swapper.yaml"))
    assert (result.exit_code, result.stdout.count("set appendfsync always")) == (0, 1)
