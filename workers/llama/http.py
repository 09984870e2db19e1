"""The exact requests of llama-server, as a router and with one model, and what its answers mean.

Invariant: no request here loads or wakes a model (to a router `autoload=false` everywhere; the model stands in the
query of a GET and in the body of a POST), and every answer that is not a success becomes a BackendError with the
server's own words. Touches the network only.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from itertools import pairwise
from types import TracebackType
from typing import Self, TypeVar

import aiohttp
import msgspec
from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt, wait_exponential

from swapper.errors import BackendDown, BackendGone, BackendRefused

T = TypeVar("T")

READ_S = 10.0
_CONNECT_S = 5.0
_BURST_S = 0.5


class Status(msgspec.Struct, frozen=True):
    """A model's `status`. `args` of a running model hold its child's real `--port`."""

    value: str
    args: list[str] = []
    failed: bool = False
    exit_code: int | None = None


class Model(msgspec.Struct, frozen=True):
    """One entry of GET /models. `name` is what we call it by: its id, or the alias it was looked up under.

    `meta` is there while it is loaded, `architecture` always, of builds that tell them. `run` tells the process it runs
    in from those before: its port here (`0` or the last one while it does not run).
    """

    class Meta(msgspec.Struct, frozen=True):
        """Tokens of context per slot."""

        n_ctx: object = None

    class Architecture(msgspec.Struct, frozen=True):
        """What it takes: `text`, `image`, `audio`."""

        input_modalities: object = None

    id: str
    status: Status
    aliases: list[str] = []
    name: str = ""
    run: str = ""
    meta: Meta | None = None
    architecture: Architecture | None = None


class Slot(msgspec.Struct, frozen=True):
    """One entry of GET /slots. `n_prompt_tokens` (tokens in it), `id_task`, `params` are absent until a task ran there.

    `id_task` and `params` are those of its last task; a save, a restore and an erase change neither.
    """

    class Params(msgspec.Struct, frozen=True):
        """What we use of the parameters a call was made with."""

        seed: object = None
        n_predict: object = None

    id: int
    n_ctx: int
    is_processing: bool
    id_task: int | None = None
    n_prompt_tokens: int | None = None
    params: Params | None = None


class Props(msgspec.Struct, frozen=True):
    """What we use of a running model's GET /props."""

    class Settings(msgspec.Struct, frozen=True):
        """Tokens of context per slot; 0 where the build does not tell."""

        n_ctx: int = 0

    build_info: str = ""
    role: str = ""
    is_sleeping: bool = False
    model_path: str = ""
    chat_template: str = ""
    total_slots: int = 0
    default_generation_settings: Settings = Settings()
    modalities: object = None


class SavedSlot(msgspec.Struct, frozen=True):
    """Answer of `action=save`; `n_saved` 0 means that the slot was empty (the file then holds only a header)."""

    class Timings(msgspec.Struct, frozen=True):
        """Milliseconds as the server measured them."""

        save_ms: float = 0.0

    n_saved: int
    n_written: int
    timings: Timings = Timings()


class RestoredSlot(msgspec.Struct, frozen=True):
    """Answer of `action=restore`."""

    class Timings(msgspec.Struct, frozen=True):
        """Milliseconds as the server measured them."""

        restore_ms: float = 0.0

    n_restored: int
    timings: Timings = Timings()


class Counters(msgspec.Struct, frozen=True):
    """Of GET /metrics: calls at work and waiting now; tokens of prompts read since its start, and the s that took."""

    processing: int
    deferred: int
    prompt_tokens: int = 0
    prompt_s: float = 0.0


class _Models(msgspec.Struct):
    data: list[Model]


class _Error(msgspec.Struct):
    class Body(msgspec.Struct):
        message: str = ""

    error: Body


class RouterHttp:
    """Client of one router.

    A POST has a connection of its own, so that it is never sent into one the server just closed. Reads share theirs
    within a burst; the server (which keeps an idle one, and a thread for it, up to 5 s) ends those of proxied answers.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self.fence: Callable[[], Awaitable[None]] = _unfenced
        """Awaited right before every POST: it lets nothing through that must have no effect any more."""
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None
        self._reading: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def session(self) -> aiohttp.ClientSession:
        """The session without reuse, made on first use (it needs the running loop)."""
        if self._session is None or self._session.closed:
            self._session = self._opened(aiohttp.TCPConnector(force_close=True, limit=0))
        return self._session

    @property
    def _reads(self) -> aiohttp.ClientSession:
        if self._reading is None or self._reading.closed:
            self._reading = self._opened(aiohttp.TCPConnector(keepalive_timeout=_BURST_S, limit=0))
        return self._reading

    def _opened(self, connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
        timeout = aiohttp.ClientTimeout(total=None, connect=_CONNECT_S)
        return aiohttp.ClientSession(headers=self._headers, connector=connector, timeout=timeout)

    async def close(self) -> None:
        """Drop the connections."""
        for session in (self._session, self._reading):
            if session is not None:
                await session.close()

    def named(self, model: str) -> Mapping[str, str]:
        """How a request's query or body says which model is meant."""
        return {"model": model}

    def harmless(self) -> Mapping[str, str]:
        """What a request's query says so that nothing is loaded for it."""
        return {"autoload": "false"}

    async def models(self) -> dict[str, Model]:
        """GET /models: every model the router knows, by its id and by each alias."""
        answer = _decode(await self._read("/models"), _Models, "/models")
        found = {alias: _called(model, alias) for model in answer.data for alias in model.aliases}
        return found | {model.id: _called(model, model.id) for model in answer.data}

    async def slots(self, model: str) -> list[Slot]:
        """GET /slots of a loaded model, in slot order. Wakes a sleeping one: look at /models first."""
        return _decode(await self._read("/slots", model), list[Slot], "/slots")

    async def props(self, model: str) -> Props:
        """GET /props of a loaded model."""
        return _decode(await self._read("/props", model), Props, "/props")

    async def counters(self, model: str) -> Counters | None:
        """GET /metrics of a loaded model; None where the server runs without `--metrics`. Wakes a sleeping one."""
        try:
            text = (await self._read("/metrics", model)).decode(errors="replace")
        except BackendRefused as refused:
            if refused.status == 501:
                return None
            raise
        found = dict(line.rsplit(" ", 1) for line in text.splitlines() if line and line[0] != "#" and " " in line)
        try:
            return Counters(
                processing=int(float(found["llamacpp:requests_processing"])),
                deferred=int(float(found["llamacpp:requests_deferred"])),
                prompt_tokens=int(float(found.get("llamacpp:prompt_tokens_total", 0))),
                prompt_s=float(found.get("llamacpp:prompt_seconds_total", 0)),
            )
        except KeyError as missing:
            raise BackendRefused(f"{self.url}/metrics does not show {missing.args[0]}") from None

    async def load(self, model: str) -> None:
        """POST /models/load. Returns at once, the load goes on."""
        await self.post("/models/load", {"model": model}, limit_s=READ_S)

    async def unload(self, model: str) -> None:
        """POST /models/unload. Returns at once, the process ends later."""
        await self.post("/models/unload", {"model": model}, limit_s=READ_S)

    async def save(self, model: str, slot: int, name: str) -> SavedSlot:
        """Save a slot; waits as long as the slot is busy. The server overwrites an existing file in place."""
        answer = await self.post(f"/slots/{slot}", {**self.named(model), "filename": name}, action="save")
        return _decode(answer, SavedSlot, "save")

    async def restore(self, model: str, slot: int, name: str) -> RestoredSlot:
        """Restore a slot, over what it holds. A refused restore leaves the slot empty."""
        answer = await self.post(f"/slots/{slot}", {**self.named(model), "filename": name}, action="restore")
        return _decode(answer, RestoredSlot, "restore")

    async def erase(self, model: str, slot: int) -> None:
        """Empty a slot."""
        await self.post(f"/slots/{slot}", self.named(model), action="erase", limit_s=READ_S)

    async def post(
        self, path: str, body: Mapping[str, object], *, action: str | None = None, limit_s: float | None = None
    ) -> bytes:
        """One POST, never repeated. `limit_s` None: the caller bounds it."""
        params = {**self.harmless(), **({"action": action} if action else {})}
        await self.fence()
        return await self._ask("POST", path, params, body, limit_s)

    async def _read(self, path: str, model: str | None = None) -> bytes:
        params = {**self.harmless(), **(self.named(model) if model else {})}
        async for attempt in AsyncRetrying(
            stop=stop_after_attempt(3),
            wait=wait_exponential(multiplier=0.02, max=0.2),
            retry=retry_if_exception(_lost_connection),
            reraise=True,
        ):
            with attempt:
                return await self._ask("GET", path, params, None, READ_S)
        raise AssertionError("unreachable: the last attempt raises")

    async def _ask(
        self,
        method: str,
        path: str,
        params: Mapping[str, str],
        body: Mapping[str, object] | None,
        limit_s: float | None,
    ) -> bytes:
        timeout = aiohttp.ClientTimeout(total=limit_s, connect=_CONNECT_S)
        try:
            session = self._reads if method == "GET" else self.session
            async with session.request(method, self.url + path, params=params, json=body, timeout=timeout) as response:
                data = await response.read()
                if response.status >= 400:
                    raise BackendRefused(_words(path, response.status, data), response.status)
                return data
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            refused = isinstance(error, ConnectionRefusedError) or isinstance(
                getattr(error, "os_error", None), ConnectionRefusedError
            )
            raise (BackendGone if refused else BackendDown)(
                f"{self.url}{path} does not answer: {str(error) or type(error).__name__}"
            ) from error


class ServerHttp(RouterHttp):
    """Client of a server with one model: no request says which."""

    def named(self, model: str) -> Mapping[str, str]:
        """There is only one."""
        del model
        return {}

    def harmless(self) -> Mapping[str, str]:
        """It loads nothing by itself."""
        return {}

    async def silent(self, limit_s: float) -> bool:
        """Whether somebody at its address takes connections and says nothing for so long, asked once."""
        try:
            await self._ask("GET", "/health", {}, None, limit_s)
        except BackendDown as down:
            return isinstance(down.__cause__, TimeoutError)
        except BackendRefused:
            return False
        return False

    async def answers(self) -> bool:
        """Whether anybody is at its address, asked once."""
        try:
            await self._ask("GET", "/health", {}, None, READ_S)
        except BackendGone:
            return False
        except (BackendDown, BackendRefused):
            return True
        return True


async def _unfenced() -> None:
    """Nobody else is there."""


def _called(model: Model, name: str) -> Model:
    args = model.status.args
    ports = (value for option, value in reversed(list(pairwise(args))) if option == "--port")
    return msgspec.structs.replace(model, name=name, run=next(ports, "0"))


def _lost_connection(error: BaseException) -> bool:
    """Worth another try at once; a server that hangs (a time-out) is not."""
    cause = error.__cause__
    return isinstance(cause, aiohttp.ClientConnectionError) and not isinstance(cause, TimeoutError)


def _words(path: str, status: int, data: bytes) -> str:
    try:
        said = msgspec.json.decode(data, type=_Error).error.message
    except msgspec.DecodeError:
        said = data.decode(errors="replace").strip()
    return f"llama-server answered {status} to {path}: {said or 'nothing'}"


def _decode(data: bytes, shape: type[T], what: str) -> T:
    try:
        return msgspec.json.decode(data, type=shape)
    except msgspec.DecodeError as error:
        raise BackendRefused(f"the answer to {what} is not what llama-server gives: {error}") from error
