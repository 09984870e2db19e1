"""Logging for programs and for people."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Generator

import pytest
import structlog
from aiohttp.http_exceptions import BadStatusLine, InvalidHeader

from swapper.log import setup


@pytest.fixture(autouse=True)
def restored() -> Generator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield
    root.handlers = handlers
    root.setLevel(level)
    logging.getLogger("aiohttp.server").filters = []
    structlog.reset_defaults()


def test_each_record_is_one_json_object_where_nobody_watches() -> None:
    out = io.StringIO()
    setup(stream=out)
    structlog.get_logger("swapper.test").info("serving", card="gpu0")
    logging.getLogger("library").warning("slow by %d ms", 7)
    ours, theirs = (json.loads(text) for text in out.getvalue().splitlines())
    assert (ours["event"], ours["card"], ours["level"]) == ("serving", "gpu0", "info")
    assert (theirs["event"], theirs["logger"]) == ("slow by 7 ms", "library")


def test_what_is_nothing_is_not_said_to_a_person_and_is_null_to_a_program() -> None:
    person, program = io.StringIO(), io.StringIO()
    for out, as_json in ((person, False), (program, True)):
        setup(stream=out, as_json=as_json)
        structlog.get_logger("swapper.test").info("swap ended", ms=0, reason=None)
    assert "ms=0" in person.getvalue()
    assert "reason" not in person.getvalue()
    assert json.loads(program.getvalue())["reason"] is None


def test_a_failure_is_logged_without_the_values_of_its_variables() -> None:
    out = io.StringIO()
    setup(stream=out)
    secret = "hunter" + "2" * 3
    try:
        raise RuntimeError("went wrong")
    except RuntimeError:
        structlog.get_logger("swapper.test").exception("died", length=len(secret))
    assert "went wrong" in json.loads(out.getvalue())["exception"]
    assert secret not in out.getvalue()


def test_what_is_no_http_is_told_once_a_minute_without_what_came_and_a_bug_each_time() -> None:
    out = io.StringIO()
    setup(stream=out)
    logger = logging.getLogger("aiohttp.server")
    for error in (BadStatusLine("GET\0"), InvalidHeader(b"Authorization hunter2"), RuntimeError("a bug")):
        try:
            raise error
        except Exception as raised:
            logger.exception("Error handling request from %s", "127.0.0.1", exc_info=raised)
    told, bug = (json.loads(text) for text in out.getvalue().splitlines())
    assert (told["level"], "exception" in told) == ("info", False)
    assert told["event"].startswith("what came is no HTTP: ")
    assert (bug["level"], "a bug" in bug["exception"]) == ("error", True)


def test_what_was_not_told_is_counted() -> None:
    out = io.StringIO()
    setup(stream=out)
    logger, error = logging.getLogger("aiohttp.server"), InvalidHeader(b"Authorization hunter2")
    for created in (1000.0, 1030.0, 1059.0, 1061.0):
        record = logger.makeRecord(logger.name, logging.ERROR, "", 0, "Error", (), (type(error), error, None))
        record.created = created
        logger.handle(record)
    told = [json.loads(text)["event"] for text in out.getvalue().splitlines()]
    assert [text.rpartition("; ")[2] for text in told] == [f"{n} more since the last such line" for n in (0, 2)]
    assert "hunter" not in out.getvalue()


def test_people_get_lines() -> None:
    out = io.StringIO()
    setup(stream=out, as_json=False)
    structlog.get_logger("swapper.test").info("serving", card="gpu0")
    assert "serving" in out.getvalue()
    assert "card=gpu0" in out.getvalue()
