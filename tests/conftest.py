"""Rules for all tests: in CI nothing is skipped, and no test leaves a process behind."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator

import psutil
import pytest

from tests.support.router import RUNNING

STRICT = os.environ.get("CI", "").lower() in ("1", "true")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if STRICT and report.skipped:
        report.outcome = "failed"
        report.longrepr = f"skipped, which CI does not allow: {report.longrepr}"
    if report.failed:
        report.sections += [(f"llama-server at {router.url}", "\n".join(router.log_tail())) for router in RUNNING]
    return report


@pytest.fixture(autouse=True, scope="session")
def no_process_left_behind() -> Iterator[None]:
    """When everything is done, no process that the tests started is alive (adopted ones carry our mark)."""
    os.environ["SWAPPER_TEST_RUN"] = mark = str(os.getpid())
    yield
    left = [p for p in psutil.process_iter(["pid", "name"]) if p.pid != os.getpid() and _marked(p, mark)]
    names = [f"{p.info['name']} ({p.pid})" for p in left]
    for process in left:
        process.kill()
    assert not names, f"left behind: {', '.join(names)}"


def _marked(process: psutil.Process, mark: str) -> bool:
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        return process.environ().get("SWAPPER_TEST_RUN") == mark
    except psutil.Error:
        return False
