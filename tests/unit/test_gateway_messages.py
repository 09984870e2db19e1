"""Anthropic's route: its own keepalives and errors in a stream, and where its answers tell what was reused."""

from __future__ import annotations

import json

from swapper.gateway.filler import MESSAGES
from swapper.gateway.proof import Reuse, Tail
from tests.unit.gateway_doubles import ALPHA, answer, serve

ASK = {"model": "alpha", "max_tokens": 8, "messages": [{"role": "user", "content": "hi"}]}


def test_a_stream_tells_its_prompt_in_the_first_event_and_what_it_generated_in_a_late_one() -> None:
    tail = Tail(sse=True, head=True)
    started = {"message": {"usage": {"cache_read_input_tokens": 90, "input_tokens": 10, "output_tokens": 0}}}
    tail.feed(b"event: message_start\ndata: " + json.dumps(started).encode() + b"\n\n")
    for _ in range(40):
        tail.feed(b"event: content_block_delta\ndata: " + json.dumps({"delta": "x" * 60_000}).encode() + b"\n\n")
    tail.feed(b'event: message_delta\ndata: {"usage": {"output_tokens": 5}}\n\n')
    tail.feed(b'event: message_stop\ndata: {"type": "message_stop"}\n\n')
    assert tail.reuse() == Reuse(90, 10, None, 104)


def test_a_plain_answer_counts_the_cached_tokens_beside_the_others() -> None:
    tail = Tail(sse=False, head=True)
    tail.feed(b'{"usage": {"cache_read_input_tokens": 90, "input_tokens": 10, "output_tokens": 5}}')
    assert tail.reuse() == Reuse(90, 10, None, 104)


def test_an_error_in_a_stream_is_an_event_of_its_own_and_nothing_follows() -> None:
    assert MESSAGES.error(b'{"message":"no"}') == (b'event: error\ndata: {"type":"error","error":{"message":"no"}}\n\n')


async def test_a_call_goes_to_the_same_path_of_its_server() -> None:
    async with serve() as gateway:
        gateway.upstream.scripts = [answer({"type": "message"})]
        got = await gateway.call(ASK, path="/v1/messages")
        assert got.status == 200
        assert gateway.upstream.seen[0].path == "/v1/messages"
        assert [talk.id for talk in gateway.member.talks.index.talks(ALPHA)]
