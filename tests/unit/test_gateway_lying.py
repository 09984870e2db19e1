"""A server that breaks HTTP in every way: the client gets a right answer, a stated refusal or a broken connection.

Everything is said and heard on sockets, as clients and servers do.
"""

from __future__ import annotations

import asyncio
import json
from functools import partial

import pytest

from swapper.gateway.context import Limits
from tests.support.liar import (
    CHUNKED,
    LAST,
    Heard,
    Line,
    answer,
    chunk,
    dies,
    drips,
    hangs,
    leaves_half_open,
    ok,
    says,
)
from tests.support.wire import HUNG_S, Wire, request, settled, wire
from tests.unit.gateway_doubles import CHAT
from tests.unit.gateway_liar import BOTH, KINDS, PLAIN_CALL, STREAMED_CALL, lied_to

all_kinds = pytest.mark.parametrize("kind", KINDS)
both = pytest.mark.parametrize("kind", BOTH)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
BODY = b'{"right": "answer"}'
LENGTH = b"Content-Length: %d\r\n" % len(BODY)


# ---- right answers, however they come


@both
@pytest.mark.parametrize(
    "said",
    [
        HEAD + LENGTH + b"\r\n" + BODY,
        b"HTTP/1.1 100 Continue\r\n\r\n" + ok(BODY),
        b"HTTP/1.1 103 Early Hints\r\nLink: </a>; rel=preload\r\n\r\n" * 3 + ok(BODY),
        CHUNKED + b"".join(chunk(BODY[at : at + 1]) for at in range(len(BODY))) + LAST,
        CHUNKED + b'%x;a=b;c="d"\r\n' % len(BODY) + BODY + b"\r\n0;e\r\nX-Trailer: t\r\n\r\n",
        b"HTTP/1.1 200\r\nContent-Type: application/json\r\n" + LENGTH + b"\r\n" + BODY,
        b"hTTP/1.1 200 OK\r\n".replace(b"hTTP", b"HTTP")
        + b"content-type:application/json\r\n"
        + LENGTH
        + b"\r\n"
        + BODY,
    ],
    ids=["length", "100 first", "103 thrice", "tiny chunks", "extensions and trailers", "no reason", "no space"],
)
@pytest.mark.parametrize("slow", [False, True])
async def test_an_unusual_answer_that_is_right_is_passed_on(kind: str, said: bytes, slow: bool) -> None:
    async with lied_to(kind) as lied:
        lied.liar.plays = [drips(said) if slow else says(said)]
        for _ in range(2):
            got = await lied.call()
            assert (got.status, got.body, got.complete) == (200, BODY, True)
            assert got.one("X-Trailer") is None
        await lied.at_rest()


@both
@pytest.mark.parametrize("version", [b"HTTP/1.0", b"HTTP/1.1"])
async def test_a_body_that_ends_with_its_connection_is_whole(kind: str, version: bytes) -> None:
    async with lied_to(kind) as lied:
        lied.liar.plays = [dies(version + b" 200 OK\r\nContent-Type: application/json\r\n\r\n", BODY)]
        got = await lied.call()
        assert (got.status, got.body, got.complete) == (200, BODY, True)
        await lied.at_rest()


@both
@pytest.mark.parametrize("status", [400, 401, 408, 413, 429, 500, 503])
@pytest.mark.parametrize("size", [20, 100_000])
async def test_a_refusal_of_the_servers_passes_untouched(kind: str, status: int, size: int) -> None:
    async with lied_to(kind) as lied:
        said = b"{" + b" " * size
        lied.liar.plays = [says(answer(status, said, "Retry-After: 7", "X-Own: 1", "X-Own: 2"))]
        got = await lied.call()
        assert (got.status, got.body, got.one("Retry-After")) == (status, said, "7")
        assert got.all("X-Own") == ["1", "2"]
        assert len(lied.liar.heard) == 1
        await lied.at_rest()


# ---- deaths


BEFORE = {
    "before the head": b"",
    "in the status line": HEAD[:7],
    "in the middle of the head": HEAD[:-5],
    "before the empty line": HEAD + LENGTH,
}


@all_kinds
@pytest.mark.parametrize("at", BEFORE)
@pytest.mark.parametrize("how", [dies, leaves_half_open])
async def test_a_server_that_dies_before_its_body_is_asked_again_and_then_it_is_a_502(
    kind: str, at: str, how: object
) -> None:
    broken = dies(BEFORE[at]) if how is dies else leaves_half_open(BEFORE[at])
    async with lied_to(kind) as lied:
        lied.liar.plays = [broken, says(ok(BODY))]
        got = await lied.call()
        assert (got.status, got.body) == (200, BODY)
        bodies = {heard.body for heard in lied.liar.heard}
        assert len(lied.liar.heard) == 2
        assert len(bodies) == 1
        lied.liar.plays = [broken]
        got = await lied.call()
        assert (got.status, got.error()["code"]) == (502, "upstream_failed")
        await lied.at_rest()


CUT = {
    "in a body with a length": HEAD + LENGTH + b"\r\n" + BODY[:-1],
    "in a chunk": CHUNKED + chunk(BODY)[:-6],
    "before the end of a chunk": CHUNKED + chunk(BODY)[:-2],
    "between chunks": CHUNKED + chunk(BODY),
    "in a chunk's size": CHUNKED + chunk(BODY) + b"1",
    "in the last chunk": CHUNKED + chunk(BODY) + b"0\r\n",
    "in the trailers": CHUNKED + chunk(BODY) + b"0\r\nX-Trailer: t\r\n",
    "in the middle of nonsense": CHUNKED + chunk(BODY) + b"zz\r\n" + BODY,
    "in a chunk's size that is too large": CHUNKED + chunk(BODY) + b"f" * 40 + b"\r\n" + BODY,
}


@all_kinds
@pytest.mark.parametrize("at", CUT)
@pytest.mark.parametrize("reset", [False, True])
async def test_a_cut_answer_never_looks_complete(kind: str, at: str, reset: bool) -> None:
    async with lied_to(kind) as lied:
        lied.liar.plays = [dies(CUT[at], reset=reset)]
        got = await lied.call()
        assert (got.status == 200 and not got.complete) or got.error()["code"] == "upstream_failed"
        if got.status == 200:
            assert BODY.startswith(got.body)
        lied.liar.plays = [says(ok(BODY))]
        assert (await lied.call()).body == BODY
        await lied.at_rest()


@both
@pytest.mark.parametrize("trailer", [b"Content-Length: 3", b"Transfer-Encoding: chunked", b"X-Bad: a\0b", b"no colon"])
async def test_trailers_that_http_does_not_allow_end_the_call_one_way_or_another(kind: str, trailer: bytes) -> None:
    async with lied_to(kind) as lied:
        lied.liar.plays = [drips(CHUNKED + chunk(BODY) + b"0\r\n" + trailer + b"\r\n\r\n")]
        got = await lied.call()
        assert (got.status == 200 and got.body == BODY) or got.error()["code"] == "upstream_failed"
        await lied.at_rest()


@all_kinds
async def test_a_call_whose_connection_had_been_closed_meanwhile_succeeds(kind: str) -> None:
    async with lied_to(kind) as lied:
        lied.liar.plays = [dies(ok(BODY))]
        for _ in range(3):
            got = await lied.call()
            assert (got.status, got.body) == (200, BODY)


@all_kinds
async def test_a_call_whose_connection_is_closed_as_it_comes_succeeds(kind: str) -> None:
    async with lied_to(kind) as lied:
        for _ in range(3):
            lied.liar.plays = [says(ok(b"{}")), dies(), says(ok(BODY))]
            await lied.call()
            got = await lied.call()
            assert (got.status, got.body) == (200, BODY)


# ---- lengths that lie, and more than was asked for


EXTRA = {
    "bytes": b"more",
    "a line": b"\r\n",
    "an answer": ok(b'{"of": "another call"}'),
    "an error": answer(500, b'{"error": {"message": "proxy error"}}'),
    "half an answer": ok(b'{"of": "another call"}')[:40],
    "an interim answer": b"HTTP/1.1 100 Continue\r\n\r\n",
    "a length that was too short": BODY,
}


def follows(extra: str, *, late: bool) -> object:
    return pytest.param(extra, late, id=f"{extra}{' late' * late}")


@all_kinds
@pytest.mark.parametrize(("extra", "late"), [follows(extra, late=late) for extra in EXTRA for late in (False, True)])
async def test_what_follows_an_answer_is_never_taken_for_another_calls(kind: str, extra: str, late: bool) -> None:
    async with lied_to(kind) as lied:
        more = asyncio.Event()

        async def too_much(line: Line, heard: Heard) -> None:
            if late:
                await line.write(ok(BODY))
                await more.wait()
                await line.write(EXTRA[extra])
            else:
                await line.write(ok(BODY) + EXTRA[extra])

        lied.liar.plays = [too_much, says(ok(b'{"second": 1}')), says(ok(b'{"third": 1}'))]
        got = await lied.call()
        assert (got.status, got.body) == (200, BODY)
        more.set()
        await settled(lambda: lied.liar.wrote)
        for body in (b'{"second": 1}', b'{"third": 1}'):
            got = await lied.call()
            assert (got.status, got.body) == (200, body)
        assert len(lied.liar.heard) == 3
        await lied.at_rest()


BODILESS = {
    "204": b"HTTP/1.1 204 No Content\r\n",
    "304": b"HTTP/1.1 304 Not Modified\r\n",
}


@both
@pytest.mark.parametrize("status", BODILESS)
@pytest.mark.parametrize("framing", [b"", LENGTH, b"Transfer-Encoding: chunked\r\n"])
async def test_an_answer_that_may_have_no_body_has_none(kind: str, status: str, framing: bytes) -> None:
    """Its bytes would be the head of the next answer."""
    body = b"".join((chunk(BODY), LAST)) if b"chunked" in framing else BODY
    async with lied_to(kind) as lied:
        lied.liar.plays = [says(BODILESS[status] + framing + b"\r\n" + body), says(ok(b'{"second": 1}'))]
        async with wire(lied.gateway.url) as client:
            got = await client.call(PLAIN_CALL)
            assert (got.status, got.body, got.complete) == (int(status), b"", True)
            got = await client.call(PLAIN_CALL)
            assert (got.status, got.body) == (200, b'{"second": 1}')
        await lied.at_rest()


@both
async def test_a_head_that_is_answered_with_a_body_has_none(kind: str) -> None:
    async with lied_to(kind) as lied:
        lied.liar.plays = [says(ok(BODY)), says(ok(b'{"second": 1}'))]
        async with wire(lied.gateway.url) as client:
            got = await client.call(request(b"", "/upstream/alpha/health", method="HEAD"), "HEAD")
            assert (got.status, got.body) == (200, b"")
            got = await client.call(PLAIN_CALL)
            assert (got.status, got.body) == (200, b'{"second": 1}')
        await lied.at_rest()


@both
async def test_an_answer_with_a_length_and_chunks_is_one_of_both_or_a_refusal(kind: str) -> None:
    both = HEAD + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(BODY) + LAST
    async with lied_to(kind) as lied:
        lied.liar.plays = [says(both), says(both), says(both), says(ok(b'{"second": 1}'))]
        async with wire(lied.gateway.url) as client:
            got = await client.call(PLAIN_CALL)
            assert (got.status == 200 and got.body == BODY) or got.error()["code"] == "upstream_failed"
            assert not (got.all("Content-Length") and got.all("Transfer-Encoding"))
        lied.liar.plays = [says(ok(b'{"second": 1}'))]
        assert (await lied.call()).body == b'{"second": 1}'


# ---- heads


BAD_HEADS = {
    "NUL": b"X-Bad: a\0b\r\n",
    "CR": b"X-Bad: a\rX-Other: b\r\n",
    "a name with a space": b"X Bad: a\r\n",
    "no colon": b"X-Bad\r\n",
    "no name": b": a\r\n",
    "two lengths": LENGTH + b"Content-Length: 5\r\n",
    "a length that is none": b"Content-Length: -5\r\n",
    "a length in words": b"Content-Length: five\r\n",
    "a length beyond all": b"Content-Length: 99999999999999999999999999999\r\n",
    "an unknown coding": b"Transfer-Encoding: gopher\r\n",
}


@both
@pytest.mark.parametrize("head", BAD_HEADS)
async def test_a_head_that_http_does_not_allow_is_a_refusal_or_is_passed_on_mended(kind: str, head: str) -> None:
    """h11 judges what the client gets."""
    async with lied_to(kind) as lied:
        lied.liar.plays = [dies(HEAD + BAD_HEADS[head] + b"\r\n" + BODY)]
        got = await lied.call()
        assert got.status in (200, 502)
        assert got.status == 200 or got.error()["code"] == "upstream_failed"
        assert got.all("X-Other") == []
        lied.liar.plays = [says(ok(BODY))]
        assert (await lied.call()).body == BODY
        await lied.at_rest()


@both
@pytest.mark.parametrize(
    "said",
    [b"SSH-2.0-OpenSSH_9.2\r\n", b"HTTP/9.9 200 OK\r\n\r\n", b"\0" * 100, b"\r\n" * 50],
    ids=["another protocol", "another version", "NUL", "empty lines"],
)
async def test_what_is_no_http_is_a_502(kind: str, said: bytes) -> None:
    async with lied_to(kind) as lied:
        lied.liar.plays = [dies(said)]
        got = await lied.call()
        assert (got.status, got.error()["code"]) == (502, "upstream_failed")
        await lied.at_rest()


HUGE = {
    "one header of 60 KiB": b"X-Huge: " + b"h" * 60_000 + b"\r\n",
    "100 headers": b"".join(b"X-%d: v\r\n" % number for number in range(100)),
    "1000 headers": b"".join(b"X-%d: v\r\n" % number for number in range(1000)),
    "one header of 1 MiB": b"X-Huge: " + b"h" * (1 << 20) + b"\r\n",
}


@both
@pytest.mark.parametrize("head", HUGE)
async def test_a_huge_head_passes_or_is_a_502_and_nothing_waits_for_it(kind: str, head: str) -> None:
    async with lied_to(kind) as lied:
        lied.liar.plays = [says(HEAD + HUGE[head] + LENGTH + b"\r\n" + BODY)]
        got = await lied.call()
        assert (got.status, got.body) == (200, BODY) or got.error()["code"] == "upstream_failed"
        assert got.status == 200 or head != "100 headers"
        await lied.at_rest()


@both
@pytest.mark.parametrize(
    "piece",
    [
        pytest.param(b"X-More: and more\r\n", id="headers"),
        pytest.param(b"h" * 65_536, id="a line"),
        pytest.param(b"HTTP/1.1 100 Continue\r\n\r\n", id="interim answers"),
    ],
)
async def test_a_head_without_an_end_is_given_up_before_it_fills_the_memory(kind: str, piece: bytes) -> None:
    async def endless(line: Line, heard: Heard) -> None:
        await line.write(HEAD if piece.startswith(b"X") else piece)
        while True:
            await line.write(piece * 100)

    async with lied_to(kind) as lied:
        lied.liar.plays = [endless]
        async with asyncio.timeout(HUNG_S):
            got = await lied.call()
        assert (got.status, got.error()["code"]) == (502, "upstream_failed")
        assert lied.liar.wrote < 64 << 20
        await lied.at_rest()


# ---- clients that leave


SILENT = {
    "before the head": b"",
    "in the head": HEAD,
    "after the head": HEAD + LENGTH + b"\r\n",
    "in the body": HEAD + LENGTH + b"\r\n" + BODY[:5],
}


@all_kinds
@pytest.mark.parametrize("at", SILENT)
@pytest.mark.parametrize("call", [PLAIN_CALL, STREAMED_CALL], ids=["plain", "streamed"])
@pytest.mark.parametrize("reset", [False, True])
async def test_whoever_leaves_closes_the_servers_socket_at_once(kind: str, at: str, call: bytes, reset: bool) -> None:
    async with lied_to(kind) as lied:
        lied.liar.plays = [hangs(SILENT[at])]
        async with wire(lied.gateway.url) as client:
            await client.send(call)
            await lied.liar.arrived.get()
            await settled(lambda: lied.liar.wrote)
            client.leave(reset=reset)
            async with asyncio.timeout(HUNG_S):
                await lied.liar.lines[-1].gone.wait()
        lied.liar.plays = [says(ok(BODY))]
        assert (await lied.call()).body == BODY
        await lied.at_rest()


@both
async def test_who_waits_for_a_silent_server_is_told_nothing_and_may_be_kept_alive(kind: str) -> None:
    async with lied_to(kind, Limits(keepalive_ms=10)) as lied:
        lied.liar.plays = [hangs()]
        async with wire(lied.gateway.url) as plain, wire(lied.gateway.url) as streamed:
            await plain.send(PLAIN_CALL)
            await streamed.send(STREAMED_CALL)
            said = b""
            while said.count(b"data: ") < 3:
                said += await streamed.some()
            assert plain.beyond == b""


def asks(name: str) -> bytes:
    return request(json.dumps({"model": "alpha", "prompt": name}).encode(), "/completion")


@all_kinds
async def test_every_caller_gets_the_answer_to_its_own_request(kind: str) -> None:
    """Many at once, over connections that are used again, some of them with more than was asked for."""

    async def echo(line: Line, heard: Heard) -> None:
        said = ok(json.dumps({"to": json.loads(heard.body)["prompt"]}).encode())
        extra = len(lied.liar.heard) % 3 == 0
        await line.drip(said + ok(b'{"to": "nobody"}') if extra else said)

    async def ask(name: str) -> None:
        async with wire(lied.gateway.url) as client:
            for number in range(5):
                got = await client.call(asks(f"{name}/{number}"))
                assert (got.status, json.loads(got.body)) == (200, {"to": f"{name}/{number}"})

    async with lied_to(kind) as lied:
        lied.liar.plays = [echo]
        await asyncio.gather(*(ask(str(number)) for number in range(8)))
        await lied.at_rest()


@all_kinds
async def test_an_answer_whose_client_leaves_as_it_comes_is_nobodys(kind: str) -> None:
    """The gateway hears of both at once, in either order, many times."""

    async def leaves(client: Wire, passes: int, line: Line, heard: Heard) -> None:
        client.leave()
        for _ in range(passes):
            await asyncio.sleep(0)
        line.writer.write(ok(b'{"of": "who left"}'))

    async with lied_to(kind) as lied:
        for passes in (0, 1, 2, 3) * 5:
            async with wire(lied.gateway.url) as client:
                lied.liar.plays = [partial(leaves, client, passes), says(ok(BODY))]
                await client.send(PLAIN_CALL)
                await lied.liar.arrived.get()
                await settled(lambda: lied.liar.wrote)
                got = await lied.call()
                assert (got.status, got.body) == (200, BODY)
                await lied.liar.arrived.get()
        await lied.at_rest()


@all_kinds
@pytest.mark.parametrize("size", [100_000, 200_000, 1_000_000])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/upstream/alpha/v1/chat/completions"])
async def test_a_connection_that_carried_a_large_answer_carries_the_next(kind: str, size: int, path: str) -> None:
    """Also where that was read more slowly than it came."""
    call = request(json.dumps(CHAT).encode(), path)
    async with lied_to(kind) as lied:
        lied.liar.plays = [says(ok(b"x" * size))]
        for _ in range(3):
            got = await lied.call(call)
            assert (got.status, len(got.body), got.complete) == (200, size, True)

        async def more(line: Line, heard: Heard) -> None:
            await line.write(ok(b"x" * size))
            await over.wait()
            await line.write(ok(b'{"of": "another call"}'))

        over = asyncio.Event()
        lied.liar.plays = [more, says(ok(BODY))]
        assert len((await lied.call(call)).body) == size
        over.set()
        await settled(lambda: lied.liar.wrote)
        assert (await lied.call(call)).body == BODY
        await lied.at_rest()
