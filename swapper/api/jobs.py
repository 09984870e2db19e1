"""The job routes: run a recipe of the configuration under a lease, look at it, read what it says, end it.

Invariant: a caller chooses a recipe and its parameters, never a command. What is running is the runner's; here is only
asked and shown.
"""

from __future__ import annotations

import asyncio
import difflib
from typing import cast

from aiohttp import web

from swapper.api import bodies
from swapper.api.auth import class_or_default, may_act_for
from swapper.api.bodies import JobBody, bad_value
from swapper.api.context import ApiContext
from swapper.api.leases import view_lease
from swapper.api.problem import Problem
from swapper.api.views import Json, iso
from swapper.core.jobs import Job, JobState
from swapper.jobs.recipes import Refused
from swapper.jobs.runner import Crowded, Jobs
from workers import joblog

_CHUNK = 64 << 10
_LOOK_S = 0.5
"""So often a log that is followed is looked at: files tell nobody when they grow."""


class JobRoutes:
    """Handlers over one context."""

    def __init__(self, ctx: ApiContext) -> None:
        self._ctx = ctx

    def table(self) -> list[web.RouteDef]:
        """Route definitions, for `app.add_routes`."""
        return [
            web.post("/api/jobs", self.submit),
            web.get("/api/jobs", self.index),
            web.get("/api/jobs/{id}", self.show),
            web.get("/api/jobs/{id}/log", self.log),
            web.delete("/api/jobs/{id}", self.cancel),
        ]

    async def submit(self, request: web.Request) -> web.Response:
        """`POST /api/jobs[?wait=]`: 201 with the job; it waits for its lease, runs and ends by itself."""
        wait_s = bodies.wait_seconds(request.query)
        body = await bodies.read_body(request, JobBody)
        jobs = self._jobs()
        recipe = jobs.recipes.get(body.recipe)
        if recipe is None:
            near = difflib.get_close_matches(body.recipe, jobs.recipes, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there is {', '.join(jobs.recipes) or 'none'}"
            raise bad_value("recipe", f"{body.recipe!r} is no recipe of the configuration; {hint}")
        klass = class_or_default(request, body.klass)
        try:
            job = await jobs.submit(recipe, body.params, request["owner"], klass)
        except Refused as refused:
            raise bad_value(f"params.{refused.name}", str(refused)) from None
        except Crowded as crowded:
            raise Problem(429, "queue-full", f"The job was not queued: {crowded}. Try again later.") from None
        if wait_s is not None:
            job = await self._over(job, wait_s)
        location = {"Location": f"/api/jobs/{job.id}"}
        return web.json_response(await self._view(job), status=201, headers=location)

    async def index(self, request: web.Request) -> web.Response:
        """`GET /api/jobs?state=&recipe=&owner=&limit=`: newest first; 1,000 that are over are kept."""
        query = request.query
        state = query.get("state")
        if state is not None and state not in set(JobState):
            raise bad_value("state", f"{state!r} is none of {', '.join(JobState)}")
        limit = bodies.whole_number(query, "limit", low=1, high=1000) or 100
        wanted = {name: query[name] for name in ("state", "recipe", "owner") if name in query}
        found = await self._ctx.store.jobs(limit=100_000 if wanted else limit)
        fitting = [job for job in found if all(str(getattr(job, name)) == value for name, value in wanted.items())]
        items = [await self._view(job) for job in fitting[:limit]]
        return web.json_response({"items": items, "next_cursor": None})

    async def show(self, request: web.Request) -> web.Response:
        """`GET /api/jobs/{id}[?wait=]`: with `wait` once it is over, or after that time."""
        wait_s = bodies.wait_seconds(request.query)
        job = await self._find(request)
        if wait_s is not None:
            job = await self._over(job, wait_s)
        return web.json_response(await self._view(job))

    async def cancel(self, request: web.Request) -> web.Response:
        """`DELETE /api/jobs/{id}[?wait=]`: it is asked to end; one that is over stays as it is."""
        wait_s = bodies.wait_seconds(request.query)
        job = await self._find(request)
        if not may_act_for(request, job.owner):
            raise Problem(403, "not-the-owner", f"Only {job.owner!r} or an admin may end the job {job.id}.")
        job = await self._jobs().cancel(job)
        if wait_s is not None:
            job = await self._over(job, wait_s)
        return web.json_response(await self._view(job))

    async def log(self, request: web.Request) -> web.StreamResponse:
        """`GET /api/jobs/{id}/log[?follow=1]`: what it says, as text; followed until it is over."""
        job = await self._find(request)
        follow = request.query.get("follow") not in (None, "", "0", "false")
        path = self._jobs().process(job).log_path()
        response = web.StreamResponse(headers={"Content-Type": "text/plain; charset=utf-8"})
        await response.prepare(request)
        at = 0
        with self._ctx.tail.watch(job.id) as changed:
            while True:
                changed.clear()
                now = await self._ctx.store.job(job.id)
                while (found := await asyncio.to_thread(joblog.read, path, at, most=_CHUNK))[0]:
                    chunk, at = found
                    try:
                        await response.write(chunk)
                    except ConnectionResetError:  # whoever read it left
                        return response
                if not follow or now is None or now.over or self._ctx.tail.closed:
                    break
                try:
                    async with asyncio.timeout(_LOOK_S):
                        await changed.wait()
                except TimeoutError:
                    continue
        await response.write_eof()
        return response

    def _jobs(self) -> Jobs:
        if self._ctx.jobs is None:
            raise Problem(503, "starting", "Jobs are not taken yet: swapper is just starting. Try again in a moment.")
        return self._ctx.jobs

    async def _find(self, request: web.Request) -> Job:
        wanted = request.match_info["id"]
        job = await self._ctx.store.job(wanted)
        if job is None:
            raise Problem(404, "no-such-job", f"There is no job {wanted!r}.")
        return job

    async def _over(self, job: Job, wait_s: float) -> Job:
        deadline = asyncio.get_running_loop().time() + wait_s
        with self._ctx.tail.watch(job.id) as changed:
            while True:
                changed.clear()
                job = await self._ctx.store.job(job.id) or job
                if job.over or self._ctx.tail.closed:
                    return job
                try:
                    async with asyncio.timeout_at(deadline):
                        await changed.wait()
                except TimeoutError:
                    return job

    async def _view(self, job: Job) -> Json:
        lease = None if job.over else await self._ctx.store.lease(job.lease)
        explain = None if lease is None else cast("str | None", (await view_lease(self._ctx, lease))["explain"])
        return job_json(job, progress=None if lease is None else lease.progress, explain=explain)


def job_json(job: Job, *, progress: float | None, explain: str | None) -> Json:
    """`progress` 0 to 1 where it tells; `explain`: of one that is not over, why it waits or that it runs."""
    return {
        "id": job.id,
        "recipe": job.recipe,
        "params": dict(job.params),
        "output": dict(job.output),
        "owner": job.owner,
        "class": job.klass,
        "state": job.state,
        "reason": job.reason,
        "exit": job.exit,
        "progress": 1.0 if job.state is JobState.DONE else progress,
        "explain": explain,
        "cancelled": job.cancelled,
        "lease": job.lease,
        "created_at": iso(job.created_ms),
        "started_at": iso(job.started_ms),
        "ended_at": iso(job.ended_ms),
    }
