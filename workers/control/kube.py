"""A Kubernetes API server: where it is and who we are there (kubeconfig, or a pod's own account), get, patch and watch.

Invariant: an API that does not answer, fails (5xx) or has too much to do (429) is BackendDown: another try may help. A
refusal is BackendRefused with its status and the server's own message.
"""

from __future__ import annotations

import base64
import json
import ssl
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import aiohttp
from ruamel.yaml import YAML, YAMLError

from swapper.errors import BackendDown, BackendError, BackendRefused
from workers.control.kubetoken import Tokens

ANSWER_S = 4.0
"""An API server that is silent so long does not answer."""
WATCH_S = 240
"""A watch is begun anew after so long."""
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
MERGE = "application/merge-patch+json"
_UNKNOWN, _BUSY, _FAILS = 401, 429, 500


def objects(value: Any) -> Sequence[Mapping[str, Any]]:  # noqa: ANN401  # of JSON and YAML
    """A list of objects that may be missing."""
    return value or ()


def fields_of(value: Any) -> Mapping[str, Any]:  # noqa: ANN401
    """An object that may be missing."""
    return value or {}


@dataclass(frozen=True, slots=True)
class Cluster:
    """An API server, and what proves who we are. `token_file` and `command` give tokens that change."""

    server: str
    tls: ssl.SSLContext | None = None
    token: str | None = field(default=None, repr=False)
    token_file: Path | None = None
    command: Mapping[str, Any] | None = field(default=None, repr=False)
    namespace: str = "default"


def cluster(environ: Mapping[str, str], account: Path = _ACCOUNT) -> Cluster:
    """Of KUBECONFIG or ~/.kube/config, else of the pod we run in. Raises BackendRefused with what is missing."""
    named = environ.get("KUBECONFIG", "").split(":")[0]
    path = Path(named or Path(environ.get("HOME", "/")) / ".kube/config")
    if named or path.is_file():
        return _of_file(path)
    host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        said = f"no Kubernetes is known here: there is neither {path} nor KUBECONFIG, and this is no pod"
        raise BackendRefused(said)
    host = f"[{host}]" if ":" in host else host
    try:
        tls = ssl.create_default_context(cafile=str(account / "ca.crt"))
    except OSError as error:
        raise BackendRefused(f"{account}/ca.crt cannot be used: {error}; does this pod mount its account?") from error
    with suppress(OSError):
        namespace = (account / "namespace").read_text().strip()
        return Cluster(f"https://{host}:{port}", tls, token_file=account / "token", namespace=namespace)
    return Cluster(f"https://{host}:{port}", tls, token_file=account / "token")


def _of_file(path: Path) -> Cluster:
    try:
        loaded: object = YAML(typ="safe", pure=True).load(path.read_text())  # pyright: ignore[reportUnknownMemberType]
    except (OSError, YAMLError) as error:
        raise BackendRefused(f"{path} cannot be read as a kubeconfig: {error}") from error
    config = cast("dict[str, Any]", loaded) if isinstance(loaded, dict) else {}
    context = _named(config, "contexts", config.get("current-context"), "context", path)
    there = _named(config, "clusters", context.get("cluster"), "cluster", path)
    user = _named(config, "users", context.get("user"), "user", path)
    server = str(there.get("server", "")).rstrip("/")
    token_file = user.get("tokenFile")
    try:
        tls = _tls(there, user, path.parent) if server.startswith("https") else None
    except (OSError, ValueError) as error:  # a file that is not there, what is no certificate, what is no base64
        raise BackendRefused(f"{path}: the certificates of its cluster or user cannot be used: {error}") from error
    return Cluster(
        server,
        tls,
        token=user.get("token"),
        token_file=path.parent / token_file if token_file else None,
        command=user.get("exec"),
        namespace=context.get("namespace") or "default",
    )


def _named(config: Mapping[str, Any], plural: str, name: object, key: str, path: Path) -> dict[str, Any]:
    for one in objects(config.get(plural)):
        if one.get("name") == name:
            return dict(fields_of(one.get(key)))
    raise BackendRefused(f"{path}: there is no {key} {name!r} in {plural}; see kubectl config get-contexts")


def _tls(there: Mapping[str, Any], user: Mapping[str, Any], folder: Path) -> ssl.SSLContext:
    tls = ssl.create_default_context()
    if there.get("insecure-skip-tls-verify"):
        tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    elif data := there.get("certificate-authority-data"):
        tls.load_verify_locations(cadata=base64.b64decode(data).decode())
    elif file := there.get("certificate-authority"):
        tls.load_verify_locations(cafile=str(folder / file))
    with tempfile.TemporaryDirectory() as place:  # OpenSSL takes certificates of clients from files alone
        certificate, key = (_client(user, what, folder, Path(place)) for what in ("certificate", "key"))
        if certificate is not None:
            tls.load_cert_chain(certificate, key)
    return tls


def _client(user: Mapping[str, Any], what: str, folder: Path, place: Path) -> Path | None:
    if data := user.get(f"client-{what}-data"):
        written = place / what
        written.touch(mode=0o600)
        written.write_bytes(base64.b64decode(data))
        return written
    file = user.get(f"client-{what}")
    return folder / file if file else None


@dataclass(slots=True)
class Kube:
    """Requests to one cluster."""

    cluster: Cluster
    _session: aiohttp.ClientSession | None = field(default=None, repr=False)
    _tokens: Tokens = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Nothing is asked yet."""
        self._tokens = Tokens(self.cluster.token, self.cluster.token_file, self.cluster.command)

    async def close(self) -> None:
        """Drop the connections."""
        if self._session is not None:
            await self._session.close()

    async def get(self, path: str, **params: str) -> dict[str, Any]:
        """The object or list at a path. Raises BackendDown, BackendRefused."""
        return await self._asked("GET", path, params)

    async def patch(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Merge the body into the object; who did it is written down as `swapper`."""
        return await self._asked("PATCH", path, {"fieldManager": "swapper"}, body)

    async def review(self, namespace: str, verb: str, resource: str, subresource: str = "") -> bool:
        """Whether we may do that there (SelfSubjectAccessReview, which everybody may ask for)."""
        wanted = {"namespace": namespace, "verb": verb, "resource": resource, "subresource": subresource}
        wanted["group"] = "" if resource == "pods" else "apps"
        body = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
        asked = {**body, "spec": {"resourceAttributes": wanted}}
        answer = await self._asked("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", {}, asked)
        return bool(answer.get("status", {}).get("allowed"))

    async def watch(self, path: str, since: str, **params: str) -> AsyncIterator[dict[str, Any]]:
        """Events after the resource version `since` until the server ends it. Raises as `get`; 410: that is too old."""
        params = {**params, "watch": "1", "resourceVersion": since, "timeoutSeconds": str(WATCH_S)}
        timeout = aiohttp.ClientTimeout(connect=ANSWER_S, sock_read=WATCH_S + 30)
        token = await self._tokens.current()
        try:
            async with self._open().request(
                "GET", self._url(path), params=params, headers=_headers(token), timeout=timeout, ssl=self._tls
            ) as answer:
                if answer.status == _UNKNOWN:
                    self._tokens.refused(token)
                if answer.status != 200:
                    raise self._refusal(answer.status, await answer.read())
                async for line in answer.content:
                    event = cast("dict[str, Any]", json.loads(line))
                    if event["type"] == "ERROR":
                        status: dict[str, Any] = event["object"]
                        raise BackendRefused(str(status.get("message")), status.get("code"))
                    yield event
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._down(error) from error
        except (ValueError, KeyError, TypeError) as error:  # cut within a line, or somebody else answers for it
            raise self._strange() from error

    @property
    def _tls(self) -> ssl.SSLContext | bool:
        return self.cluster.tls or True

    def _url(self, path: str) -> str:
        return f"{self.cluster.server}{path}"

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(read_bufsize=1 << 20)
        return self._session

    async def _asked(
        self, method: str, path: str, params: Mapping[str, str], body: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        token = await self._tokens.current()
        status, raw = await self._answer(method, path, params, body, token)
        if status == _UNKNOWN and self._tokens.refused(token):  # it was taken back before its time
            status, raw = await self._answer(method, path, params, body, await self._tokens.current())
        if status >= 300:
            raise self._refusal(status, raw)
        try:
            told: object = json.loads(raw)
        except ValueError:
            told = None
        if not isinstance(told, dict):
            raise self._strange()
        return cast("dict[str, Any]", told)

    async def _answer(
        self, method: str, path: str, params: Mapping[str, str], body: Mapping[str, Any] | None, token: str | None
    ) -> tuple[int, bytes]:
        headers = _headers(token)
        if body is not None:
            headers["Content-Type"] = MERGE if method == "PATCH" else "application/json"
        timeout, data = aiohttp.ClientTimeout(total=ANSWER_S), None if body is None else json.dumps(body)
        try:
            async with self._open().request(
                method, self._url(path), params=params, data=data, headers=headers, timeout=timeout, ssl=self._tls
            ) as answer:
                return answer.status, await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._down(error) from error

    def _refusal(self, status: int, raw: bytes) -> BackendError:
        if status >= _FAILS:
            return BackendDown(f"the Kubernetes API at {self.cluster.server} fails with {status}")
        if status == _BUSY:
            return BackendDown(f"the Kubernetes API at {self.cluster.server} has too much to do ({status})")
        return _refused(status, raw)

    def _strange(self) -> BackendDown:
        return BackendDown(f"who answers at {self.cluster.server} is no Kubernetes API; what stands before it?")

    def _down(self, error: BaseException) -> BackendDown:
        why = str(error) or "no answer in time"
        return BackendDown(f"the Kubernetes API at {self.cluster.server} does not answer: {why}")


def _headers(token: str | None) -> dict[str, str]:
    return {"Accept": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})


def _refused(status: int, raw: bytes) -> BackendRefused:
    try:
        said = cast("dict[str, Any]", json.loads(raw)).get("message")
    except (ValueError, AttributeError):
        said = None
    return BackendRefused(str(said or f"the Kubernetes API answers {status}"), status)
