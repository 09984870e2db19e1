"""A whole swapper over servers of other kinds: their names are routed, and the card changes hands between them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from swapper.app import Running, running
from swapper.config import load
from tests.support import fake_kinds
from tests.support.fake_kind import FakeKind, OpenAi


@dataclass
class Front:
    """What a client sees of it."""

    running: Running
    session: aiohttp.ClientSession

    async def get(self, path: str) -> dict[str, Any]:
        async with self.session.get(self.running.url + path) as answer:
            return await answer.json()

    async def post(self, path: str, body: dict[str, object]) -> tuple[int, dict[str, Any]]:
        async with self.session.post(self.running.url + path, json=body) as answer:
            return answer.status, await answer.json()

    async def chat(self, model: str) -> dict[str, Any]:
        message = {"role": "user", "content": "hello"}
        status, body = await self.post("/v1/chat/completions", {"model": model, "messages": [message]})
        assert status == 200, body
        return body

    async def lease(self) -> str:
        status, lease = await self.post("/api/leases?wait=30", {"card": "gpu0", "label": "render"})
        assert (status, lease["state"]) == (201, "granted"), lease
        return f"/api/leases/{lease['id']}?token={lease['token']}"

    async def end(self, lease: str) -> None:
        async with self.session.delete(self.running.url + lease) as answer:
            assert answer.status == 200

    async def residents(self) -> list[str]:
        cards = (await self.get("/api/status"))["cards"]
        return next(card["residents"] for card in cards if card["name"] == "gpu0")


@asynccontextmanager
async def serving(folder: Path, tenants: str, *fakes: FakeKind) -> AsyncGenerator[Front]:
    """Over servers that run already."""
    path = folder / "swapper.yaml"
    path.write_text(f"listen: 127.0.0.1:0\nstate_dir: state\ncards: {{gpu0: {{vram: 24GiB}}}}\ntenants:\n{tenants}\n")
    async with AsyncExitStack() as stack:
        for fake in fakes:
            await fake.start()
            stack.push_async_callback(fake.vanish)
        server = await stack.enter_async_context(running(load(path, {"HOME": str(folder)})))
        yield Front(server, await stack.enter_async_context(aiohttp.ClientSession()))


async def test_an_openai_server_is_called_by_each_of_its_names_and_asked_for_its_own(tmp_path: Path) -> None:
    fake = OpenAi("base", "lora")
    models = "{base: {vram: 4GiB, aliases: [b]}, lora: {vram: 1GiB}}"
    tenants = f"  a: {{kind: openai, url: '{fake.url}', models: {models}}}"
    async with serving(tmp_path, tenants, fake) as front:
        for name in ("base", "b", "a", "lora"):
            await front.chat(name)
        assert fake.computed == ["base", "base", "base", "lora"]
        lines = {line["id"]: line for line in (await front.get("/v1/models"))["data"]}
        assert set(lines) == {"base", "lora"}
        assert lines["base"]["aliases"] == ["b"]
        assert lines["lora"]["status"] == {"value": "loaded"}
        status, body = await front.post("/v1/chat/completions", {"model": "loro", "messages": []})
        assert (status, body["error"]["code"]) == (404, "model_not_found")


async def test_a_refusal_of_the_server_passes_untouched(tmp_path: Path) -> None:
    fake = OpenAi("m")
    fake.chats = False
    tenants = f"  a: {{kind: openai, url: '{fake.url}', models: {{m: {{vram: 4GiB}}}}}}"
    async with serving(tmp_path, tenants, fake) as front:
        status, body = await front.post("/v1/chat/completions", {"model": "m", "messages": []})
        assert (status, body) == (400, {"error": {"message": "The model does not support Chat Completions API"}})


async def test_a_call_brings_an_ollama_model_and_a_lease_sends_it_away_and_it_comes_back(tmp_path: Path) -> None:
    fake = fake_kinds.Ollama("m", "n")
    tenants = f"  o: {{kind: ollama, url: '{fake.url}', models: {{m: {{vram: 16GiB}}, n: {{vram: 16GiB}}}}}}"
    async with serving(tmp_path, tenants, fake) as front:
        await front.chat("m")
        assert fake.listed == {"m": -1}
        await front.chat("n")
        assert fake.listed == {"n": -1}
        lease = await front.lease()
        assert fake.listed == {}
        await front.end(lease)
        async with asyncio.timeout(30):
            while fake.listed != {"n": -1}:
                await fake.looked(1)


@pytest.mark.parametrize("other", [fake_kinds.Vllm, fake_kinds.Sglang])
async def test_the_card_changes_hands_between_a_llama_swap_and_one_that_sleeps(
    tmp_path: Path, other: type[fake_kinds.Vllm | fake_kinds.Sglang]
) -> None:
    swap, whole = fake_kinds.LlamaSwap("s"), other("w")
    kind = other.__name__.lower()
    tenants = (
        f"  x: {{kind: llama-swap, url: '{swap.url}', models: {{s: {{vram: 16GiB}}}}}}\n"
        f"  y: {{kind: {kind}, sleep: 1, url: '{whole.url}', models: {{w: {{vram: 16GiB}}}}}}"
    )
    async with serving(tmp_path, tenants, swap, whole) as front:
        assert (await front.chat("w"))["model"] == "w"
        assert await front.residents() == ["y"]
        await front.chat("s")
        assert await front.residents() == ["x/s"]
        assert (swap.holding, whole.holding) == ({"s"}, set())
        await front.chat("w")
        assert await front.residents() == ["y"]
        assert (swap.holding, whole.holding) == (set(), {"w"})
        assert not whole.dead
        assert sum(fake.cut for fake in (swap, whole)) == 0
        tenants_seen = {one["id"]: one for one in (await front.get("/api/status"))["tenants"]}
        assert not tenants_seen["y"].get("conversations")


async def test_a_model_that_cannot_be_loaded_is_told_to_who_called_it_in_the_servers_words(tmp_path: Path) -> None:
    fake = fake_kinds.Ollama("m")
    tenants = f"  o: {{kind: ollama, url: '{fake.url}', models: {{absent: {{vram: 1GiB}}}}}}"
    async with serving(tmp_path, tenants, fake) as front:
        status, body = await front.post("/v1/chat/completions", {"model": "absent", "messages": []})
        assert (status, body["error"]["code"]) == (502, "upstream_failed")
        assert "has no model 'absent'; it has: m; run `ollama pull absent` there" in body["error"]["message"]


async def test_hooks_run_around_what_a_call_brings(tmp_path: Path) -> None:
    fake = fake_kinds.Ollama("m")
    hooks = "hooks: {before_load: [sh, -c, 'echo \"$SWAPPER_HOOK $SWAPPER_TENANT\" >> story']}"
    tenants = f"  o: {{kind: ollama, url: '{fake.url}', models: {{m: {{vram: 1GiB}}}}, {hooks}}}"
    async with serving(tmp_path, tenants, fake) as front:
        await front.chat("m")
    assert (tmp_path / "story").read_text() == "before_load o/m\n"
