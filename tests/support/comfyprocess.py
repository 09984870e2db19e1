"""The ComfyUI of the tests as a process (comfyui.py): started, killed, ticked, told to lie, and what it has in VRAM.

Invariant: whoever starts one stops it. `command` starts the same one under a control of the product.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import psutil

from tests.support.router import free_port

_READY_S = 20.0
ROOT = Path(__file__).parents[2]
Json = dict[str, Any]


def prompt(*, steps: int = 1, seed: int = 0, **outside: object) -> Json:
    """A body for POST /prompt of `steps` + 2 steps; `outside`: what stands beside the prompt, like client_id."""
    nodes: Json = {
        "1": {"class_type": "EmptyImage", "inputs": {"width": 64, "height": 64, "batch_size": 1, "color": seed}},
        "2": {"class_type": "KSampler", "inputs": {"steps": steps, "image": ["1", 0]}},
        "3": {"class_type": "PreviewImage", "inputs": {"images": ["2", 0]}},
    }
    return {"prompt": nodes, **outside}


class ComfyProcess:
    """One in a folder of its own; start and kill may alternate, the ports stay."""

    def __init__(self, folder: Path, *, listen: str = "127.0.0.1") -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.port, self.control_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        ports = ["--port", str(self.port), "--control-port", str(self.control_port)]
        self.command = [sys.executable, "-m", "tests.support.comfyui", *ports, "--folder", str(folder)]
        self.command += ["--listen", listen]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it here, and wait until it answers."""
        log = (self.folder / "log").open("ab")
        with log:
            self._process = subprocess.Popen(self.command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.wait_ready()

    def wait_ready(self) -> None:
        """Wait until whoever started it has it there."""
        deadline = time.monotonic() + _READY_S
        while True:
            try:
                self.get("/system_stats")
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
            else:
                return

    @property
    def pid(self) -> int:
        """Of the process that last started; it may be dead."""
        return int(json.loads((self.folder / "vram").read_text())["pid"])

    @property
    def alive(self) -> bool:
        """Whether that lives."""
        try:
            return psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE
        except (psutil.NoSuchProcess, FileNotFoundError):
            return False

    def vram_mib(self) -> int:
        """What it has; nothing once it is dead."""
        return self.told_mib() if self.alive else 0

    def told_mib(self) -> int:
        """The same, whether it lives or not."""
        return int(json.loads((self.folder / "vram").read_text())["mib"])

    async def held_mib(self) -> int | None:
        """The same, as a reader of a driver tells it."""
        return await asyncio.to_thread(self.vram_mib)

    def kill(self) -> None:
        """As the kernel would."""
        killed = psutil.Process(self.pid)
        above = killed.parent()
        killed.send_signal(signal.SIGKILL)
        self.stop()
        killed.wait(10)
        if above is not None and above.pid != os.getpid():
            above.wait(10)  # the launcher, which writes down how it ended

    def stop(self) -> None:
        """End the one started here. Safe to repeat."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None

    def anew(self) -> None:
        """As after a start: the same process, which is faster, where that does; another one where none lives."""
        if self._process is None or self._process.poll() is not None:
            self.start()
        else:
            self._control("POST", "/anew")

    # ---- the test's port

    def tick(self, n: int = 1) -> None:
        """Let so many steps go on."""
        self._control("POST", f"/tick?n={n}")

    def tell(self, **lies: object) -> None:
        """See comfyrules.Lies."""
        self._control("POST", "/set", lies)

    def from_the_start(self, **lies: object) -> None:
        """The same for those that start from now on."""
        (self.folder / "lies").write_text(json.dumps(lies))

    def state(self) -> Json:
        """`done, posted, calls, mib, pending, running, clients`."""
        return cast("Json", json.loads(self._control("GET", "/state")))

    def until(self, wanted: Callable[[Json], object], *, limit_s: float = 20) -> Json:
        """The first state that is as wanted."""
        deadline = time.monotonic() + limit_s
        while not wanted(state := self.state()):
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {limit_s:g} s: {state}")
            time.sleep(0.02)
        return state

    # ---- as its clients

    def get(self, path: str) -> Json:
        """JSON."""
        with urllib.request.urlopen(self.url + path, timeout=10) as answer:
            return cast("Json", json.loads(answer.read()))

    def post(self, path: str, body: object) -> Json:
        """JSON both ways; {} for an empty answer."""
        return post(self.url + path, body)

    def _control(self, method: str, path: str, body: object = None) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} if data else {}
        url = f"http://127.0.0.1:{self.control_port}{path}"
        with urllib.request.urlopen(urllib.request.Request(url, data, headers, method=method), timeout=10) as answer:
            return cast("bytes", answer.read())


def post(url: str, body: object, *, headers: dict[str, str] | None = None, limit_s: float = 60) -> Json:
    """POST JSON; the JSON of the answer, {} for an empty one. Raises HTTPError."""
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **(headers or {})})
    with urllib.request.urlopen(request, timeout=limit_s) as answer:
        raw = answer.read()
    return cast("Json", json.loads(raw)) if raw else {}


def refused(url: str, body: object, *, headers: dict[str, str] | None = None) -> tuple[int, Json]:
    """Status and JSON of a POST that must fail."""
    try:
        answer = post(url, body, headers=headers)
    except urllib.error.HTTPError as error:
        return error.code, cast("Json", json.loads(error.read()))
    raise AssertionError(f"it was answered: {answer}")
