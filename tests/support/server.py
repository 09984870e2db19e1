"""A real `swapper serve` process over a real llama-server, for tests that kill it and look again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self, TypeVar, cast

from swapper.demo.models import make_models
from tests.support.router import RealRouter, free_port
from workers.control.command import CommandControl

READY_S = 30.0

Json = dict[str, object]

ALPHA = {"alpha": "{vram: 8GiB, default: true}"}
"""The one model that most tests need, and its traits."""

KINDS = {"alpha": "slots", "lfm": "rewind", "gemma": "replay"}
"""Dense attention, hybrid (shortconv), sliding window: the strategy of each."""


class Server:
    """`swapper serve` on a port of its own; start, kill and start again keep folder and port."""

    def __init__(
        self,
        folder: Path,
        router: RealRouter,
        models: Mapping[str, str],
        *,
        owned: bool = False,
        slot_dir: Path | None = None,
        snapshots: str = "{}",
    ) -> None:
        """`models`: name -> traits in YAML. `owned`: swapper starts the router itself (control: command)."""
        self.folder = folder
        self.router = router
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.config = folder / "swapper.yaml"
        self.state_dir = folder / "state"
        self.slot_dir = slot_dir or router.slot_dir
        self.log_path = folder / "serve.log"
        folder.mkdir(parents=True, exist_ok=True)
        self.config.write_text(
            f"""
listen: 127.0.0.1:{self.port}
state_dir: {self.state_dir}
cards: {{gpu0: {{probe: declared, vram: 24GiB}}}}
tenants:
  llama:
    kind: llama-router
    control: {"command" if owned else "attach"}
    card: gpu0
    url: {router.url}
    slot_dir: {self.slot_dir}
    preset: {router.preset}
    snapshots: {snapshots}
    models: {{{", ".join(f"{name}: {traits}" for name, traits in models.items())}}}
"""
            + (f"    command: {json.dumps(router.command)}\n" if owned else "")
        )
        self.program: Sequence[str] = ("-m", "swapper")
        self.env: Mapping[str, str] = {}
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def of_alpha(cls, folder: Path, *, owned: bool = False) -> Self:
        """One whose resident is the model `alpha`, with its router; each has a folder of its own below `folder`."""
        router = RealRouter(folder / "router", make_models(folder, ["alpha"]))
        return cls(folder / "swapper", router, ALPHA, owned=owned)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it was started, and neither killed nor stopped since."""
        return self._process is not None

    def start(self, *, until: str = "/ready") -> None:
        """Start it and wait until it says it is ready; `until` /health where something keeps it from that."""
        with self.log_path.open("ab") as log:
            command = [sys.executable, *self.program, "serve", "-c", str(self.config)]
            env = os.environ | self.env
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env)
        self.wait_ready(until)

    def wait_ready(self, until: str = "/ready") -> None:
        """Wait until it says it is ready (again)."""
        assert self._process is not None
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise AssertionError(f"swapper serve ended:\n{self.log_path.read_text()}")
            try:
                with urllib.request.urlopen(self.url + until, timeout=5):
                    return
            except (OSError, urllib.error.HTTPError):
                time.sleep(0.02)
        raise AssertionError(f"swapper serve was not ready in {READY_S} s:\n{self.log_path.read_text()}")

    def kill(self) -> None:
        """Kill it as the kernel would: nothing is said, nothing is cleaned."""
        os.kill(self.pid, signal.SIGKILL)
        self._reap()

    def stop(self) -> int:
        """SIGTERM; the exit status."""
        if self._process is None:
            return 0
        self._process.terminate()
        return self._reap()

    def wait(self) -> int:
        """The exit status of one that ends by itself."""
        return self._reap()

    def _reap(self) -> int:
        assert self._process is not None
        status = self._process.wait(20)
        self._process = None
        return status

    async def stop_router(self) -> None:
        """End the router that swapper started (`owned`), as its own control does."""
        await CommandControl("llama", self.router.command, self.state_dir / "servers" / "llama").stop()

    def chat(self, model: str, *messages: str) -> Json:
        """One chat answer; the messages alternate between user and assistant."""
        roles = ("user", "assistant")
        talk = [{"role": roles[i % 2], "content": text} for i, text in enumerate(messages)]
        return self.post("/v1/chat/completions", {"model": model, "messages": talk, "max_tokens": 8, "temperature": 0})

    def lease(self, label: str, *, wait: int = 0) -> Json:
        """Ask for the whole card."""
        return self.post(f"/api/leases?wait={wait}", {"card": "gpu0", "label": label, "ttl_s": 60})

    def release(self, lease: Json) -> None:
        """Give a lease back."""
        self.delete(f"/api/leases/{lease['id']}?token={lease['token']}")

    def swaps(self) -> list[Json]:
        """The swaps so far, newest first."""
        return cast("list[Json]", self.get("/api/swaps")["items"])

    def next_swap(self, wanted: Callable[[Json], bool], *, limit_s: float = 30) -> Json:
        """The next swap, from now on, whose image is as wanted."""
        with urllib.request.urlopen(self.url + "/api/events", timeout=limit_s) as answer:
            for raw in answer:
                if raw.startswith(b"data:"):
                    image = cast("Json", json.loads(raw[5:]))
                    if "steps" in image and wanted(image):
                        return image
        raise AssertionError("the event stream ended")

    def until(self, wanted: Callable[[Json], list[Json]], *, limit_s: float = 30) -> list[Json]:
        """What `wanted` finds in the status, once it finds something."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            if found := wanted(self.get("/api/status")):
                return found
            time.sleep(0.02)
        raise AssertionError(f"not within {limit_s:g} s; the status is {self.get('/api/status')}")

    def alerts(self, since: str = "0") -> list[str]:
        """The texts of all alerts in the retained log."""
        texts: list[str] = []
        with urllib.request.urlopen(f"{self.url}/api/events?since={since}&follow=0", timeout=20) as answer:
            kind = ""
            for raw in answer:
                if raw.startswith(b"event:"):
                    kind = raw[6:].decode().strip()
                elif raw.startswith(b"data:") and kind == "alert":
                    texts.append(str(json.loads(raw[5:])["text"]))
        return texts

    def get(self, path: str) -> Json:
        """GET, JSON where it is JSON."""
        return self._call("GET", path)

    def post(self, path: str, body: Mapping[str, object]) -> Json:
        """POST JSON, JSON back."""
        return self._call("POST", path, body)

    def delete(self, path: str) -> Json:
        """DELETE, JSON back."""
        return self._call("DELETE", path)

    def _call(self, method: str, path: str, body: Mapping[str, object] | None = None) -> Json:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} if data else {}
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            raw = answer.read()
        return cast("Json", json.loads(raw)) if raw[:1] in b"{[" else {"text": raw.decode()}


S = TypeVar("S", bound=Server)


@contextmanager
def serving(server: S) -> Generator[S]:
    """Its router is started, then it is; at the end both are stopped, whatever the test stopped already."""
    try:
        server.router.start()
        server.start()
        yield server
    finally:
        server.stop()
        server.router.stop()
