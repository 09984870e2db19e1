"""What is foretold of a llama-server before it starts is what the real one then says of itself, and never a guess."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import fields
from pathlib import Path

import pytest

from swapper.config import Config, loads
from swapper.foresee import Foresight, losses
from swapper.snapshots.manifest import MANIFEST_SUFFIX, Fingerprint, Manifest, decode
from tests.contract.conftest import ONE_THREAD
from tests.contract.saving import LONG, save
from tests.contract.talk import Talk
from tests.support.plain import PlainServer
from tests.support.router import RealRouter
from workers.backend import SaveArgs
from workers.control.attach import AttachControl
from workers.llama import foreseen
from workers.llama.router import LlamaRouter
from workers.llama.server import LlamaServer

SHAPING = {
    "cache-type-k": "q8_0",
    "fa": "on",
    "rope-freq-base": "20000",
    "override-kv": "tokenizer.ggml.add_bos_token=bool:false",
    "swa-full": "true",
}
NOT_FORETOLD = {"model", "template"}


def configured(
    server: RealRouter | PlainServer, kind: str, *, control: str = "command", preset: bool = False
) -> Config:
    """As a configuration file beside the server would say it."""
    started = (
        f"command: {json.dumps(server.command)}" if control == "command" else f"preset: {server.folder}/presets.ini"
    )
    text = f"""
state_dir: state
cards: {{gpu0: {{vram: 24GiB}}}}
tenants:
  llama:
    kind: {kind}
    control: {control}
    {started}
    card: gpu0
    url: {server.url}
    slot_dir: {server.slot_dir}
    models: {{alpha: {{vram: 2GiB}}}}
"""
    return loads(text, folder=server.folder, environ=os.environ)


@asynccontextmanager
async def saved(folder: Path, models: Mapping[str, Path], shaping: Mapping[str, str]) -> AsyncGenerator[RealRouter]:
    """A router that has saved one conversation of alpha."""
    router = RealRouter(folder, {"alpha": models["alpha"]}, ctx=4096, defaults=ONE_THREAD, overrides={"alpha": shaping})
    await asyncio.to_thread(router.start)
    backend = LlamaRouter(
        router.url,
        tenants={"llama/alpha": "alpha"},
        state_dir=folder / "state",
        slot_dir=router.slot_dir,
        control=AttachControl("llama"),
    )
    try:
        await backend.start()
        await backend.load("llama/alpha")
        async with Talk(router.url) as talk:
            await talk.say("alpha", LONG, slot=0)
        await save(backend, "alpha")
        yield router
    finally:
        await backend.close()
        await asyncio.to_thread(router.stop)


def manifest_of(slots: Path) -> Manifest:
    (path,) = slots.glob(f"*{MANIFEST_SUFFIX}")
    return decode(path.read_bytes())


async def foretold(config: Config, tenant: str) -> foreseen.Known:
    return await asyncio.to_thread(lambda: Foresight(config, "llama", os.environ).of(tenant))


def _values(fingerprint: Fingerprint) -> dict[str, object]:
    return {field.name: getattr(fingerprint, field.name) for field in fields(Fingerprint)}


@pytest.mark.parametrize("shaping", [{}, SHAPING])
async def test_of_a_router_all_but_the_template_is_foretold_and_right(
    tmp_path: Path, models: dict[str, Path], shaping: dict[str, str]
) -> None:
    async with saved(tmp_path, models, shaping) as router:
        found = await foretold(configured(router, "llama-router"), "llama/alpha")
        fingerprint = manifest_of(router.slot_dir).fingerprint
        assert set(found) == {field.name for field in fields(Fingerprint)} - NOT_FORETOLD
        assert found == {name: value for name, value in _values(fingerprint).items() if name in found}
        assert losses(configured(router, "llama-router"), "llama", os.environ) == []


CHANGES = [
    ("ctx-size = 4096", "ctx-size = 2048", "saved under another context size per slot (2048, now 1024)"),
    ("parallel = 2", "parallel = 1", "saved under another context size per slot (2048, now 4096)"),
    ("kv-unified = false", "kv-unified = true", "saved under another context size per slot (2048, now 4096)"),
    ("[alpha]", "[alpha]\nctk = q8_0", "saved under other cache types (f16 f16, now q8_0 f16)"),
    ("[alpha]", "[alpha]\nfa = off", "saved under another flash-attn setting (auto, now off)"),
    ("[alpha]", "[alpha]\nrope-freq-base = 20000", "saved under other rope or attention arguments (none, now "),
]


async def test_what_the_preset_would_refuse_is_told_before_the_restart(tmp_path: Path, models: dict[str, Path]) -> None:
    async with saved(tmp_path, models, {}) as router:
        manifest, preset = manifest_of(router.slot_dir), router.preset.read_text()
        config = configured(router, "llama-router")
        for before, after, why in CHANGES:
            assert before in preset
            router.preset.write_text(preset.replace(before, after, 1))
            (loss,) = losses(config, "llama", os.environ)
            assert str(loss).startswith(f"1 conversation of llama/alpha ({manifest.tokens} tokens, ")
            assert f") will not come back after the restart: {why}" in str(loss)
        assert losses(configured(router, "llama-router", control="attach"), "llama", os.environ) == []
        router.preset.write_text(preset.replace(str(models["alpha"]), str(models["beta"])))
        for control in ("command", "attach"):
            (loss,) = losses(configured(router, "llama-router", control=control), "llama", os.environ)
            assert loss.why == f"saved under another model file ({models['alpha']}, now {models['beta']})"


async def test_what_the_server_chooses_itself_is_not_claimed(tmp_path: Path, models: dict[str, Path]) -> None:
    async with saved(tmp_path, models, {}) as router:
        preset = router.preset.read_text()
        router.preset.write_text(preset.replace("parallel = 2", "parallel = -1").replace("kv-unified = false", ""))
        found = await foretold(configured(router, "llama-router"), "llama/alpha")
        assert {"n_parallel", "n_ctx_slot"}.isdisjoint(found)
        router.preset.write_text(preset.replace(f"model = {models['alpha']}", "hf-repo = somebody/something"))
        found = await foretold(configured(router, "llama-router"), "llama/alpha")
        assert {"gguf", "mmproj", "n_ctx_slot"}.isdisjoint(found)


async def test_of_a_server_with_one_model_it_is_the_same(tmp_path: Path, models: dict[str, Path]) -> None:
    shaping = [word for name, value in SHAPING.items() if name != "swa-full" for word in (f"--{name}", value)]
    words = [word.replace("--fa", "-fa") for word in shaping] + ["--swa-full"]
    server = PlainServer(tmp_path, models["alpha"], ctx=4096, arguments=words)
    backend = LlamaServer(
        server.url, tenant="llama", control=server.control(), state_dir=tmp_path / "state", slot_dir=server.slot_dir
    )
    try:
        await backend.start()
        await backend.load("llama")
        async with Talk(server.url) as talk:
            await talk.say("alpha", LONG, slot=0)
        saved = await backend.save("llama", SaveArgs(0, "alpha.1.kv"))
        assert saved.tokens
    finally:
        await backend.close()
        await server.control().stop()
    config = configured(server, "llama-server")
    found = await foretold(config, "llama")
    fingerprint = manifest_of(server.slot_dir).fingerprint
    assert set(found) == {field.name for field in fields(Fingerprint)} - NOT_FORETOLD
    assert found == {name: value for name, value in _values(fingerprint).items() if name in found}
    assert losses(config, "llama", os.environ) == []
