"""Logging for programs and for people."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Generator

import pytest
import structlog

from swapper.log import setup


@pytest.fixture(autouse=True)
def restored() -> Generator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield
    root.handlers = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def test_each_record_is_one_json_object_where_nobody_watches() -> None:
    out = io.StringIO()
    setup(stream=out)
    structlog.get_logger("swapper.test").info("serving", card="gpu0")
    logging.getLogger("library").warning("slow by %d ms", 7)
    ours, theirs = (json.loads(text) for text in out.getvalue().splitlines())
    assert (ours["event"], ours["card"], ours["level"]) == ("serving", "gpu0", "info")
    assert (theirs["event"], theirs["logger"]) == ("slow by 7 ms", "library")


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


def test_people_get_lines() -> None:
    out = io.StringIO()
    setup(stream=out, as_json=False)
    structlog.get_logger("swapper.test").info("serving", card="gpu0")
    assert "serving" in out.getvalue()
    assert "card=gpu0" in out.getvalue()
