"""Logging, set up once a process: for a person on a terminal, one JSON object a line otherwise.

Invariant: everything goes to standard error, so that standard output stays what a command answers. The libraries'
own records (logging) come out the same way.
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO

import structlog
from structlog.types import Processor


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
        else [structlog.dev.ConsoleRenderer(colors=out.isatty())]
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
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level)
    logging.getLogger("aiohttp.access").setLevel(max(level, logging.WARNING))
