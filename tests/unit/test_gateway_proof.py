"""What answers tell about reuse: the numbers out of a passing stream, the slot, and the judgement."""

from __future__ import annotations

import json

import pytest

from swapper.core.conversations import ProofResult
from swapper.core.proof import judge
from swapper.gateway.proof import LAST_EVENTS, LAST_LINES, TAIL_BYTES, Reuse, SlotLine, Tail, pick_slot
from tests.unit.gateway_doubles import event

LAST: dict[str, object] = {
    "choices": [{"finish_reason": "stop", "index": 0, "delta": {}}],
    "timings": {"cache_n": 3010, "prompt_n": 66, "predicted_n": 8, "predicted_ms": 2.5},
}


@pytest.mark.parametrize("size", [1, 7, 64, 100_000])
def test_timings_are_found_in_the_last_events_however_the_chunks_fall(size: int) -> None:
    text = event('{"choices":[]}') * 20 + event(json.dumps(LAST)) + event("[DONE]")
    tail = Tail(sse=True)
    for start in range(0, len(text), size):
        tail.feed(text[start : start + size])
    assert tail.reuse() == Reuse(3010, 66, None, 3010 + 66 + 8 - 1)


def test_only_the_end_of_a_long_stream_is_kept() -> None:
    tail = Tail(sse=True)
    for _ in range(40):
        tail.feed(event(json.dumps({"content": "x" * 60_000})))
    tail.feed(event(json.dumps(LAST)))
    assert tail.reuse() == Reuse(3010, 66, None, 3010 + 66 + 8 - 1)


def test_events_with_crlf_are_read_too() -> None:
    tail = Tail(sse=True)
    tail.feed(b"data: " + json.dumps(LAST).encode() + b"\r\n\r\ndata: [DONE]\r\n\r\n")
    assert tail.reuse() == Reuse(3010, 66, None, 3010 + 66 + 8 - 1)


@pytest.mark.parametrize("end", [": still here\n\n", "\n", "event: done\ndata: [DONE]\n\n", "data: [DONE]"])
def test_the_numbers_are_found_whatever_else_ends_the_stream(end: str) -> None:
    tail = Tail(sse=True)
    tail.feed(b"data: " + json.dumps(LAST, indent=0).replace("\n", "\ndata: ").encode() + b"\n\n" + end.encode())
    assert tail.reuse() == Reuse(3010, 66, None, 3010 + 66 + 8 - 1)


@pytest.mark.parametrize("after", [event('{"choices":[]}') * LAST_EVENTS, b"\n" * LAST_LINES])
def test_numbers_that_do_not_stand_at_the_end_are_not_looked_for(after: bytes) -> None:
    tail = Tail(sse=True)
    tail.feed(event(json.dumps(LAST)) + after)
    assert tail.reuse() is None


def test_a_plain_completion_names_its_slot() -> None:
    tail = Tail(sse=False)
    tail.feed(b'{"id_slot": 1, "content": "timings", ')
    tail.feed(b'"timings": {"cache_n": 12, "prompt_n": 3, "predicted_n": 1}}')
    assert tail.reuse() == Reuse(12, 3, 1, 15)


def test_usage_serves_where_there_are_no_timings() -> None:
    tail = Tail(sse=False)
    tail.feed(
        b'{"usage": {"prompt_tokens": 100, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 90}}}'
    )
    assert tail.reuse() == Reuse(90, 10, None, 103)


def test_usage_tells_what_the_answer_left_in_its_slot() -> None:
    tail = Tail(sse=False)
    usage = {"prompt_tokens": 100, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 90}}
    tail.feed(json.dumps({"usage": usage}).encode())
    assert tail.reuse() == Reuse(90, 10, None, 104)


@pytest.mark.parametrize(
    "body", [b"", b"<html>", b'{"usage": {"prompt_tokens": 3}}', b'{"timings": null}', b"x" * (TAIL_BYTES + 1)]
)
def test_an_answer_without_numbers_proves_nothing(body: bytes) -> None:
    tail = Tail(sse=False)
    for start in range(0, max(len(body), 1), 65_536):
        tail.feed(body[start : start + 65_536])
    assert tail.reuse() is None


def line(slot: int, task: int | None, tokens: int | None = 15, busy: bool = False) -> SlotLine:
    return SlotLine(slot, busy, task, tokens)


@pytest.mark.parametrize(
    ("lines", "claimed", "expected"),
    [
        pytest.param([line(0, None, None), line(1, 7)], {}, 1, id="the only slot that ran anything"),
        pytest.param([line(0, 5, 16), line(1, 7)], {}, 1, id="the one that holds as many tokens as were left"),
        pytest.param([line(0, 5), line(1, 7)], {0: 5}, 1, id="the other task was another answer's"),
        pytest.param([line(0, 5), line(1, 7)], {}, None, id="two fit: nobody knows"),
        pytest.param([line(0, 5, busy=True)], {}, None, id="it already runs the next call"),
        pytest.param([line(0, 5, 16)], {}, None, id="the next call has been there already"),
        pytest.param([], {}, None, id="no answer from the server"),
    ],
)
def test_a_slot_is_trusted_only_when_it_is_the_one(
    lines: list[SlotLine], claimed: dict[int, int], expected: int | None
) -> None:
    picked = pick_slot(lines, claimed, Reuse(cache_n=10, prompt_n=2, left=15))
    assert (None if picked is None else picked.id) == expected


@pytest.mark.parametrize(
    ("saved", "cache_n", "prompt_n", "result", "words"),
    [
        pytest.param(4000, 4000, 40, ProofResult.WARM, None, id="all of it was reused"),
        pytest.param(4000, 2000, 3000, ProofResult.WARM, None, id="half of it was reused"),
        pytest.param(4000, 1700, 1500, ProofResult.WARM, None, id="an earlier turn of it again"),
        pytest.param(4000, 2100, 20, ProofResult.WARM, None, id="a much earlier turn, but half of it was reused"),
        pytest.param(8000, 500, 50, ProofResult.COLD, "slot taken by another, shorter", id="the same system prompt"),
        pytest.param(8000, 40, 30, ProofResult.COLD, "slot taken by another, shorter", id="a short system prompt"),
        pytest.param(4000, 1700, 1499, ProofResult.COLD, "shorter prompt (3199 tokens", id="just too short to tell"),
        pytest.param(4000, 1999, 3000, ProofResult.COLD, "read again", id="less than half of both"),
        pytest.param(4000, 0, 4040, ProofResult.COLD, "read again", id="nothing was reused"),
        pytest.param(4000, 10, 4030, ProofResult.COLD, "read again", id="only the template's first tokens"),
        pytest.param(4000, 1, 5, ProofResult.COLD, "slot taken by another, shorter prompt", id="a stranger says hi"),
        pytest.param(4000, 10, 5, ProofResult.COLD, "slot taken by another", id="a stranger with the same template"),
        pytest.param(0, 0, 10, ProofResult.COLD, "read again", id="nothing was saved"),
        pytest.param(20, 20, 3, ProofResult.WARM, None, id="a short conversation in full"),
    ],
)
def test_warm_is_said_only_after_reuse_was_seen(
    saved: int, cache_n: int, prompt_n: int, result: ProofResult, words: str | None
) -> None:
    said, reason = judge(saved, cache_n, prompt_n)
    assert said is result
    assert (reason is None) == (words is None)
    assert words is None or (reason is not None and words in reason)
