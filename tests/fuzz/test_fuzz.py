"""Some hundred seeds each time, those that found something once among them; and that the judge finds what is wrong."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.fuzz.check import Judge, bodies, read, was_sent
from tests.fuzz.requests import sent_by
from tests.support.liar import Heard
from tests.support.liedserve import attacked

SEEDS = range(400)
KEPT = 8
"""Connections to the server that may stay open."""


async def test_whatever_becomes_of_a_request_all_live_on_and_nobody_s_bytes_are_another_s(tmp_path: Path) -> None:
    async with attacked(tmp_path) as made:
        await made.lives()
        made.liar.heard.clear()
        judge = Judge(made)
        process = psutil.Process(made.serve.pid)
        before = process.num_fds()
        for seed in SEEDS:
            await judge.check(sent_by(seed))
        await made.lives()
        assert process.num_fds() <= before + KEPT


REQUEST = b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n"


@pytest.mark.parametrize(
    ("head", "body"),
    [
        (b"POST /a HTTP/1.1\r\n\r\n", b"bodyP"),
        (b"POST /b HTTP/1.1\r\n\r\n", b"body"),
        (b"POST /a HTTP/1.1\r\nX-Evil: 1\r\n\r\n", b"body"),
        (b"POST /a HTTP/1.1\r\nHost: a\rb\r\n\r\n", b"body"),
    ],
)
def test_what_was_not_sent_as_a_whole_is_found(head: bytes, body: bytes) -> None:
    whole = REQUEST + b"body" + b"POST /c HTTP/1.1\r\n\r\n"
    was_sent(whole, Heard(b"POST /a HTTP/1.1\r\nHost: y\r\n\r\n", b"body", 1))
    with pytest.raises(AssertionError):
        was_sent(whole, Heard(head, body, 1))


def test_a_body_ends_where_its_length_or_its_last_chunk_says() -> None:
    assert bodies(REQUEST + b"body more", 4) == {b"body"}
    assert bodies(b"x\r\n\r\n2\r\nbo\r\n2;a=b\r\ndy\r\n0\r\n\r\n", 4) == {b"body"}
    assert bodies(b"x\r\n\r\n2\r\nbo\r\n3\r\ndy\r\n0\r\n\r\n", 4) == set()


def test_answers_are_counted_and_what_is_none_is_an_error() -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
    assert read(answer * 2 + answer[:-1]) == 3
    with pytest.raises(Exception, match="illegal"):
        read(answer + b"more" * 10 + b"\r\n\r\n")
