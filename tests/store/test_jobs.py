"""Jobs on record: written by who has read their newest version, and never again once they are over."""

from __future__ import annotations

from dataclasses import replace

from swapper.core.jobs import Job, JobState
from swapper.core.types import WorkClass
from swapper.store import codec
from swapper.store.protocol import Store


def job(number: int, **changes: object) -> Job:
    made = Job(
        f"jb_{number}", "encode", "ann", WorkClass.BATCH, "main", 1_000 + number, f"ls_{number}", {"input": "/a"}, {}
    )
    return replace(made, **changes)  # pyright: ignore[reportArgumentType]


def over(written: Job, ended_ms: int = 5_000) -> Job:
    return replace(written, state=JobState.DONE, exit=0, ended_ms=ended_ms)


async def put(store: Store, one: Job) -> Job:
    written = await store.put_job(one)
    assert written is not None
    return written


async def test_a_job_is_read_as_it_was_written_and_its_version_rises(store: Store) -> None:
    written = await put(store, job(1, output={"output": "/b"}))
    assert written.version == 1
    assert await store.job("jb_1") == written
    running = await put(store, replace(written, state=JobState.RUNNING, started_ms=7))
    assert running.version == 2
    assert await store.job("jb_1") == running
    assert await store.job("jb_2") is None


async def test_who_has_not_read_its_newest_version_writes_nothing(store: Store) -> None:
    written = await put(store, job(1))
    newest = await put(store, replace(written, cancelled=True))
    assert await store.put_job(replace(written, state=JobState.RUNNING)) is None
    assert await store.put_job(job(1)) is None
    assert await store.job("jb_1") == newest


async def test_one_that_is_over_stays_as_it_is(store: Store) -> None:
    done = await put(store, over(await put(store, job(1))))
    assert await store.put_job(replace(done, cancelled=True)) is None
    assert await store.job("jb_1") == done


async def test_they_are_listed_newest_first_and_those_that_last_alone(store: Store) -> None:
    made = [await put(store, job(number)) for number in (1, 2, 3)]
    done = await put(store, over(made[1]))
    assert await store.jobs(limit=10) == (made[2], done, made[0])
    assert await store.jobs(limit=2) == (made[2], done)
    assert await store.jobs(limit=10, unfinished=True) == (made[2], made[0])


async def test_each_change_is_an_event_with_the_job_as_it_is_then(store: Store) -> None:
    done = await put(store, over(await put(store, job(1))))
    told = [event for event in await store.events(after="0", limit=10, block_ms=0) if event.type == "job"]
    assert [(event.subject, event.version) for event in told] == [("jb_1", 1), ("jb_1", 2)]
    assert codec.job(told[-1].data) == done


async def test_a_thousand_that_are_over_are_kept_and_all_that_last(store: Store) -> None:
    lasting = await put(store, job(0))
    for number in range(1, 1_003):
        await put(store, over(await put(store, job(number)), ended_ms=number))
    assert await store.job("jb_2") is None
    assert await store.job("jb_3") is not None
    assert await store.job("jb_0") == lasting
    assert len(await store.jobs(limit=5_000)) == 1_001
