"""What is told of models to who lists them: by the configuration, by their files, by their servers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swapper.gateway.listed import ModelInfo, Traits
from swapper.listing import models_of, shown
from tests.support.projector import make_projector
from tests.unit.gateway_doubles import ALPHA, Served, serve
from tests.unit.test_config import GOOD, parsed, problems
from workers.llama.http import Model, Props, Status
from workers.llama.told import Told

TRAITS = """
        name: Qwen for the house
        description: answers
        metadata: {tier: 1, tags: [a]}
        unlisted: true
        ttl: 5m
        capabilities: {in: [text, image], tools: true, context: 4096}
"""


def configured(traits: str = TRAITS) -> str:
    return GOOD.replace(
        "      qwen3.6-27b: {vram: 19.5GiB, aliases: [gpt-4o, chat], default: true}",
        "      qwen3.6-27b:\n        vram: 19.5GiB\n        aliases: [gpt-4o, chat]" + traits.rstrip(),
    )


def listed(text: str, folder: Path = Path("/etc/swapper")) -> Mapping[str, ModelInfo]:
    return {one.id: one for one in models_of(parsed(text, folder=folder), {})}


def test_what_is_written_of_a_model_is_told_of_it() -> None:
    one = listed(configured())["qwen3.6-27b"]
    assert (one.name, one.description, one.metadata) == ("Qwen for the house", "answers", {"tier": 1, "tags": ["a"]})
    assert (one.unlisted, one.ttl_s, one.context_length, one.aliases) == (True, 300, 4096, ("gpt-4o", "chat"))
    assert one.command == "llama-server --port 8080"
    line = one.line(loaded=True, created=1, context=None, inputs=["text"])
    assert line["architecture"] == {
        "input_modalities": ["text", "image"],
        "output_modalities": ["text"],
        "modality": "text+image->text",
    }
    assert line["capabilities"] == {"vision": True, "function_calling": True}
    assert line["supported_parameters"] == ["tools", "tool_choice"]
    meta = {"tier": 1, "tags": ["a"], "type": "model", "aliases": ["gpt-4o", "chat"]}
    assert line["meta"] == {"llamaswap": meta, "n_ctx": 4096}


@pytest.mark.parametrize(
    ("traits", "said"),
    [
        ("capabilities: {in: [txt]}", "'txt' is not one of text, image, audio, video; did you mean text?"),
        ("capabilities: {visoin: true}", "unknown key; known here: in, out, tools, embeddings, reranker, context"),
        ("metadata: {a: .nan}", "a must be a value that JSON has"),
        ("unlistet: true", "unknown key; did you mean unlisted?"),
    ],
)
def test_what_cannot_be_told_is_refused(traits: str, said: str) -> None:
    [problem] = problems(configured(f"\n        {traits}\n"))
    assert said in problem


@pytest.mark.parametrize(
    ("traits", "can"),
    [
        (Traits(("text", "image"), ("text",)), {"vision"}),
        (Traits(("audio",), ("text",)), {"audio_transcriptions"}),
        (Traits(("text",), ("audio",)), {"audio_speech"}),
        (Traits(("text", "image"), ("image",)), {"image_generation", "image_to_image"}),
        (Traits(("text",), None, embeddings=True), {"embeddings"}),
        (Traits(reranker=True), {"reranker"}),
        (Traits(("text",), ("text",)), set[str]()),
    ],
)
def test_what_it_can_do_follows_from_what_it_takes_and_gives(traits: Traits, can: set[str]) -> None:
    told: Any = traits.told()
    assert {*told.get("capabilities", {})} == can


# ---- files


def preset(folder: Path, text: str) -> str:
    (folder / "presets.ini").write_text(text)
    return GOOD.replace("    slot_dir: slots\n", "    slot_dir: slots\n    preset: presets.ini\n")


@pytest.mark.parametrize(
    ("options", "traits"),
    [
        ("embeddings = true", Traits(("text",), None, embeddings=True)),
        ("embeddings = true\npooling = rank", Traits(("text",), None, reranker=True)),
        ("reranking = true", Traits(("text",), None, reranker=True)),
        ("mmproj = /nowhere.gguf", Traits(("text", "image"), ("text",))),
        ("ctx-size = 4096", Traits()),
    ],
)
def test_a_llama_servers_options_tell_what_its_model_can_do(tmp_path: Path, options: str, traits: Traits) -> None:
    text = preset(tmp_path, f"[small]\nmodel = /m.gguf\n{options}\n")
    assert listed(text, tmp_path)["small"].traits == traits


def test_a_projectors_header_tells_that_it_sees(tmp_path: Path) -> None:
    make_projector(tmp_path / "eyes.gguf", 64)
    text = preset(tmp_path, "[small]\nmodel = /m.gguf\nmmproj = eyes.gguf\n")
    assert listed(text, tmp_path)["small"].traits.inputs == ("text", "image")


def test_a_command_is_told_without_what_only_its_owner_may_know() -> None:
    told = shown(
        [
            *("env", "HF_TOKEN=hf_secret", "X=1", "vllm", "serve", "--api-key", "sk-secret", "--max-tokens", "5"),
            *("--tokenizer=t", "--api-key=sk-secret", "--proxy", "http://ann:secret@host/", "--hf-token", "secret"),
        ]
    )
    assert "secret" not in told
    assert all(word in told for word in ("X=1", "--max-tokens 5", "--tokenizer=t", "@host/"))


# ---- servers


def test_a_router_tells_the_context_of_a_slot_and_what_its_models_take() -> None:
    told, status = Told(), Status("loaded")
    media = Model.Architecture(["text", "image"])
    told.models(
        {"llama/a": "a", "llama/b": "b", "llama/c": "c"},
        {
            "a": Model("a", status, meta=Model.Meta(2048), architecture=media),
            "b": Model("b", status, meta=Model.Meta("many"), architecture=Model.Architecture("text")),
        },
    )
    assert told.contexts == {"llama/a": {"a": 2048}}
    assert told.inputs == {"llama/a": {"a": ("text", "image")}}
    told.models({"llama/a": "a"}, {"a": Model("a", Status("unloaded"))})
    assert told.contexts == {"llama/a": {"a": 2048}}


def test_a_plain_server_tells_the_same_by_its_props() -> None:
    told = Told()
    modalities = {"vision": False, "audio": True, "video": 1}
    told.props("chat", "m", Props(default_generation_settings=Props.Settings(512), modalities=modalities))
    assert (told.contexts, told.inputs) == ({"chat": {"m": 512}}, {"chat": {"m": ("text", "audio")}})


# ---- through the gateway


async def got(served: Served, path: str) -> tuple[int, Any]:
    async with served.client.get(served.url + path) as response:
        return response.status, await response.json()


async def test_one_model_is_told_of_by_any_of_its_names_also_with_slashes() -> None:
    async with serve() as served:
        hidden = ModelInfo("org/beta:7b", ALPHA, ("b",), unlisted=True)
        served.ctx.models = (*served.ctx.models, hidden)
        served.ctx.names = {**served.ctx.names, "org/beta:7b": ALPHA, "b": ALPHA}
        _, lines = await got(served, "/v1/models")
        assert [line["id"] for line in lines["data"]] == ["alpha"]
        for path in ("alpha", "gpt-4o", "org/beta:7b", "org%2Fbeta:7b"):
            status, line = await got(served, f"/v1/models/{path}")
            assert (status, line["id"], line["object"]) == (200, path.replace("%2F", "/"), "model")
        assert (await got(served, "/v1/models/b"))[1]["aliases"] == ["b"]
        status, refused = await got(served, "/v1/models/alpah")
        assert (status, refused["error"]["code"]) == (404, "model_not_found")
        assert "did you mean alpha" in refused["error"]["message"]


async def test_what_a_server_tells_goes_before_what_was_thought() -> None:
    async with serve() as served:
        served.ctx.contexts = {ALPHA: {"alpha": 2048}}
        served.ctx.inputs = {ALPHA: {"alpha": ["text", "image"]}}
        _, line = await got(served, "/v1/models/alpha")
        assert (line["context_length"], line["meta"]["n_ctx"]) == (2048, 2048)
        assert (line["capabilities"], line["architecture"]["modality"]) == ({"vision": True}, "text+image->text")


async def test_who_runs_is_told_with_all_that_llama_swap_tells() -> None:
    async with serve() as served:
        [one] = served.ctx.models
        served.ctx.models = (replace(one, command="llama-server -m x", ttl_s=60, name="A", description="d"),)
        _, told = await got(served, "/running")
        line = {"model": "alpha", "state": "ready", "cmd": "llama-server -m x", "proxy": served.upstream.url}
        assert told == {"running": [{**line, "ttl": 60, "name": "A", "description": "d"}]}


async def test_looking_brings_no_model_onto_its_card() -> None:
    async with serve(opened=False) as served:
        for path in ("/v1/models", "/v1/models/alpha", "/models", "/running"):
            status, told = await got(served, path)
            assert status == 200
        assert told == {"running": []}
        assert (await got(served, "/v1/models/alpha"))[1]["status"] == {"value": "unloaded"}
        assert served.admission.demand() == ()
        await asyncio.sleep(0)
        assert served.upstream.seen == []
