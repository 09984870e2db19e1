"""The declared probe counts whom it is shown alive, and a living lease holder as all the rest."""

from __future__ import annotations

import asyncio
import os
import subprocess

import pytest

from workers.backend import Owners, Reading, TenantState
from workers.vram.declared import Declared

NEEDS = {"llama/med": 8_000, "llama/big": 20_000}
CARD = Declared(24_000, 500, NEEDS)
NOBODY = Owners()


async def test_an_empty_card_has_all_but_its_reserve() -> None:
    assert await CARD.read({}, (), NOBODY) == Reading(24_000, 0, 23_500)


@pytest.mark.parametrize(
    ("state", "used"),
    [
        (TenantState.LOADED, 8_000),
        (TenantState.LOADING, 8_000),
        (TenantState.SLEEPING, 8_000),
        (TenantState.UNLOADED, 0),
        (TenantState.FAILED, 0),
        (TenantState.STOPPED, 0),
        (TenantState.UNREACHABLE, 8_000),
    ],
)
async def test_a_tenant_counts_while_it_is_seen_holding_vram(state: TenantState, used: int) -> None:
    reading = await CARD.read({"llama/med": state, "llama/big": TenantState.UNLOADED}, (), NOBODY)
    assert (reading.used_mib, reading.free_mib) == (used, 23_500 - used)
    assert reading.holders == (("llama/med",) if used else ())


async def test_free_is_never_negative() -> None:
    reading = await CARD.read(dict.fromkeys(NEEDS, TenantState.LOADED), (), NOBODY)
    assert (reading.used_mib, reading.free_mib) == (28_000, 0)


async def test_a_living_holder_takes_all_that_is_left_and_is_named() -> None:
    reading = await CARD.read({}, (os.getpid(),), NOBODY)
    assert (reading.used_mib, reading.free_mib) == (23_500, 0)
    assert reading.holders[0].startswith(f"pid {os.getpid()} (")


def test_a_holder_that_ended_takes_nothing_even_before_its_parent_noticed() -> None:
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    zombie = asyncio.run(CARD.read({}, (child.pid,), NOBODY))
    child.wait()
    gone = asyncio.run(CARD.read({}, (child.pid,), NOBODY))
    assert zombie == gone == Reading(24_000, 0, 23_500)


async def test_a_tenant_nobody_declared_a_need_for_takes_all_that_is_left() -> None:
    reading = await CARD.read({"llama/new": TenantState.LOADED}, (), NOBODY)
    assert (reading.free_mib, reading.holders) == (0, ("llama/new",))
