"""The runner of jobs: each is seen to its end whatever the store, the disk or its lease does meanwhile."""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from swapper.core.commit import Commit, Committed, LeaseChange
from swapper.core.jobs import Job, JobState
from swapper.core.types import ACTIVE, Lease, LeaseRequest, LeaseState, WorkClass
from swapper.errors import StoreDown
from swapper.jobs import runner
from swapper.jobs.recipes import Param, Recipe
from swapper.jobs.runner import Jobs
from swapper.store.memory import MemoryStore
from swapper.store.protocol import Ended, NotFound, WrongToken
from swapper.store.tail import Tail
from workers.jobs import JobProcess, Place, ever_running, still_running, temporary

QUICK = (sys.executable, "-c", "import sys; open(sys.argv[1], 'w').write('x')", "{output}")
LONG = (sys.executable, "-c", "import time; time.sleep(600)", "{output}")
T = TypeVar("T")


async def _at_once() -> None:
    """This host is ours."""


async def begins(pid: int, started: int) -> bool:
    """Whoever it is."""
    del pid, started
    return True


@dataclass(slots=True)
class Rig:
    """A runner that runs, and what it runs on."""

    store: MemoryStore
    tail: Tail
    jobs: Jobs
    media: Path
    folder: Path

    def recipe(self, command: tuple[str, ...]) -> Recipe:
        return Recipe("write", command, {"output": Param("output")}, (self.media,), "gpu0", None, 3_600_000, 1_000)

    async def submit(self, command: tuple[str, ...] = QUICK, output: str = "out") -> Job:
        self.jobs.recipes = {"write": self.recipe(command)}
        return await self.jobs.submit(self.jobs.recipes["write"], {"output": output}, "ann", WorkClass.NORMAL)

    async def change(self, lease: str, state: LeaseState, token: int | None = None) -> None:
        """Commit it, as the coordinator would."""
        change = LeaseChange(lease, ACTIVE, state, token=token, card="gpu0")
        assert await self.store.commit(Commit(leases=(change,))) == Committed()

    async def grant(self, job: Job) -> None:
        await self.lease(job, lambda lease: lease is not None)
        await self.change(job.lease, LeaseState.GRANTED, (await self.store.read()).next_token)

    async def lease(self, job: Job, wanted: Callable[[Lease | None], bool]) -> Lease | None:
        """Its lease, once it is as wanted."""

        async def newest() -> Lease | None:
            return await self.store.lease(job.lease)

        return await self._once(newest, wanted)

    async def until(self, job_id: str, wanted: Callable[[Job], bool]) -> Job:
        """The job, once it is as wanted."""

        async def newest() -> Job | None:
            return await self.store.job(job_id)

        found = await self._once(newest, lambda job: job is not None and wanted(job))
        assert found is not None
        return found

    async def over(self, job: Job) -> Job:
        return await self.until(job.id, lambda one: one.over)

    async def _once(self, newest: Callable[[], Awaitable[T]], wanted: Callable[[T], bool]) -> T:
        async with asyncio.timeout(20):
            with self.tail.watch_all() as changed:
                while True:
                    changed.clear()
                    if wanted(found := await newest()):
                        return found
                    await changed.wait()


@asynccontextmanager
async def running(
    tmp_path: Path, *, max_queue: int = 100, fence: Callable[[], Awaitable[None]] = _at_once
) -> AsyncGenerator[Rig]:
    store = MemoryStore(lambda: time.time_ns() // 1_000_000)
    tail = Tail(store)
    media, folder, number = tmp_path / "media", tmp_path / "jobs", itertools.count()
    media.mkdir()
    (folder / ".running").mkdir(parents=True)
    (folder / ".running" / "jb_none").touch()
    jobs = Jobs(
        store,
        tail,
        {},
        folder,
        host="main",
        max_queue=max_queue,
        new_id=lambda kind: f"{kind}_{next(number)}",
        now_ms=lambda: time.time_ns() // 1_000_000,
        fence=fence,
        env={},
        url="",
    )
    rig = Rig(store, tail, jobs, media, folder)
    task = asyncio.create_task(jobs.run())
    try:
        yield rig
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await tail.close()
        for path in folder.glob("*"):
            await JobProcess(path.name, path, {}).end(0)


async def tidied(rig: Rig) -> None:
    """Until the first tidying, with which it begins, is over."""
    async with asyncio.timeout(20):
        while True:
            if not ever_running(rig.folder):  # the last thing it looks at
                return
            await asyncio.sleep(0)  # a turn for everybody else


async def test_one_that_the_store_took_without_its_lease_is_refused_and_does_not_run_later(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        rig.store.fail(before=1, of=("enqueue",))
        with pytest.raises(StoreDown):
            await rig.submit()
        (taken,) = await rig.store.jobs(limit=10)
        assert (await rig.over(taken)).state is JobState.CANCELLED
        lease = await rig.store.lease(taken.lease)
        assert lease is None or lease.state is LeaseState.CANCELLED


async def test_so_is_one_of_which_nobody_heard_that_the_store_had_it(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        rig.store.fail(after=1, of=("put_job",))
        with pytest.raises(StoreDown):
            await rig.submit()
        (taken,) = await rig.store.jobs(limit=10)
        assert (await rig.over(taken)).state is JobState.CANCELLED


async def test_a_lease_that_ended_while_the_host_was_made_sure_of_starts_nothing(tmp_path: Path) -> None:
    asked, sure = asyncio.Event(), asyncio.Event()

    async def fence() -> None:
        asked.set()
        await sure.wait()

    async with running(tmp_path, fence=fence) as rig:
        job = await rig.submit()
        await rig.grant(job)
        await asked.wait()
        await rig.change(job.lease, LeaseState.EXPIRED)
        sure.set()
        failed = await rig.over(job)
        assert failed.state is JobState.FAILED
        assert "its lease was expired" in (failed.reason or "")
        assert not rig.jobs.process(job).begun


async def test_one_whose_folder_cannot_be_made_fails_and_gives_its_lease_back(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        await tidied(rig)
        job = await rig.submit()
        folder = rig.folder / job.id
        folder.symlink_to(tmp_path / "nowhere")
        await rig.grant(job)
        failed = await rig.over(job)
        assert failed.state is JobState.FAILED
        assert f"cannot be started: {folder}" in (failed.reason or "")
        lease = await rig.store.lease(job.lease)
        assert lease is not None
        assert lease.state is LeaseState.RELEASED


async def test_one_whose_half_output_cannot_be_removed_comes_to_an_end(tmp_path: Path) -> None:
    fails = (sys.executable, "-c", "import os, sys; os.mkdir(sys.argv[1]); sys.exit(3)", "{output}")
    async with running(tmp_path) as rig:
        job = await rig.submit(fails)
        await rig.grant(job)
        failed = await rig.over(job)
        assert (failed.state, failed.exit) == (JobState.FAILED, 3)


async def test_its_process_stands_on_its_lease_before_it_begins(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        job = await rig.submit()
        process, beats = rig.jobs.process(job), list[tuple[bool, int | None, int | None]]()
        heartbeat = rig.store.heartbeat

        async def heard(
            lease_id: str,
            token: int,
            *,
            progress: float | None = None,
            request: LeaseRequest | None = None,
            now_ms: int | None = None,
        ) -> Lease | NotFound | WrongToken | Ended:
            assert request is not None
            beats.append((process.begun, request.holder_pid, request.holder_started))
            return await heartbeat(lease_id, token, progress=progress, request=request, now_ms=now_ms)

        rig.store.heartbeat = heard
        await rig.grant(job)
        assert (await rig.over(job)).state is JobState.DONE
        assert beats[0] == (False, *(process.recorded() or ()))


async def test_a_lease_that_names_nobody_though_its_job_runs_is_told_when_it_is_found_again(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        job = await rig.submit(LONG)
        await rig.grant(job)
        await rig.until(job.id, lambda one: one.state is JobState.RUNNING)
        lease = await rig.store.lease(job.lease)
        assert lease is not None
        silent = replace(lease.request, holder_pid=None, holder_started=None)
        await rig.store.heartbeat(job.lease, lease.token or 0, request=silent)  # as a store put back would have it
        with rig.tail.watch(job.lease):
            found = await rig.lease(job, lambda one: one is not None and one.request.holder_pid is not None)
        assert found is not None
        assert found.request.holder_pid == rig.jobs.process(job).pid()
        await rig.jobs.cancel(job)
        await rig.over(job)


async def test_of_one_that_is_over_nothing_is_said_to_run(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        job = await rig.submit(LONG)
        await rig.grant(job)
        await rig.until(job.id, lambda one: one.state is JobState.RUNNING)
        pid = rig.jobs.process(job).pid()
        assert still_running(rig.folder, "gpu0", ()) == (f"pid {pid} (job {job.id})",)
        assert still_running(rig.folder, "gpu0", (job.lease,)) == ()
        assert still_running(rig.folder, "gpu1", ()) == ()
        await rig.jobs.cancel(job)
        await rig.over(job)
        assert still_running(rig.folder, "gpu0", ()) == ()
        assert ever_running(rig.folder) == []


async def test_what_runs_of_one_that_the_store_has_forgotten_is_ended_and_its_folder_goes(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        await tidied(rig)
        final = tmp_path / "movie.mkv"
        forgotten = JobProcess("jb_old", rig.folder / "jb_old", {"output": str(final)})
        hidden = temporary(str(final), "jb_old")
        hidden.write_text("half of it")
        await forgotten.start(LONG, dict(os.environ), Place("ls_old", "gpu0"), begins, follows=False)
        pid = forgotten.pid()
        assert pid is not None
        job = await rig.submit(LONG)
        await rig.grant(job)
        await rig.until(job.id, lambda one: one.state is JobState.RUNNING)
        await rig.jobs.tidy()
        assert not psutil.pid_exists(pid)
        assert not (rig.folder / "jb_old").exists()
        assert not hidden.exists()
        assert rig.jobs.process(job).pid() is not None
        await rig.jobs.cancel(job)
        await rig.over(job)


async def test_the_folder_of_one_that_comes_while_it_is_tidied_stays(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        await tidied(rig)
        (rig.folder / "jb_old").mkdir()
        read = rig.store.jobs
        made: list[Job] = []

        async def jobs(*, limit: int, unfinished: bool = False) -> tuple[Job, ...]:
            found = await read(limit=limit, unfinished=unfinished)
            made.append(await rig.submit())
            rig.jobs.process(made[0]).log_path().parent.mkdir()
            return found

        rig.store.jobs = jobs
        await rig.jobs.tidy()
        assert {path.name for path in rig.folder.iterdir()} == {".running", made[0].id}


async def test_one_for_whose_lease_there_was_no_room_says_so(tmp_path: Path) -> None:
    async with running(tmp_path, max_queue=1) as rig:
        other = LeaseRequest("bob", "gpu0", None, "other", WorkClass.NORMAL, 60_000, 60_000)
        await rig.store.enqueue(other, lease_id="ls_other", max_queue=1)
        rig.store.fail(before=1, of=("enqueue",))
        with pytest.raises(StoreDown):
            await rig.submit()
        (refused,) = await rig.store.jobs(limit=10)
        ended = await rig.over(refused)
        assert (ended.state, ended.reason) == (JobState.FAILED, runner.FULL)
