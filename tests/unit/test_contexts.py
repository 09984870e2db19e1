"""How many tokens a call may have stands in `/v1/models` where a server of another kind tells it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.support import fake_kinds
from tests.support.fake_kind import OpenAi
from tests.unit.test_kinds_whole import running as up
from tests.unit.test_kinds_whole import server
from tests.unit.test_serve_kinds import Front, serving


async def lines(front: Front, **tokens: int) -> dict[str, dict[str, Any]]:
    """Once each of these has told so many."""
    async with asyncio.timeout(20):
        while True:
            found = {one["id"]: one for one in (await front.get("/v1/models"))["data"]}
            if all(found[model].get("context_length") == told for model, told in tokens.items()):
                return found
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("key", ["max_model_len", "context_length", "context_window"])
async def test_a_server_that_says_it_of_its_models_is_believed(tmp_path: Path, key: str) -> None:
    fake = OpenAi("base", "lora")
    fake.tells = {key: 40_960}
    tenants = f"  a: {{kind: openai, url: '{fake.url}', models: {{base: {{vram: 4GiB}}, lora: {{vram: 1GiB}}}}}}"
    async with serving(tmp_path, tenants, fake) as front:
        found = await lines(front, base=40_960, lora=40_960)
        assert found["lora"]["meta"] == {"n_ctx": 40_960}


async def test_what_runs_tells_after_how_many_seconds_without_a_call_it_leaves(tmp_path: Path) -> None:
    fake = OpenAi("m")
    tenants = f"  a: {{kind: openai, url: '{fake.url}', models: {{m: {{vram: 4GiB, ttl: 90s}}}}}}"
    async with serving(tmp_path, tenants, fake) as front:
        await front.chat("m")
        [line] = (await front.get("/running"))["running"]
        assert (line["model"], line["state"], line["ttl"]) == ("m", "ready", 90)


@pytest.mark.parametrize("told", ["many", 0, -5, True, None])
async def test_what_is_no_number_of_tokens_tells_nothing(told: object) -> None:
    fake = OpenAi("m")
    fake.tells = {"max_model_len": told}
    backend = server(fake)
    async with up(fake, backend):
        await backend.observe()
        assert backend.contexts() == {}


async def test_an_ollama_tells_it_of_what_it_runs_and_its_model_s_own_number_before_that(tmp_path: Path) -> None:
    fake = fake_kinds.Ollama("m", "n")
    fake.parameters = 'stop  "x"\nnum_ctx    2048\ntop_k 20'
    tenants = f"  o: {{kind: ollama, url: '{fake.url}', models: {{m: {{vram: 6GiB}}, n: {{vram: 6GiB}}}}}}"
    async with serving(tmp_path, tenants, fake) as front:
        assert "context_length" not in (await lines(front))["m"]
        await front.chat("m")
        await lines(front, m=2_048)
        fake.tells = {"context_length": 16_384}
        await front.chat("n")
        await lines(front, n=16_384)


async def test_of_a_llama_swap_it_is_what_the_model_s_own_server_says_once_it_runs(tmp_path: Path) -> None:
    fake = fake_kinds.LlamaSwap("s", "t")
    tenants = f"  x: {{kind: llama-swap, url: '{fake.url}', models: {{s: {{vram: 6GiB}}, t: {{vram: 6GiB}}}}}}"
    async with serving(tmp_path, tenants, fake) as front:
        await front.chat("s")
        found = await lines(front, s=8_192)
        assert "context_length" not in found["t"]
        assert fake.holding == {"s"}  # asking of one that does not run would load it
