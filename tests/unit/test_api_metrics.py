"""`/metrics`: every figure once, none that nobody knows, whatever is away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from swapper.core.commit import Commit, Committed
from swapper.core.conversations import Conversation, ProofResult
from swapper.core.types import Card, Demand, Swap, WorkClass
from swapper.store.protocol import StoredEvent
from tests.support.api import Served, served
from tests.unit.index_doubles import answer
from tests.unit.test_api_snapshots import Saved
from tests.unit.test_api_status import SWAP

MED = "llama/med"


class Counting:
    """Its counters run; `told` waits until so many events of one kind were looked at since it was asked last."""

    def __init__(self, api: Served) -> None:
        self._seen: asyncio.Queue[str] = asyncio.Queue()
        observe = api.ctx.meter.observe

        def seen(event: StoredEvent) -> None:
            observe(event)
            self._seen.put_nowait(event.type)

        self.observe = seen

    async def told(self, kind: str, times: int = 1) -> None:
        async with asyncio.timeout(20):
            while times:
                times -= await self._seen.get() == kind


Count = Callable[[], Awaitable[Counting]]


@pytest.fixture
async def counting(api: Served, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Count]:
    tasks: list[asyncio.Task[None]] = []

    async def begin() -> Counting:
        counting = Counting(api)
        monkeypatch.setattr(api.ctx.meter, "observe", counting.observe)
        tasks.append(asyncio.create_task(api.ctx.count()))
        await api.ctx.meter.counting.wait()
        return counting

    yield begin
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture
async def api() -> AsyncGenerator[Served]:
    async with served() as running:
        yield running


async def scraped(api: Served) -> Mapping[str, float]:
    """The figures as they stand in the text: `name{label="value",...}`, labels in the order of the alphabet."""
    async with aiohttp.ClientSession(api.url) as http, http.get("/metrics") as got:
        assert got.status == 200
        lines = [line for line in (await got.text()).splitlines() if not line.startswith("#")]
    assert len({line.rpartition(" ")[0] for line in lines}) == len(lines)
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


async def commit(api: Served, *swaps: Swap) -> None:
    assert await api.store.commit(Commit(swaps=swaps)) == Committed()


async def test_leases_are_counted_by_state_and_card_and_a_card_with_none_is_zero(api: Served) -> None:
    async with aiohttp.ClientSession(api.url) as http:
        for body in ({"card": "gpu0"}, {"card": "gpu0"}, {"vram": "1GiB"}):
            async with http.post("/api/leases", json=body) as got:
                lease = await got.json()
    await api.grant(lease["id"], "gpu1")
    found = await scraped(api)
    assert found['swapper_leases{card="gpu0",state="queued"}'] == 2
    assert found['swapper_leases{card="gpu1",state="granted"}'] == 1
    assert found['swapper_leases{card="gpu1",state="preparing"}'] == 0
    assert found["swapper_store_up"] == 1


async def test_a_swap_counts_once_however_often_it_is_told_of_and_scraped(api: Served, counting: Count) -> None:
    log = await counting()
    await commit(api, SWAP)
    await commit(api, replace(SWAP, reason="told again"))
    await commit(api, replace(SWAP, id="sw_2"))
    await log.told("swap", 3)
    found = await scraped(api)
    assert found['swapper_swaps_total{card="gpu0",outcome="done"}'] == 2
    assert found['swapper_swap_seconds_count{card="gpu0",step="save"}'] == 2
    assert found['swapper_swap_seconds_sum{card="gpu0",step="save"}'] == pytest.approx(0.08)
    assert await scraped(api) == found


async def test_a_running_swap_counts_when_it_is_over(api: Served, counting: Count) -> None:
    log = await counting()
    await commit(api, replace(SWAP, outcome=None, ended_ms=None))
    await log.told("swap")
    assert 'swapper_swaps_total{card="gpu0",outcome="done"}' not in await scraped(api)
    await commit(api, SWAP)
    await log.told("swap")
    assert (await scraped(api))['swapper_swaps_total{card="gpu0",outcome="done"}'] == 1


async def test_what_was_over_before_the_process_began_does_not_count_though_it_is_told_of_again(
    api: Served, counting: Count
) -> None:
    await commit(api, SWAP)
    log = await counting()
    await commit(api, replace(SWAP, reason="told again"))
    await log.told("swap")
    assert 'swapper_swaps_total{card="gpu0",outcome="done"}' not in await scraped(api)


async def test_a_conversation_counts_as_unproved_and_once_more_as_what_was_seen(api: Served, counting: Count) -> None:
    talk = Conversation(MED, 0, "a.kv", 4096, 1, saved=True, restored=True, result=ProofResult.UNPROVED)
    warm, cold = (replace(talk, result=result) for result in (ProofResult.WARM, ProofResult.COLD))
    swap = replace(SWAP, to=(MED,), conversations=(talk,))
    await commit(api, replace(swap, id="sw_before"))
    log = await counting()
    await commit(api, swap)
    await commit(api, replace(swap, conversations=(warm,)))
    await commit(api, replace(swap, id="sw_before", conversations=(cold,)))
    await log.told("swap", 3)
    found = await scraped(api)
    for result in ("unproved", "warm", "cold"):
        assert found[f'swapper_restore_tokens_total{{model="llama/med",result="{result}"}}'] == 4096


async def test_a_lease_waited_from_its_request_to_its_grant_once(api: Served, counting: Count) -> None:
    log = await counting()
    async with (
        aiohttp.ClientSession(api.url) as http,
        http.post("/api/leases", json={"card": "gpu0", "class": "batch"}) as got,
    ):
        lease = await got.json()
    await api.grant(lease["id"])
    await api.change(lease["id"], explain="told again")
    await log.told("lease", 3)
    found = await scraped(api)
    assert found['swapper_lease_wait_seconds_count{card="gpu0",class="batch"}'] == 1


async def test_after_an_outage_of_the_store_it_goes_on_counting(api: Served, counting: Count) -> None:
    log = await counting()
    api.redis.connected = False
    assert (await scraped(api))["swapper_store_up"] == 0
    api.redis.connected = True
    await commit(api, SWAP)
    await log.told("swap")
    assert (await scraped(api))['swapper_swaps_total{card="gpu0",outcome="done"}'] == 1


async def test_prompt_tokens_are_the_indexs(api: Served) -> None:
    await api.commit_card(Card("gpu0", residents=(MED,)))
    answer(api.ctx.index, "abcd", tenant=MED)
    answer(api.ctx.index, "abcde", 3_000, tenant=MED)
    answer(api.ctx.index, "abcdef", tenant=MED)
    found = await scraped(api)
    assert found['swapper_prompt_tokens_total{kind="cached",model="llama/med"}'] == 3_000
    assert found['swapper_prompt_tokens_total{kind="processed",model="llama/med"}'] == 12_000
    assert found['swapper_prompt_tokens_total{kind="reread",model="llama/med"}'] == 6_000
    assert found['swapper_conversations{model="llama/med",place="server"}'] == 1


async def test_what_agents_and_gateways_see_is_shown_and_what_nobody_saw_is_absent(api: Served) -> None:
    api.live.cards["gpu0"] = {"total_mib": 1024, "used_mib": 256, "free_mib": 768, "holders": []}
    api.live.tenants[MED] = "loaded"
    await api.store.beat("g1", (Demand("g1", MED, WorkClass.INTERACTIVE, 2, 3, 1),), ttl_ms=60_000)
    found = await scraped(api)
    assert found['swapper_vram_bytes{card="gpu0",kind="used"}'] == 256 << 20
    assert found['swapper_tenant_state{state="loaded",tenant="llama/med"}'] == 1
    assert found['swapper_tenant_state{state="unloaded",tenant="llama/med"}'] == 0
    assert found['swapper_inflight{model="llama/med"}'] == 3
    assert 'swapper_vram_bytes{card="gpu1",kind="used"}' not in found
    assert 'swapper_snapshot_bytes{model="llama/med"}' not in found


async def test_snapshots_are_weighed_by_model(api: Served, tmp_path: Path) -> None:
    saved = Saved(tmp_path / "slots")
    api.ctx.shelves = {"llama": saved.shelf, "twin": saved.shelf}
    saved.save("a.kv")
    saved.save("b.kv")
    saved.save("c.kv", tenant="llama/gone")
    found = await scraped(api)
    assert (
        found['swapper_snapshot_bytes{model="llama/med"}'],
        found['swapper_snapshot_bytes{model="llama/gone"}'],
    ) == (200, 100)


async def test_calls_are_counted_by_model_and_status_with_what_they_waited(api: Served) -> None:
    api.ctx.meter.answered(MED, 200, 1_500)
    api.ctx.meter.answered(MED, 499, 500)
    found = await scraped(api)
    assert found['swapper_requests_total{code="200",model="llama/med"}'] == 1
    assert found['swapper_requests_total{code="499",model="llama/med"}'] == 1
    assert found['swapper_request_wait_seconds_sum{model="llama/med"}'] == 2.0


async def test_calls_of_the_store_are_timed_by_their_name(api: Served) -> None:
    api.store.took = api.ctx.meter.stored
    await commit(api, SWAP)
    await commit(api, replace(SWAP, id="sw_2"))
    found = await scraped(api)
    assert found['swapper_store_seconds_count{op="commit"}'] == 2
    assert found['swapper_store_seconds_bucket{le="5.0",op="commit"}'] == 2
    assert 0 < found['swapper_store_seconds_sum{op="commit"}'] < 5


async def test_a_scrape_is_answered_while_the_store_is_down(api: Served) -> None:
    api.live.tenants[MED] = "loaded"
    api.redis.connected = False
    found = await scraped(api)
    assert found["swapper_store_up"] == 0
    assert found['swapper_tenant_state{state="loaded",tenant="llama/med"}'] == 1
    assert not any(name.startswith("swapper_leases") for name in found)
