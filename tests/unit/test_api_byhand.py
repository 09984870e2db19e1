"""By hand over HTTP: what is written for each call, what it is answered, who may, and llama-swap's own ways."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace

import aiohttp
import pytest

from swapper.api import byhand as room
from swapper.core import byhand
from swapper.core.commit import Commit, Committed
from swapper.core.errand import Errand, Verb
from swapper.core.spec import TenantSpec
from swapper.core.types import Card, Hold, WorkClass
from tests.support.api import SPEC, Served, key, served

MED, ODD, OLLAMA = "llama/med", "llama/org/m:Q4", "ollama"
KEYS = (key("ann", "models"), key("ops", "admin"), key("bob", "leases"))
ADMIN = {"Authorization": "Bearer ops-secret"}
WIDE = replace(
    SPEC,
    tenants={
        **SPEC.tenants,
        ODD: TenantSpec(ODD, "llama", "gpu0", "main", need_mib=1_024),
        OLLAMA: TenantSpec(OLLAMA, OLLAMA, "gpu1", "main", need_mib=1_024, kind="ollama"),
    },
)


@asynccontextmanager
async def front(*keys: str) -> AsyncGenerator[tuple[Served, aiohttp.ClientSession]]:
    """The API, with these keys or none, and a session to it."""
    async with served(tuple(one for one in KEYS if one.name in keys), spec=WIDE) as api:
        api.ctx.names = {"med": MED, "gpt-4o": MED, "org/m:Q4": ODD, "gemma": OLLAMA}
        async with aiohttp.ClientSession(api.url) as http:
            yield api, http


async def errands(api: Served) -> tuple[Errand, ...]:
    return (await api.store.read()).errands


async def end_next(api: Served, outcome: str = "done", reason: str | None = None) -> Errand:
    """Wait until something is asked for by hand, and end it as the coordinator would have."""
    after = "0"
    while not (waiting := await errands(api)):
        events = await api.store.events(after=after, limit=100, block_ms=5_000)
        after = events[-1].id if events else after
    errand = waiting[0]
    swap = replace(byhand.queued_swap(errand), outcome=outcome, reason=reason, ended_ms=errand.asked_ms + 5)
    assert await api.store.commit(Commit(swaps=(swap,), over=(errand.id,))) == Committed()
    return errand


@pytest.mark.parametrize(
    ("path", "verb", "tenants", "drain_ms"),
    [
        ("/api/models/med/load", Verb.LOAD, (MED,), None),
        ("/api/models/gpt-4o/load", Verb.LOAD, (MED,), None),
        ("/api/models/org/m:Q4/load", Verb.LOAD, (ODD,), None),
        ("/api/models/org%2Fm%3AQ4/unload", Verb.UNLOAD, (ODD,), None),
        ("/api/models/llama/med/unload?drain=30", Verb.UNLOAD, (MED,), 30_000),
        ("/api/models/med/unload?drain=0", Verb.UNLOAD, (MED,), 0),
        ("/api/models/llama/unload", Verb.UNLOAD, (MED, ODD), None),
        ("/api/tenants/llama/med/pin", Verb.PIN, (MED,), None),
        ("/api/tenants/llama/unpin", Verb.UNPIN, (MED, ODD), None),
        ("/api/tenants/frigate/pin", Verb.PIN, ("frigate",), None),
    ],
)
async def test_what_is_asked_for_is_written_and_answered_with_its_swap(
    path: str, verb: Verb, tenants: tuple[str, ...], drain_ms: int | None
) -> None:
    async with front() as (api, http), http.post(path) as answer:
        body = await answer.json()
        assert answer.status == 202, body
        (errand,) = await errands(api)
        assert (errand.verb, errand.tenants, errand.drain_ms, errand.owner) == (verb, tenants, drain_ms, "local")
        assert answer.headers["Location"] == f"/api/swaps/{errand.id}"
        assert (body["swap_id"], body["id"], body["state"], body["cause"]) == (errand.id, errand.id, "queued", "manual")
        assert (body["outcome"], body["stage"], body["steps"]) == (None, None, [])
        assert str(verb) in body["explain"]


@pytest.mark.parametrize(("query", "force"), [("", False), ("?force=0", False), ("?force=1", True)])
async def test_a_card_is_vacated_by_force_only_where_that_is_said(query: str, force: bool) -> None:
    async with front() as (api, http), http.post(f"/api/cards/gpu0/vacate{query}") as answer:
        assert answer.status == 202
        (errand,) = await errands(api)
        assert (errand.verb, errand.card, errand.tenants, errand.force) == (Verb.VACATE, "gpu0", (), force)


async def test_who_waits_is_answered_with_the_end() -> None:
    async with front() as (api, http):
        ending = asyncio.create_task(end_next(api, reason="llama/med was not on gpu0"))
        async with http.post("/api/models/med/unload?wait=30") as answer:
            body = await answer.json()
        errand = await ending
        assert (answer.status, body["swap_id"], body["outcome"]) == (200, errand.id, "done")
        assert body["explain"] == "llama/med was not on gpu0"
        async with http.get(f"/api/swaps/{errand.id}") as answer:
            assert (await answer.json())["outcome"] == "done"


async def test_who_waited_in_vain_is_answered_with_how_it_stands() -> None:
    async with front() as (api, http):
        hold = Hold("ls_1", "encode", None, None, granted=True)
        await api.commit_card(Card("gpu0", holds=(hold,)))
        async with http.post("/api/models/med/load?wait=0.05") as answer:
            body = await answer.json()
        assert (answer.status, body["state"]) == (202, "queued")
        assert body["explain"] == "load llama/med waits: gpu0 is held by ls_1 (encode)"
        async with http.get(f"/api/swaps/{body['swap_id']}?wait=0") as answer:
            assert (await answer.json())["explain"] == body["explain"]


async def test_one_that_waits_is_told_by_the_status_and_by_an_event() -> None:
    async with front() as (_, http):
        async with http.post("/api/models/med/load") as answer:
            swap_id = (await answer.json())["swap_id"]
        async with http.get("/api/status") as answer:
            (card, other) = (await answer.json())["cards"]
        (line,) = card["by_hand"]
        assert (line["swap_id"], line["verb"], line["tenants"], line["owner"]) == (swap_id, "load", [MED], "local")
        assert line["explain"].startswith("load llama/med waits")
        assert other["by_hand"] == []
        async with http.get("/api/events?follow=0", headers={"Last-Event-ID": "0"}) as answer:
            text = await answer.text()
        assert f'"id": "{swap_id}"' in text
        assert '"state": "queued"' in text


async def test_pins_and_who_is_kept_off_stand_in_the_status() -> None:
    async with front() as (api, http):
        await api.commit_card(Card("gpu0", pinned=(MED,), unused=(ODD,)))
        async with http.get("/api/cards/gpu0") as answer:
            tenants = {one["id"]: one for one in (await answer.json())["tenants"]}
        assert (tenants[MED]["pinned"], tenants[MED]["kept_off"]) == (True, False)
        assert (tenants[ODD]["pinned"], tenants[ODD]["kept_off"]) == (False, True)


@pytest.mark.parametrize(
    ("path", "status", "code", "said"),
    [
        ("/api/models/mde/load", 404, "no-such-model", "model not found: 'mde'; did you mean med"),
        ("/api/models/unload/mde", 404, "no-such-model", "model not found: 'mde'; did you mean med"),
        ("/api/models/" + "x" * 600 + "/load", 404, "no-such-model", "there is"),
        ("/api/cards/gpu7/vacate", 404, "no-such-card", "did you mean gpu"),
        ("/api/tenants/lama/pin", 404, "no-such-tenant", "did you mean llama"),
        ("/api/models/llama/load", 422, "several-models", "name the one to load: llama/med, llama/org/m:Q4"),
        ("/api/models/med/unload?drain=soon", 422, "bad-field", "drain: 'soon' is not a number of seconds"),
        ("/api/models/med/unload?drain=999999", 422, "bad-field", "86400 at most"),
        ("/api/cards/gpu0/vacate?force=please", 422, "bad-field", "force: 'please' is neither 1 nor 0"),
        ("/api/models/med", 404, "not-found", "a model has /load and /unload"),
    ],
)
async def test_a_mistake_is_refused_in_one_sentence_and_nothing_is_written(
    path: str, status: int, code: str, said: str
) -> None:
    async with front() as (api, http), http.post(path) as answer:
        body = await answer.json()
        assert (answer.status, body["type"]) == (status, f"urn:swapper:{code}")
        assert said in body["detail"]
        assert await errands(api) == ()


async def test_beyond_the_most_it_is_refused_until_one_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "MOST", 1)
    async with front() as (api, http):
        async with http.post("/api/models/med/load") as answer:
            assert answer.status == 202
        async with http.post("/api/models/med/load") as answer:
            assert (answer.status, (await answer.json())["type"]) == (429, "urn:swapper:queue-full")
        await end_next(api)
        async with http.post("/api/models/med/load") as answer:
            assert answer.status == 202


async def test_with_the_store_down_nothing_is_acknowledged() -> None:
    async with front() as (api, http):
        api.redis.connected = False
        for path in ("/api/models/med/load", "/api/cards/gpu0/vacate", "/api/tenants/frigate/pin"):
            async with http.post(path) as answer:
                assert (answer.status, (await answer.json())["type"]) == (503, "urn:swapper:store-down")
        async with http.get("/unload") as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (503, "store_down")
        api.redis.connected = True
        assert await errands(api) == ()


# Who may.


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/api/models/med/unload"),
        ("POST", "/api/models/unload"),
        ("POST", "/api/models/unload/med"),
        ("POST", "/api/models/unload/x/load"),
        ("GET", "/unload"),
        ("POST", "/api/cards/gpu0/vacate"),
        ("POST", "/api/tenants/llama/med/pin"),
        ("POST", "/api/tenants/llama/med/unpin"),
    ],
)
async def test_what_sends_somebody_away_is_the_administrators(method: str, path: str) -> None:
    async with front("ann", "bob") as (api, http):
        for name in ("ann", "bob"):
            async with http.request(method, path, headers={"x-api-key": f"{name}-secret"}) as answer:
                assert answer.status == 403, await answer.text()
        assert await errands(api) == ()


async def test_a_load_needs_what_a_call_needs() -> None:
    async with front("ann", "bob") as (api, http):
        async with http.post("/api/models/med/load", headers={"x-api-key": "bob-secret"}) as answer:
            assert answer.status == 403
        async with http.post("/api/models/med/load", headers={"x-api-key": "ann-secret"}) as answer:
            assert answer.status == 202
        assert [errand.owner for errand in await errands(api)] == ["ann"]


async def test_a_key_that_may_not_be_as_urgent_as_a_load_is_told_so() -> None:
    batch = key("eve", "models", classes=(WorkClass.BATCH,))
    async with served((batch,), spec=WIDE) as api, aiohttp.ClientSession(api.url) as http:
        answer = await http.post("/api/models/med/load", headers={"x-api-key": "eve-secret"})
        async with answer:
            assert (answer.status, (await answer.json())["type"]) == (403, "urn:swapper:class-not-allowed")


@pytest.mark.parametrize(("site", "status"), [("cross-site", 403), ("same-site", 403), ("same-origin", 200)])
async def test_an_image_on_a_page_of_another_site_unloads_nothing(site: str, status: int) -> None:
    async with served() as api, aiohttp.ClientSession(api.url) as http:
        ending = asyncio.create_task(end_next(api)) if status == 200 else None
        async with http.get("/unload", headers={"Referer": "http://evil.example/page"}) as answer:
            assert answer.status == 403
        async with http.get("/unload", headers={"Sec-Fetch-Site": site}) as answer:
            assert answer.status == status
        if ending is not None:
            await ending


# llama-swap's.


async def test_unload_of_all_is_one_unload_a_card_and_ok_once_they_are_over() -> None:
    async with front() as (api, http):
        asking = asyncio.create_task(http.get("/unload").__aenter__())
        first, second = await end_next(api), await end_next(api)
        answer = await asking
        assert (answer.status, await answer.text(), answer.content_type) == (200, "OK", "text/plain")
        assert {(e.card, e.tenants) for e in (first, second)} == {("gpu0", (MED, ODD)), ("gpu1", (OLLAMA,))}
        answer.release()


async def test_post_of_it_says_ok_as_json() -> None:
    async with front() as (api, http):
        asking = asyncio.create_task(http.post("/api/models/unload").__aenter__())
        for _ in range(2):
            await end_next(api)
        answer = await asking
        assert (answer.status, await answer.json()) == (200, {"msg": "ok"})
        answer.release()


@pytest.mark.parametrize("name", ["med", "gpt-4o", "org/m:Q4", "llama/med"])
async def test_unload_of_one_by_any_of_its_names_is_ok_once_it_is_over(name: str) -> None:
    async with front() as (api, http):
        ending = asyncio.create_task(end_next(api))
        async with http.post(f"/api/models/unload/{name}") as answer:
            assert (answer.status, await answer.text()) == (200, "OK")
        assert (await ending).verb is Verb.UNLOAD


async def test_who_could_not_be_unloaded_is_told_why() -> None:
    async with front() as (api, http):
        ending = asyncio.create_task(end_next(api, "compensated", "calls were still running at the drain limit"))
        async with http.post("/api/models/unload/med") as answer:
            body = await answer.json()
        assert (answer.status, body["type"]) == (409, "urn:swapper:not-unloaded")
        assert "still running at the drain limit" in body["detail"]
        await ending


async def test_a_look_with_head_unloads_nothing() -> None:
    async with front() as (api, http), http.head("/unload") as answer:
        assert answer.status == 405
        assert await errands(api) == ()


async def test_who_stops_waiting_changes_nothing() -> None:
    async with front() as (api, http):
        with pytest.raises(TimeoutError):
            await http.get("/unload", timeout=aiohttp.ClientTimeout(total=0.2))
        assert len(await errands(api)) == 2
