"""A store that is put back to an older state has jobs again that were over: they come to their end once more."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from swapper.core.jobs import Job, JobState
from swapper.core.types import WorkClass
from swapper.jobs.runner import Jobs
from swapper.store.memory import MemoryStore
from swapper.store.tail import Tail
from tests.support.virtual_time import virtual

JOB = Job("jb1", "encode", "mia", WorkClass.BATCH, "main", 1, "ls1", {}, {}, state=JobState.RUNNING, started_ms=1)


async def nothing() -> None:
    """The host is ours."""


@virtual
async def test_a_job_that_the_store_has_again_as_running_is_brought_to_an_end() -> None:
    store = MemoryStore(lambda: 1)
    tail = Tail(store)
    jobs = Jobs(
        store,
        tail,
        {},
        Path("/nowhere/at/all"),
        host="main",
        max_queue=10,
        new_id=lambda prefix: f"{prefix}2",
        now_ms=lambda: 2,
        fence=nothing,
        env={},
        url="",
    )
    running = asyncio.create_task(jobs.run())
    await asyncio.sleep(1)  # it has read which jobs there are: none
    await store.put_job(JOB)
    await store.put_job(replace(JOB, id="jb2", host="other"))
    for _ in range(100):
        await asyncio.sleep(1)
        if (job := await store.job("jb1")) is not None and job.over:
            break
    else:
        raise AssertionError("nobody sees to it")
    assert (job.state, job.reason) == (JobState.FAILED, "the store was put back to an older state, without its lease")
    theirs = await store.job("jb2")
    assert theirs is not None
    assert not theirs.over
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await tail.close()
