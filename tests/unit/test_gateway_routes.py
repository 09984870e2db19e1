"""Every path that is a call of a model: where it goes, what reaches the server, and how the model is found in it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace

import pytest
from aiohttp import web
from yarl import URL

from swapper.gateway.routes import GET, POST
from tests.unit.gateway_doubles import ALPHA, CHAT, Served, keyed, plain, serve

FORM = "multipart/form-data; boundary=edge"


def form(*parts: tuple[str, bytes], edge: bytes = b"edge") -> bytes:
    head = b'--%s\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n'
    return b"".join(head % (edge, name.encode(), data) for name, data in parts) + b"--%s--\r\n" % edge


async def send(served: Served, method: str, path: str, body: bytes = b"", kind: str = "application/json") -> int:
    async with served.client.request(
        method, URL(served.url + path, encoded=True), data=body, headers={"Content-Type": kind}
    ) as response:
        await response.read()
        return response.status


@pytest.mark.parametrize("path", POST)
async def test_a_posted_call_goes_up_as_it_came_under_the_servers_own_path(path: str) -> None:
    async with serve() as served:
        body = b'{"model": "alpha", "input":  "x"}'
        assert await send(served, "POST", path, body) == 200
        [seen] = served.upstream.seen
        wanted = path.removeprefix("/audioapi").removeprefix("/v/") if path.startswith(("/v/", "/audioapi")) else path
        assert (seen.method, seen.path, seen.body) == ("POST", "/" + wanted.lstrip("/"), body)
        assert seen.query == {"autoload": "false"}


@pytest.mark.parametrize("path", sorted(GET.keys() - {"/props", "/slots"}))
async def test_a_look_names_its_model_in_the_query(path: str) -> None:
    async with serve() as served:
        assert await send(served, "GET", f"{path}?model=gpt-4o&more=%2F") == 200
        [seen] = served.upstream.seen
        assert (seen.method, seen.path, seen.body) == ("GET", path, b"")
        assert seen.query == {"model": "alpha", "more": "/", "autoload": "false"}


async def test_a_look_without_a_model_or_with_two_is_refused_in_words() -> None:
    async with serve() as served:
        async with served.client.get(served.url + "/props") as response:
            assert response.status == 404
            assert "/props?model=NAME" in (await response.json())["error"]["message"]
        assert await send(served, "GET", "/props?model=alpha&model=beta") == 400
        assert served.upstream.seen == []


async def test_a_forms_model_is_found_and_its_alias_changed_in_place() -> None:
    async with serve() as served:
        sound = bytes(range(256)) + b"\r\n--edg"
        parts = (("file", sound), ("model", b"gpt-4o"), ("language", "grüß".encode()))
        assert await send(served, "POST", "/v1/audio/transcriptions", form(*parts), FORM) == 200
        [seen] = served.upstream.seen
        assert seen.body == form(("file", sound), ("model", b"alpha"), parts[2])
        assert seen.headers["Content-Type"] == FORM


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (form(("model", b"alpha"), ("model", b"beta")), "names its model twice"),
        (form(("file", b"x")), "names no model"),
        (form(("model", b"x" * 5000)), "too long"),
        (form(("model", b"alpha"))[:-9], "not the form"),
        (form(("model", b"alpha"), edge=b"other"), "not the form"),
        (form(("model", b"\xff")), "not UTF-8"),
    ],
)
async def test_a_form_that_can_be_read_in_two_ways_or_in_none_is_refused(body: bytes, said: str) -> None:
    async with serve() as served:
        async with served.client.post(
            served.url + "/v1/images/edits", data=body, headers={"Content-Type": FORM}
        ) as response:
            assert response.status == 400
            assert said in (await response.json())["error"]["message"]
        assert served.upstream.seen == []


async def test_what_only_asks_leaves_the_conversations_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serve() as served:
        heard: list[str] = []

        def answered(*_: object) -> None:
            heard.append("answered")

        monkeypatch.setattr(served.member.talks, "answered", answered)
        await send(served, "POST", "/tokenize", json.dumps(CHAT).encode())
        await send(served, "GET", "/upstream/alpha/metrics")
        assert heard == []
        await send(served, "POST", "/v1/embeddings", json.dumps(CHAT).encode())
        assert heard == ["answered"]


# ---- /upstream


@pytest.mark.parametrize(
    ("asked", "path", "query"),
    [
        ("/upstream/alpha/health", "/health", {}),
        ("/upstream/gpt-4o/a%2Fb/c%20d?x=%26&y", "/a%2Fb/c%20d", {"x": "&", "y": ""}),
        ("/upstream/org/big:Q4_K_M/", "/", {}),
        ("/upstream/org%2Fbig:Q4_K_M/slots", "/slots", {}),
        ("/upstream/alpha/alpha//x/../y", "//x/../y", {}),
        ("/upstream/%61lpha/health", "/health", {}),
    ],
)
async def test_the_longest_name_is_the_model_and_the_rest_goes_up_as_it_came(
    asked: str, path: str, query: Mapping[str, str]
) -> None:
    async with serve() as served:
        served.ctx.targets = {ALPHA: replace(served.ctx.targets[ALPHA], router=False)}
        served.ctx.names = dict.fromkeys((*served.ctx.names, "org/big:Q4_K_M", "alpha/alpha", "org"), ALPHA)
        assert await send(served, "DELETE", asked) == 200
        [seen] = served.upstream.seen
        assert (seen.method, seen.raw_path, seen.query, seen.body) == ("DELETE", path, query, b"")


async def test_a_servers_page_may_come_packed_and_an_answer_comes_as_it_is() -> None:
    async with serve() as served:
        packs = {"Accept-Encoding": "gzip, br"}
        await (await served.client.get(served.url + "/upstream/alpha/", headers=packs)).read()
        await served.call(CHAT, "/upstream/alpha/v1/chat/completions", headers=packs)
        await served.call(CHAT, headers=packs)
        assert [one.headers["Accept-Encoding"] for one in served.upstream.seen] == ["gzip, br", "identity", "identity"]


async def test_a_servers_page_gets_its_slash_and_an_unknown_model_a_sentence() -> None:
    async with serve() as served:
        for method, status in (("GET", 301), ("POST", 308)):
            async with served.client.request(
                method, URL(served.url + "/upstream/alpha?x=%0a%23", encoded=True), allow_redirects=False
            ) as response:
                assert (response.status, response.headers["Location"]) == (status, "/upstream/alpha/?x=%0a%23")
        async with served.client.get(served.url + "/upstream/alpa/health") as response:
            assert response.status == 404
            assert "alpa" in (await response.json())["error"]["message"]
        assert served.upstream.seen == []


async def test_a_body_through_a_router_names_the_model_and_any_other_body_goes_up_as_it_is() -> None:
    async with serve() as served:
        await send(served, "POST", "/upstream/gpt-4o/v1/chat/completions", b'{"n": 1.0e5,"messages":[]}')
        await send(served, "POST", "/upstream/alpha/anything", b"not json at all")
        one, other = served.upstream.seen
        assert json.loads(one.body) == {"n": 1e5, "messages": [], "model": "alpha"}
        assert b"1.0e5" in one.body
        assert (other.body, other.query) == (b"not json at all", {"model": "alpha", "autoload": "false"})


CONTROLS = (
    ("POST", "/slots/0?action=erase"),
    ("POST", "/slots%2F0"),
    ("POST", "//slots/0"),
    ("POST", "/lora-adapters"),
    ("POST", "/props"),
    ("POST", "/v1/../slots/0"),
    ("POST", "/v1/unload_lora_adapter"),
    ("DELETE", "/api/delete"),
)
"""They change slots, or what is loaded: each kind has some."""


@pytest.mark.parametrize(("method", "path"), CONTROLS)
async def test_what_may_change_a_server_is_the_administrators(method: str, path: str) -> None:
    for scopes, status in ((("models",), 403), (("models", "admin"), 200)):
        async with serve(middleware=keyed(scopes=frozenset(scopes))) as served:
            assert await send(served, method, f"/upstream/alpha{path}", b"{}") == status
            assert len(served.upstream.seen) == (0 if status == 403 else 1)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/completion", "/tokenize"])
async def test_work_at_a_models_own_server_needs_no_more_than_work_elsewhere(path: str) -> None:
    async with serve(middleware=keyed(scopes=frozenset({"models"}))) as served:
        assert await send(served, "POST", f"/upstream/alpha{path}", b"{}") == 200
        assert await send(served, "GET", "/upstream/alpha/metrics") == 200


async def test_a_look_at_a_server_of_several_models_may_unload_one_there() -> None:
    """llama-swap's `GET /unload`."""
    async with serve(middleware=keyed(scopes=frozenset({"models"}))) as served:
        served.ctx.targets = {ALPHA: replace(served.ctx.targets[ALPHA], router=False, slots=False)}
        assert await send(served, "GET", "/upstream/alpha/unload") == 403
        assert await send(served, "GET", "/upstream/alpha/v1/models") == 200


@pytest.mark.parametrize("several", [True, False])
async def test_of_a_server_with_several_models_none_but_the_one_asked_for_is_named(several: bool) -> None:
    """It would load the other, whatever has the card; one with its own names for adapters gets what was written."""
    async with serve() as served:
        other = replace(served.ctx.targets[ALPHA], router=False, slots=False, several=several)
        served.ctx.targets = {ALPHA: other}
        await send(served, "POST", "/upstream/alpha/v1/chat/completions", b'{"model":"beta"}')
        await send(served, "POST", "/upstream/alpha/v1/audio/transcriptions", form(("model", b"beta")), FORM)
        named = b"alpha" if several else b"beta"
        chat, sound = served.upstream.seen
        assert json.loads(chat.body) == {"model": named.decode()}
        assert sound.body == form(("model", named))


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "alpha", "MODEL": "beta"}',
        b'{"Model": "beta", "model": "alpha"}',
        b'{"model": "alpha", "mod\\u0045l": "beta"}',
        b'{"model": "beta", "model": "alpha"}',
    ],
)
async def test_a_server_that_takes_other_letters_for_the_same_reads_no_other_model(body: bytes) -> None:
    """Those written in Go do, and load what they read."""
    async with serve() as served:
        served.ctx.targets = {ALPHA: replace(served.ctx.targets[ALPHA], router=False, slots=False)}
        assert await send(served, "POST", "/v1/chat/completions", body) == 200
        assert json.loads(served.upstream.seen[0].body) == {"model": "alpha"}


async def test_nobody_loads_unloads_or_reloads_a_routers_models_through_it() -> None:
    async with serve() as served:
        assert await send(served, "POST", "/upstream/alpha/models/unload", b'{"model": "alpha"}') == 403
        assert await send(served, "POST", "/upstream/alpha//models/load", b'{"model": "beta"}') == 403
        assert served.upstream.seen == []
        await send(served, "GET", "/upstream/alpha/v1/models?reload=1&x=2")
        assert served.upstream.seen[0].query == {"x": "2", "model": "alpha", "autoload": "false"}


async def test_of_an_answers_headers_none_acts_for_swappers_own_pages() -> None:
    async def script(request: web.Request) -> web.StreamResponse:
        theirs = {"Set-Cookie": "a=b", "Service-Worker-Allowed": "/", "Clear-Site-Data": "*", "X-Swapper-Swap": "sw_1"}
        return web.Response(text="page", headers={**theirs, "X-Kept": "1"})

    async with serve() as served:
        served.upstream.scripts = [script]
        async with served.client.get(served.url + "/upstream/alpha/") as response:
            kept = {*response.headers}
        assert "X-Kept" in kept
        assert not {"Set-Cookie", "Service-Worker-Allowed", "Clear-Site-Data", "X-Swapper-Swap"} & kept


async def test_a_call_of_a_models_own_server_waits_for_the_card_like_any_other() -> None:
    async with serve(opened=False) as served:
        served.upstream.scripts = [plain("its page", 200)]
        async with served.client.get(served.url + "/running") as response:
            assert await response.json() == {"running": []}
        page = asyncio.create_task(send(served, "GET", "/upstream/alpha/"))
        await served.waiting(1)
        served.admission.open(ALPHA, 2)
        assert await page == 200
        assert served.upstream.seen[0].path == "/"
        async with served.client.get(served.url + "/running") as response:
            [line] = (await response.json())["running"]
            assert (line["model"], line["state"], line["proxy"]) == ("alpha", "ready", served.upstream.url)
