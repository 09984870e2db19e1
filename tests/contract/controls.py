"""What the contract of controls is played on: one real thing each, that the test itself can start and end, too.

Invariant: a rig acts on the thing itself (a process, a container, a unit, a Deployment) and never through a control.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from tests.support.dockerd import Dockerd
from tests.support.fake_kube import TOKEN, FakeKube
from workers.control import Phase, Seen, Watched
from workers.control.command import CommandControl
from workers.control.docker import DockerControl
from workers.control.engine import Engine
from workers.control.kube import Cluster
from workers.control.kubernetes import KubernetesControl
from workers.control.process import WatchedProcess
from workers.control.systemd import SystemdControl

Docker = Callable[..., DockerControl]
"""Makes the control of an engine's container: `(engine, container="it")`."""


class Rig(Protocol):
    """One thing. `control` gives a new control of it each time, as each new process of the product makes one."""

    def control(self) -> Watched: ...

    async def end(self) -> None:
        """As somebody else ends it: at once, badly where it can end badly."""
        ...

    async def begin(self) -> None:
        """As somebody else starts it."""
        ...

    async def remove(self) -> None:
        """Leave nothing behind of what was made for it."""
        ...


class ProcessRig:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _bare(self) -> CommandControl:
        return CommandControl("it", ["sleep", "1000"], self._folder / "it", cwd=self._folder)

    def control(self) -> Watched:
        return WatchedProcess(self._bare())

    async def end(self) -> None:
        pid = self._bare().pid()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    async def begin(self) -> None:
        await self._bare().ensure()

    async def remove(self) -> None: ...


class DockerRig:
    def __init__(self, engine: Dockerd, name: str) -> None:
        self._engine = engine
        self._name = name
        engine.create(name)

    def control(self) -> Watched:
        return DockerControl("it", self._name, Engine(self._engine.url))

    async def end(self) -> None:
        await asyncio.to_thread(self._engine.api.kill, self._name)

    async def begin(self) -> None:
        await asyncio.to_thread(self._engine.api.start, self._name)

    async def remove(self) -> None:
        self._engine.api.remove_container(self._name, force=True)


class SystemdRig:
    def __init__(self, folder: Path) -> None:
        """`folder` is where a fake systemctl was installed, which is on PATH."""
        about = {"command": ["sleep", "1000"]}
        (folder / "units/it.service.json").write_text(json.dumps(about))

    def control(self) -> Watched:
        return SystemdControl("it", "it.service")

    async def end(self) -> None:
        control = self.control()
        await control.look()
        pid = control.pid()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    async def begin(self) -> None:
        started = await asyncio.create_subprocess_exec("systemctl", "start", "it.service")
        assert await started.wait() == 0

    async def remove(self) -> None: ...


class KubernetesRig:
    def __init__(self, kube: FakeKube) -> None:
        self._kube = kube
        kube.brisk = True
        kube.deploy("it", 0)

    def control(self) -> Watched:
        where = Cluster(self._kube.url, token=TOKEN, namespace="media")
        return KubernetesControl("it", "it", find=lambda: where)

    async def end(self) -> None:
        self._kube.scale("it", 0)

    async def begin(self) -> None:
        self._kube.scale("it", 1)

    async def remove(self) -> None:
        await self._kube.stop()


async def until(control: Watched, phase: Phase) -> Seen:
    """Look at each change until it is so."""
    async for _ in control.changes():
        seen = await control.look()
        if seen.phase is phase:
            return seen
    raise AssertionError("changes end never")
