"""Servers of other kinds beside the llama router, each in a box: Ollama, vLLM, ComfyUI, in memory, with their lies.

Invariant: what they hold of the card is what they physically have; what they answer may be a lie, and each is told when
it is. A lie lasts as long as its process, unless it says how often. They answer as `tests/support/fake_kinds.py` and
`comfyui.py` do, of which they are what the shipped backends ask for.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from urllib.parse import parse_qs, urlsplit

from tests.sim.box import Box
from tests.sim.leaving import Unload
from tests.support.fake_wire import Answer, Dropped, Json, NobodyThere, refused, said
from workers.control import Phase, Seen

ANSWER_S, LOAD_S, SLEEP_S, FREE_S = 0.01, 0.6, 0.2, 0.3
LEAVING_S = 0.2
"""Between the answer to an unload and its beginning, at least."""


@dataclass(slots=True)
class Tales:
    """`late_s`: so much longer VRAM is held than is said. `deaf`: what is asked for is answered with ok, and not done.

    `torn`: so many wake-ups fail halfway. `mute`: nobody gets an answer while it has nothing of the card.
    """

    late_s: float = 0.0
    deaf: bool = False
    torn: int = 0
    mute: bool = False


@dataclass(slots=True)
class ServerBox(Box):
    """A box in which a server runs. `unloading` is told before a model loses its VRAM by what was asked."""

    tales: Tales = field(default_factory=Tales)
    unloading: Callable[[Unload], None] = lambda _: None
    in_flight: Callable[[str], Mapping[str, int]] = lambda _: {}
    stuck: set[str] = field(default_factory=set[str])
    busy: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def alive(self) -> bool:
        """Whether it listens."""
        return self.phase is Phase.UP

    @property
    def silent(self) -> bool:
        """Whether it listens, and answers nobody."""
        return self.alive and self.tales.mute and not self.holds

    def over(self) -> None:
        """With its process goes all of it."""
        self.busy.clear()
        self.tales.deaf = self.tales.mute = False
        Box.over(self)

    async def request(
        self, method: str, path: str, query: Mapping[str, str] | None = None, body: bytes = b"", port: str | None = None
    ) -> Answer:
        """As FakeRouter's."""
        del query, port
        if not self.alive:
            raise NobodyThere(self.plan.name)
        await asyncio.sleep(ANSWER_S)
        if self.silent:
            await asyncio.Event().wait()
        asked: Json = json.loads(body) if body else {}
        url = urlsplit(path)
        return await self.answer(f"{method} {url.path}", asked, parse_qs(url.query))

    async def answer(self, what: str, asked: Json, query: Mapping[str, list[str]]) -> Answer:
        """What it says to a request."""
        del asked, query
        return refused(404, f"{what}: not found")

    def _leaves(self, tenant: str) -> None:
        self.unloading(Unload(tenant, self.in_flight(tenant), {}, lambda _: None))

    async def compute(self, model: str, tokens: int) -> Answer:
        """A call, for as long as it takes; it ends with the process."""
        run = self.run
        self.busy[model] = self.busy.get(model, 0) + 1
        try:
            await asyncio.sleep(ANSWER_S * (1 + tokens / 10))
        finally:
            if self.run == run and self.there:
                self.busy[model] -= 1
        if self.run != run or not self.alive:
            raise Dropped(self.plan.name)
        choice = {"index": 0, "message": {"role": "assistant", "content": "a"}, "finish_reason": "length"}
        return said({"object": "chat.completion", "model": model, "choices": [choice]})


class VllmBox(ServerBox):
    """It has all its VRAM from its start, and gives it back asleep. `asleep`: what of it is."""

    __slots__ = ("asleep", "dead", "weights")

    def begun(self, *, by: str) -> None:
        """Awake."""
        self.asleep: set[str] = set()
        self.weights, self.dead = True, False
        ServerBox.begun(self, by=by)

    @property
    def holds(self) -> bool:
        """Asleep it has nothing."""
        return self.holder in self.vram.held

    async def answer(self, what: str, asked: Json, query: Mapping[str, list[str]]) -> Answer:
        """See its source."""
        match what:
            case "GET /v1/models":
                return said({"object": "list", "data": [{"id": self.plan.name, "object": "model"}]})
            case "GET /metrics":
                lines = (f"vllm:num_requests_{n} {sum(self.busy.values()) * (n == 'running')}.0" for n in _COUNTS)
                return Answer(200, "\n".join(lines).encode())
            case "GET /is_sleeping":
                return said({"is_sleeping": bool(self.asleep)})
            case "POST /sleep":
                return await self._sleep(int(query.get("level", ["1"])[0]))
            case "POST /wake_up":
                return await self._wake(query.get("tags", ["weights", "kv_cache"]))
            case "POST /collective_rpc":
                self.weights = self.weights or "weights" not in self.asleep
                return said({"results": [None]})
            case "POST /v1/chat/completions" if self.dead or self.asleep or not self.weights:
                return refused(500, "EngineCore encountered an issue")
            case "POST /v1/chat/completions":
                return await self.compute(self.plan.name, int(asked.get("max_tokens", 1)))
            case _:
                return refused(404, "Not Found")

    async def _sleep(self, level: int) -> Answer:
        if self.tales.deaf:
            self.say(f"    {self.plan.name} says that it sleeps, and does not")
            return Answer(200)
        self.dead = self.dead or bool(sum(self.busy.values()))
        if not self.asleep:
            self._leaves(self.plan.name)
        await asyncio.sleep(SLEEP_S)
        self.asleep, self.weights = {"weights", "kv_cache"}, self.weights and level == 1
        self.vram.let_go(self.holder)
        self.say(f"    {self.plan.name} sleeps")
        return Answer(200)

    async def _wake(self, tags: list[str]) -> Answer:
        torn = self.tales.torn > 0 and "kv_cache" in tags
        if torn:
            self.tales.torn -= 1
            self.say(f"    {self.plan.name} wakes up halfway")
            tags = [tag for tag in tags if tag != "kv_cache"]
        if not self.holds:
            self.vram.take(self.holder, self.plan.need_mib)
        await asyncio.sleep(SLEEP_S)
        self.asleep -= set(tags)
        return refused(500, "CUDA error: an illegal memory access was encountered") if torn else Answer(200)


_COUNTS = ("running", "waiting")


@dataclass(slots=True)
class _Runner:
    """A model's process at an Ollama. `leaving`: to end once nothing runs in it. `keep_s` None: until told."""

    holder: str
    leaving: bool = False
    keep_s: float | None = None
    used: float = 0.0


class OllamaBox(ServerBox):
    """It has what its models have, each in a runner of its own; one that it lists no more may live a little longer."""

    __slots__ = ("count", "runners")

    def begun(self, *, by: str) -> None:
        """With no model."""
        del by
        self.runners: dict[str, _Runner] = {}
        self.count = 0

    @property
    def needs_mib(self) -> int:
        """Nothing before a model is loaded."""
        return 0

    @property
    def holds(self) -> bool:
        """While any of its models does."""
        return any(one.holder in self.vram.held for one in self.runners.values())

    @property
    def living(self) -> int:
        """How many runners there are, listed or not."""
        return sum(1 for name in self.vram.held if name.startswith(f"{self.holder} runner "))

    def seen(self) -> Seen:
        """With its process."""
        found = ServerBox.seen(self)
        return Seen(found.phase, found.why, found.run, (self.pid,) if self.there else (), (), found.came_back)

    @property
    def pid(self) -> int:
        """Of this run."""
        return 700_000 + self.run

    def over(self) -> None:
        """Its runners end with it."""
        for name in [name for name in self.vram.held if name.startswith(f"{self.holder} runner ")]:
            self.vram.let_go(name)
        self.runners.clear()
        self.busy.clear()
        self.tales.deaf = False

    async def answer(self, what: str, asked: Json, query: Mapping[str, list[str]]) -> Answer:
        """See server/routes.go."""
        del query
        name = str(asked.get("model", ""))
        if asked and name not in dict(self.plan.models):
            return refused(404, f"model '{name}' not found")
        match what:
            case "GET /api/ps":
                return said({"models": [{"name": one, "model": one} for one in self.runners]})
            case "POST /api/show":
                return said({"details": {}, "capabilities": ["completion"]})
            case "POST /api/generate" if asked.get("keep_alive") == 0 and not asked.get("prompt"):
                await self._expire(name)
                return said({"model": name, "done": True, "done_reason": "unload"})
            case "POST /api/generate":
                await self.load(name)
                await self.compute(name, 1)
                return said({"model": name, "response": "a", "done": True})
            case "POST /v1/chat/completions":
                await self.load(name, by="a call")
                answer = await self.compute(name, int(asked.get("max_tokens", 1)))
                self._rest(name)
                return answer
            case _:
                return refused(404, "404 page not found")

    async def load(self, name: str, *, by: str = "", keep_s: float | None = None) -> None:
        """It is listed at once, and has computed nothing yet. Who calls it takes its unload back."""
        one, need, run = self.runners.get(name), dict(self.plan.models)[name], self.run
        if one is None:
            self.count += 1
            one = self.runners[name] = _Runner(f"{self.holder} runner {self.count} of {name}", keep_s=keep_s)
            self.say(f"    {self.plan.name} loads {name}{f' for {by}' if by else ''}")
            (self.vram.intrude if by else self.vram.take)(one.holder, need)
            await asyncio.sleep(LOAD_S)
        elif one.leaving and by:
            self.say(f"    the unload of {name} is taken back by {by}")
            one.leaving, one.keep_s = False, keep_s
        if self.run != run or not self.alive:
            raise Dropped(self.plan.name)

    async def direct(self, name: str, seconds: float) -> None:
        """Somebody calls a model past us, with a keep-alive of his own; it leaves by itself after that."""
        if not self.alive or self.vram.used_mib + dict(self.plan.models)[name] > self.total_mib:
            return
        run = self.run
        try:
            await self.load(name, by="somebody else", keep_s=seconds)
            await self.compute(name, 50)
        except Dropped:
            return
        await asyncio.sleep(seconds)
        one = self.runners.get(name)
        if self.run == run and one is not None and one.keep_s is not None and not self.busy.get(name):
            self.stuck.add(one.holder)  # nobody asked for it, so nobody waits for its end
            self._gone(name, one)

    async def _expire(self, name: str) -> None:
        one = self.runners.get(name)
        if one is None or self.tales.deaf:
            return
        one.leaving = True
        asyncio.get_running_loop().call_later(LEAVING_S, self._rest, name)

    def _rest(self, name: str) -> None:
        """What was to leave does, once nothing runs in it."""
        one = self.runners.get(name)
        if one is not None and one.leaving and not self.busy.get(name):
            self._leaves(f"{self.plan.name}/{name}")
            self._gone(name, one)

    def _gone(self, name: str, one: _Runner) -> None:
        del self.runners[name]
        self.say(f"    {self.plan.name} lists {name} no more")
        asyncio.get_running_loop().call_later(self.tales.late_s, self.vram.let_go, one.holder)


class ComfyBox(ServerBox):
    """It has what its prompts loaded until it frees that."""

    __slots__ = ("prompts",)

    def begun(self, *, by: str) -> None:
        """Idle."""
        del by
        self.prompts = 0

    @property
    def needs_mib(self) -> int:
        """Nothing before its first prompt."""
        return 0

    @property
    def holds(self) -> bool:
        """From a prompt until it has freed."""
        return self.holder in self.vram.held

    @property
    def held_mib(self) -> int:
        """What its process has."""
        return self.vram.held.get(self.holder, 0)

    async def render(self, seconds: float) -> None:
        """A prompt of the gate's."""
        if self.alive:
            self.begin(seconds)
        await asyncio.sleep(seconds)

    def begin(self, seconds: float, *, by: str = "") -> None:
        """A prompt; it goes on whoever waits for it."""
        self.prompts += 1
        if by:
            self.say(f"    {self.plan.name} works for {by}")
        (self.vram.intrude if by else self.vram.take)(self.holder, self.plan.need_mib)
        asyncio.get_running_loop().call_later(seconds, self._done, self.run)

    def _done(self, run: int) -> None:
        if self.run == run and self.there:
            self.prompts -= 1

    async def answer(self, what: str, asked: Json, query: Mapping[str, list[str]]) -> Answer:
        """See comfyui.py."""
        del asked, query
        match what:
            case "GET /prompt":
                return said({"exec_info": {"queue_remaining": self.prompts}})
            case "GET /system_stats":
                return said({"system": {}, "devices": [{"type": "cuda", "torch_vram_total": self.held_mib << 20}]})
            case "POST /free":
                asyncio.get_running_loop().call_later(FREE_S, self._free, self.run)
                return Answer(200)
            case _:
                return refused(404, "Not Found")

    def _free(self, run: int) -> None:
        if self.run != run or self.prompts:
            return
        if self.tales.deaf:
            self.say(f"    {self.plan.name} frees nothing")
            self.stuck.add(self.holder)
        else:
            self.vram.let_go(self.holder)


SERVERS: Mapping[str, type[ServerBox]] = {"vllm": VllmBox, "ollama": OllamaBox, "comfyui": ComfyBox}


def runners(boxes: Iterable[Box]) -> Callable[[Iterable[int]], int]:
    """`workers.ollama.runners` among these."""

    def count(servers: Iterable[int]) -> int:
        pids = {*servers}
        return sum(box.living for box in boxes if isinstance(box, OllamaBox) and box.there and box.pid in pids)

    return count
