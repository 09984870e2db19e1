"""llama-server's router mode without a process: the same questions, the same answers, the same lies, and faults on top.

Invariant: it waits for the loop's clock alone (`loop.time()`, `asyncio.sleep`), so it lives in virtual time as well;
every request ends with an answer, or with Dropped or NobodyThere where a client would see its connection end. The
facts are those of `tests/contract`, which run on this and on the real one. Not modelled: the cache in RAM, drafts,
images, API keys, reloading the preset.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.support.fake_asked import ACTIONS, NOT_FOUND, Asked, understood
from tests.support.fake_calls import BUILD, act, answer, metrics, props, slots
from tests.support.fake_child import ChildGone, FakeChild, House, Pace
from tests.support.fake_faults import FakeVram, Fault, Faults, Kind, Verb
from tests.support.fake_slots import FakeModel
from tests.support.fake_wire import (
    LOST,
    NO_CONNECTION,
    SSE_TYPE,
    Answer,
    Dropped,
    Json,
    NobodyThere,
    Stream,
    event,
    proxy_error,
    refused,
    said,
)

_LOG_LINES = 200


@dataclass(slots=True)
class _Entry:
    """A model of the preset and its child, if one runs. `port` and `exit_code` are those of the last one."""

    model: FakeModel
    child: FakeChild | None = None
    port: str = "0"
    exit_code: int = 0


class FakeRouter:
    """One router. `start` it inside a running loop; `close` it there too.

    `slot_dir` None: without --slot-save-path. `models_max` 0: no limit. `vram` may be shared with others on the card.
    """

    def __init__(
        self,
        models: Iterable[FakeModel],
        *,
        slot_dir: Path | None = None,
        metrics: bool = True,
        models_max: int = 0,
        autoload: bool = False,
        pace: Pace | None = None,
        vram: FakeVram | None = None,
    ) -> None:
        self.faults = Faults()
        self.vram = vram or FakeVram()
        self.pace = pace or Pace()
        self.alive = False
        self.log: deque[str] = deque(maxlen=_LOG_LINES)
        self._models = list(models)
        self._max = models_max
        self._autoload = autoload
        self._house = House(self.pace, self.faults, self.vram, slot_dir, metrics, self._say, self.log.append)
        self._entries: dict[str, _Entry] = {}
        self._children: list[FakeChild] = []
        self._feeds: dict[Stream, bool] = {}
        self._streams: dict[Stream, None] = {}
        self._inflight: set[asyncio.Task[Any]] = set()
        self._direct: set[asyncio.Task[Any]] = set()
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self) -> None:
        """Come up, and load what loads on startup. RuntimeError where those are more than there may be."""
        eager = [model for model in self._models if model.load_on_startup]
        if len(eager) > self._max:
            text = f"number of models to load on startup ({len(eager)}) exceeds models_max ({self._max})"
            self.log.append(text)
            raise RuntimeError(text)
        self.alive = True
        self._entries = {model.name: _Entry(model) for model in self._models}
        for model in eager:
            self._begin(self._entries[model.name])

    def die(self) -> None:
        """End as if killed: every connection is cut; the children follow a moment later, without a word."""
        self.alive = False
        for stream in [*self._streams, *self._feeds]:
            stream.drop()
        for task in list(self._inflight):
            task.cancel()
        for entry in self._entries.values():
            if entry.child is not None:
                self._spawn(self._orphaned(entry.child))
        self._entries = {}

    async def close(self) -> None:
        """End everything at once; no task is left."""
        self.die()
        for child in list(self._children):
            child.end(1)
        left = [*self._tasks, *self._inflight, *self._direct]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await asyncio.sleep(0)  # so that what the children were doing has ended too

    def child(self, model: str, port: str | None = None) -> FakeChild | None:
        """The child of a model that runs now (on this port); also one that outlives its router."""
        found = [child for child in self._children if child.model.name == model and port in (None, child.port)]
        return found[-1] if found else None

    async def request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        *,
        port: str | None = None,
    ) -> Answer:
        """One request. `headers` say nothing that it needs. Raises Dropped or NobodyThere.

        `port`: asked of the child that listens there, as whoever passes the router by would.
        """
        del headers
        asked = understood(method, path, query or {}, body)
        child = next((one for one in self._children if one.port == port and one.listening), None)
        if child is None and (port is not None or not self.alive):
            raise NobodyThere("nobody listens there")
        if child is not None and isinstance(asked, Asked):
            asked = replace(asked, model=child.model.name)
        task = self._spawn(self._befallen(asked, child), self._inflight if child is None else self._direct)
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            task.add_done_callback(_unread)
            task.cancel()
            raise
        if task.cancelled():
            raise Dropped("the router ended")
        answered = task.result()
        if child is None and isinstance(answered.body, Stream):
            self._streams = {stream: None for stream in self._streams if stream.open} | {answered.body: None}
        return answered

    async def _befallen(self, asked: Asked | Answer, child: FakeChild | None) -> Answer:
        if isinstance(asked, Answer):
            return asked
        early = await self._befall(asked, after=False)
        if early is not None:
            return early
        try:
            answered = await (self._answer(asked) if child is None else self._direct_answer(child, asked))
        except ChildGone:
            if child is not None:
                raise Dropped("the process ended") from None
            answered = proxy_error(LOST)
        late: Answer | None = None
        read = False
        try:
            late = await self._befall(asked, after=True)
            read = late is None
        finally:
            if not read and isinstance(answered.body, Stream):
                await answered.body.aclose()
        return late or answered

    async def _befall(self, asked: Asked, *, after: bool) -> Answer | None:
        """Whatever fault is set for this; an answer where it takes the place of the true one."""
        kinds = [Kind.LATE, Kind.ERROR, Kind.HANG, Kind.DROP, Kind.RESTARTS]
        if after or asked.verb not in (Verb.LOAD, Verb.SAVE, Verb.RESTORE, Verb.ANSWER):
            kinds.append(Kind.CHILD_DIES)
        fault = self.faults.take(asked.verb, asked.model, *kinds, after=after)
        match fault:
            case None:
                pass
            case Fault(kind=Kind.LATE):
                await asyncio.sleep(fault.seconds)
            case Fault(kind=Kind.ERROR):
                return refused(fault.status, "made to fail")
            case Fault(kind=Kind.HANG):
                await _for_ever()
            case Fault(kind=Kind.DROP):
                raise Dropped("the connection was cut")
            case Fault(kind=Kind.CHILD_DIES):
                entry = self._entry(asked.model)
                if entry is not None and entry.child is not None:
                    entry.child.end(1)
                    return None if after else proxy_error(LOST)
            case _:
                self.die()
                self._spawn(self._again(fault.seconds))
                await _for_ever()  # cancelled with the rest
        return None

    async def _answer(self, asked: Asked) -> Answer:
        match asked.verb:
            case Verb.HEALTH:
                return said({"status": "ok"})
            case Verb.MODELS:
                return said({"data": [self._listed(entry) for entry in self._entries.values()], "object": "list"})
            case Verb.EVENTS:
                return self._feed()
            case Verb.PROPS if asked.model is None:
                return said({"role": "router", "max_instances": self._max, "build_info": BUILD})
            case Verb.LOAD | Verb.UNLOAD if isinstance(asked.body, Answer):
                return asked.body
            case Verb.LOAD:
                return await self._load(asked.model)
            case Verb.UNLOAD:
                return self._unload(asked.model)
            case _:
                return await self._proxied(asked)

    async def _load(self, name: str | None) -> Answer:
        entry = self._entry(name)
        if entry is None:
            return NOT_FOUND
        if entry.child is not None:
            return refused(400, "model is already running")
        running = [other.child for other in self._entries.values() if other.child is not None]
        if 0 < self._max <= len(running):
            idle = [child for child in running if child.value != "loading" and not child.calls and not child.stopping]
            if not idle:
                return refused(500, "model limit reached, try again later")
            await min(idle, key=lambda child: child.last_used).stop()
        self._begin(entry)
        return said({"success": True})

    def _begin(self, entry: _Entry) -> None:
        child = FakeChild(entry.model, self._house, self._ended)
        entry.child, entry.port, entry.exit_code = child, child.port, 0
        self._children.append(child)
        child.begin()

    def _unload(self, name: str | None) -> Answer:
        entry = self._entry(name)
        if entry is None:
            return refused(400, "model is not found")
        if entry.child is None:
            return refused(400, "model is not running")
        if self.faults.take(Verb.UNLOAD, entry.model.name, Kind.VRAM_HELD):
            entry.child.hold_vram()
        self._spawn(entry.child.stop())
        return said({"success": True})

    def _ended(self, child: FakeChild) -> None:
        self._children.remove(child)
        entry = self._entries.get(child.model.name)
        if entry is not None and entry.child is child:
            entry.child, entry.exit_code = None, child.exit_code or 0
            self._say(child.model.name, "status_change", {"status": "unloaded", "exit_code": entry.exit_code})

    async def _proxied(self, asked: Asked) -> Answer:
        """A request that a child answers."""
        if isinstance(asked.body, Answer):
            return asked.body
        if not asked.model:
            return refused(400, "model name is missing from the request")
        entry = self._entry(asked.model)
        if entry is None:
            return refused(400, f"model '{asked.model}' not found")
        wanted = asked.query.get("autoload")
        if self._autoload if wanted is None else wanted in ("true", "1"):
            failed = await self._loaded_for(entry)
            if failed is not None:
                return failed
        child = entry.child
        if child is None:
            return refused(400, "model is not loaded")
        if not child.listening:
            return proxy_error(NO_CONNECTION)
        return await self._of_child(child, asked)

    async def _loaded_for(self, entry: _Entry) -> Answer | None:
        """Load it for whoever calls it; their answer where that fails."""
        if entry.child is None:
            answered = await self._load(entry.model.name)
            if answered.status != 200:
                return answered
        up = entry.child is not None and await entry.child.came_up()
        return None if up else refused(500, f"model name={entry.model.name} failed to load")

    async def _direct_answer(self, child: FakeChild, asked: Asked) -> Answer:
        if isinstance(asked.body, Answer):
            return asked.body
        if asked.verb in (Verb.MODELS, Verb.EVENTS, Verb.LOAD, Verb.UNLOAD):
            return NOT_FOUND
        return said({"status": "ok"}) if asked.verb is Verb.HEALTH else await self._of_child(child, asked, direct=True)

    async def _of_child(self, child: FakeChild, asked: Asked, *, direct: bool = False) -> Answer:
        assert not isinstance(asked.body, Answer)
        match asked.verb:
            case Verb.SLOTS:
                return await child.serve(slots(child))
            case Verb.METRICS:
                return await child.serve(metrics(child))
            case Verb.PROPS:
                return await child.serve(props(child))
            case Verb.ANSWER:
                return await answer(child, asked.path, asked.body, direct=direct)
            case _ if asked.query.get("action") not in ACTIONS:
                return refused(400, "Invalid action")
            case _:
                slot = asked.path.removeprefix("/slots/")
                return await child.serve(act(child, asked.verb, slot, asked.body.get("filename")), kept=True)

    def _entry(self, name: str | None) -> _Entry | None:
        by_alias = (entry for entry in self._entries.values() if name in entry.model.aliases)
        return self._entries.get(name or "") or next(by_alias, None)

    def _listed(self, entry: _Entry) -> Json:
        model, child = entry.model, entry.child
        status: Json = {"value": child.value if child else "unloaded", "args": self._args(entry), "preset": ""}
        if child is None and entry.exit_code:
            status |= {"exit_code": entry.exit_code, "failed": True}
        listed: Json = {"id": model.name, "aliases": list(model.aliases), "tags": [], "object": "model"}
        listed |= {
            "owned_by": "llamacpp",
            "created": int(asyncio.get_running_loop().time()),
            "status": status,
            "source": "preset",
        }
        return listed | ({"meta": child.info()["meta"]} if child and child.value == "loaded" else {})

    def _args(self, entry: _Entry) -> list[str]:
        model, folder = entry.model, self._house.slot_dir
        return [
            *("llama-server", "--host", "127.0.0.1"),
            *(["--metrics"] if self._house.metrics else []),
            *("--port", entry.port),
            *(["--slot-save-path", str(folder)] if folder is not None else []),
            *("--alias", model.name, "--ctx-size", str(model.n_ctx)),
            "--kv-unified" if model.kv_unified else "--no-kv-unified",
            *("--model", model.path, "--parallel", str(model.parallel)),
            *model.args,
        ]

    def _feed(self) -> Answer:
        def over() -> None:
            self._feeds.pop(stream, None)

        stream = Stream(over)
        self._feeds[stream] = self.faults.take(Verb.EVENTS, None, Kind.DEAF) is not None
        return Answer(200, stream, SSE_TYPE)

    def _say(self, model: str, kind: str, data: Json) -> None:
        for stream, deaf in list(self._feeds.items()):
            if not deaf:
                stream.put(event({"model": model, "event": kind, "data": data}))

    async def _orphaned(self, child: FakeChild) -> None:
        await asyncio.sleep(self.pace.orphan_s)
        child.end(1)

    async def _again(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self.start()

    def _spawn(
        self, work: Coroutine[None, None, Any], among: set[asyncio.Task[Any]] | None = None
    ) -> asyncio.Task[Any]:
        among = self._tasks if among is None else among
        task = asyncio.create_task(work)
        among.add(task)
        task.add_done_callback(among.discard)
        return task


async def _for_ever() -> None:
    await asyncio.get_running_loop().create_future()


def _unread(task: asyncio.Task[Answer]) -> None:
    """Whoever asked went away in the moment in which the answer came."""
    if not task.cancelled() and task.exception() is None and isinstance(body := task.result().body, Stream):
        body.shut()
