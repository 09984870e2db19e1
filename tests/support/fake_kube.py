"""A Kubernetes API server over HTTP, one namespace of Deployments and pods: what the control asks of one, by its rules.

Invariant: it refuses what the real one refuses: a patch of a wrong type (415), of an old resource version (409), what
the account may not (403), what is not there (404), a watch from before what it still remembers (410 as an event). And
it lies as the real one does: `status.replicas` drops at once, while terminating pods stay listed until they are gone;
`observedGeneration` lags behind; a watch ends without a word. `controller` False: nothing moves by itself; `brisk`:
pods that terminate are gone in a moment; `stranger`: what a proxy before it says with a 200 instead. `fault` has its
next answers fail, as overloaded and restarting ones do.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from aiohttp import web

DEPLOYMENTS = "/apis/apps/v1/namespaces/{ns}/deployments"
PODS = "/api/v1/namespaces/{ns}/pods"
_PATCHES = ("application/merge-patch+json", "application/strategic-merge-patch+json")
TOKEN = "t0ken"


@dataclass(frozen=True)
class Fault:
    """See `FakeKube.fault`."""

    how: int | str
    method: str
    end: str

    def meets(self, request: web.Request) -> bool:
        return request.method == self.method and request.path.endswith(self.end) and "watch" not in request.query


class FakeKube:
    """Start it with `start`; `url` is its address, `denied` what the account may not: (verb, resource)."""

    def __init__(self) -> None:
        self.controller = True
        self.brisk = False
        self.denied: set[tuple[str, str]] = set()
        self.deployments: dict[str, dict[str, Any]] = {}
        self.pods: dict[str, dict[str, Any]] = {}
        self.extra: dict[str, list[dict[str, Any]]] = {}
        self.requests: list[str] = []
        self.conflicts = 0
        self.stranger = ""
        self.url = ""
        self._version = 100
        self._oldest = 0
        self._events: list[tuple[int, str, dict[str, Any]]] = []
        self._moved = asyncio.Event()
        self._watchers: set[asyncio.Task[Any]] = set()
        self._made = 0
        self._faults: list[Fault] = []
        self.token = TOKEN
        self._runner: web.AppRunner | None = None

    async def start(self) -> FakeKube:
        """At the address it had before, where it had one."""
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", int(self.url.rpartition(":")[2] or 0), reuse_address=True)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def stop(self) -> None:
        """It is gone: watches are cut, nobody listens."""
        self.cut()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def fault(self, how: int | str, method: str, end: str, times: int = 1) -> None:
        """The next `times` requests by that method of a path that ends so fail.

        `how`: a status; `cut`: closed without a word; `half`: in the midst of the answer; `lost`: it is done, and the
        answer does not come; `silent`: nothing is done and nothing said.
        """
        self._faults += [Fault(how, method, end)] * times

    # What happens in the cluster.

    def deploy(self, name: str, replicas: int = 1, **meta: Any) -> None:  # noqa: ANN401
        self.deployments[name] = {
            "metadata": {"name": name, "uid": f"uid-{name}", "generation": 1, "annotations": {}, **meta},
            "spec": {"replicas": replicas, "selector": {"matchLabels": {"app": name}}},
            "status": {"observedGeneration": 1, "replicas": 0, "readyReplicas": 0},
        }
        self._changed("ADDED", self.deployments[name])
        self.reconcile(name)

    def scale(self, name: str, replicas: int, manager: str = "kubectl") -> None:
        """As somebody else does it."""
        found = self.deployments[name]
        if found["spec"]["replicas"] != replicas:
            found["metadata"]["generation"] += 1
        found["spec"]["replicas"] = replicas
        fields: dict[str, Any] = {"f:spec": {"f:replicas": {}}}
        managed: dict[str, Any] = {
            "manager": manager,
            "time": f"2026-01-01T00:00:{self._version % 60:02}Z",
            "fieldsV1": fields,
        }
        found["metadata"].setdefault("managedFields", []).append(managed)
        self._changed("MODIFIED", found)
        self.reconcile(name)

    def reconcile(self, name: str) -> None:
        """What the controllers and the kubelet do at once; pods stay Terminating until `vanish`."""
        if not self.controller:
            return
        found = self.deployments[name]
        wanted = found["spec"]["replicas"]
        alive = [pod for pod in self._of(name) if "deletionTimestamp" not in pod["metadata"]]
        if self.brisk and alive[wanted:]:
            asyncio.get_running_loop().call_soon(self.vanish, name)
        for pod in alive[wanted:]:
            pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
            self._changed("MODIFIED", pod)
        for _ in range(wanted - len(alive)):
            self._made += 1
            pod: dict[str, Any] = {
                "metadata": {"name": f"{name}-{self._made}", "uid": f"pod-{self._made}", "labels": {"app": name}},
                "spec": {"terminationGracePeriodSeconds": 30},
                "status": {"containerStatuses": [{"containerID": f"containerd://{self._made:064x}", "ready": True}]},
            }
            self.pods[pod["metadata"]["name"]] = pod
            self._changed("ADDED", pod)
        status = {"observedGeneration": found["metadata"]["generation"], "replicas": wanted, "readyReplicas": wanted}
        found["status"].update(status)
        self._changed("MODIFIED", found)

    def vanish(self, name: str) -> None:
        """Its terminating pods end."""
        for pod in self._of(name):
            if "deletionTimestamp" in pod["metadata"]:
                del self.pods[pod["metadata"]["name"]]
                self._changed("DELETED", pod)

    def status(self, name: str, **status: Any) -> None:  # noqa: ANN401
        self.deployments[name]["status"].update(status)
        self._changed("MODIFIED", self.deployments[name])

    def forget(self) -> None:
        """Of what was until now nothing is remembered: who watches from there begins anew."""
        self._version += 10
        self._oldest = self._version
        self._events.clear()

    def cut(self) -> None:
        """Every watch ends without a word."""
        for watcher in self._watchers:
            watcher.cancel()

    def _of(self, name: str) -> list[dict[str, Any]]:
        return [pod for pod in self.pods.values() if pod["metadata"]["labels"].get("app") == name]

    def _changed(self, what: str, thing: dict[str, Any]) -> None:
        self._version += 1
        thing["metadata"]["resourceVersion"] = str(self._version)
        self._events.append((self._version, what, copy.deepcopy(thing)))
        self._moved.set()
        self._moved = asyncio.Event()

    # The API.

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(f"{request.method} {request.path}")
        mine = (one for one in self._faults if one.meets(request))
        fault = next(mine, None)
        if fault is None:
            return await self._answered(request)
        self._faults.remove(fault)
        if isinstance(fault.how, int):
            return _status(fault.how, "the server is currently unable to handle the request")
        if fault.how == "silent":
            await asyncio.Event().wait()
        if fault.how == "lost":
            await self._answered(request)
        half = web.StreamResponse(headers={"Content-Length": "1000"})
        if fault.how == "half":
            await half.prepare(request)
            await half.write(b'{"kind": ')
        assert request.transport is not None
        request.transport.abort()
        return half

    async def _answered(self, request: web.Request) -> web.StreamResponse:
        if self.stranger:
            return web.Response(text=self.stranger, content_type="text/html")
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            return _status(401, "Unauthorized")
        if request.path.endswith("/selfsubjectaccessreviews"):
            return await self._review(request)
        for place, items in self.extra.items():
            if request.path == place:
                return web.json_response({"items": items})
        parts = request.path.strip("/").split("/")
        if "namespaces" not in parts:
            return _status(404, "the server could not find the requested resource")
        _, resource, *rest = parts[parts.index("namespaces") + 1 :]
        subject = f"{resource}/{rest[1]}" if len(rest) > 1 else resource
        verb = {"GET": "watch" if "watch" in request.query else ("get" if rest else "list"), "PATCH": "patch"}
        if (denied := (verb[request.method], subject)) in self.denied:
            said = f'{resource} "it" is forbidden: User "swapper" cannot {denied[0]} resource "{subject}"'
            return _status(403, said)
        if resource not in ("deployments", "pods"):
            return _status(404, "the server could not find the requested resource")
        if "watch" in request.query:
            return await self._watch(request, resource)
        if not rest:
            items = [thing for thing in self._things(resource).values() if _selected(thing, request.query)]
            return web.json_response({"metadata": {"resourceVersion": str(self._version)}, "items": items})
        found = self._things(resource).get(rest[0])
        if found is None:
            return _status(404, f'deployments.apps "{rest[0]}" not found')
        if request.method == "PATCH":
            return await self._patch(request, found, scale=len(rest) > 1)
        return web.json_response(_scale(found) if len(rest) > 1 else found)

    def _things(self, resource: str) -> dict[str, dict[str, Any]]:
        return self.deployments if resource == "deployments" else self.pods

    async def _review(self, request: web.Request) -> web.Response:
        wanted: dict[str, str] = (await request.json())["spec"]["resourceAttributes"]
        subject = wanted["resource"] + (f"/{wanted['subresource']}" if wanted["subresource"] else "")
        return web.json_response({"status": {"allowed": (wanted["verb"], subject) not in self.denied}}, status=201)

    async def _patch(self, request: web.Request, found: dict[str, Any], *, scale: bool) -> web.Response:
        if request.content_type not in _PATCHES:
            return _status(415, "the body of the request was in an unknown format")
        body = cast("dict[str, Any]", await request.json())
        meta: dict[str, Any] = body.get("metadata", {})
        if self.conflicts:
            self.conflicts -= 1
            self._changed("MODIFIED", found)
        if meta.get("resourceVersion", found["metadata"]["resourceVersion"]) != found["metadata"]["resourceVersion"]:
            return _status(409, "the object has been modified; please apply your changes to the latest version")
        name = found["metadata"]["name"]
        if scale:
            self.scale(name, body["spec"]["replicas"], request.query["fieldManager"])
            return web.json_response(_scale(found))
        found["metadata"]["annotations"].update(meta.get("annotations", {}))
        self._changed("MODIFIED", found)
        return web.json_response(found)

    async def _watch(self, request: web.Request, resource: str) -> web.StreamResponse:
        since = int(request.query["resourceVersion"])
        answer = web.StreamResponse(headers={"Content-Type": "application/json"})
        await answer.prepare(request)
        task = asyncio.current_task()
        assert task is not None
        self._watchers.add(task)
        try:
            while True:
                turn = self._moved
                if since < self._oldest:
                    gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
                    await answer.write(json.dumps({"type": "ERROR", "object": gone}).encode() + b"\n")
                    return answer
                for version, what, thing in list(self._events):
                    here = ("selector" in thing["spec"]) == (resource == "deployments")
                    if version > since and here and _selected(thing, request.query):
                        await answer.write(json.dumps({"type": what, "object": thing}).encode() + b"\n")
                        since = version
                await turn.wait()
        except (asyncio.CancelledError, ConnectionError):
            return answer
        finally:
            self._watchers.discard(task)


def _selected(thing: Mapping[str, Any], query: Mapping[str, str]) -> bool:
    name = query.get("fieldSelector", "").removeprefix("metadata.name=")
    if name and thing["metadata"]["name"] != name:
        return False
    labels: Mapping[str, str] = thing["metadata"].get("labels") or {}
    wanted = [pair.split("=", 1) for pair in query.get("labelSelector", "").split(",") if pair]
    return all(labels.get(key) == value for key, value in wanted)


def _scale(found: Mapping[str, Any]) -> dict[str, Any]:
    labels: Mapping[str, str] = found["spec"]["selector"]["matchLabels"]
    status = {"replicas": found["status"]["replicas"], "selector": ",".join(f"{k}={v}" for k, v in labels.items())}
    return {"kind": "Scale", "spec": {"replicas": found["spec"]["replicas"]}, "status": status}


def _status(code: int, message: str) -> web.Response:
    return web.json_response({"kind": "Status", "status": "Failure", "code": code, "message": message}, status=code)
