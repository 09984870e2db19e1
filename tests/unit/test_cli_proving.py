"""`swapper snapshots test` without a server: what it refuses, what its verdict is, and a card borrowed and lost."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from swapper.cli import borrowed
from swapper.cli.borrowed import OutOfTime
from swapper.cli.proving import proved, verdict
from swapper.cli.trial import Found, Report
from swapper.client import SwapperClient
from swapper.core.conversations import Strategy
from swapper.core.types import LeaseState
from swapper.errors import SwapperError
from swapper.statefolder import StateFolder
from tests.support.api import Served, served
from tests.unit.test_cli import swapper

CONFIG = """
state_dir: state
cards: {{gpu0: {{probe: declared, vram: 24GiB}}}}
tenants:
  plain:
    kind: {kind}
    control: {control}
    command: [llama-server, -m, x.gguf]
    card: gpu0
    url: http://127.0.0.1:1
    evict: {evict}
    models: {{med: {{vram: 1GiB}}}}
"""
NOBODY: list[str] = []


@pytest.fixture
async def api(monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Served]:
    monkeypatch.delenv("SWAPPER_LEASE", raising=False)
    async with served() as running:
        yield running


@pytest.fixture
async def client(api: Served) -> AsyncGenerator[SwapperClient]:
    async with SwapperClient(api.url) as client:
        yield client


async def lease_of(api: Served) -> str:
    """The one lease there is."""
    async with SwapperClient(api.url) as client:
        (item,) = (await client.leases())["items"]
    return item["id"]


def borrow(client: SwapperClient, wait_s: float | None = None) -> AbstractAsyncContextManager[None]:
    return borrowed.borrowed(client, "gpu0", "trial", wait_s=wait_s, say=NOBODY.append)


@pytest.mark.parametrize(
    ("traits", "why"),
    [
        ({"kind": "ollama"}, "kind ollama keeps no conversations that could be tested"),
        ({"evict": "never"}, "evict: never keeps it on its card, also beside a lease"),
        ({"control": "attach"}, "control attach cannot be tested: the test starts and ends the server, and swapper"),
        ({}, "no swapper serve runs on this machine with state_dir {folder}/state: test a llama-server where"),
    ],
)
async def test_what_cannot_be_tried_or_not_from_here_is_told_why(
    tmp_path: Path, traits: dict[str, str], why: str
) -> None:
    config = tmp_path / "swapper.yaml"
    config.write_text(CONFIG.format(**{"kind": "llama-server", "control": "command", "evict": "auto", **traits}))
    result = await swapper("snapshots", "test", "med", "-c", str(config))
    assert result.exit_code == 2
    assert why.format(folder=tmp_path) in result.stderr.replace("\n", " ")


async def test_a_server_of_another_users_serve_is_not_started_by_us(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What we started and wrote there serve could neither end nor read."""
    config = tmp_path / "swapper.yaml"
    config.write_text(CONFIG.format(kind="llama-server", control="command", evict="auto"))
    folder = StateFolder(tmp_path / "state")
    monkeypatch.setattr(os, "getuid", lambda: -1)
    result = await swapper("snapshots", "test", "med", "-c", str(config))
    folder.release()
    assert result.exit_code == 2
    assert f"swapper serve (process {os.getpid()}) runs as the user" in result.stderr.replace("\n", " ")


@pytest.mark.parametrize(
    ("in_use", "ok", "said"),
    [
        (Strategy.REWIND, True, "rewind, which is in use, came back warm; warm: rewind, replay"),
        (Strategy.SLOTS, False, "slots, which is in use, came back cold; warm: rewind, replay"),
        (Strategy.OFF, False, "its conversations are not kept (strategy off); warm would be: rewind, replay"),
        (None, True, "warm: rewind, replay; swapper has not found out yet which one it uses"),
    ],
)
def test_only_the_strategy_in_use_decides(in_use: Strategy | None, ok: bool, said: str) -> None:
    found = (Found("slots", "cold", "read again"), Found("rewind", "warm"), Found("replay", "warm"))
    report = Report("b1", 3_000, 400.0, found)
    assert proved(report, in_use) is ok
    assert verdict(report, in_use).startswith(said)


async def test_a_card_is_borrowed_for_the_block_and_given_back(api: Served, client: SwapperClient) -> None:
    granting = asyncio.create_task(api.granted_when_queued())
    async with borrow(client):
        lease = await granting
        assert (await client.lease(lease))["state"] == "granted"
    assert (await client.lease(lease))["state"] == "released"


async def test_it_is_given_back_though_the_block_fails(api: Served, client: SwapperClient) -> None:
    granting = asyncio.create_task(api.granted_when_queued())
    with pytest.raises(ZeroDivisionError):
        async with borrow(client):
            raise ZeroDivisionError
    assert (await client.lease(await granting))["state"] == "released"


async def test_a_card_that_is_not_granted_in_time_is_waited_for_no_more(api: Served, client: SwapperClient) -> None:
    with pytest.raises(OutOfTime, match="the wait ran out"):
        async with borrow(client, wait_s=0.05):
            raise AssertionError
    assert (await client.lease(await lease_of(api)))["state"] == "cancelled"


async def test_a_lost_lease_ends_the_block_with_the_reason(
    api: Served, client: SwapperClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(borrowed, "TTL_S", 5)
    monkeypatch.setattr(borrowed, "BEATS", 500)
    granting = asyncio.create_task(api.granted_when_queued())

    async def work() -> None:
        async with borrow(client):
            await api.change(await granting, LeaseState.REVOKED, reason="max_hold")
            await asyncio.Event().wait()

    with pytest.raises(SwapperError, match=r"the lease was lost: .*revoked"):
        await work()


async def test_under_a_lease_that_does_not_cover_the_card_nothing_is_begun(
    api: Served, client: SwapperClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = await client.request_lease({"card": "gpu0", "vram": "1GiB"})
    await api.grant(lease["id"])
    monkeypatch.setenv("SWAPPER_LEASE", lease["id"])
    with pytest.raises(SwapperError, match="the whole of gpu0 is needed"):
        async with borrow(client):
            raise AssertionError
