"""Logging, set up once a process: for a person on a terminal, one JSON object a line otherwise.

Invariant: everything goes to standard error, so that standard output stays what a command answers. The libraries'
own records (logging) come out the same way. Nobody fills the log from outside: what comes in and is no HTTP is one line
a minute.
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO

import structlog
from aiohttp.http_exceptions import HttpProcessingError
from structlog.types import EventDict, Processor

NO_HTTP_S = 60.0
"""So often it is said at most that something came that is no HTTP."""


class _NoHttp(logging.Filter):
    """aiohttp tells what is no HTTP as an error with a traceback, each time. It is its sender's mistake, not ours.

    The line names the kind only: what follows in aiohttp's words is what came, and may hold a key.
    """

    def __init__(self) -> None:
        super().__init__()
        self._told: float | None = None
        self._untold = 0

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, HttpProcessingError):
            return True
        if self._told is not None and record.created - self._told < NO_HTTP_S:
            self._untold += 1
            return False
        kind = str(error.message).partition("\n")[0].partition(":")[0][:80]
        record.levelno, record.levelname, record.exc_info = logging.INFO, "INFO", None
        record.msg, record.args = "what came is no HTTP: %s; %d more since the last such line", (kind, self._untold)
        self._told, self._untold = record.created, 0
        return logging.getLogger(record.name).isEnabledFor(logging.INFO)


def _without_nothing(_logger: object, _method: str, event: EventDict) -> EventDict:
    """To a person `reason=None` says less than nothing; a program may count on each key."""
    return {name: value for name, value in event.items() if value is not None}


def setup(*, stream: TextIO | None = None, as_json: bool | None = None, level: int = logging.INFO) -> None:
    """Configure structlog and logging. `as_json` None: JSON unless `stream` (standard error) is a terminal."""
    out: TextIO = sys.stderr if stream is None else stream
    as_json = not out.isatty() if as_json is None else as_json
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    render: list[Processor] = (
        [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(ensure_ascii=False)]
        if as_json
        else [_without_nothing, structlog.dev.ConsoleRenderer(colors=out.isatty())]
    )
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.make_filtering_bound_logger(level),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(out)
    clean = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=[clean, *render]))
    server = logging.getLogger("aiohttp.server")
    server.filters = [_NoHttp()]
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level)
    logging.getLogger("aiohttp.access").setLevel(max(level, logging.WARNING))
