"""A plain llama-server as its own one model: whether its process lives, whether it is loaded, and with which arguments.

Invariant: state comes from the process and from `GET /props`, which wakes nobody and answers 503 while the model is
being loaded. A server whose process cannot be seen from here is asked anew each time. Reads /proc; starts nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from swapper.errors import BackendGone, BackendRefused
from workers.llama.argv import long_names, serves_one
from workers.llama.child import Child
from workers.llama.http import Model, Props, ServerHttp, Status

_LOADING = 503


class Standing:
    """Implements `quiet.Models` for one server. `pid` gives its process while that lives, `command` what starts it."""

    def __init__(self, http: ServerHttp, name: str, pid: Callable[[], int | None], command: Sequence[str] = ()) -> None:
        self._http = http
        self._name = name
        self._pid = pid
        self._command = tuple(command)
        self._seen: Model | None = None
        self.props: Props | None = None
        """What it said last while it was loaded."""

    def process(self) -> Child | None:
        """The process that was started, which may be a shell around the server; None where none lives or is ours."""
        pid = self._pid()
        return Child.of(pid) if pid is not None else None

    async def look(self, name: str) -> Model | None:
        """Ask the server now; None where it is not what was configured. Raises BackendDown where it hangs."""
        del name
        process = await asyncio.to_thread(self.process)
        self._seen = None
        try:
            props = await self._http.props(self._name)
        except BackendGone:
            # A process opens its port a moment after its start.
            return await self._model("unloaded" if process is None else "loading", process)
        except BackendRefused as refused:
            if refused.status == _LOADING:
                return await self._model("loading", process)
            raise
        if props.role == "router":
            return None
        self.props = props
        model = await self._model("sleeping" if props.is_sleeping else "loaded", process)
        if process is not None and not props.is_sleeping:
            self._seen = model
        return model

    async def _model(self, value: str, process: Child | None) -> Model:
        words, run = self._command, ""
        if process is not None:
            words, run = await asyncio.to_thread(_words, process), f"{process.pid}.{process.started}"
        return Model(self._name, Status(value, long_names(words or self._command)), name=self._name, run=run)

    def loaded(self, name: str) -> Model | None:
        """As it was last seen, if that was loaded and the same process lives."""
        seen, process = self._seen, self.process() if self._seen is not None else None
        same = seen is not None and process is not None and seen.run == f"{process.pid}.{process.started}"
        return seen if same and name == self._name else None

    def forget(self, name: str) -> None:
        """The next verb looks again."""
        del name
        self._seen = None

    def server(self) -> Child | None:
        """The process that really serves. Blocking."""
        process = self.process()
        return _serving(process) if process is not None else None

    def serving(self, model: Model) -> Child | None:
        """The process that really serves, whose environment counts. Blocking."""
        del model
        return self.server()


def _words(process: Child) -> tuple[str, ...]:
    return _command_of(_serving(process).pid)


def _serving(process: Child) -> Child:
    """It or the first of its descendants whose command line names a model; a shell script may stand around it."""
    if serves_one(long_names(_command_of(process.pid))):
        return process
    try:
        below = psutil.Process(process.pid).children(recursive=True)
    except psutil.Error:
        return process
    named = (one.pid for one in below if serves_one(long_names(_command_of(one.pid))))
    return next(filter(None, map(Child.of, named)), process)


def _command_of(pid: int) -> tuple[str, ...]:
    try:
        return tuple(Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1])
    except OSError:
        return ()
