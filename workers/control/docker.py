"""Control `docker`: a container that exists already is started and stopped; nothing here makes or removes one.

Invariant: it counts as gone only when the engine says that it does not run and its process is gone; an engine that
does not answer, or fails, says nothing. A paused container is there, and so is one that was seen to run here and that
was renamed since, also where another has its name. Stopping it is by hand, which the engine remembers until it begins
anew: one with `restart: always` comes back then, and is told of as such.
"""

from __future__ import annotations

import asyncio
import math
import re
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, cast

from docker.errors import NotFound

from swapper.errors import BackendError, BackendRefused
from workers.control import GRACE_MS, ExitStatus, Phase, Seen, launcher
from workers.control.container import Container, time_s
from workers.control.engine import Engine
from workers.control.pulse import Pulse

_NOT_FOUND = 404
_ID = re.compile(r"[0-9a-f]{12,64}")
_PROJECT, _SERVICE = "com.docker.compose.project", "com.docker.compose.service"
_KILL_S = 10.0
_POLL_S = 0.02
_EARLY_S = 1.0
_NEXT_S = 1e-6
"""The engine tells lines of one microsecond apart, and a number of seconds does not."""


class DockerControl:
    """The container of the server `name`: by its name, its id, or as `PROJECT/SERVICE` of Compose."""

    def __init__(self, name: str, container: str, engine: Engine | None = None, *, grace_ms: int = GRACE_MS) -> None:
        self._name = name
        self._grace_ms = grace_ms
        self._container = container
        self._engine = engine or Engine()
        self._pulse = Pulse()
        self._acting = asyncio.Lock()
        self._seeing = threading.Lock()
        self._looks = count(1)
        self._shown = 0
        self._last: Container | Phase = Phase.UNREACHABLE
        self._ran: str | None = None
        self._stopped_at: int | None = None
        self._note: str | None = None
        self._before_s: float | None = None

    # What changes something.

    async def ensure(self) -> None:
        """Start the container where it does not run, go on with it where it is paused. Raises BackendError."""
        async with self._acting:
            self._stopped_at = None
            try:
                await self._start()
            except BackendRefused as refused:
                if refused.status != _NOT_FOUND:
                    raise BackendRefused(f"{self._container} cannot be started: {refused}") from refused
                await self._start()  # it was made anew under its name meanwhile
        self._pulse.beat()

    async def _start(self) -> None:
        found = await self._found()
        if found.paused:
            await self._engine.ask(lambda client: client.unpause(found.id), acts=True)
        elif not found.running:
            self._before_s = await self._last_word_s(found)
            await self._engine.ask(lambda client: client.start(found.id), acts=True)
        await self._found()

    async def _last_word_s(self, found: Container) -> float | None:
        """When it last said something, s since the epoch: whatever it says after that is of the run to come.

        The engine writes a line down after it was said, maybe after the end of its run.
        """
        try:
            line = await self._engine.ask(lambda client: client.logs(found.id, tail=1, timestamps=True))
        except BackendError:
            return None
        return time_s(line.split(b" ", 1)[0].decode(errors="replace")) + _NEXT_S

    async def stop(self, grace_ms: int | None = None) -> None:
        """Stop it, by KILL after its grace or the container's own longer time; returns once its process is gone."""
        async with self._acting:
            self._note = None
            found = await self._find()
            if found is not None and found.running:
                grace_s = math.ceil((self._grace_ms if grace_ms is None else grace_ms) / 1000)
                await self._stop(found, max(grace_s, found.stop_timeout_s))
            self._stopped_at = self._engine.losses
        self._pulse.beat()

    async def _stop(self, found: Container, grace_s: int) -> None:
        if found.paused:
            await self._unpaused(found.id)
        try:
            await self._engine.ask(lambda client: client.stop(found.id, timeout=grace_s), acts=True)
        except BackendRefused as refused:
            if refused.status != _NOT_FOUND:
                raise BackendRefused(f"{self._container} cannot be stopped: {refused}") from refused
        after = await self._find()
        if after is not None and after.id == found.id and after.running:
            raise BackendError(f"the container {found.name} was stopped and runs: somebody started it meanwhile")
        if after is not None and after.was_killed and after.id == found.id:
            self._note = (
                f"the container {found.name} did not end on {found.stop_signal} and was killed after {grace_s} s: "
                "its first process does not handle it (init: true, or a stop_signal that it does, spares the wait)"
            )
        await self._vanished(found)

    async def _unpaused(self, container: str) -> None:
        """What is frozen can handle no signal (Docker thaws it by itself, Podman refuses the stop)."""
        try:
            await self._engine.ask(lambda client: client.unpause(container), acts=True)
        except BackendRefused:
            return

    async def _vanished(self, found: Container) -> None:
        """Its first process is gone a moment after the engine said so, or hangs in the kernel."""
        for _ in range(round(_KILL_S / _POLL_S)):
            if found.process is None or not launcher.lives(*found.process):
                return
            await asyncio.sleep(_POLL_S)
        assert found.process is not None
        raise BackendError(f"{found.name} was stopped, and its process {found.process[0]} hangs in the kernel")

    async def restart(self, grace_ms: int | None = None) -> None:
        """Stop it and start it again."""
        await self.stop(grace_ms)
        await self.ensure()

    # What only looks.

    async def look(self) -> Seen:
        """Ask the engine now."""
        try:
            found = await self._find()
        except BackendError as error:
            return Seen(Phase.UNREACHABLE, str(error))
        if found is None:
            return Seen(Phase.MISSING, self._missing())
        seen = found.seen()
        if found.running and not seen.why:
            seen = replace(seen, why=self._renamed(found))
        anew = self._stopped_at is not None and self._stopped_at != self._engine.losses
        if anew and found.running and found.always_back:
            return replace(seen, came_back=True)
        return seen

    def changes(self) -> AsyncIterator[None]:
        """One item at once, then one whenever the engine told of its containers, went away or came back."""
        self._engine.listen(self._heard)
        return self._pulse.beats()

    def _heard(self, event: dict[str, Any] | None) -> None:
        """In the thread of the events: see for ourselves first, for who asks without waiting."""
        del event  # by name or service it may be one that was made just now, so each counts
        look = next(self._looks)
        with suppress(BackendError):
            self._show(self._engine.ask_now(self._inspected), look)
        self._pulse.beat_from_anywhere()

    @property
    def always_back(self) -> bool:
        """Whether it comes back when its engine begins anew although it was stopped, as last seen."""
        return isinstance(self._last, Container) and self._last.always_back

    def notes(self) -> str | None:
        """Whether the last stop was by KILL."""
        return self._note

    async def close(self) -> None:
        """Let go of the engine."""
        await self._engine.close()

    def alive(self) -> bool | None:
        """Whether it runs, as last seen; None while the engine does not answer."""
        last = self._last
        return last.alive() if isinstance(last, Container) else (False if last is Phase.MISSING else None)

    def pid(self) -> int | None:
        """Its first process while it lives, where it is one of this machine's."""
        last = self._last
        process = last.process if isinstance(last, Container) else None
        return process[0] if process is not None and launcher.lives(*process) else None

    def exit_status(self) -> ExitStatus | None:
        """How it ended, as last seen."""
        return self._last.exit_status() if isinstance(self._last, Container) else None

    def log_tail(self, n: int) -> list[str] | None:
        """The last lines of its last run. Blocking; None where its log cannot be read."""
        last = self._last
        if not isinstance(last, Container):
            return None
        # What a process says first may be older than the start that the engine writes down.
        since = last.started_s - _EARLY_S if self._before_s is None else self._before_s

        def logs(client: Any) -> bytes:  # noqa: ANN401
            return cast("bytes", client.logs(last.id, tail=n, since=max(0.001, since)))

        try:
            return self._engine.ask_now(logs).decode(errors="replace").splitlines()[-n:]
        except BackendError:
            return None

    def log_path(self) -> Path | None:
        """Its log is the engine's."""
        return None

    async def problems(self) -> list[str]:
        """What would keep it from being started and stopped, each with how it is mended."""
        try:
            found = await self._find()
        except BackendError as error:
            return [str(error)]
        return [] if found is not None else [self._missing()]

    # The container.

    async def _found(self) -> Container:
        found = await self._find()
        if found is None:
            raise BackendRefused(self._missing())
        return found

    async def _find(self) -> Container | None:
        """Ask the engine; None where there is no such container. Raises BackendError."""
        self._engine.listen(self._heard)
        look = next(self._looks)
        try:
            found = await self._engine.ask(self._inspected)
        except BackendError as error:
            missing = isinstance(error, BackendRefused) and error.status == _NOT_FOUND
            self._show(Phase.MISSING if missing else Phase.UNREACHABLE, look)
            if missing:
                return None
            raise
        self._show(found, look)
        return found

    def _show(self, found: Container | Phase, look: int) -> None:
        """An older look never takes the place of a younger one."""
        with self._seeing:
            if look > self._shown:
                self._shown, self._last = look, found
                if isinstance(found, Container):
                    self._ran = found.id if found.running else None

    def _inspected(self, client: Any) -> Container:  # noqa: ANN401
        """What has its name now; what was last seen to run, where that runs on under another one."""
        found: Container | None = None
        lost: Exception | None = None
        try:
            found = self._named(client)
        except NotFound as error:
            lost = error
        except BackendRefused as refused:
            if refused.status != _NOT_FOUND:
                raise
            lost = refused
        ran = self._ran
        if ran is not None and (found is None or found.id != ran):
            with suppress(NotFound):
                left = Container.of(client.inspect_container(ran))
                if left.running:
                    return left
        if found is None:
            assert lost is not None
            raise lost
        return found

    def _renamed(self, found: Container) -> str:
        word = self._container
        if "/" in word or found.name == word or found.id.startswith(word):
            return ""
        return f"the container that was started as {word} is called {found.name} now: write that name as container:"

    def _named(self, client: Any) -> Container:  # noqa: ANN401
        project, slash, service = self._container.partition("/")
        if not slash:
            return Container.of(client.inspect_container(self._container))
        labels = [f"{_PROJECT}={project}", f"{_SERVICE}={service}"]
        listed = cast("Sequence[dict[str, Any]]", client.containers(all=True, filters={"label": labels}))
        if len(listed) > 1:
            names = ", ".join(sorted(one["Names"][0].lstrip("/") for one in listed))
            said = f"several containers are {self._container} of Compose: {names}"
            raise BackendRefused(f"{said}; write the name of the one that is meant as container:")
        if not listed:
            raise BackendRefused(self._missing(), _NOT_FOUND)
        return Container.of(client.inspect_container(listed[0]["Id"]))

    def _missing(self) -> str:
        project, slash, service = self._container.partition("/")
        if slash:
            make = f"docker compose -p {project} create {service}"
            return f"there is no container of the service {service} in the Compose project {project}: {make}"
        if _ID.fullmatch(self._container):
            return f"the container {self._container} was removed: write its name, which outlives that, or the new id"
        return f"there is no container {self._container}: create it (docker create), or correct container:"
