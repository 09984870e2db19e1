"""What a model will take, from its file and options, and what `check` says of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from presets import ModelOptions
from presets.options import Setting
from swapper import estimates
from swapper.config import load
from swapper.core.watched import NeedFrom
from swapper.demo.models import make_models
from tests.unit.test_cli import swapper
from workers.llama.estimate import MIB, Estimate, estimate

GIB = 1 << 30
QWEN: dict[str, str | int | float | bool] = {
    "general.architecture": "qwen3",
    "qwen3.block_count": 36,
    "qwen3.embedding_length": 4096,
    "qwen3.attention.head_count": 32,
    "qwen3.attention.head_count_kv": 8,
    "qwen3.attention.key_length": 128,
    "qwen3.attention.value_length": 128,
    "qwen3.context_length": 40_960,
}


def options(**settings: str) -> ModelOptions:
    return ModelOptions("m", {name.replace("_", "-"): Setting(value, "x") for name, value in settings.items()})


def found(size: int = 5 * GIB, facts: dict[str, str | int | float | bool] = QWEN, **settings: str) -> Estimate:
    made = estimate(options(**settings), size, facts)
    assert made is not None
    return made


def test_weights_and_the_cache_of_all_contexts_count() -> None:
    made = found(ctx_size="32768", parallel="4")
    assert made.weights_mib == 5 * 1024
    assert made.cache_mib == 36 * 32_768 * 8 * (128 + 128) * 2 // MIB == 4608
    assert made.n_ctx == 32_768
    assert made.mib == 5120 + 4608 + 512 + 256


def test_without_a_context_it_is_the_model_s_own() -> None:
    assert found().n_ctx == 40_960


@pytest.mark.parametrize(("kind", "mib"), [("q8_0", 2448), ("q4_0", 1296), ("f32", 9216), ("new", 9216)])
def test_the_types_of_the_cache_count(kind: str, mib: int) -> None:
    assert found(ctx_size="32768", cache_type_k=kind, cache_type_v=kind).cache_mib == mib


def test_layers_that_remember_nothing_do_not_count() -> None:
    made = found(facts={**QWEN, "qwen3.full_attention_interval": 4}, ctx_size="32768")
    assert made.cache_mib == 4608 // 4


def test_where_the_file_tells_less_more_is_taken() -> None:
    short = {key: QWEN[key] for key in QWEN if not key.endswith(("_kv", "key_length", "value_length"))}
    assert found(facts=short, ctx_size="32768").cache_mib == 4608 * 4


def test_layers_that_stay_on_the_processor_do_not_count() -> None:
    made = found(ctx_size="32768", n_gpu_layers="0")
    assert (made.weights_mib, made.cache_mib) == (0, 0)
    assert found(ctx_size="32768", n_gpu_layers="99").cache_mib == 4608


@pytest.mark.parametrize("facts", [{}, {"general.architecture": "qwen3"}])
def test_a_file_that_does_not_tell_is_no_estimate(facts: dict[str, str | int | float | bool]) -> None:
    assert estimate(options(), GIB, facts) is None
    assert estimate(options(), 0, QWEN) is None


def config(folder: Path, model: str) -> Path:
    (folder / "presets.ini").write_text(f"[m]\nmodel = {model}\nctx-size = 8192\n")
    path = folder / "swapper.yaml"
    path.write_text(
        f"""
state_dir: {folder}/state
cards: {{gpu0: {{probe: nvml}}}}
tenants:
  llama: {{kind: llama-router, url: http://127.0.0.1:1, preset: presets.ini, slot_dir: {folder}, models: {{m: {{}}}}}}
"""
    )
    return path


def test_a_need_that_nobody_wrote_is_estimated_from_the_model_file(tmp_path: Path) -> None:
    model = make_models(tmp_path, ["alpha"])["alpha"]
    read = load(config(tmp_path, str(model)), {})
    assert read.spec().tenants["llama/m"].need_from is NeedFrom.UNKNOWN
    needs = estimates.thought(read, {})
    spec = read.spec().estimated(needs)
    assert spec.tenants["llama/m"].need_mib == needs["llama/m"]
    (line,) = [estimates.told(tenant, one) for tenant, one in estimates.estimates(read, {}).items()]
    assert line.startswith("llama/m: no vram is written; ")
    assert "8,192 tokens of context" in line


def test_what_cannot_be_read_here_counts_as_the_whole_card(tmp_path: Path) -> None:
    read = load(config(tmp_path, "/models/away.gguf"), {})
    assert estimates.thought(read, {}) == {}
    spec = read.spec().learned({"gpu0": 24_576})
    assert (spec.tenants["llama/m"].need_mib, spec.tenants["llama/m"].need_from) == (24_576, NeedFrom.UNKNOWN)
    (line,) = [estimates.told(tenant, one) for tenant, one in estimates.estimates(read, {}).items()]
    assert "counts as the whole card until it was measured" in line


async def test_check_says_it(tmp_path: Path) -> None:
    model = make_models(tmp_path, ["alpha"])["alpha"]
    found = await swapper("check", "--json", "-c", str(config(tmp_path, str(model))))
    (line,) = [line for line in json.loads(found.stdout)["cards"] if line.startswith("llama/m: ")]
    assert "is estimated until it was measured" in line
