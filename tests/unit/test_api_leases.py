"""The lease routes, over the shipped store."""

from __future__ import annotations

import asyncio
import math
import os
import re
import subprocess
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import aiohttp
import pytest

from swapper.core.types import LeaseState, WorkClass
from tests.support.api import Served, key, served
from workers.control.launcher import stat_of

Json = dict[str, Any]


@pytest.fixture
async def api() -> AsyncGenerator[Served]:
    async with served() as running:
        yield running


@pytest.fixture
async def http(api: Served) -> AsyncGenerator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(api.url) as session:
        yield session


async def ask(http: aiohttp.ClientSession, **body: object) -> Json:
    async with http.post("/api/leases", json={"card": "gpu0", **body}) as answer:
        assert answer.status == 201, await answer.text()
        return await answer.json()


async def problem(answer: aiohttp.ClientResponse, status: int) -> Json:
    assert answer.status == status, await answer.text()
    assert answer.content_type == "application/problem+json"
    body: Json = await answer.json()
    assert body["status"] == status
    assert {"type", "title", "detail"} <= body.keys()
    return body


async def test_a_request_is_answered_with_the_queued_lease_and_its_place(http: aiohttp.ClientSession) -> None:
    async with http.post("/api/leases", json={"card": "gpu0", "label": "encode holiday", "expected_s": 300}) as answer:
        assert answer.status == 201
        lease = await answer.json()
    assert answer.headers["Location"] == f"/api/leases/{lease['id']}"
    assert re.fullmatch(r"ls_[0-9A-HJKMNP-TV-Z]{26}", lease["id"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", lease["created_at"])
    expected = {
        "card": "gpu0",
        "owner": "local",
        "label": "encode holiday",
        "class": "normal",
        "vram_mib": None,
        "state": "queued",
        "reason": None,
        "token": None,
        "holder": None,
        "position": 1,
        "eta_s": None,
        "ttl_s": 30,
        "max_hold_s": 3600,
        "expires_at": None,
        "granted_at": None,
        "ended_at": None,
        "revoke_at": None,
        "swap_id": None,
        "env": {"CUDA_VISIBLE_DEVICES": None, "HIP_VISIBLE_DEVICES": None},
    }
    assert {name: lease[name] for name in expected} == expected
    assert lease["explain"].startswith("queued")


async def test_the_second_in_the_queue_has_position_two(http: aiohttp.ClientSession) -> None:
    await ask(http)
    assert (await ask(http))["position"] == 2


async def test_an_object_without_fields_asks_for_any_whole_card(http: aiohttp.ClientSession) -> None:
    async with http.post("/api/leases", json={}) as answer:
        lease = await answer.json()
    assert (answer.status, lease["card"], lease["vram_mib"]) == (201, None, None)


async def test_a_partial_lease_is_counted_in_mib(http: aiohttp.ClientSession) -> None:
    assert (await ask(http, vram="1.5GiB"))["vram_mib"] == 1536


async def test_waiting_ends_as_soon_as_the_lease_is_granted(api: Served, http: aiohttp.ClientSession) -> None:
    granting = asyncio.create_task(api.granted_when_queued())
    async with http.post("/api/leases?wait=60", json={"card": "gpu0"}) as answer:
        lease = await answer.json()
    assert answer.status == 201
    assert lease["id"] == await granting
    assert lease["state"] == "granted"
    assert lease["token"] > 1 << 50
    assert lease["eta_s"] == 0.0
    assert lease["explain"] == "granted at once"
    assert lease["expires_at"] > lease["granted_at"]


async def test_waiting_on_a_known_lease_ends_when_it_is_cancelled(http: aiohttp.ClientSession) -> None:
    lease = await ask(http)

    async def look() -> Json:
        async with http.get(f"/api/leases/{lease['id']}?wait=60") as answer:
            return await answer.json()

    waiting = asyncio.create_task(look())
    await asyncio.sleep(0)
    async with http.delete(f"/api/leases/{lease['id']}") as answer:
        assert answer.status == 200
    assert (await waiting)["state"] == "cancelled"


async def test_a_wait_that_runs_out_shows_the_lease_still_queued(http: aiohttp.ClientSession) -> None:
    async with http.post("/api/leases?wait=0.05", json={}) as answer:
        assert (answer.status, (await answer.json())["state"]) == (201, "queued")


async def test_hanging_up_while_waiting_changes_nothing(api: Served, http: aiohttp.ClientSession) -> None:
    lease = await ask(http)
    hasty = aiohttp.ClientTimeout(total=0.1)
    with pytest.raises(TimeoutError):
        await http.get(f"/api/leases/{lease['id']}?wait=60", timeout=hasty)
    found = await api.store.lease(lease["id"])
    assert found is not None
    assert found.state == LeaseState.QUEUED


async def test_a_heartbeat_moves_the_expiry_and_keeps_the_progress(api: Served, http: aiohttp.ClientSession) -> None:
    lease = await ask(http, ttl_s=5)
    token = await api.grant(lease["id"])
    await api.change(lease["id"], revoke_ms=1_900_000_000_000)
    async with http.post(f"/api/leases/{lease['id']}/heartbeat", json={"token": token, "progress": 0.4}) as answer:
        alive = await answer.json()
    assert answer.status == 200
    assert alive["progress"] == 0.4
    assert alive["expires_at"] > alive["granted_at"]
    assert alive["revoke_at"] == "2030-03-17T17:46:40.000Z"


async def test_a_heartbeat_with_another_token_is_refused(api: Served, http: aiohttp.ClientSession) -> None:
    lease = await ask(http)
    beat = f"/api/leases/{lease['id']}/heartbeat"
    async with http.post(beat, json={"token": 7}) as answer:
        assert "no token yet" in (await problem(answer, 409))["detail"]
    token = await api.grant(lease["id"])
    async with http.post(beat, json={"token": token + 1}) as answer:
        assert (await problem(answer, 409))["type"] == "urn:swapper:wrong-token"


async def test_a_heartbeat_of_an_ended_lease_is_gone(api: Served, http: aiohttp.ClientSession) -> None:
    lease = await ask(http)
    token = await api.grant(lease["id"])
    await api.change(lease["id"], LeaseState.REVOKED, reason="held longer than max_hold")
    async with http.post(f"/api/leases/{lease['id']}/heartbeat", json={"token": token}) as answer:
        assert "revoked (held longer than max_hold)" in (await problem(answer, 410))["detail"]


async def test_releasing_needs_the_token_and_may_be_repeated(api: Served, http: aiohttp.ClientSession) -> None:
    lease = await ask(http)
    token = await api.grant(lease["id"])
    path = f"/api/leases/{lease['id']}"
    async with http.delete(path) as answer:
        assert (await problem(answer, 409))["type"] == "urn:swapper:token-needed"
    async with http.delete(f"{path}?token={token + 1}") as answer:
        assert (await problem(answer, 409))["type"] == "urn:swapper:wrong-token"
    async with http.delete(f"{path}?token={token}") as answer:
        released = await answer.json()
        assert (answer.status, released["state"]) == (200, "released")
    async with http.delete(f"{path}?token={token}") as answer:
        assert (answer.status, await answer.json()) == (200, released)


async def test_a_lease_that_is_not_there_is_404(http: aiohttp.ClientSession) -> None:
    async with http.get("/api/leases/ls_nothing") as answer:
        assert (await problem(answer, 404))["type"] == "urn:swapper:no-such-lease"
    async with http.delete("/api/leases/ls_nothing") as answer:
        await problem(answer, 404)
    async with http.post("/api/leases/ls_nothing/heartbeat", json={"token": 1}) as answer:
        await problem(answer, 404)


async def test_the_same_idempotency_key_gives_the_same_lease(http: aiohttp.ClientSession) -> None:
    headers = {"Idempotency-Key": "nightly-7"}
    async with http.post("/api/leases", json={"card": "gpu0"}, headers=headers) as answer:
        first = await answer.json()
        assert answer.status == 201
    async with http.post("/api/leases", data=b'{ "card": "gpu0" }', headers=headers) as answer:
        assert (answer.status, (await answer.json())["id"]) == (200, first["id"])
    async with http.post("/api/leases", json={"card": "gpu1"}, headers=headers) as answer:
        assert (await problem(answer, 422))["lease"] == first["id"]


async def test_a_full_queue_is_429(http: aiohttp.ClientSession) -> None:
    for _ in range(5):
        await ask(http)
    async with http.post("/api/leases", json={}) as answer:
        assert (await problem(answer, 429))["position"] == 6


@pytest.mark.parametrize(
    ("body", "field", "says"),
    [
        ({"lable": "x"}, "lable", "did you mean label?"),
        ({"card": "gpu9"}, "card", "there is gpu0, gpu1"),
        ({"vram": "12GB"}, "vram", "did you mean 12GiB?"),
        ({"vram": "0GiB"}, "vram", "no VRAM"),
        ({"vram": "\u0663GiB"}, "vram", "is not a size"),
        ({"vram": "9" * 300 + "GiB"}, "vram", "more than any card or disk has"),
        ({"card": "gpu1", "vram": "9GiB"}, "vram", "the most a lease can have is 8 GiB, on gpu1"),
        ({"vram": "22GiB"}, "vram", "the most a lease can have is 21.5 GiB, on gpu0"),
        ({"label": "x" * 201}, "label", "200 characters at most"),
        ({"label": "a\x1b[2J"}, "label", "printable"),
        ({"class": "urgent"}, "class", "must be one of interactive, normal, batch or maintenance"),
        ({"ttl_s": 4}, "ttl_s", "must be 5 or more"),
        ({"ttl_s": 3601}, "ttl_s", "must be 3600 or less"),
        ({"ttl_s": "30"}, "ttl_s", "must be a number"),
        ({"ttl_s": math.nan}, "ttl_s", "finite"),
        ({"max_hold_s": 0}, "max_hold_s", "must be 1 or more"),
        ({"not_before": "2026-03-01T04:00:00"}, "not_before", "must be a time with its zone, like 2026-"),
        ({"deadline": "2020-01-01T00:00:00Z"}, "deadline", "has passed"),
        ({"holder_pid": 1}, "holder_pid", "must be 2 or more"),
        ({"webhook": "http://elsewhere/"}, "webhook", "host the configuration allows"),
    ],
)
async def test_a_bad_field_is_named(http: aiohttp.ClientSession, body: Json, field: str, says: str) -> None:
    async with http.post("/api/leases", json=body) as answer:
        found = await problem(answer, 422)
    assert found["type"] == "urn:swapper:bad-field"
    assert found["errors"][0]["field"] == field
    assert says in found["detail"]


async def test_the_process_a_lease_names_is_known_by_its_start(api: Served, http: aiohttp.ClientSession) -> None:
    stat = stat_of(os.getpid())
    assert stat is not None
    for body in ({}, {"holder_started": stat[3]}):
        lease = await api.store.lease((await ask(http, **body, holder_pid=os.getpid()))["id"])
        assert lease is not None
        assert lease.request.holder_started == stat[3]


@pytest.mark.parametrize(
    ("body", "field", "says"),
    [
        ({"holder_pid": os.getpid(), "holder_started": 1}, "holder_pid", "is another one"),
        ({"holder_started": 1}, "holder_started", "it belongs to a holder_pid"),
    ],
)
async def test_what_a_lease_says_of_its_process_must_be_so(
    http: aiohttp.ClientSession, body: Json, field: str, says: str
) -> None:
    async with http.post("/api/leases", json=body) as answer:
        found = await problem(answer, 422)
    assert found["errors"][0]["field"] == field
    assert says in found["detail"]


@pytest.fixture(params=[False, True])
def ended_pid(request: pytest.FixtureRequest) -> Iterator[int]:
    """The pid of a process that has ended, before its parent asked how (it is a zombie then) and after."""
    with subprocess.Popen(["true"]) as gone:
        os.waitid(os.P_PID, gone.pid, os.WEXITED | os.WNOWAIT)
        if request.param:
            gone.wait()
        yield gone.pid


async def test_a_process_that_has_ended_is_no_holder(http: aiohttp.ClientSession, ended_pid: int) -> None:
    async with http.post("/api/leases", json={"holder_pid": ended_pid}) as answer:
        assert f"no process {ended_pid} runs" in (await problem(answer, 422))["detail"]


async def test_a_process_of_swapper_s_own_is_no_holder(api: Served, http: aiohttp.ClientSession) -> None:
    api.ctx.whose = {os.getpid(): "swapper serve itself"}.get
    async with http.post("/api/leases", json={"holder_pid": os.getpid()}) as answer:
        assert f"{os.getpid()} is swapper serve itself" in (await problem(answer, 422))["detail"]
    assert (await ask(http, holder_pid=os.getppid()))["holder"] == f"process:{os.getppid()}"


@pytest.mark.parametrize("query", ["wait=soon", "wait=-1", "wait=nan", "wait=\u0663"])
async def test_a_bad_wait_is_422(http: aiohttp.ClientSession, query: str) -> None:
    async with http.post(f"/api/leases?{query}", json={}) as answer:
        assert (await problem(answer, 422))["errors"][0]["field"] == "wait"


async def test_leases_are_listed_newest_first_in_pages(api: Served, http: aiohttp.ClientSession) -> None:
    ids = [(await ask(http))["id"] for _ in range(3)]
    async with http.get("/api/leases?limit=2") as answer:
        page = await answer.json()
    assert [lease["id"] for lease in page["items"]] == [ids[2], ids[1]]
    async with http.get(f"/api/leases?limit=2&cursor={page['next_cursor']}") as answer:
        rest = await answer.json()
    assert ([lease["id"] for lease in rest["items"]], rest["next_cursor"]) == ([ids[0]], None)
    await api.grant(ids[1])
    async with http.get("/api/leases?state=granted&card=gpu0&owner=local") as answer:
        assert [lease["id"] for lease in (await answer.json())["items"]] == [ids[1]]


@pytest.mark.parametrize("query", ["state=waiting", "limit=0", "limit=many", "cursor=x"])
async def test_a_bad_query_of_the_list_is_422(http: aiohttp.ClientSession, query: str) -> None:
    async with http.get(f"/api/leases?{query}") as answer:
        assert (await problem(answer, 422))["errors"][0]["field"] == query.partition("=")[0]


async def test_a_store_that_is_down_is_503_and_ends_the_wait(api: Served, http: aiohttp.ClientSession) -> None:
    lease = await ask(http)
    waiting = asyncio.create_task(http.get(f"/api/leases/{lease['id']}?wait=60"))
    await api.ctx.tail.end()
    api.redis.connected = False
    async with http.post("/api/leases", json={}) as answer:
        assert (await problem(answer, 503))["retry_after_s"] == 1
        assert answer.headers["Retry-After"] == "1"
    api.redis.connected = True
    await api.grant(lease["id"])
    async with await waiting as answer:
        assert answer.status in (200, 503)


async def test_only_the_owner_or_an_admin_may_act_on_a_lease() -> None:
    keys = (key("ann", "leases"), key("bob", "leases"), key("ops", "admin"))
    async with served(keys) as api, aiohttp.ClientSession(api.url) as http:
        as_ann, as_bob, as_ops = ({"Authorization": f"Bearer {name}-secret"} for name in ("ann", "bob", "ops"))
        async with http.post("/api/leases", json={}, headers=as_ann) as answer:
            lease = await answer.json()
        assert lease["owner"] == "ann"
        path = f"/api/leases/{lease['id']}"
        token = await api.grant(lease["id"])
        async with http.post(f"{path}/heartbeat", json={"token": token}, headers=as_bob) as answer:
            assert (await problem(answer, 403))["type"] == "urn:swapper:not-the-owner"
        async with http.delete(f"{path}?token={token}", headers=as_bob) as answer:
            await problem(answer, 403)
        async with http.get(path, headers=as_bob) as answer:
            assert answer.status == 200
        async with http.delete(f"{path}?token={token}", headers=as_ops) as answer:
            assert answer.status == 200


async def test_a_class_the_key_does_not_have_is_403() -> None:
    keys = (key("ann", "leases", classes=(WorkClass.BATCH,)),)
    async with served(keys) as api, aiohttp.ClientSession(api.url, headers={"x-api-key": "ann-secret"}) as http:
        async with http.post("/api/leases", json={"class": "interactive"}) as answer:
            assert "may use batch, not interactive" in (await problem(answer, 403))["detail"]
        async with http.post("/api/leases", json={}) as answer:
            assert (await answer.json())["class"] == "batch"
