"""Runs the jobs of this host: asks for the lease, starts the process, follows it, tells how it ended.

Invariant: what is done next follows from what is on record (the job, its lease, its process), never from memory, so
that after a restart a job goes on where it was: a process that lives is followed again, one that ended is judged by its
exit status, one whose lease is over is ended. A job's lease is given back only when nothing of it runs any more.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

import structlog

from swapper.core.jobs import Job, JobState
from swapper.core.types import FINAL, Lease, LeaseRequest, LeaseState, WorkClass
from swapper.errors import BackendError, StoreDown
from swapper.jobs.environment import passed_on
from swapper.jobs.recipes import Recipe, Refused
from swapper.store.protocol import Ended, Enqueued, NotFound, Store
from swapper.store.tail import Tail
from workers.control import ExitStatus
from workers.jobs import JobProcess, Place, ever_running, forgotten, in_temporary
from workers.supervise import kept_running, supervised, until_stored

TTL_MS = 60_000
"""So long a job's lease lives without us; its process goes on meanwhile, and is found again."""
BEAT_S = 15.0
LEFT_LINES = 3
_OPEN = 100_000
FULL = "no more leases may wait (policy.max_queue)"
_PUT_BACK = "the store was put back to an older state, without its lease"
_LOOK_S = 15.0
"""So often it is looked for jobs that nobody here sees to."""
_LOOKS_TO_TIDY = 240
_GRACE_MS = 30_000
"""Of a job whose recipe is not known any more."""
log = structlog.stdlib.get_logger(__name__)


class Crowded(Exception):
    """No more leases may wait."""


class Jobs:
    """See the module text. `env`: the device variables of each card; `fence` returns while this host is surely ours."""

    def __init__(
        self,
        store: Store,
        tail: Tail,
        recipes: Mapping[str, Recipe],
        folder: Path,
        *,
        host: str,
        max_queue: int,
        new_id: Callable[[str], str],
        now_ms: Callable[[], int],
        fence: Callable[[], Awaitable[None]],
        env: Mapping[str, Mapping[str, str | None]],
        url: str,
    ) -> None:
        self.recipes = recipes
        self._store = store
        self._tail = tail
        self._folder = folder
        self._host = host
        self._max_queue = max_queue
        self._new_id = new_id
        self._now_ms = now_ms
        self._fence = fence
        self._env = env
        self._url = url
        self._submitting: set[str] = set()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._cancels: dict[str, asyncio.Event] = {}
        self._closed = False

    # ---- what callers ask for

    async def submit(self, recipe: Recipe, given: Mapping[str, object], owner: str, klass: WorkClass) -> Job:
        """A new job, queued. Raises recipes.Refused, Crowded, StoreDown."""
        params = await asyncio.to_thread(recipe.checked, given)
        job = Job(
            id=self._new_id("jb"),
            recipe=recipe.name,
            owner=owner,
            klass=klass,
            host=self._host,
            created_ms=self._now_ms(),
            lease=self._new_id("ls"),
            params=params,
            output=recipe.outputs(params),
        )
        self._submitting.add(job.id)
        try:
            job = await self._store.put_job(job) or job
            if await self._enqueue(job, recipe) is None:
                await self._finish(job, JobState.FAILED, FULL)
                raise Crowded(FULL)
        except (StoreDown, asyncio.CancelledError):
            self._begin(replace(job, cancelled=True))  # it may be on record, and nobody was told of it
            raise
        finally:
            self._submitting.discard(job.id)
        self._begin(job)
        return job

    async def cancel(self, job: Job) -> Job:
        """It is to end: at once where it waits, else its process is asked to. Raises StoreDown."""
        while not job.over and not job.cancelled:
            changed = await self._store.put_job(replace(job, cancelled=True))
            if changed is not None:
                job = changed
                break
            job = await self._store.job(job.id) or job
        if (flag := self._cancels.get(job.id)) is not None:
            flag.set()
        return job

    def process(self, job: Job) -> JobProcess:
        """The process of a job of this host."""
        return JobProcess(job.id, self._folder / job.id, job.output)

    # ---- the loop

    async def run(self) -> None:
        """Go on with every job of this host that is not over; returns never."""
        try:
            for look in count():
                await self._take_up()
                if look % _LOOKS_TO_TIDY == 0:
                    await supervised("tidy the folders of jobs", self.tidy())
                await asyncio.sleep(_LOOK_S)
        finally:
            self._closed = True
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _take_up(self) -> None:
        """Those of earlier processes, and those that a store put back to an older state has as unfinished again."""
        for job in await until_stored("read the jobs", lambda: self._store.jobs(limit=_OPEN, unfinished=True)):
            if job.host == self._host and job.id not in self._submitting:
                self._begin(job)

    def _begin(self, job: Job) -> None:
        if job.id in self._tasks or self._closed:
            return
        flag = self._cancels[job.id] = asyncio.Event()
        if job.cancelled:
            flag.set()
        task = asyncio.create_task(kept_running(f"job {job.id}", lambda: self._see_to(job.id, flag)))
        self._tasks[job.id] = task
        task.add_done_callback(lambda _: self._leave(job))

    def _leave(self, job: Job) -> None:
        """Nobody sees to it any more."""
        self._tasks.pop(job.id, None)
        self._cancels.pop(job.id, None)

    async def _see_to(self, job_id: str, cancelled: asyncio.Event) -> None:
        """Bring a job to its end."""
        job = await until_stored("read a job", lambda: self._store.job(job_id))
        if job is None or job.over:
            return
        process, recipe = self.process(job), self.recipes.get(job.recipe)
        lease = await self._decided(job, recipe, process, cancelled)
        if isinstance(lease, str):
            await self._end_early(job, process, lease)
        elif process.begun:
            await self._follow(await self._runs(job), lease, process, recipe, cancelled)
        elif lease.state is not LeaseState.GRANTED:
            await self._finish(job, *_without_a_start(job, lease))
        elif job.state is JobState.RUNNING:
            gone = f"its folder {self._folder / job.id} is gone, and with it how it ended"
            await self._give_back(lease)
            await self._finish(job, JobState.FAILED, gone)
        elif recipe is None or cancelled.is_set():
            why = "it was cancelled" if cancelled.is_set() else f"there is no recipe {job.recipe} any more"
            await self._give_back(lease)
            await self._finish(job, JobState.CANCELLED if cancelled.is_set() else JobState.FAILED, why)
        elif (problem := await self._start(job, recipe, lease, process)) is not None:
            await self._give_back(lease)
            await self._finish(job, JobState.FAILED, problem)
        else:
            await self._follow(await self._runs(job), lease, process, recipe, cancelled)

    async def _decided(
        self, job: Job, recipe: Recipe | None, process: JobProcess, cancelled: asyncio.Event
    ) -> Lease | str:
        """Its lease, once it is granted or over; where the store has none, why not."""
        full = False
        if recipe is not None and not process.begun and job.state is JobState.QUEUED:
            full = await until_stored("ask for a job's lease", lambda: self._enqueue(job, recipe)) is None
        with self._tail.watch(job.lease) as changed:
            while True:
                changed.clear()
                lease = await until_stored("read a job's lease", lambda: self._store.lease(job.lease))
                if lease is None:
                    return FULL if full else _PUT_BACK
                if lease.state is LeaseState.GRANTED or lease.state in FINAL:
                    return lease
                if cancelled.is_set():
                    await until_stored("give a job's lease up", lambda: self._store.end(job.lease, None))
                    continue
                await _either(changed, cancelled)

    async def _start(self, job: Job, recipe: Recipe, lease: Lease, process: JobProcess) -> str | None:
        """What keeps it from being started, in words."""
        words = recipe.argv(in_temporary(job.params, job.output, job.id))
        devices = self._env.get(lease.card or "", {})
        env = {name: value for name, value in devices.items() if value is not None}
        env |= {"SWAPPER_LEASE": lease.id, "SWAPPER_TOKEN": str(lease.token), "SWAPPER_URL": self._url}
        over: str | None = None

        async def named(pid: int, started: int) -> bool:
            nonlocal over
            await self._fence()
            over = await self._renewed(lease, (pid, started))  # it may have ended while this host was made sure of
            return over is None

        try:
            await asyncio.to_thread(recipe.checked, job.params)  # a link may lead elsewhere by now
            place = Place(lease.id, lease.card or "")
            await process.start(words, passed_on(os.environ, recipe.env) | env, place, named, follows=recipe.follows)
        except Refused as refused:
            return f"params.{refused.name}: {refused}"
        except BackendError as error:
            if process.begun:  # a slow start may have come about all the same
                await process.end(recipe.grace_ms)
                await asyncio.to_thread(process.discard)
            return str(error)
        return over

    async def _follow(
        self, job: Job, lease: Lease, process: JobProcess, recipe: Recipe | None, cancelled: asyncio.Event
    ) -> None:
        """Until it has ended, or has to."""
        grace_ms = _GRACE_MS if recipe is None else recipe.grace_ms
        ended = asyncio.create_task(process.ended())
        beat = asyncio.create_task(self._keep(lease, process))
        stop = asyncio.create_task(cancelled.wait())
        try:
            await asyncio.wait({ended, beat, stop}, return_when=asyncio.FIRST_COMPLETED)
            why = None
            if not ended.done():
                why = beat.result() if beat.done() else "it was cancelled"
                await process.end(grace_ms)
            status = await ended
            await process.end(grace_ms)  # what it left behind holds the card as it did
        finally:
            for task in (ended, beat, stop):
                task.cancel()
            await asyncio.gather(ended, beat, stop, return_exceptions=True)
        state, reason = await asyncio.to_thread(_judged, process, status, why, cancelled=cancelled.is_set())
        await self._give_back(lease)
        await self._finish(job, state, reason, status)

    async def _keep(self, lease: Lease, process: JobProcess) -> str:
        """Renew the lease until it is over; returns why it is, in words."""
        named = await asyncio.to_thread(process.recorded)
        while True:
            progress = await asyncio.to_thread(process.progress)
            if (over := await self._renewed(lease, named, progress)) is not None:
                return over
            with self._tail.watch(lease.id) as changed, suppress(TimeoutError):
                async with asyncio.timeout(BEAT_S):
                    await changed.wait()

    async def _renewed(self, lease: Lease, named: tuple[int, int] | None, progress: float | None = None) -> str | None:
        """Renew it once, with its process (pid, start) on it; where it is over, why, in words."""
        pid, started = named or (None, None)
        asked = replace(lease.request, holder_pid=pid, holder_started=started)

        async def beat() -> Lease | object:
            return await self._store.heartbeat(lease.id, lease.token or 0, progress=progress, request=asked)

        match await until_stored("renew a job's lease", beat):
            case Lease():
                return None
            case Ended(lease=over):
                return f"its lease was {over.state}: {over.reason or 'without a reason'}"
            case NotFound():
                return _PUT_BACK
            case _:
                return "its lease is another's now"

    async def _end_early(self, job: Job, process: JobProcess, why: str) -> None:
        if process.begun:
            await process.end(_GRACE_MS)
            await asyncio.to_thread(process.discard)
        await self._finish(job, JobState.FAILED, why)

    # ---- the store

    async def _enqueue(self, job: Job, recipe: Recipe) -> Lease | None:
        """Its lease, asked for now or before; None where no more may wait."""
        request = LeaseRequest(
            owner=job.owner,
            card=recipe.card,
            vram_mib=recipe.vram_mib,
            label=f"job {job.recipe}",
            klass=job.klass,
            ttl_ms=TTL_MS,
            max_hold_ms=recipe.max_hold_ms,
            holder=f"job:{job.id}",
        )
        answer = await self._store.enqueue(request, lease_id=job.lease, max_queue=self._max_queue)
        return answer.lease if isinstance(answer, Enqueued) else None

    async def _give_back(self, lease: Lease) -> None:
        await until_stored("give a job's lease back", lambda: self._store.end(lease.id, lease.token))

    async def _finish(self, job: Job, state: JobState, reason: str | None, status: ExitStatus | None = None) -> None:
        code = None if status is None else status.code if status.signal is None else -status.signal
        over = replace(job, state=state, reason=reason, exit=code, ended_ms=self._now_ms())
        await self._put(over)
        log.info("job ended", job=job.id, recipe=job.recipe, state=state, reason=reason)

    async def _runs(self, job: Job) -> Job:
        """It has begun, which may be on record already."""
        if job.state is JobState.RUNNING:
            return job
        return await self._put(replace(job, state=JobState.RUNNING, started_ms=self._now_ms()))

    async def _put(self, job: Job) -> Job:
        """Write it over whatever a caller has noted meanwhile (that it is to end)."""
        while (written := await until_stored("write a job", partial(self._store.put_job, job))) is None:
            now = await until_stored("read a job", partial(self._store.job, job.id))
            if now is None or now.over:
                return now or job
            job = replace(job, version=now.version, cancelled=now.cancelled)
        return written

    async def tidy(self) -> None:
        """Folders of jobs that the store has forgotten go, and what may still run of these."""
        there = await asyncio.to_thread(_names, self._folder)  # first: a job is on record before it has a folder
        known = {job.id for job in await until_stored("read the jobs", lambda: self._store.jobs(limit=_OPEN))}
        for name in sorted(there - known):
            with suppress(BackendError):  # it hangs in the kernel: its folder stays, and is looked at again
                process = await asyncio.to_thread(forgotten, self._folder, name)
                await process.end(_GRACE_MS)
                await asyncio.to_thread(process.discard)
                await asyncio.to_thread(shutil.rmtree, self._folder / name, ignore_errors=True)
        for name in await asyncio.to_thread(ever_running, self._folder):
            process = JobProcess(name, self._folder / name, {})
            if name not in self._tasks and not await asyncio.to_thread(process.left):
                await process.end(0)


def _without_a_start(job: Job, lease: Lease) -> tuple[JobState, str]:
    if job.cancelled or lease.state is LeaseState.CANCELLED:
        return JobState.CANCELLED, "it was cancelled before it began"
    return JobState.FAILED, f"its lease was {lease.state}: {lease.reason or 'without a reason'}"


def _judged(
    process: JobProcess, status: ExitStatus | None, why: str | None, *, cancelled: bool
) -> tuple[JobState, str | None]:
    """How it came out; its outputs get their names, or go. Blocking. `why` it was made to end, else None."""
    problem = why
    if why is None and status is not None and status.clean:
        problem = process.publish()
        return (JobState.DONE, None) if problem is None else (JobState.FAILED, problem)
    process.discard()
    if cancelled:
        return JobState.CANCELLED, "it was cancelled"
    if problem is None:
        said = "; ".join(process.log_tail(LEFT_LINES)) or "it said nothing"
        how = "nobody saw how it ended" if status is None else str(status)
        problem = f"{how}: {said}"
    return JobState.FAILED, problem


def _names(folder: Path) -> set[str]:
    try:
        return {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    except FileNotFoundError:
        return set()


async def _either(*events: asyncio.Event) -> None:
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
