"""What SGLang adds to OpenAI's routes: how many calls are in it, and giving its memory back.

Invariant: no request here is made that the server would die of. It asserts that no call is in flight at a release, and
that what is resumed was released; it does not say whether it was, so that stands in a file, with the server it is true
of, written before each step. Source: SGLang's http_server.py and its scheduler's weight updater, issue 4566.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from swapper.errors import BackendDown, BackendError, BackendRefused
from workers.client import ServerClient, decoded
from workers.vllm import gauges

WHO = "SGLang"
SAVER = "--enable-memory-saver"
BACKUP = "--enable-weights-cpu-backup"
_TAGS = ("kv_cache", "weights")
_COUNTS = ("sglang:num_running_reqs", "sglang:num_queue_reqs")


class _Mark(msgspec.Struct):
    """`step` is releasing, released or resuming; `server` is whom it is true of."""

    step: str
    server: str
    tags: list[str]


class Info(msgspec.Struct):
    """What we use of the server's own arguments. None: this build does not know the option."""

    model_path: str = ""
    random_seed: int | None = None
    enable_memory_saver: bool | None = None
    enable_weights_cpu_backup: bool | None = None


class _Load(msgspec.Struct):
    num_reqs: int | None = None
    num_running_reqs: int = 0
    num_waiting_reqs: int = 0

    @property
    def calls(self) -> int:
        return self.num_running_reqs + self.num_waiting_reqs if self.num_reqs is None else self.num_reqs


class _Loads(msgspec.Struct):
    loads: list[_Load]


class _Said(msgspec.Struct):
    success: bool = True
    sleeping: bool = True
    message: str = ""


class Sglang:
    """The engine behind one SGLang. `level` 1: it keeps a copy of its weights in host memory; 2: they are read again.

    `folder` is for the mark; `run` tells this run of its process from others, None where that cannot be seen.
    """

    def __init__(self, http: ServerClient, level: int, folder: Path, run: Callable[[], str | None]) -> None:
        self._http = http
        self._level = level
        self._path = folder / "released.json"
        self._run = run

    async def in_flight(self) -> int | None:
        """By what its scheduler counts just now; its metrics, where there is no other, lag behind."""
        for path in ("/v1/loads", "/get_load"):
            with suppress(BackendRefused):
                data = await self._http.get(path)
                loads = decoded(data, _Loads, WHO).loads if path == "/v1/loads" else decoded(data, list[_Load], WHO)
                return sum(one.calls for one in loads)
        try:
            return gauges((await self._http.get("/metrics")).decode(errors="replace"), _COUNTS)
        except BackendRefused as refused:
            if refused.status == 404:
                return None
            raise

    async def info(self) -> Info:
        """Its arguments, by the route of its version."""
        try:
            data = await self._http.get("/server_info")
        except BackendRefused as refused:
            if refused.status != 404:
                raise
            data = await self._http.get("/get_server_info")
        return decoded(data, Info, WHO)

    async def resting(self) -> bool:
        """By the mark, where it is true of the server that runs now. Raises BackendError where a step was cut off."""
        mark = self._read()
        if mark is None:
            return False
        if mark.server != await self._server():
            with suppress(BackendError):  # it is about another server, wherever it stands
                self._forget()
            return False
        if mark.step != "released":
            raise BackendError(self._unknown())
        return True

    def torn(self) -> bool:
        """Never: `resting` says so of one that was cut off."""
        return False

    def ended(self) -> None:
        """Its process is gone, and what was released with it."""
        with suppress(BackendError):
            self._forget()

    async def rest(self, limit_s: float) -> None:
        """Pause, flush, release. Raises BackendRefused where the server was not started for it."""
        if await self.resting():
            return
        self.fit(await self.info())
        server = await self._server()
        with suppress(BackendRefused):  # older ones know no pause
            await self._http.post("/pause_generation", {}, limit_s=limit_s)
        try:
            await self._http.post("/flush_cache", limit_s=limit_s)
        except BackendError:
            await self._go_on(limit_s)
            raise
        self._write(_Mark("releasing", server, list(_TAGS)), "so nothing was released")
        try:
            said = await self._http.post("/release_memory_occupation", {"tags": list(_TAGS)}, limit_s=limit_s)
            self._believe(said, sleeping=True)
        except BackendRefused:
            self._forget()
            await self._go_on(limit_s)
            raise
        self._write(_Mark("released", server, list(_TAGS)), f"and {WHO} was released: restart it to wake it")

    async def wake(self, limit_s: float) -> None:
        """Resume what was released, read the weights again where no copy was kept, go on."""
        mark = self._read()
        if mark is None:
            return
        info = await self.info()
        self._write(_Mark("resuming", mark.server, mark.tags), "so nothing was resumed")
        await self._http.post("/resume_memory_occupation", {"tags": mark.tags}, limit_s=limit_s)
        if self._level != 1:
            said = await self._http.post("/update_weights_from_disk", {"model_path": info.model_path}, limit_s=limit_s)
            self._believe(said, sleeping=False)
        await self._go_on(limit_s)
        self._forget()

    async def _go_on(self, limit_s: float) -> None:
        with suppress(BackendRefused):
            await self._http.post("/continue_generation", {}, limit_s=limit_s)

    def fit(self, info: Info) -> None:
        """Raises BackendRefused where a release would answer ok and free nothing, or lose what is not read again."""
        where = f"{WHO} at {self._http.url} was started without"
        if info.enable_memory_saver is False:
            raise BackendRefused(
                f"{where} {SAVER}, so that it would free nothing: start it with that, or leave sleep out"
            )
        if self._level == 1 and info.enable_weights_cpu_backup is not True:
            raise BackendRefused(
                f"{where} {BACKUP}, so that its weights would be lost: start it with that, or sleep: 2"
            )

    def _believe(self, data: bytes, *, sleeping: bool) -> None:
        """Most answer null; the diffusion server says whether it sleeps."""
        if data.strip() in (b"", b"null"):
            return
        try:
            said = msgspec.json.decode(data, type=_Said)
        except msgspec.DecodeError:
            return
        if not said.success or (sleeping and not said.sleeping):
            raise BackendRefused(f"{WHO} at {self._http.url} did not do it: {said.message or 'it says no success'}")

    def _unknown(self) -> str:
        text = f"a release or resume of {WHO} at {self._http.url} was cut off, and it dies of one it does not expect"
        return f"{text}: restart it"

    async def _server(self) -> str:
        """Tells this start of the server from others: by its process as far as that is seen, and by the seed it drew.

        Who listens at its address may only pass on to it (a tunnel), and it may be started with the same seed always:
        each tells what the other does not. What both miss is told by nobody having listened meanwhile.
        """
        return f"{self._run() or 'elsewhere'} seed {(await self.info()).random_seed}"

    def _read(self) -> _Mark | None:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=_Mark)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError):
            return _Mark("releasing", "", [])

    def _forget(self) -> None:
        if not self._path.exists():
            return
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            raise BackendDown(
                f"{self._path} cannot be removed ({error.strerror}): remove it, and restart {WHO}"
            ) from error

    def _write(self, mark: _Mark, so: str) -> None:
        """`so`: what follows where it cannot be written."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            fresh = self._path.with_name("released.json.new")
            fresh.write_bytes(msgspec.json.encode(mark))
            fresh.replace(self._path)
        except OSError as error:
            raise BackendDown(f"{self._path} cannot be written ({error.strerror}), {so}") from error
