"""Which pages of a browser may call models, and what the others get although they do not ask."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from aiohttp import web

from swapper.gateway.origins import Origins, origins_of
from tests.unit.gateway_doubles import ALPHA, CHAT, STREAM, Served, Stream, event, keyed, serve
from tests.unit.test_config import GOOD, parsed, problems

OURS = ("127.0.0.1:9292",)
ASKS = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,x-stainless-os"}
EVIL = "https://evil.example"
NEAR = "http://localhost:3000"


@pytest.mark.parametrize(
    ("origin", "hosts", "admitted"),
    [
        (NEAR, OURS, True),
        ("http://127.0.0.1:8080", OURS, True),
        ("http://[::1]:8080", OURS, True),
        ("https://chat.localhost", OURS, True),
        ("http://nas.lan:3000", ("nas.lan:9292",), True),
        ("http://192.168.1.5", ("192.168.1.5:9292",), True),
        ("https://ai.example.com", ("127.0.0.1:9292", "ai.example.com"), True),
        ("app://obsidian.md", OURS, True),
        ("chrome-extension://abcdef", OURS, True),
        (EVIL, OURS, False),
        ("http://nas.lan:3000", OURS, False),
        ("http://localhost.evil.example", OURS, False),
        ("http://evil.example:9292", OURS, False),
        ("null", OURS, False),
        ("", OURS, False),
        ("http://[", OURS, False),
    ],
)
def test_without_keys_pages_of_this_machine_and_of_the_host_they_call_are_admitted(
    origin: str, hosts: tuple[str, ...], admitted: bool
) -> None:
    assert origins_of(("auto",), keyed=False).admit(origin, hosts) is admitted


@pytest.mark.parametrize(
    ("written", "has_keys", "admitted"),
    [
        (("auto",), True, {EVIL, NEAR, "null"}),
        (("any",), False, {EVIL, NEAR, "null"}),
        (("none",), False, set[str]()),
        (("none",), True, set[str]()),
        (("https://Chat.example:443/",), False, {"https://chat.example", NEAR}),
        (("none", "https://chat.example"), True, {"https://chat.example", NEAR}),
    ],
)
def test_what_is_written_decides(written: tuple[str, ...], has_keys: bool, admitted: set[str]) -> None:
    found = origins_of(written, keyed=has_keys)
    pages = (EVIL, NEAR, "null", "https://chat.example")
    wanted = admitted | ({"https://chat.example"} if EVIL in admitted else set[str]())
    assert {page for page in pages if found.admit(page, OURS)} == wanted
    assert found.admit("http://127.0.0.1:9292", OURS)  # a server's own page


@pytest.mark.parametrize(
    ("written", "cors"),
    [
        ("auto", ("auto",)),
        ("'*'", ("any",)),
        ("https://chat.example/", ("https://chat.example",)),
        ("[local, https://chat.example]", ("local", "https://chat.example")),
    ],
)
def test_pages_are_configured_as_words_or_by_their_address(written: str, cors: tuple[str, ...]) -> None:
    assert parsed(GOOD + f"gateway: {{cors: {written}}}\n").gateway.cors == cors


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("lokal", "did you mean local?"),
        ("chat.example", "like https://chat.example.org"),
        ("https://chat.example/page", "without a path"),
        ("[https://*.example]", "without a path"),
        ("null", "None is none of auto, local, any, none"),
    ],
)
def test_what_is_no_page_is_refused(written: str, said: str) -> None:
    [problem] = problems(GOOD + f"gateway: {{cors: {written}}}\n")
    assert said in problem


# ---- through the gateway


async def asked(served: Served, method: str, path: str, headers: Mapping[str, str]) -> tuple[int, Mapping[str, str]]:
    async with served.client.request(method, served.url + path, headers=headers) as response:
        await response.read()
        return response.status, response.headers


async def test_what_a_browser_asks_before_a_call_is_answered_without_a_key_and_brings_no_model() -> None:
    @web.middleware
    async def locked(request: web.Request, handler: object) -> web.StreamResponse:
        raise web.HTTPUnauthorized

    async with serve(opened=False, middleware=locked, pages=origins_of(("auto",), keyed=True)) as served:
        for path in ("/v1/chat/completions", "/upstream/alpha/v1/chat/completions", "/v1/models"):
            status, headers = await asked(served, "OPTIONS", path, {"Origin": EVIL, **ASKS})
            assert status == 204
            assert headers["Access-Control-Allow-Origin"] == "*"
            assert headers["Access-Control-Allow-Headers"] == ASKS["Access-Control-Request-Headers"]
            assert "POST" in headers["Access-Control-Allow-Methods"]
            assert "Access-Control-Allow-Credentials" not in headers
        assert served.admission.demand() == ()
        status, headers = await asked(served, "GET", "/v1/models", {"Origin": EVIL})
        assert (status, headers["Access-Control-Allow-Origin"]) == (401, "*")  # so that the page can say so


async def test_a_page_of_this_machine_reads_answers_streams_and_refusals_and_no_other_page_does() -> None:
    async with serve(pages=Origins()) as served:
        stream = Stream().put(event("{}"), None)
        served.upstream.scripts = [stream]
        async with served.post(STREAM, headers={"Origin": NEAR}) as response:
            assert response.headers["Access-Control-Allow-Origin"] == NEAR
            assert response.headers["Vary"] == "Origin"
            assert "X-Swapper-Wait-Ms" in response.headers["Access-Control-Expose-Headers"]
        refused = await served.call({"model": "nobody"}, headers={"Origin": NEAR})
        assert (refused.status, refused.headers["Access-Control-Allow-Origin"]) == (404, NEAR)


@pytest.mark.parametrize(
    "page",
    [
        {"Origin": EVIL},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Referer": f"{EVIL}/page"},
    ],
)
async def test_a_page_from_elsewhere_gets_nothing_done_where_no_key_is_needed(page: Mapping[str, str]) -> None:
    async with serve(opened=False, pages=Origins()) as served:
        calls = [("POST", "/v1/chat/completions"), ("GET", "/upstream/alpha/x"), ("GET", "/props?model=alpha")]
        for method, path in calls:
            status, headers = await asked(served, method, path, page)
            assert status == 403
            assert "Access-Control-Allow-Origin" not in headers
        assert (await asked(served, "OPTIONS", "/v1/chat/completions", {**page, "Origin": EVIL, **ASKS}))[0] == 403
        assert served.admission.demand() == ()


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Origin": NEAR},
        {"Sec-Fetch-Site": "none"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Referer": f"{NEAR}/page"},
    ],
)
async def test_programs_links_and_near_pages_get_through(headers: Mapping[str, str]) -> None:
    async with serve(pages=Origins()) as served:
        assert (await asked(served, "GET", "/upstream/alpha/x", headers))[0] == 200


async def test_where_a_key_is_needed_it_decides_and_not_the_page() -> None:
    pages = origins_of(("none",), keyed=True)
    async with serve(middleware=keyed(owner="ann"), pages=pages) as served:
        answer = await served.call(CHAT, headers={"Origin": EVIL})
        assert (answer.status, "Access-Control-Allow-Origin" in answer.headers) == (200, False)


async def test_who_may_read_is_said_here_and_not_by_the_server_which_is_not_told_whose_page_it_is() -> None:
    """llama-server lets the page of any Origin read."""

    async def open_to_all(request: web.Request) -> web.StreamResponse:
        return web.json_response({}, headers={"Access-Control-Allow-Origin": request.headers.get("Origin", "*")})

    async with serve(middleware=keyed(owner="ann"), pages=origins_of(("none",), keyed=True)) as served:
        served.upstream.scripts = [open_to_all]
        answer = await served.call(CHAT, headers={"Origin": EVIL})
        assert "Access-Control-Allow-Origin" not in answer.headers
        assert "Origin" not in served.upstream.seen[-1].headers


async def test_the_administration_is_not_spoken_for() -> None:
    async with serve(pages=origins_of(("any",), keyed=False)) as served:
        for path in ("/api/leases", "/api/models/alpha/unload", "/metrics", "/ui/"):
            _, headers = await asked(served, "OPTIONS", path, {"Origin": EVIL, **ASKS})
            assert "Access-Control-Allow-Origin" not in headers
        assert served.admission.gate(ALPHA).open


async def test_options_that_no_browser_asks_are_answered_as_llama_swap_does_but_for_a_models_own_server() -> None:
    async with serve(pages=Origins()) as served:
        assert (await asked(served, "OPTIONS", "/v1/models", {}))[0] == 204
        assert (await asked(served, "OPTIONS", "/upstream/alpha/x", {}))[0] == 200
        assert served.upstream.seen[-1].method == "OPTIONS"
