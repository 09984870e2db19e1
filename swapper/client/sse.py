"""Reading server-sent events from lines of bytes.

Invariant: a pure parser over an async stream of lines; comments are skipped, an event ends at an empty line.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Message:
    """One server-sent event; `data` is its text, lines joined."""

    id: str
    event: str
    data: str


async def messages(lines: AsyncIterable[bytes]) -> AsyncIterator[Message]:
    """The messages of a stream; an unfinished one at the end is dropped, as the standard says."""
    last_id, event, data = "", "message", list[str]()
    async for raw in lines:
        line = raw.decode("utf-8", "replace").rstrip("\r\n")
        if not line:
            if data:
                yield Message(last_id, event, "\n".join(data))
            event, data = "message", []
            continue
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        match name:
            case "id":
                last_id = value
            case "event":
                event = value
            case "data":
                data.append(value)
            case _:
                pass
