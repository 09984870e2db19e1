"""The client's side of a call: what of its request is needed to answer it, and where the answer goes.

Invariant: an answer begins once and ends once, or the connection is broken; nothing here waits. What the client takes
too slowly holds back the server, never the memory of this process: the `source` is paused and resumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from swapper.caller import Caller
from swapper.gateway.heads import header, passed_on
from swapper.gateway.link import Headers
from swapper.problem import Problem


class Source(Protocol):
    """Where an answer comes from, and can be held back."""

    def pause(self) -> None:
        """Read no more for now."""
        ...

    def resume(self) -> None:
        """Read on."""
        ...


class Downstream(Protocol):
    """One request's client. After it has left all writing is in vain, and harmless."""

    def begin(self, status: int, reason: str, headers: Headers, *, bounded: bool) -> None:
        """The head of the answer. `bounded`: it says its length; else its end is told by chunks."""
        ...

    def write(self, chunk: bytes) -> None:
        """More of the body."""
        ...

    def end(self) -> None:
        """It was all."""
        ...

    def abort(self) -> None:
        """Break the connection: what was written is not all."""
        ...

    def fed_by(self, source: Source | None) -> None:
        """Whom to hold back from here on."""
        ...


@dataclass(frozen=True, slots=True)
class Arrived:
    """A request but for its body: headers as they were sent, of them the lines that go up, and how long it may wait."""

    headers: Sequence[tuple[bytes, bytes]]
    caller: Caller
    passed: bytes
    wait: str = ""


def arrived(headers: Sequence[tuple[bytes, bytes]], caller: Caller) -> Arrived:
    """A request with these headers."""
    return Arrived(headers, caller, passed_on(headers), header(headers, b"x-swapper-max-wait").strip())


def refuse(down: Downstream, problem: Problem) -> int:
    """A refusal in OpenAI's envelope as the whole answer; its status."""
    body = problem.envelope()
    headers = [(b"Content-Type", b"application/json"), (b"Content-Length", b"%d" % len(body))]
    headers += [(name.encode(), value.encode("latin-1", "replace")) for name, value in problem.headers.items()]
    down.begin(problem.status, problem.reason, headers, bounded=True)
    down.write(body)
    down.end()
    return problem.status
