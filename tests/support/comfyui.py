"""A ComfyUI without models: the server of facts seen on 0.3.64, as a process of its own, with its lies to be switched.

    python -m tests.support.comfyui --port 8188 --control-port 8187 --folder FOLDER

What it tells over HTTP and its websocket is what the real one tells, in that order, also where that is not true:
/free answers 200 before anything is freed, an interrupt may be lost, the list of pending prompts is in no order. A
prompt is as many steps as its nodes have (`steps` of a KSampler, one of any other); each waits for a tick of the test
where `hold` is set. What it would have in VRAM stands in FOLDER/vram (JSON: pid, mib), which its death leaves as it is.
The control port is the test's: /tick, /set and /state (see comfyprocess.py).
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import json
import os
import uuid
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, cast

from aiohttp import WSMsgType, web

from tests.support.comfyrules import Json, Lies, origin_only, refusal, validate

Item = tuple[float, str, Json, Json, list[str]]

VERSION = "0.3.64"
SECRET = frozenset({"api_key_comfy_org", "auth_token_comfy_org"})
PREVIEW = b"\x00\x00\x00\x01\x00\x00\x00\x01" + bytes(8)
"""A binary event: type, format, picture."""
PAGE = "<!DOCTYPE html><html><head><title>ComfyUI</title></head><body>the page of the UI</body></html>"


class Comfy:
    """One process's worth of ComfyUI."""

    def __init__(self, folder: Path, argv: list[str]) -> None:
        self.folder = folder
        self.argv = argv
        self.sockets: dict[str, web.WebSocketResponse] = {}
        self.working: asyncio.Task[None] | None = None
        self.begun = asyncio.Event()
        self.begin()

    def begin(self) -> None:
        """As after a start."""
        self.lies = Lies()
        self.ticks = asyncio.Semaphore(0)
        self.number = 0
        self.pending: list[Item] = []
        self.running: dict[int, Item] = {}
        self.history: dict[str, Json] = {}
        self.flags: dict[str, bool] = {}
        self.interrupted = False
        self.changed = asyncio.Event()
        self.done: list[str] = []
        self.posted: list[Json] = []
        self.calls: dict[str, int] = {}
        self.mib = 0
        told = self.folder / "lies"
        if told.exists():
            self.tell(cast("Json", json.loads(told.read_text())))
        self.vram(self.lies.idle_mib)

    def tell(self, lies: Mapping[str, object]) -> None:
        """Set some."""
        for name, value in lies.items():
            if not hasattr(self.lies, name):
                raise ValueError(f"no such lie: {name}")
            setattr(self.lies, name, value)
        if not self.lies.hold:
            self.ticks.release()

    def vram(self, mib: int) -> None:
        """From now on so much is taken."""
        self.mib = mib
        fresh = self.folder / "vram.new"
        fresh.write_text(json.dumps({"pid": os.getpid(), "mib": mib}))
        fresh.replace(self.folder / "vram")

    async def run(self) -> None:
        """Until killed. A worker that is cancelled makes way for a ComfyUI as it is after a start, but for its pid."""
        while True:
            self.working = asyncio.create_task(self.work())
            self.begun.set()
            await asyncio.wait({self.working})
            for socket in list(self.sockets.values()):
                await socket.close()
            self.begin()

    # ---- the worker's thread

    async def work(self) -> None:
        """`prompt_worker` of main.py: a prompt, then the flags, then the next prompt."""
        while True:
            await self.changed.wait()
            if not self.pending and not self.flags:
                self.changed.clear()
                continue
            if self.pending:
                item = heapq.heappop(self.pending)
                self.running[0] = item
                await self.queue_updated()
                await self.execute(item)
            flags, self.flags = self.flags, {}
            free = flags.get("free_memory", False)
            if flags.get("unload_models", free):
                await asyncio.sleep(self.lies.free_s)
                self.vram(max(self.lies.keeps_mib, self.lies.idle_mib))

    async def execute(self, item: Item) -> None:
        _, prompt_id, prompt, extra, outputs = item
        self.interrupted = False  # one that came before the start is lost
        client = cast("str | None", extra.get("client_id"))
        messages: list[list[Any]] = []

        async def say(event: str, data: Json, *, broadcast: bool = False) -> None:
            messages.append([event, {"prompt_id": prompt_id, **data}])
            if client is not None or broadcast:
                await self.send(event, {"prompt_id": prompt_id, **data}, None if broadcast else client)

        await say("execution_start", {})
        await say("execution_cached", {"nodes": []})
        self.vram(self.lies.load_mib)
        made: Json = {}
        cut = None
        for name, node in prompt.items():
            if client is not None:
                await self.send("executing", {"node": name, "prompt_id": prompt_id}, client)
            if not await self.node(name, node, prompt_id, client):
                cut = name
                break
            if name in outputs:
                made[name] = {"images": [{"filename": f"{prompt_id}.png", "subfolder": "", "type": "output"}]}
                if client is not None:
                    told = {"node": name, "output": made[name], "prompt_id": prompt_id}
                    await self.send("executed", told, client)
        if cut is None:
            await say("execution_success", {})
        else:
            where: Json = {"node_id": cut, "node_type": prompt[cut]["class_type"], "executed": []}
            await say("execution_interrupted", where, broadcast=True)
        self.history[prompt_id] = {
            "prompt": list(item),
            "outputs": made if cut is None else {},
            "status": {
                "status_str": "success" if cut is None else "error",
                "completed": cut is None,
                "messages": messages,
            },
            "meta": {},
        }
        self.running.clear()
        if cut is None:
            self.done.append(prompt_id)
        await self.queue_updated()
        if client is not None:
            await self.send("executing", {"node": None, "prompt_id": prompt_id}, client)

    async def node(self, name: str, node: Json, prompt_id: str, client: str | None) -> bool:
        """False: it was interrupted, at the next boundary of a step."""
        steps = int(node["inputs"].get("steps", 1)) if node["class_type"] == "KSampler" else 1
        for step in range(steps):
            if self.interrupted:
                self.interrupted = False
                return False
            if self.lies.hold:
                await self.ticks.acquire()
            await asyncio.sleep(self.lies.step_s)
            if client is not None:
                told = {"value": step + 1, "max": steps, "prompt_id": prompt_id, "node": name}
                await self.send("progress", told, client)
                if client in self.sockets:
                    await self.sockets[client].send_bytes(PREVIEW)
        return True

    # ---- telling

    def queue_info(self) -> Json:
        return {"exec_info": {"queue_remaining": len(self.running) + len(self.pending)}}

    async def queue_updated(self) -> None:
        await self.send("status", {"status": self.queue_info()}, None)

    async def send(self, event: str, data: Json, sid: str | None) -> None:
        sockets = list(self.sockets.values()) if sid is None else [self.sockets[sid]] if sid in self.sockets else []
        for socket in sockets:
            try:
                await socket.send_json({"type": event, "data": data})
            except (ConnectionError, RuntimeError):
                continue

    # ---- the routes

    async def websocket(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        sid = request.query.get("clientId", "") or uuid.uuid4().hex
        self.sockets[sid] = socket  # whoever had it hears no more
        try:
            await self.send("status", {"status": self.queue_info(), "sid": sid}, sid)
            async for message in socket:
                if message.type is WSMsgType.TEXT and json.loads(message.data).get("type") == "feature_flags":
                    await self.send("feature_flags", {"supports_preview_metadata": True}, sid)
        finally:
            self.sockets.pop(sid, None)  # also where another has it now
        return socket

    async def post_prompt(self, request: web.Request) -> web.Response:
        body = cast("Json", json.loads(await request.read()))
        self.posted.append(body)
        if self.lies.slow_posts > 0:
            self.lies.slow_posts -= 1
            await asyncio.sleep(0.3)
        if "number" in body:
            number = float(body["number"])
        else:
            number = -self.number if body.get("front") else self.number
            self.number += 1
        if "prompt" not in body:
            return refusal("no_prompt", "No prompt provided", "No prompt provided", {})
        prompt = cast("Json", body["prompt"])
        extra = dict(cast("Json", body.get("extra_data", {})))
        if "client_id" in body:
            extra["client_id"] = body["client_id"]
        targets = cast("list[str] | None", body.get("partial_execution_targets"))
        outputs, error = validate(prompt, targets)
        if error is not None:
            return error
        prompt_id = str(body.get("prompt_id", uuid.uuid4()))
        heapq.heappush(self.pending, (number, prompt_id, prompt, extra, outputs))
        await self.queue_updated()
        self.changed.set()
        return web.json_response({"prompt_id": prompt_id, "number": number, "node_errors": {}})

    async def get_prompt(self, _request: web.Request) -> web.Response:
        return web.json_response(self.queue_info())

    async def get_queue(self, _request: web.Request) -> web.Response:
        told = [[shown(item) for item in items] for items in (self.running.values(), self.pending)]
        return web.json_response({"queue_running": told[0], "queue_pending": told[1]})

    async def post_queue(self, request: web.Request) -> web.Response:
        body = cast("Json", json.loads(await request.read()))
        if body.get("clear"):
            self.pending.clear()
        wanted = cast("list[str]", body.get("delete", []))
        self.pending = [item for item in self.pending if item[1] not in wanted]
        heapq.heapify(self.pending)
        await self.queue_updated()
        return web.Response()

    async def get_history(self, request: web.Request) -> web.Response:
        wanted = request.match_info.get("id")
        if wanted is None:
            return web.json_response(self.history)
        return web.json_response({wanted: self.history[wanted]} if wanted in self.history else {})

    async def post_interrupt(self, request: web.Request) -> web.Response:
        raw = await request.read()
        wanted = cast("Json", json.loads(raw)).get("prompt_id") if raw else None
        if wanted is not None and all(item[1] != wanted for item in self.running.values()):
            return web.Response()
        if self.lies.lose_interrupts > 0:
            self.lies.lose_interrupts -= 1
            return web.Response()
        self.interrupted = True
        return web.Response()

    async def post_free(self, request: web.Request) -> web.Response:
        body = cast("Json", json.loads(await request.read()))  # an empty body is a 500 there, too
        self.flags.update({name: True for name in ("unload_models", "free_memory") if body.get(name)})
        self.changed.set()
        return web.Response()

    async def system_stats(self, _request: web.Request) -> web.Response:
        total, mib = 24_576 << 20, self.mib << 20
        card = {"name": "cuda:0 Test", "type": "cuda", "index": 0, "vram_total": total, "vram_free": total - mib // 8}
        held = max(self.mib - self.lies.idle_mib, 0) << 20
        torch = {"torch_vram_total": held, "torch_vram_free": held // 2}
        system = {"os": "posix", "comfyui_version": VERSION, "argv": self.argv, "ram_total": 0, "ram_free": 0}
        return web.json_response({"system": system, "devices": [card | torch]})

    async def upload(self, request: web.Request) -> web.Response:
        post = await request.post()
        image = cast("web.FileField", post["image"])
        (self.folder / "input").mkdir(exist_ok=True)
        (self.folder / "input" / Path(image.filename).name).write_bytes(image.file.read())
        return web.json_response({"name": image.filename, "subfolder": "", "type": "input"})

    async def view(self, request: web.Request) -> web.StreamResponse:
        path = self.folder / "input" / Path(request.query["filename"]).name
        return web.FileResponse(path) if path.exists() else web.Response(status=404)

    async def page(self, _request: web.Request) -> web.Response:
        return web.Response(text=PAGE, content_type="text/html", headers={"Cache-Control": "no-cache"})

    async def bad(self, _request: web.Request) -> web.Response:
        return web.Response(status=403, text="no")

    def app(self) -> web.Application:
        routes: list[tuple[str, str, Callable[[web.Request], Awaitable[web.StreamResponse]]]] = [
            ("GET", "/ws", self.websocket),
            ("GET", "/prompt", self.get_prompt),
            ("POST", "/prompt", self.post_prompt),
            ("GET", "/queue", self.get_queue),
            ("POST", "/queue", self.post_queue),
            ("GET", "/history", self.get_history),
            ("GET", "/history/{id}", self.get_history),
            ("POST", "/interrupt", self.post_interrupt),
            ("POST", "/free", self.post_free),
            ("GET", "/system_stats", self.system_stats),
            ("POST", "/upload/image", self.upload),
            ("GET", "/view", self.view),
            ("GET", "/forbidden", self.bad),
        ]
        app = web.Application(client_max_size=100 << 20, middlewares=[self.counted, origin_only, self.mute])
        for method, path, handler in routes:
            app.router.add_route(method, path, handler)
            app.router.add_route(method, "/api" + path, handler)
        app.router.add_get("/", self.page)
        return app

    @web.middleware
    async def counted(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        name = f"{request.method} {request.path.removeprefix('/api')}"
        self.calls[name] = self.calls.get(name, 0) + 1
        return await handler(request)

    @web.middleware
    async def mute(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if self.lies.silent:
            await asyncio.Event().wait()
        return await handler(request)

    # ---- the test's port

    def control(self) -> web.Application:
        async def tick(request: web.Request) -> web.Response:
            for _ in range(int(request.query.get("n", "1"))):
                self.ticks.release()
            return web.Response()

        async def put(request: web.Request) -> web.Response:
            self.tell(cast("Json", await request.json()))
            return web.Response()

        async def state(_request: web.Request) -> web.Response:
            queued = [item[1] for item in sorted(self.pending)]
            told = {"done": self.done, "posted": self.posted, "calls": self.calls, "mib": self.mib, "pending": queued}
            running = [item[1] for item in self.running.values()]
            return web.json_response(told | {"running": running, "clients": list(self.sockets)})

        async def anew(_request: web.Request) -> web.Response:
            assert self.working is not None
            self.begun.clear()
            self.working.cancel()
            await self.begun.wait()
            return web.Response()

        app = web.Application()
        app.add_routes([web.post("/anew", anew)])
        app.add_routes([web.post("/tick", tick), web.post("/set", put), web.get("/state", state)])
        return app


def shown(item: Item) -> list[Any]:
    """As /queue tells it: without the keys of paid nodes (newer versions than 0.3.64)."""
    number, prompt_id, prompt, extra, outputs = item
    return [number, prompt_id, prompt, {key: value for key, value in extra.items() if key not in SECRET}, outputs]


async def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser()
    for name in ("--port", "--control-port"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--listen", default="127.0.0.1")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    comfy = Comfy(args.folder, ["main.py", "--listen", args.listen, "--port", str(args.port)])
    for app, port in ((comfy.control(), args.control_port), (comfy.app(), args.port)):
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True).start()
    await comfy.run()


if __name__ == "__main__":
    asyncio.run(main())
