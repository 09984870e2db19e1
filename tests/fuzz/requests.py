"""What a seed makes of good requests: bytes, and where they are cut when they are sent. The same for ever."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

_BODY = b'{"model": "alpha", "prompt": "%d"}'
_TOKENS = (
    *(
        b"\r\n",
        b"\n",
        b"\r",
        b"\r\n\r\n",
        b"\0",
        b" ",
        b"\t",
        b":",
        b"0\r\n\r\n",
        b"0",
        b"\xff",
        b"\x0b",
        b"%00",
        b"//",
    ),
    *(b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"HTTP/0.9", b"Content-Length: 5\r\n", b"Content-Length: 0\r\n", b", "),
    *(b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: identity\r\n", b"transfer-encoding:\tChunked\r\n"),
    *(b"Transfer-Encoding : chunked\r\n", b"Connection: close\r\n", b"Connection: Content-Length\r\n", b"-1", b"+"),
    *(b"Expect: 100-continue\r\n", b"Expect: x\r\n", b"Upgrade: websocket\r\nConnection: Upgrade\r\n", b";a=b"),
    *(b"Host: b\r\n", b"X-Folded: a\r\n b\r\n", b"Content-Encoding: gzip\r\n", b"ffffffffffffffff", b"POST http://x/"),
    *(b"X-Long: %s\r\n" % (b"a" * 9000), b"X: a\r\n" * 200, b"..", b"/../", b"?model=alpha", b"#", b"\xc3\xa9", b'"'),
    b"POST /completion HTTP/1.1\r\nHost: s\r\nContent-Length: 20\r\n\r\n" + b'{"model":"alpha"}   ',
)


@dataclass(frozen=True, slots=True)
class Sent:
    """What goes over one connection, in these pieces."""

    pieces: tuple[bytes, ...]

    @property
    def whole(self) -> bytes:
        """All of it."""
        return b"".join(self.pieces)


def sent_by(seed: int) -> Sent:
    """One to three requests, changed in some places."""
    random = Random(seed)
    text = bytearray(b"".join(_good(random) for _ in range(random.choice((1, 1, 2, 3)))))
    for _ in range(random.choice((1, 1, 1, 2, 3, 6))):
        _change(random, text)
    cuts = sorted(random.randrange(len(text) + 1) for _ in range(random.choice((0, 0, 1, 3))))
    return Sent(tuple(bytes(text[a:b]) for a, b in zip((0, *cuts), (*cuts, len(text)), strict=True)))


def _good(random: Random) -> bytes:
    body = _BODY % random.randrange(10**9)
    path = random.choice(
        (b"/completion", b"/v1/chat/completions", b"/upstream/alpha/x", b"/v1/embeddings", b"/tokenize")
    )
    head = b"POST %s HTTP/1.1\r\nHost: gateway\r\nContent-Type: application/json\r\nX-Mark: %d\r\n"
    head %= (path, random.randrange(10**9))
    match random.randrange(5):
        case 0:
            size = random.randrange(1, len(body))
            chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:size], body[size:]))
            return head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"
        case 1:
            return b"GET %s HTTP/1.1\r\nHost: gateway\r\n\r\n" % random.choice((b"/v1/models", b"/props?model=alpha"))
        case _:
            return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


def _change(random: Random, text: bytearray) -> None:
    """One place of it, most often in a head."""
    at = random.randrange(len(text) + 1)
    if random.random() < 0.5:
        at = _line_end(random, text)
    size = random.choice((1, 1, 2, 5, 20, 60))
    match random.randrange(6):
        case 0 | 1:
            text[at:at] = random.choice(_TOKENS)
        case 2:
            del text[at : at + size]
        case 3:
            text[at:at] = text[at : at + size] * random.choice((1, 1, 2, 50))
        case 4:
            text[at : at + 1] = bytes((random.randrange(256),))
        case _:
            del text[at:]
    if not text:
        text += b"\r\n"


def _line_end(random: Random, text: bytearray) -> int:
    """Where a line begins: most of what changes the meaning of a head stands there."""
    ends = [at + 2 for at in range(len(text)) if text.startswith(b"\r\n", at)]
    return random.choice(ends or [0])
