"""Keys, status, swaps, readiness and events over HTTP."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator

import aiohttp
import pytest

from swapper.api import status
from swapper.api.auth import scope_needed
from swapper.api.ids import lease_id
from swapper.api.views import conversation_json
from swapper.client.sse import Message, messages
from swapper.core.commit import Commit, Committed
from swapper.core.conversations import Conversation
from swapper.core.types import (
    Card,
    Demand,
    Departed,
    Failure,
    Fault,
    Gate,
    Hold,
    Step,
    StepOutcome,
    StepRecord,
    Swap,
    WorkClass,
    World,
)
from tests.support.api import Served, key, served
from workers.control.launcher import stat_of

SWAP = Swap(
    id="sw_1",
    card="gpu0",
    cause="lease ls_1",
    token=7,
    from_=("llama/med",),
    to=(),
    stage=Step.VACATE,
    started_ms=1_900_000_000_000,
    stage_ms=1_900_000_000_100,
    lease="ls_1",
    steps=(StepRecord(Step.SAVE, "llama/med", 1_900_000_000_050, 40, 31.5, StepOutcome.DONE),),
    conversations=(Conversation("llama/med", 0, "a.bin", 4096, 1 << 20, saved=True),),
    outcome="done",
    ended_ms=1_900_000_000_200,
)
HOLDERS = ["llama/med", "pid 12 (ffmpeg (2))", "pid 13", "llama/other"]


@pytest.fixture
async def api() -> AsyncGenerator[Served]:
    async with served() as running:
        yield running


@pytest.fixture
async def http(api: Served) -> AsyncGenerator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(api.url) as session:
        yield session


async def test_health_needs_no_key_and_everything_else_does() -> None:
    async with served((key("ann", "leases"),)) as api, aiohttp.ClientSession(api.url) as http:
        async with http.get("/health") as answer:
            assert (answer.status, await answer.text()) == (200, "OK")
        for path in ("/api/status", "/api/leases", "/ready", "/api/nothing", "/v1/models"):
            async with http.get(path) as answer:
                assert answer.status == 401
                assert answer.headers["WWW-Authenticate"].startswith("Bearer")


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer ann-secret"},
        {"Authorization": "bearer ann-secret"},
        {"x-api-key": "ann-secret"},
        {"Authorization": "Basic YW55Ym9keTphbm4tc2VjcmV0"},
        {"Authorization": "Bearer stale", "x-api-key": "ann-secret"},
    ],
)
async def test_a_key_may_come_as_bearer_header_or_basic_password(headers: dict[str, str]) -> None:
    async with (
        served((key("ann", "leases"),)) as api,
        aiohttp.ClientSession(api.url) as http,
        http.get("/api/leases", headers=headers) as answer,
    ):
        assert answer.status == 200


@pytest.mark.parametrize("value", ["Bearer wrong", "Basic !!", "Basic YQ==", "Digest x", "Bearer ", "Bearer \xe9"])
async def test_a_wrong_key_is_401(value: str) -> None:
    async with (
        served((key("ann", "leases"),)) as api,
        aiohttp.ClientSession(api.url) as http,
        http.get("/api/status", headers={"Authorization": value}) as answer,
    ):
        assert answer.status == 401


async def test_a_key_without_the_scope_is_403_in_the_style_of_the_path() -> None:
    keys = (key("chat", "models"), key("ann", "leases"))
    async with served(keys) as api, aiohttp.ClientSession(api.url) as http:
        async with http.post("/api/leases", json={}, headers={"x-api-key": "chat-secret"}) as answer:
            assert (answer.status, answer.content_type) == (403, "application/problem+json")
        async with http.get("/v1/models", headers={"x-api-key": "ann-secret"}) as answer:
            assert answer.status == 403
            assert (await answer.json())["error"]["type"] == "permission_error"


@pytest.mark.parametrize(
    ("method", "path", "scope"),
    [
        ("POST", "/api/leases", "leases"),
        ("GET", "/api/status", None),
        ("GET", "/metrics", None),
        ("POST", "/api/cards/gpu0/vacate", "admin"),
        ("POST", "/api/models/med/load", "models"),
        ("POST", "/v1/chat/completions", "models"),
        ("GET", "/apiary", "models"),
    ],
)
def test_every_path_has_its_scope(method: str, path: str, scope: str | None) -> None:
    assert scope_needed(method, path) == scope


async def test_without_keys_a_web_page_of_elsewhere_may_not_act(api: Served, http: aiohttp.ClientSession) -> None:
    async with http.post("/api/leases", json={}, headers={"Origin": "http://evil.example"}) as answer:
        assert (answer.status, (await answer.json())["type"]) == (403, "urn:swapper:cross-origin")
    async with http.post("/api/leases", json={}, headers={"Origin": api.url}) as answer:
        assert answer.status == 201


async def test_an_unknown_path_is_a_problem_or_an_envelope(http: aiohttp.ClientSession) -> None:
    async with http.get("/api/nothing") as answer:
        assert (answer.status, (await answer.json())["type"]) == (404, "urn:swapper:not-found")
    async with http.put("/api/leases") as answer:
        assert (answer.status, (await answer.json())["status"]) == (405, 405)
        assert "GET" in answer.headers["Allow"]
    async with http.get("/v2/else") as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (404, "not_found")


def told(name: str, pid: int | None, **traits: object) -> dict[str, object]:
    """A holder; without further words it is foreign."""
    known = {"name": name, "pid": pid, "mib": None, "container": None, "tenant": None, "lease": None, "foreign": True}
    return known | traits


async def test_the_status_tells_cards_tenants_leases_and_demand(api: Served, http: aiohttp.ClientSession) -> None:
    api.live.tenants["llama/med"] = "loaded"
    api.live.cards["gpu0"] = {"total_mib": 24576, "used_mib": 6144, "free_mib": 18432, "holders": HOLDERS}
    unsaved = Demand("g1", "llama/med", WorkClass.BATCH, 0, 0, None, unsaved=True)
    calls = Demand("g1", "llama/med", WorkClass.INTERACTIVE, 2, 1, 5_000)
    await api.store.beat("g1", (unsaved, calls), ttl_ms=60_000)
    card = Card(
        "gpu0",
        residents=("llama/med",),
        holds=(Hold("ls_1", "encode", 2048, None, granted=True),),
        departed=(Departed("ls_0", "gone", 12, free_ms=0),),
    )
    commit = Commit(cards=(card,), swaps=(SWAP,), gates={"llama/med": Gate(3, open=True)})
    assert await api.store.commit(commit) == Committed()
    async with http.post("/api/leases", json={"label": "next"}) as answer:
        lease = await answer.json()
    async with http.get("/api/status") as answer:
        status = await answer.json()
    gpu0, gpu1 = status["cards"]
    assert (gpu0["name"], gpu0["phase"], gpu0["residents"], gpu0["capacity_mib"]) == (
        "gpu0",
        "steady",
        ["llama/med"],
        24 * 1024 - 512 - 2048,
    )
    assert gpu0["vram"] == {"total_mib": 24576, "used_mib": 6144, "free_mib": 18432}
    assert gpu0["holders"] == [
        told("llama/med", None, tenant="llama/med", foreign=False),
        told("ffmpeg (2)", 12, lease="ls_0", foreign=False),
        told("pid 13", 13),
        told("llama/other", None),
    ]
    assert gpu1["vram"] == {"total_mib": 8192, "used_mib": None, "free_mib": None}
    assert [(found["id"], found["position"]) for found in status["leases"]] == [(lease["id"], 1)]
    assert status["queued"] == 1
    med = status["tenants"][0]
    assert (med["state"], med["resident"], med["open"], med["strategy"]) == ("loaded", True, True, None)
    assert med["conversations"][0]["tokens"] == 4096
    demand = status["demand"][0]
    assert (demand["tenant"], demand["class"], demand["waiting"]) == ("llama/med", "interactive", 2)
    assert "llama/med" in demand["explain"]
    async with http.get("/api/cards/gpu0") as answer:
        one = await answer.json()
    assert one["phase"] == "steady"
    assert [tenant["id"] for tenant in one["tenants"]] == ["llama/med", "frigate"]
    async with http.get("/api/cards/gpu7") as answer:
        assert answer.status == 404


async def test_a_swap_is_told_with_its_steps_and_conversations(api: Served, http: aiohttp.ClientSession) -> None:
    assert await api.store.commit(Commit(swaps=(SWAP,))) == Committed()
    async with http.get("/api/swaps?limit=5") as answer:
        (listed,) = (await answer.json())["items"]
    async with http.get("/api/swaps/sw_1") as answer:
        assert await answer.json() == {**listed, "state": "done", "explain": None}
    assert (listed["from"], listed["to"], listed["outcome"], listed["overhead_ms"]) == (["llama/med"], [], "done", 200)
    step = listed["steps"][0]
    assert (step["step"], step["tenant"], step["ms"], step["backend_ms"]) == ("save", "llama/med", 40, 31.5)
    talk = listed["conversations"][0]
    assert (talk["model"], talk["saved"], talk["restored"], talk["result"]) == ("llama/med", True, False, None)
    async with http.get("/api/swaps/sw_2") as answer:
        assert answer.status == 404
        kept = "one that moved no model is kept only while it runs"
        assert (await answer.json())["detail"] == f"There is no swap 'sw_2'; {kept}."


async def test_what_a_card_is_at_can_be_asked_for_though_it_moves_nobody_and_will_be_on_no_record(
    api: Served, http: aiohttp.ClientSession
) -> None:
    tending = Swap("sw_3", "gpu0", "conversation of llama/med", 9, (), (), Step.RESTORE, 0, 0, tends="llama/med")
    await api.commit_card(Card("gpu0", residents=("llama/med",), swap=tending))
    async with http.get("/api/cards/gpu0") as answer:
        named = (await answer.json())["swap"]["id"]
    async with http.get(f"/api/swaps/{named}") as answer:
        assert (answer.status, (await answer.json())["cause"]) == (200, "conversation of llama/med")
    async with http.get("/api/swaps") as answer:
        assert (await answer.json())["items"] == []


async def test_ready_tells_why_not(api: Served, http: aiohttp.ClientSession) -> None:
    async with http.get("/ready") as answer:
        assert answer.status == 200
    async with http.get("/ready?model=med") as answer:
        assert (answer.status, (await answer.json())["reasons"]) == (503, ["llama/med is not observed yet"])
    api.live.tenants["llama/med"] = "loaded"
    async with http.get("/ready?model=llama/med") as answer:
        assert (await answer.json())["reasons"] == ["llama/med is loaded, but its gate is closed"]
    assert await api.store.commit(Commit(gates={"llama/med": Gate(1, open=True)})) == Committed()
    async with http.get("/ready?model=med") as answer:
        assert answer.status == 200
    async with http.get("/ready?model=none") as answer:
        assert answer.status == 404
    api.live.wrong.append("the agent of main is silent")
    async with http.get("/ready") as answer:
        assert (answer.status, (await answer.json())["reasons"]) == (503, ["the agent of main is silent"])


async def test_ready_does_not_say_so_while_the_store_is_down(api: Served, http: aiohttp.ClientSession) -> None:
    api.live.tenants["llama/med"] = "loaded"
    api.redis.connected = False
    for path in ("/ready", "/ready?model=med"):
        async with http.get(path) as answer:
            (reason,) = (await answer.json())["reasons"]
            assert (answer.status, reason.startswith("the store does not answer: ")) == (503, True)


async def test_ready_does_not_wait_long_for_a_store_that_hangs(
    api: Served, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang() -> World:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(status, "READY_S", 0.01)
    monkeypatch.setattr(api.store, "read", hang)
    async with http.get("/ready") as answer:
        assert (answer.status, (await answer.json())["reasons"]) == (503, ["the store did not answer within 0.01 s"])


async def test_a_fault_is_a_problem_and_no_card_without_one_is_not_ready(
    api: Served, http: aiohttp.ClientSession
) -> None:
    said = [f"{card} is at fault: held by pid 12 (ffmpeg)" for card in ("gpu0", "gpu1")]
    for known, ready in ((said[:1], []), (said, said)):
        await api.commit_card(Card(f"gpu{len(known) - 1}", fault=Fault("held by pid 12 (ffmpeg)", 1024, 0)))
        async with http.get("/api/status") as answer:
            assert (await answer.json())["problems"] == known
        async with http.get("/ready") as answer:
            assert (answer.status, (await answer.json())["reasons"]) == (503 if ready else 200, ready)


@pytest.mark.parametrize(("tenant", "owed"), [("llama/med", False), ("frigate", True), ("frigate", False)])
async def test_who_cannot_be_loaded_is_a_problem_with_its_reason_and_not_ready_where_it_should_be_there(
    api: Served, http: aiohttp.ClientSession, tenant: str, owed: bool
) -> None:
    """It should be if it is a default, or if it was there before a lease."""
    expected = owed or tenant == "llama/med"
    failure = Failure("--slot-save-path: not a directory", 2, 4_000_000_000_000)
    return_to = (tenant,) if owed else None
    await api.commit_card(Card("gpu0", failed={tenant: failure}, return_to=return_to))
    when = "(tried 2 times, again from 2096-10-02T07:06:40.000Z on)"
    said = [f"{tenant} cannot be loaded: --slot-save-path: not a directory {when}"]
    async with http.get("/api/status") as answer:
        assert (await answer.json())["problems"] == said
    async with http.get("/ready") as answer:
        assert (answer.status, (await answer.json())["reasons"]) == ((503, said) if expected else (200, []))


async def next_messages(answer: aiohttp.ClientResponse, count: int) -> list[Message]:
    found: list[Message] = []
    async for message in messages(answer.content):
        found.append(message)
        if len(found) == count:
            break
    return found


async def test_events_arrive_as_they_happen_and_resume_where_they_stopped(
    api: Served, http: aiohttp.ClientSession
) -> None:
    async with http.get("/api/events") as answer:
        assert answer.content_type == "text/event-stream"
        async with http.post("/api/leases", json={"label": "one"}) as asked:
            lease = await asked.json()
        await api.grant(lease["id"])
        queued, granted = await next_messages(answer, 2)
    assert (queued.event, granted.event) == ("lease", "lease")
    assert f'"id": "{lease["id"]}"' in granted.data
    assert '"state": "granted"' in granted.data
    assert await api.store.commit(Commit(cards=(Card("gpu0"),), swaps=(SWAP,))) == Committed()
    async with http.get("/api/events", headers={"Last-Event-ID": queued.id}) as answer:
        again, card, swap = await next_messages(answer, 3)
    assert again == granted
    assert (card.event, swap.event) == ("card", "swap")
    assert '"state": "steady"' in card.data
    assert '"state": "done"' in swap.data


async def test_gates_and_conversations_are_told_with_the_names_of_the_other_routes(
    api: Served, http: aiohttp.ClientSession
) -> None:
    commit = Commit(gates={"llama/med": Gate(2, open=True)}, conversations=SWAP.conversations)
    assert await api.store.commit(commit) == Committed()
    async with http.get("/api/events", headers={"Last-Event-ID": "0"}) as answer:
        gate, talk = [(message.event, json.loads(message.data)) for message in await next_messages(answer, 2)]
    assert gate == ("tenant", {"id": "llama/med", "state": "open", "epoch": 2})
    (kept,) = SWAP.conversations
    same = conversation_json(kept)
    assert same["model"] == "llama/med"
    assert talk == ("conversation", {"id": "a.bin", "state": "saved", **same, "version": 0})


async def test_the_process_a_lease_names_is_not_foreign(api: Served, http: aiohttp.ClientSession) -> None:
    async with http.post("/api/leases", json={"card": "gpu0", "holder_pid": os.getpid()}) as answer:
        lease = await answer.json()
    api.live.cards["gpu0"] = {"holders": [f"pid {os.getpid()} (blender)"]}
    await api.grant(lease["id"])
    async with http.get("/api/cards/gpu0") as answer:
        holders = (await answer.json())["holders"]
    assert holders == [told("blender", os.getpid(), lease=lease["id"], foreign=False)]


async def test_a_measured_process_is_its_tenant_s_its_lease_s_or_foreign(
    api: Served, http: aiohttp.ClientSession
) -> None:
    async with http.post("/api/leases", json={"card": "gpu0", "holder_pid": os.getpid()}) as answer:
        lease = (await answer.json())["id"]
    await api.grant(lease)
    stat = stat_of(os.getpid())
    assert stat is not None
    ours, box = [os.getpid(), stat[3]], "ab" * 32
    api.live.cards["gpu0"] = {
        "holders": ["words"],
        "held": [
            {"pid": 7, "mib": 6_000, "name": "llama-server", "line": [[7, 1]], "containers": [], "owner": "llama/med"},
            {"pid": 8, "mib": None, "name": "sh", "line": [[8, 1]], "containers": [], "owner": "llama"},
            {"pid": 9, "mib": 300, "name": "ffmpeg", "line": [[9, 5], [10, 4], ours], "containers": [], "owner": None},
            {"pid": 11, "mib": 40, "name": "x", "line": [[11, 5], [ours[0], ours[1] - 1]], "owner": None},
            {"pid": 12, "mib": 70, "name": "python", "line": [], "containers": ["cd" * 32, box], "owner": None},
        ],
        "pool": "vram",
    }
    async with http.get("/api/cards/gpu0") as answer:
        card = await answer.json()
    assert card["holders"] == [
        told("llama/med", 7, mib=6_000, tenant="llama/med", foreign=False),
        told("llama", 8, foreign=False),
        told("ffmpeg", 9, mib=300, lease=lease, foreign=False),
        told("x", 11, mib=40),
        told("python", 12, mib=70, container=box),
    ]
    assert card["probe"] == {"pool": "vram", "note": None, "unread": None}
    async with http.get("/metrics") as answer:
        assert 'swapper_vram_bytes{card="gpu0",kind="foreign"} 1.1534336e+08' in await answer.text()


async def test_a_card_that_cannot_be_read_says_why_and_tells_no_older_figures(
    api: Served, http: aiohttp.ClientSession
) -> None:
    api.live.cards["gpu0"] = {"unread": "the NVIDIA driver is not loaded; load it"}
    async with http.get("/api/cards/gpu0") as answer:
        card = await answer.json()
    assert card["vram"] == {"total_mib": 24 * 1024, "used_mib": None, "free_mib": None}
    assert card["probe"]["unread"] == "the NVIDIA driver is not loaded; load it"


async def test_events_without_following_end_with_what_is_retained(http: aiohttp.ClientSession) -> None:
    for _ in range(2):
        await (await http.post("/api/leases", json={})).read()
    async with http.get("/api/events?follow=0&since=0") as answer:
        assert (await answer.text()).count("event: lease\n") == 2


async def test_who_asks_for_the_heads_of_the_events_gets_them_and_the_next_answer(api: Served) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(api.url.rpartition(":")[2]))
    writer.write(
        b"HEAD /api/events HTTP/1.1\r\nHost: x\r\n\r\nGET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    )
    async with asyncio.timeout(20):
        heads, rest = (await reader.read()).split(b"\r\n\r\n", 1)
    writer.close()
    assert b"text/event-stream" in heads
    assert rest.startswith(b"HTTP/1.1 200 OK\r\n")
    assert rest.endswith(b"\r\n\r\nOK")


@pytest.mark.parametrize("text", ["yesterday", "99999999999999999999-1", "1-18446744073709551616", "1-2-3", "-1"])
async def test_a_bad_event_id_is_422(http: aiohttp.ClientSession, text: str) -> None:
    async with http.get("/api/events", headers={"Last-Event-ID": text}) as answer:
        assert answer.status == 422
    async with http.get("/api/events", params={"since": text, "follow": "0"}) as answer:
        assert answer.status == 422


async def test_the_highest_event_id_there_can_be_is_one(http: aiohttp.ClientSession) -> None:
    highest = f"{2**64 - 1}-{2**64 - 1}"
    async with http.get("/api/events", params={"since": highest, "follow": "0"}) as answer:
        assert (answer.status, await answer.text()) == (200, ": swapper events\n\n")


async def test_a_silent_stream_is_kept_alive_by_comments() -> None:
    async with (
        served(keepalive_s=0.01) as api,
        aiohttp.ClientSession(api.url) as http,
        http.get("/api/events") as answer,
    ):
        lines = [await answer.content.readuntil(b"\n\n") for _ in range(3)]
    assert lines[1:] == [b": keepalive\n\n"] * 2


async def test_a_server_that_stops_ends_waits_and_streams() -> None:
    async with served() as api, aiohttp.ClientSession(api.url) as http:
        async with http.post("/api/leases", json={}) as answer:
            lease = await answer.json()
        async with http.get("/api/events") as stream:
            waiting = asyncio.create_task(http.get(f"/api/leases/{lease['id']}?wait=60"))
            await api.ctx.tail.end()
            await api.ctx.close()
            async with await waiting as answer:
                assert (await answer.json())["state"] == "queued"
            assert await stream.content.read() == b": swapper events\n\n"


def test_lease_ids_sort_by_time() -> None:
    drawn = [lease_id(ms) for ms in (1, 2, 1_900_000_000_000, 1_900_000_000_001)]
    assert drawn == sorted(drawn)
    assert len({lease_id(5) for _ in range(100)}) == 100
