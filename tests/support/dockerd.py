"""A Docker engine of our own, and containers of busybox in it.

Invariant: it listens on a socket in its folder and knows nothing of another engine; whoever started one ends it with
`stop`, which leaves no process, no mount and no container. Needs root and Debian's docker.io and busybox-static.
"""

from __future__ import annotations

import io
import os
import shutil
import signal
import socket
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import docker
import psutil
import pytest

BUSYBOX = "busybox:test"
LIVING = "trap 'exit 0' TERM; echo up; while :; do sleep 0.05; done"
"""A program that ends when it is told to; the pauses are the container's, no test waits for them."""
DEAF = "trap '' TERM; echo up; while :; do sleep 0.05; done"
_UP_S = 60.0
_APPLETS = ("sh", "sleep", "cat", "echo", "test", "touch", "rm", "false", "kill")


def needed() -> None:
    """Skip where no engine can be started."""
    busybox = shutil.which("busybox")
    if os.geteuid() != 0 or shutil.which("dockerd") is None or busybox is None:
        pytest.skip("needs root, dockerd (docker.io) and busybox (busybox-static)")


class Dockerd:
    """One engine. `url` is what DOCKER_HOST would be; `api` the SDK's low-level client on it."""

    def __init__(self) -> None:
        # The paths of its sockets may have 107 characters, and a test's own folder leaves it too few.
        self._folder = folder = Path(tempfile.mkdtemp(prefix="engine"))
        self.url = f"unix://{folder}/sock"
        self._process: subprocess.Popen[bytes] | None = None
        self.api: Any = None

    def start(self) -> Dockerd:
        """Start it and wait until it answers."""
        at = self._folder
        options = ("--iptables=false", "--ip6tables=false", "--bridge=none", "--storage-driver=vfs")
        places = ("--data-root", str(at / "data"), "--exec-root", str(at / "exec"), "--pidfile", str(at / "pid"))
        with (at / "log").open("ab") as log:
            command = ["dockerd", *options, *places, "-H", self.url]
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + _UP_S
        while True:
            try:
                _ping(at / "sock")  # over one that fails the SDK leaves its own socket open
                self.api = docker.APIClient(base_url=self.url, version="auto", timeout=60)
                return self
            except OSError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise AssertionError(f"dockerd does not start: {(at / 'log').read_text()[-2000:]}") from None
                time.sleep(0.02)

    def kill(self) -> None:
        """End it as a power cut would; its containers live on until it starts again."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Remove its containers, end it, and leave nothing behind. Safe to repeat."""
        if self._process is not None and self.api is not None:
            for one in cast("Sequence[dict[str, Any]]", self.api.containers(all=True)):
                self.api.remove_container(one["Id"], force=True)
        self._end(signal.SIGTERM)
        mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for place in reversed([mount for mount in mounts if mount.startswith(f"{self._folder}/")]):
            subprocess.run(["umount", place], check=True)  # its network namespace; after a kill its folder, too
        shutil.rmtree(self._folder)

    def _end(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        if self.api is not None:
            self.api.close()
        below = psutil.Process(self._process.pid).children(recursive=True)
        self._process.send_signal(number)
        self._process.wait(30)
        self._process = None
        ours = [one for one in below if one.is_running() and one.name() == "containerd"]
        for one in ours:
            one.kill()
        psutil.wait_procs(ours, 10)

    def pause(self) -> None:
        """Have it hang: it is there and answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it answer again."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def busybox(self) -> None:
        """Have the image BUSYBOX, of nothing but a static busybox."""
        made = io.BytesIO()
        with tarfile.open(fileobj=made, mode="w") as tar:
            tar.add(cast("str", shutil.which("busybox")), "bin/busybox")
            for applet in _APPLETS:
                link = tarfile.TarInfo(f"bin/{applet}")
                link.type, link.linkname = tarfile.SYMTYPE, "busybox"
                tar.addfile(link)
        self.image(BUSYBOX, made.getvalue())

    def image(self, name: str, tar: bytes) -> None:
        """Have an image of the files in a tar."""
        repository, _, tag = name.partition(":")
        self.api.import_image_from_data(tar, repository=repository, tag=tag)

    def create(
        self,
        name: str,
        script: str | Sequence[str] = LIVING,
        *,
        restart: str = "no",
        labels: Mapping[str, str] | None = None,
        image: str = BUSYBOX,
        **more: Any,  # noqa: ANN401  # the SDK's own arguments
    ) -> str:
        """A container that does not run yet; its id. Its network is none; `network_mode` and `binds` as in the SDK."""
        host = {"network_mode": more.pop("network_mode", "none"), "restart_policy": {"Name": restart}}
        host |= {"binds": more.pop("binds")} if "binds" in more else {}
        stop_timeout = more.pop("stop_timeout", None)
        made = self.api.create_container(
            image,
            ["sh", "-c", script] if isinstance(script, str) else list(script),
            name=name,
            labels=dict(labels or {}),
            stop_timeout=stop_timeout,
            host_config=self.api.create_host_config(**host),
            **more,
        )
        return cast("str", made["Id"])

    def state(self, name: str) -> dict[str, Any]:
        """`State` of its inspection."""
        return cast("dict[str, Any]", self.api.inspect_container(name)["State"])


def _ping(path: Path) -> None:
    """Raises OSError until the engine answers; one that just begins takes a call and drops it."""
    with socket.socket(socket.AF_UNIX) as knock:
        knock.settimeout(5)
        knock.connect(str(path))
        knock.sendall(b"GET /_ping HTTP/1.0\r\n\r\n")
        if b" 200 " not in knock.recv(64):
            raise OSError("it does not answer yet")
