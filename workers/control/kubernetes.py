"""Control `kubernetes`: a Deployment is scaled to nothing and back to what it had.

Invariant: it counts as gone when it is scaled to 0 and none of its pods is listed, those that are still terminating
included; `status.replicas` is not believed, which drops before they end. How many it had is kept in an annotation of
its own, so that whoever comes next scales back to that. Nothing is deleted: a pod that does not end is named.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, cast

from tenacity import AsyncRetrying, retry_if_exception, stop_after_delay, wait_random_exponential

from swapper.errors import BackendDown, BackendError, BackendRefused
from workers.control import GRACE_MS, ExitStatus, Phase, Seen
from workers.control.kube import Cluster, Kube, cluster, fields_of, objects
from workers.control.pulse import Pulse
from workers.control.scalers import suspects

T = TypeVar("T")

KEPT = "swapper/replicas"
"""The annotation with the number of replicas before swapper scaled to 0."""
_DENIED, _NOT_FOUND, _CONFLICT = 403, 404, 409
_START_S = 5.0
"""So long a start is tried again with an API that fails; whoever wants it up tries again later."""
_LEAVE_S = 30.0
"""Beyond their grace pods may take so long to be gone from the API."""
_PAUSES_S = (0.2, 5.0)
_NEEDS = (
    ("get", "deployments", ""),
    ("list", "deployments", ""),
    ("watch", "deployments", ""),
    ("patch", "deployments", ""),
    ("patch", "deployments", "scale"),
    ("get", "deployments", "scale"),
    ("list", "pods", ""),
    ("watch", "pods", ""),
)


class KubernetesControl:
    """The Deployment of the server `name`. `find` gives the cluster; asked when it is first needed."""

    def __init__(
        self,
        name: str,
        deployment: str,
        namespace: str | None = None,
        find: Callable[[], Cluster] = lambda: cluster(os.environ),
        *,
        grace_ms: int = GRACE_MS,
    ) -> None:
        self._name = name
        self._grace_ms = grace_ms
        self._deployment = deployment
        self._named = namespace
        self._find = find
        self._kube: Kube | None = None
        self._pulse = Pulse()
        self._acting = asyncio.Lock()
        self._watching: tuple[asyncio.Task[None], ...] = ()
        self._phase = Phase.UNREACHABLE
        self._scaled_down = False

    # What changes something.

    async def ensure(self) -> None:
        """Scale it to what it had, where it is at 0. Raises BackendError."""
        async with self._acting:
            await self._again(self._up, _START_S)
            self._scaled_down = False
        self._pulse.beat()

    async def _up(self) -> None:
        found = await self._get()
        if _wanted(found) == 0:
            await self._scale(_kept(found))

    async def stop(self, grace_ms: int | None = None) -> None:
        """Scale it to 0; returns once no pod of it is listed. Its pods' own longer grace counts.

        An API that fails or is away meanwhile is asked again for as long. Raises BackendDown where that was all.
        """
        async with self._acting:
            grace_s, began = (
                (self._grace_ms if grace_ms is None else grace_ms) / 1000,
                asyncio.get_running_loop().time(),
            )
            if await self._again(self._down, grace_s + _LEAVE_S):
                self._scaled_down = True
                await self._emptied(began, grace_s)
        self._pulse.beat()

    async def _down(self) -> bool:
        try:
            found = await self._get()
        except BackendRefused as refused:
            if refused.status == _NOT_FOUND:
                return False
            raise
        if (had := _wanted(found)) > 0:
            meta = found["metadata"]
            note = {"annotations": {KEPT: str(had)}, "resourceVersion": meta["resourceVersion"]}
            await self._said("change", self._open().patch(self._path(), {"metadata": note}))
            await self._scale(0)
        return True

    async def _scale(self, replicas: int) -> None:
        await self._said("scale", self._open().patch(f"{self._path()}/scale", {"spec": {"replicas": replicas}}))

    async def _again(self, act: Callable[[], Awaitable[T]], limit_s: float) -> T:
        """Once more where somebody else wrote between our look and our change, and where the API failed, for so long.

        `act` looks first: what was done though its answer was lost is not done again.
        """
        retrying = AsyncRetrying(
            retry=retry_if_exception(_passes),
            wait=wait_random_exponential(multiplier=_PAUSES_S[0], max=_PAUSES_S[1]),
            stop=stop_after_delay(limit_s),
            reraise=True,
        )
        return await retrying(act)

    async def _emptied(self, began: float, grace_s: float) -> None:
        """Wait until none of its pods is listed; what the API does not tell is asked for again."""
        self._listen()
        while True:
            turn = self._pulse.next()
            try:
                pods = await self._pods()
                if not pods:
                    return
                if _wanted(found := await self._get()) > 0:
                    by = await self._by(found)
                    raise BackendError(f"{self._who} was scaled to 0 and is at {_wanted(found)}: {by}")
                grace_s = max(grace_s, *(float(one["spec"].get("terminationGracePeriodSeconds", 30)) for one in pods))
                late: BackendError = self._lingering(pods, grace_s + _LEAVE_S)
            except BackendDown as down:
                late = BackendDown(f"{self._who} was scaled to 0, and whether its pods are gone is not told: {down}")
            left = began + grace_s + _LEAVE_S - asyncio.get_running_loop().time()
            if left <= 0:
                raise late
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left, _PAUSES_S[1])):
                    await turn.wait()

    def _lingering(self, pods: Sequence[Mapping[str, Any]], limit_s: float) -> BackendError:
        names = ", ".join(sorted(one["metadata"]["name"] for one in pods))
        said = f"{self._who} was scaled to 0 and after {limit_s:g} s these pods are still there: {names}"
        return BackendError(f"{said}; kubectl describe pod says what holds them")

    async def restart(self, grace_ms: int | None = None) -> None:
        """Scale it to 0 and back."""
        await self.stop(grace_ms)
        await self.ensure()

    # What only looks.

    async def look(self) -> Seen:
        """Ask the API now."""
        try:
            seen = await self._look()
        except BackendRefused as refused:
            missing = refused.status == _NOT_FOUND
            seen = Seen(Phase.MISSING if missing else Phase.UNREACHABLE, str(refused))
        except BackendError as error:
            seen = Seen(Phase.UNREACHABLE, str(error))
        self._phase = seen.phase
        return seen

    async def _look(self) -> Seen:
        found = await self._get()
        pods = await self._pods()
        wanted, status = _wanted(found), cast("dict[str, Any]", found.get("status") or {})
        if wanted == 0:
            if not pods:
                return Seen(Phase.GONE)
            names = ", ".join(sorted(one["metadata"]["name"] for one in pods))
            return Seen(Phase.STOPPING, f"{names} of {self._who} is terminating", containers=_containers(pods))
        run = f"{found['metadata'].get('uid', '')}/{sorted(one['metadata'].get('uid', '') for one in pods)}"
        by = f"scaled to {wanted} by somebody else: {await self._by(found)}" if self._scaled_down else ""
        current = status.get("observedGeneration", 0) >= found["metadata"].get("generation", 0)
        if current and status.get("readyReplicas", 0) >= wanted:
            return Seen(Phase.UP, by, run, containers=_containers(pods))
        phase, why = Phase.STARTING, _waiting(pods) or f"{status.get('readyReplicas', 0)} of {wanted} pods are ready"
        for one in objects(status.get("conditions")):
            if current and one.get("type") == "Progressing" and one.get("reason") == "ProgressDeadlineExceeded":
                phase = Phase.STUCK
        return Seen(phase, by or f"{self._who}: {why}", run, containers=_containers(pods))

    async def _by(self, found: Mapping[str, Any]) -> str:
        return await suspects(self._open(), self._namespace, self._deployment, found)

    def changes(self) -> AsyncIterator[None]:
        """One item at once, then one whenever the API tells of the Deployment or of a pod of its namespace."""
        self._listen()
        return self._pulse.beats()

    def notes(self) -> str | None:
        """Nothing: a pod that must be killed is killed by its kubelet."""
        return None

    async def close(self) -> None:
        """End the watches, drop the connections."""
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        self._watching = ()
        if self._kube is not None:
            await self._kube.close()
            self._kube = None

    def alive(self) -> bool | None:
        """Whether anything of it runs, as last seen; None while that is not known."""
        return None if self._phase is Phase.UNREACHABLE else self._phase not in (Phase.GONE, Phase.MISSING)

    def pid(self) -> int | None:
        """Its processes are another machine's, as far as this control knows."""
        return None

    def exit_status(self) -> ExitStatus | None:
        """Pods end and are replaced; there is no one status."""
        return None

    def log_tail(self, n: int) -> list[str] | None:
        """Its logs are its pods'; what keeps them from being ready is in `Seen.why`."""
        del n
        return None

    def log_path(self) -> Path | None:
        """Its logs are its pods'."""
        return None

    async def problems(self) -> list[str]:
        """What would keep it from being scaled, each with how it is mended."""
        try:
            found = await self._get()
            denied = [need for need in _NEEDS if not await self._open().review(self._namespace, *need)]
        except BackendError as error:
            return [str(error)]
        lacking = ", ".join(f"{verb} {resource}{'/' if sub else ''}{sub}" for verb, resource, sub in denied)
        rights = (
            [f"swapper may not {lacking} in {self._namespace}: give its account a Role with that"] if denied else []
        )
        who = await suspects(self._open(), self._namespace, self._deployment, found, steady=True)
        return [*rights, *([f"{self._who} would be scaled back: {who}"] if who else [])]

    # The API.

    @property
    def _who(self) -> str:
        return f"the Deployment {self._namespace}/{self._deployment}"

    @property
    def _namespace(self) -> str:
        return self._named or self._open().cluster.namespace

    def _open(self) -> Kube:
        if self._kube is None:
            self._kube = Kube(self._find())
        return self._kube

    def _path(self) -> str:
        return f"/apis/apps/v1/namespaces/{self._namespace}/deployments/{self._deployment}"

    async def _get(self) -> dict[str, Any]:
        return await self._said("get", self._open().get(self._path()))

    async def _pods(self) -> Sequence[dict[str, Any]]:
        scale = await self._said("get the scale of", self._open().get(f"{self._path()}/scale"))
        selector = cast("str", scale["status"].get("selector", ""))
        listed = self._open().get(f"/api/v1/namespaces/{self._namespace}/pods", labelSelector=selector)
        return cast("Sequence[dict[str, Any]]", (await self._said("list the pods of", listed))["items"])

    async def _said(self, what: str, call: Awaitable[dict[str, Any]]) -> dict[str, Any]:
        """As the call, with refusals in our words."""
        try:
            return await call
        except BackendRefused as refused:
            if refused.status == _DENIED:
                mend = "give its account a Role with that verb"
                raise BackendRefused(f"swapper may not {what} {self._who}: {mend}: {refused}", _DENIED) from refused
            if refused.status == _NOT_FOUND:
                said = f"there is no {self._who.removeprefix('the ')}: apply it, or correct namespace: and deployment:"
                raise BackendRefused(said, _NOT_FOUND) from refused
            raise

    def _listen(self) -> None:
        if not self._watching:
            pods, deployments = (
                f"/api/v1/namespaces/{self._namespace}/pods",
                f"/apis/apps/v1/namespaces/{self._namespace}/deployments",
            )
            mine = {"fieldSelector": f"metadata.name={self._deployment}"}
            self._watching = (
                asyncio.create_task(self._hear(pods, {}), name="watch pods"),
                asyncio.create_task(self._hear(deployments, mine), name="watch the Deployment"),
            )

    async def _hear(self, path: str, params: dict[str, str]) -> None:
        """List, watch from there, and again: when it ends, when what we know is too old (410), when it was cut."""
        pause = _PAUSES_S[0]
        while True:
            try:
                listed = await self._open().get(path, **params)
                self._pulse.beat()
                pause = _PAUSES_S[0]
                async for _ in self._open().watch(
                    path, str(fields_of(listed.get("metadata")).get("resourceVersion", "")), **params
                ):
                    self._pulse.beat()
            except BackendRefused:
                pass
            except BackendDown:
                self._pulse.beat()
            await asyncio.sleep(pause)
            pause = min(pause * 2, _PAUSES_S[1])


def _passes(error: BaseException) -> bool:
    return isinstance(error, BackendDown) or (isinstance(error, BackendRefused) and error.status == _CONFLICT)


def _wanted(found: Mapping[str, Any]) -> int:
    return int(found["spec"].get("replicas", 1))


def _kept(found: Mapping[str, Any]) -> int:
    said = str(fields_of(found["metadata"].get("annotations")).get(KEPT, ""))
    return max(1, int(said)) if said.isdigit() else 1


def _containers(pods: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    statuses = (one for pod in pods for one in objects(fields_of(pod.get("status")).get("containerStatuses")))
    return tuple(str(one["containerID"]).partition("://")[2] for one in statuses if one.get("containerID"))


def _waiting(pods: Sequence[Mapping[str, Any]]) -> str:
    """Why a pod is not ready, in its own words."""
    for pod in pods:
        status = cast("dict[str, Any]", pod.get("status") or {})
        for one in objects(status.get("containerStatuses")):
            waits = fields_of(fields_of(one.get("state")).get("waiting"))
            ended = fields_of(fields_of(one.get("lastState")).get("terminated"))
            if waits.get("reason") not in (None, "ContainerCreating"):
                code = f", it ended with {ended.get('exitCode')}" if ended else ""
                return f"{pod['metadata']['name']}: {waits['reason']}{code} {waits.get('message', '')}".strip()
        for one in objects(status.get("conditions")):
            if one.get("type") == "PodScheduled" and one.get("status") == "False":
                return f"{pod['metadata']['name']} finds no node: {one.get('message', '')}"
    return ""
