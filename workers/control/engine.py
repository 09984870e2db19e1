"""The Docker engine: its SDK in threads of its own, every question answered in bounded time, its events heard.

Invariant: an engine that does not answer is BackendDown and never "stopped"; what it refuses is BackendRefused with its
own words. The SDK blocks: nothing of it runs in the event loop's thread. Source: Docker Engine API v1.41 and newer.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar, cast

import docker
from docker.errors import APIError, DockerException
from docker.utils import kwargs_from_env
from requests.exceptions import RequestException

from swapper.errors import BackendDown, BackendError, BackendRefused

T = TypeVar("T")

ANSWER_S = 4
"""An engine that is silent so long does not answer, where it has nothing to do but to answer."""
_ACT_S = 120
"""So long it may be silent over a start, and beyond the grace of a stop."""
_PAUSES_S = (0.1, 5.0)
"""Between attempts to hear its events again: the first, doubling up to the last."""
_HERE = "unix:///var/run/docker.sock"
_EVENTS = ("create", "start", "die", "stop", "pause", "unpause", "health_status", "destroy", "rename", "oom")


class Engine:
    """One engine: at `url`, else where DOCKER_HOST says, else this machine's. Nothing is asked before somebody asks."""

    def __init__(self, url: str | None = None) -> None:
        self._url = url
        self._clients: dict[int, Any] = {}
        self._making = threading.Lock()
        self._heard: Callable[[dict[str, Any] | None], None] | None = None
        self._thread: threading.Thread | None = None
        self._stream: Any = None
        self._closing = threading.Event()
        self.losses = 0
        """How often it went away while its events were heard: it began anew since, or was out of reach."""

    async def ask(self, question: Callable[[Any], T], *, acts: bool = False) -> T:
        """Let a thread ask the SDK's low-level client. Raises BackendDown, BackendRefused (with its status).

        `acts`: it may take long. Whoever is cancelled leaves the thread to end by itself, and nobody waits for that.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def deliver(result: T | None, error: BaseException | None) -> None:
            if answer.done():
                return
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(cast("T", result))

        def run() -> None:
            try:
                told: tuple[T | None, BaseException | None] = self.ask_now(question, acts=acts), None
            except BaseException as error:
                told = None, error
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(deliver, *told)

        threading.Thread(target=run, name="docker", daemon=True).start()
        return await answer

    def ask_now(self, question: Callable[[Any], T], *, acts: bool = False) -> T:
        """The same, blocking."""
        try:
            self._knock()
            return question(self._connected(_ACT_S if acts else ANSWER_S))
        except APIError as error:
            raise BackendRefused(str(error.explanation or error).strip(), error.status_code) from error
        except (DockerException, RequestException, OSError) as error:
            raise self._down(error) from error

    def listen(self, heard: Callable[[dict[str, Any] | None], None]) -> None:
        """From now on tell of each event of a container, in a thread; None: it is (again) heard, or was lost."""
        if self._thread is None:
            self._heard = heard
            self._thread = threading.Thread(target=self._listen, name="docker events", daemon=True)
            self._thread.start()

    async def close(self) -> None:
        """End the threads and connections."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._closing.set()
        stream = self._stream
        if stream is not None:
            stream.close()
        if self._thread is not None:
            self._thread.join(ANSWER_S)
        with self._making:
            for client in self._clients.values():
                client.close()

    def _knock(self) -> None:
        """Raise OSError where nobody listens, for the SDK leaves its socket open over that."""
        where = self._url or os.environ.get("DOCKER_HOST") or _HERE
        if where.startswith("unix://"):
            with socket.socket(socket.AF_UNIX) as ours:
                ours.settimeout(ANSWER_S)
                ours.connect(where.removeprefix("unix://"))

    def _connected(self, timeout_s: int) -> Any:  # noqa: ANN401  # what is asked of it is written where it is asked
        with self._making:
            if timeout_s not in self._clients:
                where: dict[str, Any] = {"base_url": self._url} if self._url else {**kwargs_from_env()}
                self._clients[timeout_s] = docker.APIClient(version="auto", timeout=timeout_s, **where)
            return self._clients[timeout_s]

    def _listen(self) -> None:
        pause = _PAUSES_S[0]
        while not self._closing.is_set():
            try:
                events = self.ask_now(lambda client: client.events(decode=True, filters=_FILTERS))
            except BackendError:
                pass
            else:
                pause = _PAUSES_S[0]
                self._hear(events)
                self.losses += 1
                self._tell(None)
            self._closing.wait(pause)
            pause = min(pause * 2, _PAUSES_S[1])

    def _hear(self, events: Any) -> None:  # noqa: ANN401
        self._stream = events
        try:
            self._tell(None)
            for event in events:
                self._tell(cast("dict[str, Any]", event))
        except (DockerException, RequestException, OSError, ValueError, AttributeError):
            pass  # it went away, or the stream was closed under its reader
        finally:
            self._stream = None
            events.close()

    def _tell(self, event: dict[str, Any] | None) -> None:
        if self._heard is not None and not self._closing.is_set():
            self._heard(event)

    def _down(self, error: Exception) -> BackendDown:
        where = f"the Docker engine at {self._url}" if self._url else "the Docker engine"
        text = str(error)
        if "Permission denied" in text:
            mend = "swapper may not use its socket: add swapper's user to the group docker"
        elif "timed out" in text.lower():
            mend = "no answer in time; see what it is busy with, or restart it"
        else:
            mend = "start it (systemctl start docker), or set DOCKER_HOST to where it is"
        return BackendDown(f"{where} does not answer: {mend}")


_FILTERS = {"type": "container", "event": list(_EVENTS)}
