"""Prompt tokens are counted as the answers pass, by whatever API and kind of server they come."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from swapper.gateway.proof import Spent, Tail
from tests.unit.gateway_doubles import ALPHA, CHAT, Stream, answer, event, plain, serve

OPENAI = {"prompt_tokens": 100, "completion_tokens": 5}


def tail(*events: object, head: bool = False) -> Tail:
    found = Tail(sse=True, head=head)
    for one in events:
        found.feed(event(one if isinstance(one, str) else json.dumps(one)))
    return found


@pytest.mark.parametrize(
    ("body", "spent"),
    [
        ({"usage": OPENAI}, Spent(0, 100)),
        ({"usage": {**OPENAI, "prompt_tokens_details": None}}, Spent(0, 100)),
        ({"usage": {**OPENAI, "prompt_tokens_details": {"cached_tokens": 80}}}, Spent(80, 20)),
        ({"usage": OPENAI, "timings": {"cache_n": 90, "prompt_n": 10, "predicted_n": 5}}, Spent(90, 10)),
        ({"usage": {"input_tokens": 10, "cache_read_input_tokens": 90, "output_tokens": 1}}, Spent(90, 10)),
        ({"usage": {"input_tokens": 10, "cache_creation_input_tokens": 7, "output_tokens": 1}}, Spent(0, 17)),
        ({"usage": {"input_tokens": 100, "input_tokens_details": {"cached_tokens": 30}}}, Spent(30, 70)),
        ({"usage": {"prompt_tokens": 12, "total_tokens": 12}, "data": []}, Spent(0, 12)),
        ({"usage": {"prompt_tokens": "many"}}, None),
        ({"choices": []}, None),
    ],
)
def test_a_body_tells_what_its_prompt_took(body: object, spent: Spent | None) -> None:
    found = Tail(sse=False)
    found.feed(json.dumps(body).encode())
    assert found.spent() == spent


def test_a_body_whose_beginning_is_gone_tells_nothing() -> None:
    found = Tail(sse=False)
    found.feed(b"x" * 2_000_000)
    found.feed(json.dumps({"usage": OPENAI}).encode())
    assert found.spent() is None


def test_the_last_events_of_a_stream_tell_it() -> None:
    many = [{"choices": [{"delta": {"content": "x"}}]}] * 50
    assert tail(*many, {"choices": [], "usage": OPENAI}, "[DONE]").spent() == Spent(0, 100)
    usage = {"input_tokens": 9, "input_tokens_details": {"cached_tokens": 4}, "output_tokens": 1}
    assert tail({"type": "response.completed", "response": {"usage": usage}}).spent() == Spent(4, 5)
    assert tail(*many, "[DONE]").spent() is None


def test_anthropic_s_stream_tells_it_first_and_a_server_that_does_later_is_believed() -> None:
    start = {"type": "message_start", "message": {"usage": {"input_tokens": 8, "cache_read_input_tokens": 2}}}
    end = {"type": "message_delta", "usage": {"output_tokens": 3}}
    assert tail(start, end, head=True).spent() == Spent(2, 8)
    nothing = {"type": "message_start", "message": {"usage": {"input_tokens": 0}}}
    late = {"type": "message_delta", "usage": {"input_tokens": 11, "output_tokens": 3}}
    assert tail(nothing, late, head=True).spent() == Spent(0, 11)


@pytest.mark.parametrize("slots", [False, True])
async def test_calls_of_every_kind_of_server_count_once(slots: bool) -> None:
    async with serve() as served:
        served.ctx.targets = {ALPHA: replace(served.ctx.targets[ALPHA], router=False, slots=slots)}
        counts = served.ctx.talks.index.counts
        served.upstream.scripts = [answer({"usage": {**OPENAI, "prompt_tokens_details": {"cached_tokens": 60}}})]
        await served.call(CHAT)
        await served.ctx.talks.idle()
        assert (counts(ALPHA).cached, counts(ALPHA).processed) == (60, 40)
        served.upstream.scripts = [answer({"data": [], "usage": {"prompt_tokens": 5, "total_tokens": 5}})]
        await served.call({"model": "alpha", "input": "x"}, "/v1/embeddings")
        served.upstream.scripts = [Stream().put(event(json.dumps({"usage": OPENAI})), event("[DONE]"), None)]
        await served.call({**CHAT, "stream": True})
        await served.ctx.talks.idle()
        assert (counts(ALPHA).cached, counts(ALPHA).processed) == (60, 145)
        served.upstream.scripts = [plain(json.dumps({"usage": OPENAI}), 500)]
        await served.call(CHAT)
        await served.call({"model": "alpha", "content": "x"}, "/tokenize")
        assert (counts(ALPHA).cached, counts(ALPHA).processed) == (60, 145)
