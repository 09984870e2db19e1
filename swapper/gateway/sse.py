"""Cuts a byte stream at the ends of SSE events, so that nothing of ours ever lands inside one.

Invariant: what goes out is what came in, in order; only an unfinished event is held back, and never much of it.
"""

from __future__ import annotations

HOLD_BYTES = 1 << 18
"""An unfinished event longer than this is passed on as it is."""


class Frames:
    """`feed` returns all finished events; `rest` is the beginning of the next one.

    `torn`: a part of an unfinished event is out.
    """

    __slots__ = ("rest", "torn")

    def __init__(self) -> None:
        self.rest = b""
        self.torn = False

    def feed(self, chunk: bytes) -> bytes:
        """Take a chunk as it came; give what may go out now (possibly nothing)."""
        text = self.rest + chunk if self.rest else chunk
        if text.endswith((b"\n\n", b"\r\n\r\n")):
            self.rest = b""
            self.torn = False
            return text
        end = max(_after(text, b"\n\n"), _after(text, b"\r\n\r\n"))
        if end:
            self.torn = False
        if len(text) - end > HOLD_BYTES:
            end = len(text)
            self.torn = True
        self.rest = text[end:]
        return text[:end]


def _after(text: bytes, mark: bytes) -> int:
    at = text.rfind(mark)
    return 0 if at < 0 else at + len(mark)
