"""Why a model could not be loaded: the few lines of llama-server's log that say so.

Invariant: pure; gives the server's own words, never ours. A router passes its children's lines on with `[PORT]` in
front; of those the errors are taken, each once, without what every failed load says anyway. The cause is said first
and passed on upwards, so the first lines count; an assertion or an uncaught exception is the last thing said.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

SHOWN = 3
"""So many lines at most."""

_LONGEST = 300
_STAMP = re.compile(r"(?:\d+\.\d\d\.\d{3}\.\d{3} )?([DIWE]) ")
"""What llama-server puts in front of a line: minutes, seconds, ms and us since its start (not every line), level."""
_WORDS = re.compile(
    r"error|fail|exception|terminate called|what\(\)|assert|abort|out of memory|invalid|unable|cannot|no such file",
    re.IGNORECASE,
)
_ECHO = re.compile(
    r"exiting due to|encountered an error while trying to fit|cmd_child_to_router"
    r"|failed to (?:load model|create[_ ]context with model),?(?: '[^']*')?$"
)
"""What follows from any failure, whatever its cause."""


def reasons(tail: Sequence[str], port: str | None) -> list[str]:
    """At most SHOWN lines of the log's `tail` that say why the child at `port` ended, oldest first.

    Without the child's own lines (`port` None: it is no router's) all are looked through; where no line says an error,
    the last one stands.
    """
    return _said(_own(tail, port))


def complains(tail: Sequence[str], port: str) -> bool:
    """Whether an error stands in the child's lines: the router may tell that it ended before it passes them on."""
    return any(_is_error(line) and not _ECHO.search(line) for line in _own(tail, port))


def _own(tail: Sequence[str], port: str | None) -> list[str]:
    if port is None:
        return [line.strip() for line in tail]
    mark = f"[{port}]"
    begins = (i for i in reversed(range(len(tail))) if not tail[i].startswith("[") and tail[i].endswith(f" {port}"))
    tail = tail[next(begins, 0) :]  # the router's line with the child's arguments: a port comes round again
    return [line.removeprefix(mark).strip() for line in tail if line.startswith(mark)] or [
        line.strip() for line in tail
    ]


def _said(own: Sequence[str]) -> list[str]:
    errors = [_STAMP.sub("", line, count=1)[:_LONGEST] for line in own if _is_error(line)]
    said = list(dict.fromkeys(line for line in errors if not _ECHO.search(line))) or errors[-1:]
    if not said:
        return [_STAMP.sub("", line, count=1)[:_LONGEST] for line in own if line and not _ECHO.search(line)][-1:]
    return said if len(said) <= SHOWN else [*said[: SHOWN - 1], said[-1]]


def _is_error(line: str) -> bool:
    stamp = _STAMP.match(line)
    return stamp[1] == "E" if stamp else _WORDS.search(line) is not None
