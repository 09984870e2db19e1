"""Rules for all tests: in CI nothing is skipped and no folder overruns its time; no test leaves a process behind."""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.router import RUNNING

STRICT = os.environ.get("CI", "").lower() in ("1", "true")
BUDGET_S = defaultdict(lambda: 30, unit=120, model=120, store=60, contract=120, sim=120, e2e=800)
"""Seconds each folder should take on two idle cores, some eight minutes together; said at the end, never a failure."""
ROOT = Path(__file__).parent
_spent: dict[str, float] = defaultdict(float)


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


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Told to whoever leads the run, also of what its workers ran."""
    _spent[Path(report.nodeid).parts[1]] += report.duration


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if STRICT and report.skipped:
        report.outcome = "failed"
        report.longrepr = f"skipped, which CI does not allow: {report.longrepr}"
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    spent = ", ".join(f"{folder} {seconds:.0f} of {BUDGET_S[folder]} s" for folder, seconds in sorted(_spent.items()))
    terminalreporter.write_line(f"time by folder: {spent}")
    for folder in _over_budget():
        terminalreporter.write_line(f"tests/{folder} took longer than it should", red=True)


def _over_budget() -> list[str]:
    return [folder for folder, seconds in _spent.items() if seconds > BUDGET_S[folder]]


@pytest.fixture(autouse=True, scope="session")
def no_process_left_behind() -> Iterator[None]:
    """When everything is done, no process that the tests started is alive (adopted ones carry our mark)."""
    os.environ["SWAPPER_TEST_RUN"] = mark = str(os.getpid())
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has what it starts in the background ignore it
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
