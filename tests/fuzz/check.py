"""What must hold whatever is sent: answers are HTTP, what a server hears was sent as one request, and all live on.

The judge knows nothing of the gateway: it looks for each request that the server heard in what was sent.
"""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import suppress

import h11

from tests.fuzz.requests import Sent
from tests.support.liar import Heard
from tests.support.liedserve import Attacked
from tests.support.wire import Wire, request, wire

OURS = frozenset(
    {*(b"host", b"content-length", b"accept-encoding", b"accept", b"user-agent", b"connection", b"content-type")}
)
"""Headers that the gateway writes itself."""


class Judge:
    """Sends one after another to one serve."""

    def __init__(self, attacked: Attacked) -> None:
        self._attacked = attacked
        self._number = 0
        self._before = b""

    async def check(self, sent: Sent) -> None:
        """Send it, and hold everything against the rules."""
        liar, whole = self._attacked.liar, sent.whole
        async with wire(self._attacked.serve.url) as client:
            with suppress(ConnectionError):
                for piece in sent.pieces:
                    await client.send(piece)
                    await asyncio.sleep(0)
            good = await self._lives()  # a round trip of its own: what was sent before it has been looked at, too
            answers = read(await there(client))
        assert answers <= whole.count(b"HTTP/") + 1, f"{answers} answers"
        assert liar.nonsense == []
        heard = [one for one in liar.heard if one.body != good]
        liar.heard.clear()
        for one in heard:  # the last one's may have come late
            try:
                was_sent(whole, one)
            except AssertionError:
                if not self._before:
                    raise
                was_sent(self._before, one)
        self._before = whole

    async def _lives(self) -> bytes:
        """A good request is answered; its body."""
        self._number += 1
        body = b'{"model": "alpha", "prompt": "number %d"}' % self._number
        got = await self._attacked.call(request(body, "/completion"))
        assert (got.status, json.loads(got.body)["body"]) == (200, body.decode())
        return body


async def there(client: Wire) -> bytes:
    """What has come so far."""
    found = b""
    with suppress(TimeoutError):
        while True:
            async with asyncio.timeout(0):
                more = await client.some()
            if not more:
                break
            found += more
    return found


def read(data: bytes) -> int:
    """How many answers stand there, all of them HTTP; the last one may be unfinished."""
    answers = 0
    while data:
        talk = h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 22)
        talk.send(h11.Request(method="POST", target="/", headers=[("Host", "gateway")]))
        talk.send(h11.EndOfMessage())
        talk.receive_data(data)
        while not isinstance(event := talk.next_event(), h11.EndOfMessage):
            if event is h11.NEED_DATA:
                return answers
            if isinstance(event, h11.Response):
                answers += 1
        data = talk.trailing_data[0]
    return answers


def was_sent(whole: bytes, heard: Heard) -> None:
    """It is one request of those that were sent: its body between the ends that its head told, its headers in it."""
    assert heard.body in bodies(whole, len(heard.body)), f"nobody sent {heard.body!r} as a body"
    path = heard.target.partition("?")[0].encode()
    assert path in whole, f"nobody asked for {path!r}"
    for line in heard.head.split(b"\r\n")[1:-2]:
        name, _, value = line.partition(b": ")
        assert name.lower() in OURS or (name.lower() in whole.lower() and value in whole), f"nobody sent {line!r}"
        assert not {*value} & {0, 10, 13}, f"{line!r} is no header"


def bodies(whole: bytes, size: int) -> set[bytes]:
    """Everything in it that is the body of a head, by a length or by chunks."""
    found = {b""} if size == 0 else set[bytes]()
    ends = [match.end() for match in re.finditer(rb"\r\n\r\n", whole)]
    lengths = {int(match[1]) for match in re.finditer(rb"(?i)content-length:[ \t]*(\d+)[ \t]*\r\n", whole)}
    if size in lengths:
        found |= {whole[end : end + size] for end in ends if len(whole) >= end + size}
    return found | {body for end in ends if (body := unchunked(whole[end:])) is not None}


def unchunked(data: bytes) -> bytes | None:
    """A chunked body that begins here, strictly read; None where none does."""
    body = b""
    while match := re.match(rb"([0-9A-Fa-f]+)(;[^\r\n]*)?\r\n", data):
        size = int(match[1], 16)
        if size == 0:
            return body
        chunk, data = data[match.end() : match.end() + size], data[match.end() + size :]
        if len(chunk) < size or not data.startswith(b"\r\n"):
            return None
        body, data = body + chunk, data[2:]
    return None
