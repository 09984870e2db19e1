"""Ollama, llama-swap, vLLM and SGLang as doubles, with their lies.

Invariant: each behaves as its own source says: Ollama answers an unload before it happens and forgets what still holds
VRAM; llama-swap cuts what runs; vLLM and SGLang die of what they do not expect, and then answer nothing but 500.
"""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

from aiohttp import web

from tests.support.fake_kind import FakeKind, OpenAi, refusal


class Ollama(FakeKind):
    """`rearms`: so many unloads are taken back by a call with a keep-alive of its own. `old`: tells no capabilities."""

    def __init__(self, *models: str, embeds: tuple[str, ...] = ()) -> None:
        super().__init__(*models, embeds=embeds)
        self.listed: dict[str, object] = {}
        self.leaving: dict[str, int] = {}
        self.rearms = 0
        self.old = False
        self.tells: dict[str, object] = {}
        """What newer ones say of each model that is loaded."""
        self.parameters = ""
        self.slow: asyncio.Event | None = None
        """Set when what is being loaded is there."""
        self.generating = asyncio.Event()

    def fresh(self) -> None:
        super().fresh()
        self.listed.clear()
        self.leaving.clear()

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/api/ps", self._ps),
            web.get("/api/tags", self._tags),
            web.post("/api/show", self._show),
            web.post("/api/generate", self._generate),
            web.post("/api/embed", self._embed),
            web.post("/v1/chat/completions", self._chat),
        ]

    def have(self, name: str, keep_alive: object = "5m") -> None:
        """Somebody has loaded it."""
        self.listed[name] = keep_alive
        self.holding.add(name)
        self.leaving.pop(name, None)

    def _named(self, name: str) -> str | None:
        full = name if ":" in name else f"{name}:latest"
        return next((one for one in self.models if full in (one, f"{one}:latest")), None)

    async def _ps(self, _: web.Request) -> web.Response:
        for name in [one for one in self.leaving if not self.flying.get(one)]:
            self.leaving[name] -= 1
            if self.leaving[name] < 0:
                del self.leaving[name], self.listed[name]  # and not yet from `holding`: its VRAM is not back
        names = [one if ":" in one else f"{one}:latest" for one in self.listed]
        return web.json_response(
            {"models": [{"name": one, "model": one, "size_vram": 1, **self.tells} for one in names]}
        )

    async def _tags(self, _: web.Request) -> web.Response:
        return web.json_response({"models": [{"name": one, "model": one} for one in self.models]})

    async def _show(self, request: web.Request) -> web.Response:
        name = (await request.json())["model"]
        if (model := self._named(name)) is None:
            return web.json_response({"error": f"model '{name}' not found"}, status=404)
        can = ["embedding"] if model in self.embeds else ["completion", "tools"]
        shown: dict[str, object] = {"details": {}}
        if self.parameters:
            shown["parameters"] = self.parameters
        return web.json_response(shown if self.old else {**shown, "capabilities": can})

    async def _generate(self, request: web.Request) -> web.Response:
        body: dict[str, Any] = await request.json()
        if (model := self._named(body["model"])) is None:
            return web.json_response({"error": f"model '{body['model']}' not found"}, status=404)
        embeds = model in self.embeds
        if body.get("keep_alive") == 0 and not body.get("prompt") and not (self.old and embeds):
            self._expire(model)
            return web.json_response({"model": model, "response": "", "done": True, "done_reason": "unload"})
        if embeds:
            return web.json_response({"error": f'"{model}" does not support generate'}, status=400)
        self.generating.set()
        if self.slow is not None:
            await self.slow.wait()
        self.have(model, body.get("keep_alive", "5m"))
        if body.get("prompt"):
            self.compute(model)
        return web.json_response({"model": model, "response": "a", "done": True, "done_reason": "length"})

    async def _embed(self, request: web.Request) -> web.Response:
        body: dict[str, Any] = await request.json()
        if (model := self._named(body["model"])) is None:
            return web.json_response({"error": f"model '{body['model']}' not found"}, status=404)
        self.have(model, body.get("keep_alive", "5m"))
        if body["input"]:
            self.compute(model)
        if body.get("keep_alive") == 0:
            self._expire(model)
        return web.json_response({"model": model, "embeddings": []})

    async def _chat(self, request: web.Request) -> web.Response:
        name = (await request.json())["model"]
        if (model := self._named(name)) is None:
            return refusal(404, f"model '{name}' not found")
        self.have(model, self.listed.get(model, "5m"))
        self.compute(model)
        return web.json_response({"model": name, "choices": [{"message": {"role": "assistant", "content": "a"}}]})

    def _expire(self, model: str) -> None:
        if self.rearms:
            self.rearms -= 1
        elif model in self.listed and not self.stuck:
            self.leaving.setdefault(model, self.lag)


class LlamaSwap(FakeKind):
    """`loud`: bytes of logs that its event stream begins with."""

    def __init__(self, *models: str, embeds: tuple[str, ...] = ()) -> None:
        super().__init__(*models, embeds=embeds)
        self.states: dict[str, str] = {}
        self.loud = 200_000
        self.silent = False

    def fresh(self) -> None:
        super().fresh()
        self.states.clear()

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/running", self._running),
            web.get("/v1/models", self._models),
            web.get("/api/events", self._events),
            web.post("/api/models/unload/{model:.+}", self._unload),
            web.get("/upstream/{model:.+}/health", self._upstream),
            web.get("/upstream/{model:.+}/props", self._props),
            web.post("/v1/chat/completions", self._chat),
        ]

    def have(self, name: str) -> None:
        """Somebody has loaded it."""
        self.states[name] = "ready"
        self.holding.add(name)

    async def _props(self, request: web.Request) -> web.Response:
        self.have(request.match_info["model"])
        return web.json_response({"default_generation_settings": {"n_ctx": 8192}})

    async def _running(self, _: web.Request) -> web.Response:
        running = [{"model": name, "state": state, "cmd": "", "ttl": 0} for name, state in self.states.items()]
        return web.json_response({"running": running})

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": one} for one in self.models]})

    async def _events(self, request: web.Request) -> web.StreamResponse:
        if self.silent:
            return web.Response(status=404, text="404 page not found")
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        flying = [{"id": n, "model": m} for m, count in self.flying.items() for n in range(count)]
        log = json.dumps({"source": "proxy", "data": 'said "inflight" ' + "x" * self.loud})
        snapshot = {"operation": "snapshot", **({"requests": flying} if flying else {})}
        for kind, data in (("logData", log), ("modelStatus", "[]"), ("inflight", json.dumps(snapshot))):
            await stream.write(b"event:message\ndata:" + json.dumps({"type": kind, "data": data}).encode() + b"\n\n")
        await stream.write_eof()
        return stream

    async def _unload(self, request: web.Request) -> web.Response:
        model = request.match_info["model"]
        if model not in self.models:
            return _not_found()
        if not self.stuck:
            self.cut += self.flying.pop(model, 0)
            self.states.pop(model, None)
            self.holding.discard(model)
        return web.Response(text="OK")

    async def _upstream(self, request: web.Request) -> web.Response:
        model = request.match_info["model"]
        if model not in self.models:
            return _not_found()
        self.have(model)
        return web.json_response({"status": "ok"})

    async def _chat(self, request: web.Request) -> web.Response:
        model = (await request.json())["model"]
        if model not in self.models:
            return _not_found()
        self.have(model)
        self.compute(model)
        return web.json_response({"choices": [{"message": {"content": "a"}}]})


def _not_found() -> web.Response:
    return web.json_response({"src": "llama-swap", "error": {"message": "model not found"}}, status=404)


class Vllm(OpenAi):
    """`dev`: it was started for development. `dead`: a call was in flight when it went to sleep.

    `wakes_badly`: only its weights come back, and it says that it failed. `dies_waking`: its process ends over that.
    `sleepless`: it does not go to sleep any more, and says so. A call that comes while it sleeps waits for ever.
    """

    def __init__(self, *models: str, embeds: tuple[str, ...] = ()) -> None:
        super().__init__(*models, embeds=embeds)
        self.dev = True
        self.sleep_mode = True
        self.wakes_badly = False
        self.dies_waking = False
        self.sleepless = False
        self.dead = False
        self.level = 0
        self.away: set[str] = set()
        self.weights = True

    def fresh(self) -> None:
        super().fresh()
        self.dead, self.level, self.weights = False, 0, True
        self.away.clear()

    def routes(self) -> list[web.RouteDef]:
        own = [
            web.get("/metrics", self._metrics),
            web.get("/is_sleeping", self._is_sleeping),
            web.get("/server_info", self._info),
            web.post("/sleep", self._sleep),
            web.post("/wake_up", self._wake),
            web.post("/collective_rpc", self._rpc),
        ]
        return [*super().routes(), *(own if self.dev else own[:1])]

    async def _metrics(self, _: web.Request) -> web.Response:
        running = sum(self.flying.values())
        lines = [
            "# HELP vllm:num_requests_running Number of requests in model execution batches.",
            f'vllm:num_requests_running{{engine="0",model_name="m"}} {running}.0',
            'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 7.0',
            'vllm:num_requests_waiting{engine="0",model_name="m"} 0.0',
        ]
        return web.Response(text="\n".join(lines))

    async def _info(self, request: web.Request) -> web.Response:
        config = {"model_config": {"model": "m", "enable_sleep_mode": self.sleep_mode}}
        return web.json_response({"vllm_config": config if request.query.get("config_format") == "json" else "text"})

    async def _is_sleeping(self, _: web.Request) -> web.Response:
        return web.json_response({"is_sleeping": bool(self.away)})

    async def _sleep(self, request: web.Request) -> web.Response:
        if self.stuck:
            return web.Response()
        if self.sleepless:
            return refusal(500, "EngineCore encountered an issue")
        if sum(self.flying.values()):
            self.dead, self.cut = True, self.cut + 1
        self.level = int(request.query.get("level", "1"))  # a body is not read
        self.away = {"weights", "kv_cache"}
        self.weights = self.level == 1
        self.holding.clear()
        return web.Response()

    async def _wake(self, request: web.Request) -> web.Response:
        tags = request.query.getall("tags", ["weights", "kv_cache"])
        if self.wakes_badly:
            tags = tags[:1]
        self.away -= set(tags)
        self.holding.update(self.models)  # and it says that it sleeps until all of it is back
        if self.dies_waking and self.away:
            asyncio.get_running_loop().call_soon(lambda: asyncio.ensure_future(self.vanish()))
        return refusal(500, "CUDA error: out of memory") if self.wakes_badly else web.Response()

    async def _chat(self, request: web.Request) -> web.Response:
        if self.away and not self.dead:
            self.begin(self.models[0])
            try:
                await asyncio.Event().wait()
            finally:
                self.end(self.models[0])
        return await super()._chat(request)

    async def _rpc(self, request: web.Request) -> web.Response:
        if (await request.json())["method"] == "reload_weights" and "weights" not in self.away:
            self.weights = True
        return web.json_response({"results": [None]})

    def answer(self, model: str) -> web.Response:
        if self.dead or self.away:
            return refusal(500, "EngineCore encountered an issue")
        if not self.weights:
            return refusal(500, "the answer is noise: the weights were not read again")
        return super().answer(model)


class Sglang(OpenAi):
    """`saver` and `backup`: what it was started with. `dead`: an assertion failed."""

    def __init__(self, *models: str, embeds: tuple[str, ...] = ()) -> None:
        super().__init__(*models, embeds=embeds)
        self.saver = True
        self.backup = True
        self.dead = False
        self.released: set[str] = set()
        self.paused = False
        self.weights = True
        self.seed = 0
        self.fixed_seed: int | None = None
        """What it was started with; None: it draws one at each start."""

    def fresh(self) -> None:
        super().fresh()
        self.dead, self.paused, self.weights = False, False, True
        self.released.clear()
        self.seed = random.randrange(1 << 30) if self.fixed_seed is None else self.fixed_seed

    def routes(self) -> list[web.RouteDef]:
        return [
            *super().routes(),
            web.get("/get_server_info", self._info),  # the newer /server_info is not there
            web.get("/get_load", self._load),
            web.post("/pause_generation", self._pause),
            web.post("/continue_generation", self._continue),
            web.post("/flush_cache", self._flush),
            web.post("/release_memory_occupation", self._release),
            web.post("/resume_memory_occupation", self._resume),
            web.post("/update_weights_from_disk", self._update),
        ]

    async def _info(self, _: web.Request) -> web.Response:
        flags = {"enable_memory_saver": self.saver, "enable_weights_cpu_backup": self.backup}
        return web.json_response({"model_path": "/models/m", "random_seed": self.seed, **flags, "internal_states": []})

    async def _load(self, _: web.Request) -> web.Response:
        return web.json_response([{"dp_rank": 0, "num_reqs": sum(self.flying.values()), "num_waiting_reqs": 0}])

    async def _pause(self, request: web.Request) -> web.Response:
        await request.json()
        self.paused = True
        return web.json_response({"status": "ok"})

    async def _continue(self, request: web.Request) -> web.Response:
        await request.json()
        self.paused = False
        return web.json_response({"status": "ok"})

    async def _flush(self, _: web.Request) -> web.Response:
        if sum(self.flying.values()):
            return web.Response(status=400, text="Flush cache failed: there are pending requests")
        return web.Response(text="Cache flushed.")

    async def _release(self, request: web.Request) -> web.Response:
        if sum(self.flying.values()):
            self.dead, self.cut = True, self.cut + 1
            return refusal(500, "release_memory_occupation should be called only when server is idle.")
        tags = (await request.json())["tags"]
        self.released |= set(tags)
        if self.saver and not self.stuck:
            self.holding.clear()
            self.weights = self.backup
        return web.json_response({"success": False, "sleeping": False} if self.stuck else None)

    async def _resume(self, request: web.Request) -> web.Response:
        for tag in (await request.json())["tags"]:
            if tag not in self.released:
                self.dead = True
                return refusal(500, f"KeyError: '{tag}'")
            self.released.remove(tag)
        self.holding.update(self.models)
        return web.json_response(None)

    async def _update(self, request: web.Request) -> web.Response:
        self.weights = (await request.json())["model_path"] == "/models/m"
        return web.json_response({"success": True, "message": "Succeeded to update model weights."})

    def answer(self, model: str) -> web.Response:
        if self.dead or self.released or self.paused:
            return refusal(500, "the scheduler has died")
        if not self.weights:
            return refusal(500, "the answer is noise: the weights were not read again")
        return super().answer(model)
