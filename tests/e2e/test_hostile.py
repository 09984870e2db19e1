"""Requests that are meant to hurt, on bare sockets to a real serve: refused in words, nothing smuggled, nothing broken.

Each is followed by a good one on its connection, where that still stands, and on one of its own.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import suppress

import pytest
import pytest_asyncio

from tests.support.liar import Heard
from tests.support.liedserve import GOOD, Attacked, attacked
from tests.support.wire import Got, request, wire

pytestmark = pytest.mark.asyncio(loop_scope="module")
BODY = b'{"model": "alpha", "prompt": "p"}'
SIZE = len(BODY)
LENGTH = f"Content-Length: {SIZE}"
CHUNKS = b"%x\r\n%s\r\n0\r\n\r\n" % (SIZE, BODY)
LINE = "POST /completion HTTP/1.1"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Attacked]:
    async with attacked(tmp_path_factory.mktemp("hostile")) as made:
        yield made


def raw(*headers: str, body: bytes = BODY, line: str = LINE, host: bool = True, end: str = "\r\n") -> bytes:
    """A request of these lines."""
    lines = (line, *(["Host: gateway"] if host else []), *headers, "", "")
    return end.join(lines).encode("latin-1") + body


async def send(served: Attacked, data: bytes) -> tuple[Got, list[Heard]]:
    """The answer, and what the server behind heard; the connection is in sync or at its end, and the serve lives."""
    before = len(served.liar.heard)
    async with wire(served.serve.url) as client:
        with suppress(ConnectionError):  # it was refused before all of it was there
            await client.send(data)
        got = await client.answer()
        heard = served.liar.heard[before:]
        if "close" in got.all("Connection"):
            assert await client.ended() == b""
        else:
            assert (await client.call(GOOD)).status == 200
    await served.lives()
    return got, heard


async def refused(served: Attacked, data: bytes, *statuses: int) -> Got:
    """It is, in OpenAI's envelope, and reaches no server."""
    got, heard = await send(served, data)
    assert got.status in (statuses or (400,))
    assert got.error()["message"]
    assert heard == []
    return got


async def served_as(served: Attacked, data: bytes, body: bytes = BODY, target: str = "/completion") -> Heard:
    """It is answered, and what reached the server is this one request."""
    got, heard = await send(served, data)
    assert got.status == 200, got
    assert [(one.method, one.target, one.body) for one in heard] == [("POST", target, body)]
    return heard[0]


# ---- where a request ends


@pytest.mark.parametrize(
    "headers",
    [
        (LENGTH, LENGTH),
        (LENGTH, f"Content-Length: {SIZE + 1}"),
        (f"Content-Length: {SIZE}, {SIZE}",),
        *(
            (f"Content-Length: {value}",)
            for value in (
                *(f"+{SIZE}", f"-{SIZE}", f"0x{SIZE:x}", f"{SIZE};", "", "9" * 25, "1e1", "\xb2", "3 3", f"{SIZE}\x0b"),
            )
        ),
        (f"Content-Length : {SIZE}",),
        (f"Content-Length: {SIZE}\r\n {SIZE}",),
    ],
)
async def test_a_length_that_can_be_read_in_two_ways_is_refused(served: Attacked, headers: tuple[str, ...]) -> None:
    await refused(served, raw(*headers))


async def test_a_length_with_space_around_it_or_zeros_before_it_is_a_length(served: Attacked) -> None:
    for value in (f" {SIZE} ", f"\t{SIZE}", f"000{SIZE}"):
        await served_as(served, raw(f"Content-Length:{value}"))


async def test_a_body_larger_than_may_be_is_refused_before_it_comes(served: Attacked) -> None:
    await refused(served, raw(f"Content-Length: {1 << 40}"), 413)


async def test_without_a_length_there_is_no_body_and_what_follows_is_no_request(served: Attacked) -> None:
    assert (await refused(served, raw(body=b""))).error()["message"].startswith("the body is not JSON")
    await refused(served, raw())


@pytest.mark.parametrize("order", [1, -1])
async def test_a_length_and_chunks_are_refused_and_nothing_behind_them_is_read(served: Attacked, order: int) -> None:
    headers = ("Content-Length: 4", "Transfer-Encoding: chunked")[::order]
    await refused(served, raw(*headers, body=b"0\r\n\r\n" + GOOD))


@pytest.mark.parametrize(
    "headers",
    [
        *(
            (f"Transfer-Encoding: {value}",)
            for value in (
                "chunked, chunked",
                "identity",
                "chunked, gzip",
                "xchunked",
                "chunked\x0b",
                "x",
                "chunked;q=1",
            )
        ),
        ("Transfer-Encoding: chunked", "Transfer-Encoding: chunked"),
        ("Transfer-Encoding: chunked", "Transfer-Encoding: identity"),
        ("Transfer-Encoding:\r\n chunked",),
        ("Transfer-Encoding : chunked",),
        ("Transfer-Encoding: ",),
        ("Transfer-Encoding: chunked", LENGTH),
    ],
)
async def test_a_coding_that_others_may_not_see_or_see_otherwise_is_refused(
    served: Attacked, headers: tuple[str, ...]
) -> None:
    await refused(served, raw(*headers, body=CHUNKS), 400, 501)


async def test_chunks_with_extensions_and_trailers_are_a_body(served: Attacked) -> None:
    for body in (
        CHUNKS,
        b"".join(b"1\r\n%c\r\n" % one for one in BODY) + b"0\r\n\r\n",
        CHUNKS.replace(b"\r\n{", b";a=b\r\n{"),
        CHUNKS.replace(b"0\r\n\r\n", b"0\r\nX-Trailer: t\r\n\r\n"),
    ):
        heard = await served_as(served, raw("Transfer-Encoding: chunked", body=body))
        assert heard.all("Transfer-Encoding") == heard.all("X-Trailer") == []
        assert heard.all("Content-Length") == [str(SIZE)]


@pytest.mark.parametrize(
    "body",
    [
        b"zz\r\n" + BODY,
        b"-5\r\n" + CHUNKS,
        b"0x" + CHUNKS,
        b"f" * 17 + b"\r\n" + BODY,
        b" " + CHUNKS,
        CHUNKS.replace(b"\r\n{", b" \r\n{"),
        CHUNKS.replace(b"}\r\n", b"}"),
        CHUNKS.replace(b"}\r\n", b"}X\r\n"),
        CHUNKS.replace(b"\r\n", b"\n"),
        CHUNKS.replace(b"\r\n{", b";\n{"),
        b"\r\n" + CHUNKS,
        CHUNKS.replace(b"0\r\n\r\n", b"0\r\nContent-Length: 5\r\n\r\n"),
        CHUNKS.replace(b"0\r\n\r\n", b"0\r\n%s\r\n" % (b"X: a\r\n" * 20_000)),
    ],
)
async def test_chunks_that_are_none_are_refused(served: Attacked, body: bytes) -> None:
    await refused(served, raw("Transfer-Encoding: chunked", body=body), 400, 431)


# ---- heads


@pytest.mark.parametrize(
    "header",
    [
        *("X-A: a\r\n b", "X-A: a\nX-B: b", "X-A: a\rb", "X-A: a\0b", "X\0A: b", "X-A : b", " X-A: b", "X-A", ": b"),
        *("X-\xe9: a", 'X-"a": b', "Accept: a\x7f", "Content-Type: \0", "Host: another"),
    ],
)
async def test_a_header_that_is_none_is_refused(served: Attacked, header: str) -> None:
    await refused(served, raw(header, LENGTH))
    if header.startswith(" "):
        await refused(served, raw(header, LENGTH, host=False))


async def test_lines_that_end_otherwise_and_a_missing_host_are_refused(served: Attacked) -> None:
    await refused(served, raw(LENGTH, end="\n"))
    await refused(served, raw(LENGTH, end="\r"))
    await refused(served, raw(LENGTH, host=False))


async def test_what_is_too_large_to_be_a_head_is_refused(served: Attacked) -> None:
    await refused(served, raw("X-A: " + "a" * 100_000, LENGTH), 431)
    await refused(served, raw(LENGTH, line=f"POST /{'a' * 100_000} HTTP/1.1"), 414, 431)
    await refused(served, raw(*(f"X-{number}: a" for number in range(10_000)), LENGTH), 400, 431)


@pytest.mark.parametrize(
    "line",
    [
        *("G@T /completion HTTP/1.1", "post /completion HTTP/1.1", "POST /completion HTTP/1.9", LINE + "x"),
        *("POST /completion http/1.1", "POST\t/completion\tHTTP/1.1", "POST /comp letion HTTP/1.1"),
        *("POST completion HTTP/1.1", "POST evil:80 HTTP/1.1", "POST * HTTP/1.1", "POST /completion?\xe9 HTTP/1.1"),
        *("POST /\xe9 HTTP/1.1", "POST http://[::1 HTTP/1.1", "POST http://a:b/completion HTTP/1.1"),
        *("PRI * HTTP/2.0", "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),
    ],
)
async def test_a_line_that_begins_no_request_is_refused(served: Attacked, line: str) -> None:
    await refused(served, raw(LENGTH, line=line))


@pytest.mark.parametrize(
    "path", ["//completion", "/v1/../completion", "/completion%00", "/completion/", "/%ff", "/v1/x"]
)
async def test_a_path_where_nothing_is_is_404(served: Attacked, path: str) -> None:
    await refused(served, raw(LENGTH, line=f"POST {path} HTTP/1.1"), 404)


async def test_an_absolute_address_is_its_path(served: Attacked) -> None:
    heard = await served_as(served, raw(LENGTH, line="POST http://evil.example/completion HTTP/1.1"))
    assert all("evil" not in value for value in heard.all("Host"))


@pytest.mark.parametrize(
    "headers",
    [
        *(("Connection: Content-Length",), ("Connection: Transfer-Encoding",), ("Connection: Host, X-A", "X-A: b")),
        *(("TE: trailers",), ("Upgrade: h2c",), ("Keep-Alive: 5",), ("Trailer: X-A",), ("Proxy-Connection: close",)),
        ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AA"),
        *(("Connection: upgrade", "Upgrade: websocket"), ("Expect: 100-continue",), ('Connection: "',)),
        ("Proxy-Authorization: Basic eA==",),
    ],
)
async def test_what_concerns_the_connection_stays_on_it(served: Attacked, headers: tuple[str, ...]) -> None:
    heard = await served_as(served, raw(*headers, LENGTH))
    names = {"TE", "Upgrade", "Keep-Alive", "Trailer", "Proxy-Connection", "HTTP2-Settings", "X-A", "Expect"}
    assert [name for name in (*names, "Proxy-Authorization") if heard.all(name)] == []
    assert heard.all("Content-Length") == [str(SIZE)]
    assert len(heard.all("Host")) == 1


async def test_what_is_expected_and_not_known_is_refused(served: Attacked) -> None:
    await refused(served, raw("Expect: nonsense", LENGTH), 417)


# ---- several on one connection


async def test_requests_in_a_row_are_answered_in_that_order_each_with_its_own(served: Attacked) -> None:
    bodies = [json.dumps({"model": "alpha", "prompt": "x" * number * 1000}).encode() for number in range(20)]
    bodies[7] = b'{"model": "alpha", "prompt": "POST /completion HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n"}'
    before = len(served.liar.heard)
    async with wire(served.serve.url) as client:
        await client.send(b"".join(request(body, "/completion") for body in bodies))
        for body in bodies:
            got = await client.answer()
            assert (got.status, json.loads(got.body)["body"]) == (200, body.decode())
    assert [one.body for one in served.liar.heard[before:]] == bodies
    await served.lives()


async def test_refusals_in_a_row_leave_what_follows_in_its_place(served: Attacked) -> None:
    nowhere, nobody = request(BODY, "/nowhere"), request(b'{"model": "nobody"}', "/completion")
    async with wire(served.serve.url) as client:
        await client.send(nowhere + GOOD + nobody + GOOD + request(b"no json", "/completion") + GOOD)
        statuses = [(await client.answer()).status for _ in range(6)]
    assert statuses == [404, 200, 404, 200, 400, 200]
    await served.lives()


async def test_a_body_that_is_never_whole_reaches_no_server(served: Attacked) -> None:
    before = len(served.liar.heard)
    for data in (raw(f"Content-Length: {SIZE + 1}"), raw("Transfer-Encoding: chunked", body=CHUNKS[:-1])):
        async with wire(served.serve.url) as client:
            await client.send(data)
    await served.lives()
    assert len(served.liar.heard) == before + 1


# ---- the model


def ask(body: bytes, path: str = "/completion") -> bytes:
    return request(body, path)


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{}", b"[]", b"null", b'"alpha"', b'{"x": {"model": "alpha"}}', b'{"model": ""}', b'{"model": null}'),
        *(b'{"model": 5}', b'{"model": ["alpha"]}', b'{"model": {"model": "alpha"}}', b'{"model": "\\ud800"}'),
        *(b'{"model": "alpha"', b'{"model": "alpha"} {}', b'{"model": "alpha",}', b'{"model": "\xff"}'),
        *(b"{'model': 'alpha'}", b'\xef\xbb\xbf{"model": "alpha"}x', b'{"model": "alpha", "a": NaN}', b"[" * 100_000),
        b'{"model": "alpha", "stream": "yes"}',
    ],
)
async def test_a_body_that_names_no_model_is_refused(served: Attacked, body: bytes) -> None:
    await refused(served, ask(body))


@pytest.mark.parametrize("name", ["beta", "a" * 10_000, "alpha\\u0000", "alpha ", "ALPHA", "alpha/", "../alpha", "é"])
async def test_a_model_that_is_not_there_is_404(served: Attacked, name: str) -> None:
    await refused(served, ask(b'{"model": "%s"}' % name.encode()), 404)


async def test_of_two_models_in_a_body_the_server_reads_the_one_that_was_found(served: Attacked) -> None:
    """The last one, as every server's own parser has it."""
    await refused(served, ask(b'{"model": "alpha", "model": "beta"}'), 404)
    await refused(served, ask(b'{"model": "alpha", "mod\\u0065l": "beta"}'), 404)
    for body in (b'{"model": "beta", "model": "alpha"}', b'{"model": "beta", "mod\\u0065l": "alpha"}'):
        heard = await served_as(served, ask(body), body)
        assert json.loads(heard.body)["model"] == "alpha"
    got, (heard,) = await send(served, ask(b'{"model": "beta", "model": "gpt-4o", "a": 1.0}'))
    assert (got.status, heard.body.count(b"model"), json.loads(heard.body)) == (200, 1, {"model": "alpha", "a": 1.0})


# ---- paths and methods

ROUTES = ("/v1/chat/completions", "/v1/messages", "/v1/embeddings", "/completion", "/tokenize", "/v1/responses")


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
@pytest.mark.parametrize("path", ROUTES)
async def test_another_method_is_405_and_says_which_there_is(served: Attacked, method: str, path: str) -> None:
    before = len(served.liar.heard)
    async with wire(served.serve.url) as client:
        got = await client.call(request(BODY, path, method=method), method)
    assert got.status == 405 or (got.status == 204 and method == "OPTIONS")
    assert got.status == 204 or "POST" in (got.one("Allow") or "")
    assert got.status == 204 or method == "HEAD" or got.error()["code"] == "method_not_allowed"
    assert len(served.liar.heard) == before


@pytest.mark.parametrize(
    "path", ["/v1", "/v1/", "/v1/nothing", "/v1/models/", "/v1/chat", "/v2/chat/completions", "/x"]
)
@pytest.mark.parametrize("method", ["GET", "POST", "PUT"])
async def test_where_nothing_is_it_is_404_in_the_envelope(served: Attacked, path: str, method: str) -> None:
    await refused(served, request(BODY, path, method=method), 404, 405)


@pytest.mark.parametrize(
    ("path", "target"),
    [
        ("/upstream/alpha/v1/chat/completions", "/v1/chat/completions"),
        ("/upstream/alpha/a%2Fb", "/a%2Fb"),
        ("/upstream/alpha/../x", "/../x"),
        ("/upstream/alpha/%2e%2e/x", "/%2e%2e/x"),
        ("/upstream/alpha//evil.example/x", "//evil.example/x"),
        ("/upstream/alpha/@evil.example/x", "/@evil.example/x"),
        ("/upstream/alpha/x%20HTTP/1.1", "/x%20HTTP/1.1"),
        ("/upstream/org%2Fbig:Q4/x", "/x"),
        ("/upstream/org/big:Q4/x", "/x"),
        ("/upstream/gr%C3%B6%C3%9Fe/x", "/x"),
    ],
)
async def test_a_path_of_a_models_own_server_goes_up_as_it_came(served: Attacked, path: str, target: str) -> None:
    got, heard = await send(served, request(b"raw", path))
    assert (got.status, [(one.target, one.body) for one in heard]) == (200, [(target, b"raw")])


@pytest.mark.parametrize(
    "path",
    [
        "/upstream/",
        "/upstream/beta/x",
        "/upstream/../alpha/x",
        "/upstream/%00/x",
        "/upstream//x",
        "/upstream/alpha/x%0d%0aX:%201",
    ],
)
async def test_a_path_of_nobodys_server_is_404(served: Attacked, path: str) -> None:
    await refused(served, request(b"raw", path), 404)
