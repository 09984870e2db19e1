"""Streams that are cut: at every byte, in two or in many, by a death or only by the wire.

An event of ours never stands inside one of the server's, and no stream that was cut looks as if it were whole.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass

import pytest

from swapper.gateway.context import Limits
from tests.support.liar import CHUNKED, LAST, SSE, Heard, Line, chunk, dies, drips, says
from tests.support.wire import Got, request, wire
from tests.unit.gateway_liar import BOTH, KINDS, STREAMED_CALL, lied_to

all_kinds = pytest.mark.parametrize("kind", KINDS)
both = pytest.mark.parametrize("kind", BOTH)
BODY = {
    "model": "alpha",
    "stream": True,
    "messages": [{"role": "user", "content": "hi"}],
    "prompt": "hi",
    "input": "hi",
}
PLAIN_SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


@dataclass(frozen=True, slots=True)
class Api:
    """A path, a whole stream of it, and what an error's event is called there."""

    path: str
    stream: bytes
    done: bool = True
    named: bool = False

    def call(self) -> bytes:
        return request(json.dumps(BODY).encode(), self.path)


def data(*values: object) -> bytes:
    return b"".join(b"data: %s\n\n" % json.dumps(value).encode() for value in values)


def named(*values: dict[str, object]) -> bytes:
    return b"".join(b"event: %s\ndata: %s\n\n" % (str(v["type"]).encode(), json.dumps(v).encode()) for v in values)


APIS = {
    "chat": Api("/v1/chat/completions", data({"choices": [{"delta": {"content": "é"}}]}) + b"data: [DONE]\n\n"),
    "chat, CRLF": Api("/v1/chat/completions", (data({"a": 1}, {"b": 2}) + b"data: [DONE]\n\n").replace(b"\n", b"\r\n")),
    "completions": Api("/v1/completions", b": hello\n\n" + data({"choices": [{"text": "a"}]}) + b"data: [DONE]\n\n"),
    "completion": Api("/completion", data({"content": "a", "stop": False}, {"content": "", "stop": True})),
    "messages": Api("/v1/messages", named({"type": "message_start"}, {"type": "message_stop"}), done=False, named=True),
    "responses": Api("/v1/responses", named({"type": "response.created"}, {"type": "response.completed"})),
}


def events(stream: bytes) -> list[tuple[str, str]]:
    """Every dispatched event of a stream, as a browser would see it; what is unfinished at its end is none."""
    found, name, lines = list[tuple[str, str]](), "", list[str]()
    for line in stream.replace(b"\r\n", b"\n").decode().split("\n")[:-1]:
        if not line:
            if lines:
                found.append((name, "\n".join(lines)))
            name, lines = "", []
        elif line.startswith("data: "):
            lines.append(line.removeprefix("data: "))
        elif line.startswith("event: "):
            name = line.removeprefix("event: ")
    return found


def check_cut(api: Api, sent: bytes, got: Got) -> None:
    """All whole events of what the server sent came, then an error, and nothing that is neither."""
    assert (got.status, got.complete) == (200, True)
    seen, whole = events(got.body), events(sent)
    assert seen[: len(whole)] == whole
    rest = seen[len(whole) :]
    (name, error), *end = rest
    assert name == ("error" if api.named else "")
    said = json.loads(error)
    assert said["error"]["code"] == "upstream_failed"
    assert end == ([("", "[DONE]")] if api.done else [])
    assert got.body.endswith(b"\n\n")


# ---- cut by the wire


@both
@pytest.mark.parametrize("api", APIS.values(), ids=APIS)
async def test_a_stream_passes_byte_for_byte_however_it_is_cut(kind: str, api: Api) -> None:
    whole = SSE + chunk(api.stream) + LAST
    async with lied_to(kind) as lied, wire(lied.gateway.url) as client:
        for at in range(len(SSE), len(whole), 3):
            lied.liar.plays = [says(whole[:at], whole[at:])]
            got = await client.call(api.call())
            assert (got.status, got.body, got.complete) == (200, api.stream, True)
        lied.liar.plays = [drips(SSE + b"".join(chunk(bytes((one,))) for one in api.stream) + LAST)]
        got = await client.call(api.call())
        assert (got.status, got.body, got.complete) == (200, api.stream, True)
        await lied.at_rest()


@both
async def test_each_event_reaches_the_client_before_the_next_is_there(kind: str) -> None:
    async with lied_to(kind) as lied, wire(lied.gateway.url) as client:
        more = asyncio.Queue[None]()

        async def one_by_one(line: Line, heard: Heard) -> None:
            await line.write(SSE)
            for number in range(5):
                event = data(number)
                await line.write(chunk(event[:4]) + chunk(event[4:]))
                await more.get()
            await line.write(LAST)

        lied.liar.plays = [one_by_one]
        await client.send(STREAMED_CALL)
        said = b""
        for number in range(5):
            while data(number) not in said:
                said += await client.some()
            more.put_nowait(None)


# ---- cut by a death


@both
@pytest.mark.parametrize("api", APIS.values(), ids=APIS)
@pytest.mark.parametrize("reset", [False, True])
async def test_a_stream_whose_server_dies_at_any_byte_ends_with_an_error_event(
    kind: str, api: Api, reset: bool
) -> None:
    async with lied_to(kind) as lied:
        for at in range(1, len(api.stream) + 1, 3):
            lied.liar.plays = [dies(SSE, chunk(api.stream[:at]), reset=reset)]
            heard = len(lied.liar.heard)
            got = await lied.call(api.call())
            if reset and len(lied.liar.heard) > heard + 1:  # it was reset before anything was read
                assert got.error()["code"] == "upstream_failed"
            else:
                check_cut(api, api.stream[:at], got)
        await lied.at_rest()


DEATHS = {
    "in a chunk": SSE + b"ff\r\n" + data(1) + b"data: {",
    "in a chunk's size": SSE + chunk(data(1)) + b"f",
    "in the last chunk": SSE + chunk(data(1)) + b"0\r\n",
    "nonsense for a chunk": SSE + chunk(data(1)) + b"what?\r\n\r\n",
    "short of its length": PLAIN_SSE + b"Content-Length: 500\r\n\r\n" + data(1) + b"data: {",
}


@all_kinds
@pytest.mark.parametrize("at", DEATHS)
async def test_a_stream_that_is_cut_by_its_framing_ends_with_an_error_event(kind: str, at: str) -> None:
    async with lied_to(kind) as lied, wire(lied.gateway.url) as client:
        passed = asyncio.Event()

        async def cut(line: Line, heard: Heard) -> None:
            first, mark, rest = DEATHS[at].partition(data(1))
            await line.write(first + mark)
            await passed.wait()
            await line.write(rest)
            line.writer.close()
            await line.writer.wait_closed()

        lied.liar.plays = [cut]
        await client.send(STREAMED_CALL)
        said = await client.some()
        while data(1) not in said:
            said += await client.some()
        passed.set()
        check_cut(APIS["chat"], data(1), await client.answer(before=said))
        await lied.at_rest()


@both
@pytest.mark.parametrize("api", APIS.values(), ids=APIS)
async def test_a_stream_that_ends_with_its_connection_is_whole_only_with_its_last_event(kind: str, api: Api) -> None:
    """Nothing else tells it from one that was cut."""
    async with lied_to(kind) as lied:
        lied.liar.plays = [dies(PLAIN_SSE + b"\r\n", api.stream)]
        got = await lied.call(api.call())
        assert (got.status, got.body, got.complete) == (200, api.stream, True)
        first = api.stream.replace(b"\r", b"").find(b"\n\n", 12) + 2 + 2 * (b"\r" in api.stream)
        lied.liar.plays = [dies(PLAIN_SSE + b"\r\n", api.stream[:first])]
        check_cut(api, api.stream[:first], await lied.call(api.call()))
        await lied.at_rest()


@both
@pytest.mark.parametrize("size", [200_000, 300_000, 1_000_000])
async def test_an_error_stands_in_no_other_event_however_large_that_was(kind: str, size: int) -> None:
    """Where a part of one is out already, the connection breaks."""
    async with lied_to(kind) as lied:
        lied.liar.plays = [dies(SSE, chunk(data(1)), chunk(b"data: " + b"x" * size))]
        got = await lied.call(STREAMED_CALL)
        if got.complete:
            check_cut(APIS["chat"], data(1), got)
        else:
            assert b"upstream_failed" not in got.body
        await lied.at_rest()


@both
async def test_a_large_event_that_comes_whole_passes_as_it_is(kind: str) -> None:
    async with lied_to(kind) as lied:
        large = data("x" * 3_000_000) + data("y")
        lied.liar.plays = [says(SSE, chunk(large), LAST)]
        got = await lied.call(STREAMED_CALL)
        assert (got.body == large, got.complete) == (True, True)


@both
async def test_what_is_no_stream_of_events_breaks_off_where_it_was_cut(kind: str) -> None:
    """Lines of JSON, as Ollama sends them: there is no place for an error of ours in them."""
    async with lied_to(kind) as lied:
        lines = CHUNKED.replace(b"application/json", b"application/x-ndjson")
        lied.liar.plays = [dies(lines, chunk(b'{"a": 1}\n'), chunk(b'{"a": '))]
        got = await lied.call(STREAMED_CALL)
        assert (got.status, got.body, got.complete) == (200, b'{"a": 1}\n{"a": ', False)
        await lied.at_rest()


@both
@pytest.mark.parametrize("api", APIS.values(), ids=APIS)
async def test_a_stream_that_was_kept_alive_ends_with_an_error_event_when_its_server_dies(kind: str, api: Api) -> None:
    async with lied_to(kind, Limits(keepalive_ms=5)) as lied:
        may_die = asyncio.Event()

        async def late(line: Line, heard: Heard) -> None:
            await may_die.wait()
            line.die()

        lied.liar.plays = [late]
        async with wire(lied.gateway.url) as client:
            await client.send(api.call())
            said = await client.some()  # a keepalive
            may_die.set()
            body = said + await client.until(b"0\r\n\r\n")
        assert b"upstream_failed" in body
        assert body.rstrip(b"0\r\n").endswith(b"data: [DONE]") is api.done
