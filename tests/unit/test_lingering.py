"""A holder that would not go is told of with every look at its card until it is gone, by its agent's next run too."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import cast

import pytest

from swapper.core.orders import Report
from swapper.core.turn import Seen
from swapper.core.types import Departed
from tests.unit.agent_doubles import MemoryLink, Running, command


@pytest.fixture
def holder() -> Iterator[subprocess.Popen[bytes]]:
    """A process that lives until it is killed."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def tells(report: Report, pid: int) -> bool:
    cards = cast("Mapping[str, Mapping[str, object]]", report.data.get("cards", {}))
    return cards.get("gpu0", {}).get("lingering") == [f"pid {pid}"]


async def test_it_is_told_of_by_the_next_run_and_no_more_once_it_is_gone(
    link: MemoryLink, running: Running, holder: subprocess.Popen[bytes]
) -> None:
    departed = [asdict(Departed("ls_1", "encode", holder.pid, 0))]
    async with running():
        await link.send(command("vacate", 9, 1, tenant=None, need_mib=1, limit_ms=0, departed=departed, now_ms=0))
        assert (await link.answer(9, 1)).outcome == "failed"
        await link.until(lambda reports: any(tells(one, holder.pid) for one in reports))
    link.reports.clear()
    async with running() as agent:
        first = await link.volunteered("observed")
        assert tells(first, holder.pid)
        holder.kill()
        holder.wait()
        await agent.watch.look("llama")
    assert not tells([report for report in link.reports if report.verb == "observed"][-1], holder.pid)


async def test_one_that_went_before_the_next_run_or_whose_pid_is_anothers_is_not(
    link: MemoryLink, running: Running, holder: subprocess.Popen[bytes]
) -> None:
    departed = [asdict(Departed("ls_1", "encode", holder.pid, 0))]
    async with running():
        await link.send(command("vacate", 9, 1, tenant=None, need_mib=1, limit_ms=0, departed=departed, now_ms=0))
        await link.answer(9, 1)
    link.reports.clear()
    holder.kill()
    holder.wait()
    async with running():
        assert not tells(await link.volunteered("observed"), holder.pid)


def test_while_it_lives_nothing_of_its_card_counts_as_free() -> None:
    seen = Seen(readings={"gpu0": {"free_mib": 100, "lingering": ["pid 7"]}, "gpu1": {"free_mib": 100}})
    assert (seen.free_mib("gpu0"), seen.free_mib("gpu1")) == (None, 100)
