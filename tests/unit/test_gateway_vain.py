"""A call that waits in vain is told why and when to come again, and may say itself how long it waits."""

from __future__ import annotations

import asyncio
import time

import pytest

from swapper.core.types import Failure
from swapper.errors import StoreDown
from swapper.gateway.context import Limits, Why
from tests.unit.gateway_doubles import ALPHA, CHAT, Served, serve

SHORT = Limits(max_wait_ms=30)
HELD = "waiting for llama/alpha: gpu0 is held by ls_1 (render), for at most another 50 min"


def told(gateway: Served, why: Why | StoreDown) -> None:
    async def say(tenant: str) -> Why:
        assert tenant == ALPHA
        if isinstance(why, StoreDown):
            raise why
        return why

    gateway.ctx.why = say


async def noticed(gateway: Served) -> None:
    """Return once the gateway knows of the failed load."""
    for _ in range(100_000):
        if ALPHA in gateway.member._failed:  # pyright: ignore[reportPrivateUsage]
            return
        await asyncio.sleep(0)
    raise AssertionError("it did not hear of it")


async def test_who_waited_too_long_is_told_who_has_the_card_and_when_to_come_again() -> None:
    async with serve(opened=False, limits=SHORT) as gateway:
        told(gateway, Why(HELD, 90_500))
        got = await gateway.call(CHAT)
        assert (got.status, got.error()["code"], got.headers["Retry-After"]) == (503, "gpu_busy", "91")
        assert HELD in got.error()["message"]


@pytest.mark.parametrize(("there_in_ms", "retry"), [(None, "30"), (0, "1"), (86_400_000, "3600")])
async def test_the_time_to_come_again_is_the_estimate_within_bounds_and_30_s_without_one(
    there_in_ms: int | None, retry: str
) -> None:
    async with serve(opened=False, limits=SHORT) as gateway:
        told(gateway, Why(HELD, there_in_ms))
        assert (await gateway.call(CHAT)).headers["Retry-After"] == retry


async def test_with_the_store_away_it_is_told_all_the_same() -> None:
    async with serve(opened=False, limits=SHORT) as gateway:
        told(gateway, StoreDown("no connection"))
        got = await gateway.call(CHAT)
        assert (got.status, "the store does not answer" in got.error()["message"]) == (503, True)


async def test_a_call_for_a_model_that_rests_is_answered_at_once_with_the_reason_and_the_next_try() -> None:
    async with serve(opened=False) as gateway:
        gateway.link.failed[ALPHA] = Failure("no such file", 2, int(time.time() * 1000) + 60_000)
        await gateway.link.tell_cards()
        await noticed(gateway)
        got = await gateway.call(CHAT)
        assert (got.status, got.error()["code"]) == (502, "upstream_failed")
        assert 55 <= int(got.headers["Retry-After"]) <= 61
        assert got.error()["message"].startswith("'alpha' could not be loaded: no such file; next try in ")
        assert gateway.admission.demand() == ()


async def test_those_who_waited_for_a_load_that_failed_are_told_when_the_next_try_is() -> None:
    async with serve(opened=False) as gateway:
        call = asyncio.create_task(gateway.call(CHAT))
        await gateway.waiting()
        gateway.link.failed[ALPHA] = Failure("out of memory", 1, int(time.time() * 1000) + 30_000)
        await gateway.link.tell_cards()
        got = await call
        assert "out of memory; next try in " in got.error()["message"]
        assert 25 <= int(got.headers["Retry-After"]) <= 31


async def test_nobody_is_answered_for_a_load_that_is_tried_again_at_once_with_more_room() -> None:
    async with serve(opened=False) as gateway:
        call = asyncio.create_task(gateway.call(CHAT))
        await gateway.waiting()
        gateway.link.failed[ALPHA] = Failure("out of memory", 1, 0, crowded=True)
        await gateway.link.tell_cards()
        await noticed(gateway)
        assert not call.done()
        gateway.admission.open(ALPHA, 2, "sw_1")
        assert (await call).status == 200


@pytest.mark.parametrize("said", ["0.03", "0", "30ms"])
async def test_a_call_may_wait_for_less_long_than_all_may(said: str) -> None:
    async with serve(opened=False) as gateway:
        got = await gateway.call(CHAT, headers={"X-Swapper-Max-Wait": said})
        assert (got.status, got.error()["code"]) == (503, "gpu_busy")


async def test_and_for_no_longer_than_all_may() -> None:
    async with serve(opened=False, limits=SHORT) as gateway:
        assert (await gateway.call(CHAT, headers={"X-Swapper-Max-Wait": "2h"})).status == 503


async def test_a_wait_that_is_none_is_refused_in_words_and_does_not_reach_the_server() -> None:
    async with serve() as gateway:
        got = await gateway.call(CHAT, headers={"X-Swapper-Max-Wait": "soon"})
        assert (got.status, got.error()["param"]) == (400, "X-Swapper-Max-Wait")
        assert "write it like 30s" in got.error()["message"]
        await gateway.call(CHAT, headers={"X-Swapper-Max-Wait": "30"})
        (seen,) = gateway.upstream.seen
        assert "X-Swapper-Max-Wait" not in seen.headers
