"""Servers of other kinds in the configuration: who their tenants are, and what is said of mistakes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from swapper.backends import backend_of
from swapper.config import Config
from swapper.config.load import loads
from swapper.errors import ConfigError
from swapper.front import target_of
from workers.control.attach import AttachControl
from workers.hooks import Hooked
from workers.llama_swap import LlamaSwap
from workers.ollama import Ollama
from workers.openai import OpenAiServer

MIB = 1024


def read(tenants: str, environ: Mapping[str, str] | None = None, cards: str = "{gpu0: {vram: 24GiB}}") -> Config:
    text = f"cards: {cards}\ntenants:\n{tenants}\n"
    return loads(text, folder=Path("/srv"), environ={"HOME": "/home/ann", **(environ or {})})


def refused(tenants: str, environ: Mapping[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        read(tenants, environ)
    return str(caught.value)


OLLAMA = "  o: {kind: ollama, url: http://h:1, models: {'qwen3:8b': {vram: 6GiB, aliases: [q]}, e: {vram: 1GiB}}}"
OPENAI = "  a: {kind: openai, control: attach, url: http://127.0.0.1:9000, models: {name: {vram: 4GiB}}}"


def test_models_that_a_server_loads_one_by_one_are_a_tenant_each() -> None:
    config = read(OLLAMA)
    assert set(config.spec().tenants) == {"o/qwen3:8b", "o/e"}
    assert config.models() == {"qwen3:8b": "o/qwen3:8b", "q": "o/qwen3:8b", "e": "o/e"}
    assert not config.spec().tenants["o/e"].save


def test_what_one_process_serves_is_one_tenant_under_all_its_names() -> None:
    config = read(
        "  v: {kind: vllm, control: command, command: [vllm], url: http://127.0.0.1:8000, "
        "models: {base: {vram: 8GiB, aliases: [b]}, lora: {vram: 1GiB, aliases: [l], default: true}}}"
    )
    (tenant,) = config.spec().tenants.values()
    assert (tenant.id, tenant.need_mib, tenant.default) == ("v", 9 * MIB, True)
    assert set(config.models()) == {"base", "b", "lora", "l", "v"}
    target = target_of(config, "v")
    assert [target.called(name) for name in ("base", "b", "v", "lora", "l")] == ["base", "base", "base", "lora", "lora"]
    assert (target.router, target.slots) == (False, False)


def test_the_shortest_openai_tenant_is_on_the_only_card_and_is_never_evicted_since_nobody_can_end_it() -> None:
    config = read(OPENAI)
    tenant = config.spec().tenants["a"]
    assert (tenant.card, tenant.evict_never, tenant.need_mib) == ("gpu0", True, 4 * MIB)
    assert any("it keeps its place as with evict: never" in one for one in config.notices)
    assert not any("keeps its place" in one for one in read(OPENAI.replace("}}}", "}}, evict: never}")).notices)


def test_with_several_cards_one_has_to_be_named() -> None:
    with pytest.raises(ConfigError, match=r"tenants\.a\.card"):
        read(OPENAI, cards="{gpu0: {vram: 24GiB}, gpu1: {vram: 24GiB}}")


def test_each_kind_becomes_its_backend_and_hooks_come_around_it() -> None:
    hooks = ", hooks: {before_load: [beep, now], after_release: [[a], [b, c]], timeout: 5s, on_failure: ignore}"
    kinds = {
        OLLAMA: Ollama,
        OLLAMA.replace("ollama", "llama-swap"): LlamaSwap,
        OPENAI: OpenAiServer,
        OPENAI.replace("openai", "vllm").replace("}}}", "}}, sleep: 1}"): OpenAiServer,
        OPENAI.replace("openai", "sglang").replace("}}}", "}}, sleep: 2}"): OpenAiServer,
    }
    for text, kind in kinds.items():
        for with_hooks in (False, True):
            config = read(text[:-1] + (hooks if with_hooks else "") + "}")
            ((name, entry),) = config.tenants.items()
            backend = backend_of(name, entry, config, AttachControl(name))
            assert isinstance(backend, Hooked if with_hooks else kind)
    entry = read(OLLAMA[:-1] + hooks + "}").tenants["o"]
    assert entry.hooks.before_load == (("beep", "now"),)
    assert entry.hooks.after_release == (("a",), ("b", "c"))
    assert (entry.hooks.timeout_ms, entry.hooks.on_failure) == (5_000, "ignore")


def test_a_model_may_have_a_key_of_its_own() -> None:
    models = "models: {a: {vram: 1GiB}, b: {vram: 1GiB, api_key_env: TWO}}"
    text = f"  s: {{kind: llama-swap, url: http://h:1, api_key_env: ONE, {models}}}"
    environ = {"ONE": "1", "TWO": "2"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONE", "1")
        patch.setenv("TWO", "2")
        config = read(text, environ)
        assert target_of(config, "s/a").api_key == "1"
        assert target_of(config, "s/b").api_key == "2"
    assert "the environment variable TWO is not set" in refused(text, {"ONE": "1"})


@pytest.mark.parametrize(
    ("tenant", "said"),
    [
        (
            "{kind: ollama, models: {m: {vram: 1GiB}}}",
            "needs url: the address of the Ollama, like http://127.0.0.1:11434",
        ),
        ("{kind: vllm, url: http://h:1, sleep: 1}", "needs models: the names that the vLLM serves, each with its vram"),
        ("{kind: ollama, url: http://h:1, models: {m: {}}}", "needs vram"),
        (
            "{kind: vllm, url: http://h:1, models: {m: {vram: 1GiB}}}",
            "cannot be ended with control: attach; write sleep: 1, control: command, or evict: never",
        ),
        (
            "{kind: openai, url: http://h:1, evict: auto, models: {m: {vram: 1GiB}}}",
            "cannot be ended with control: attach; write control: command, or evict: never",
        ),
        ("{kind: ollama, url: http://h:1, sleep: 1, models: {m: {vram: 1GiB}}}", "sleep: is not a key of kind ollama"),
        (
            "{kind: openai, url: http://h:1, slot_dir: x, models: {m: {vram: 1GiB}}}",
            "slot_dir: is not a key of kind openai",
        ),
        ("{kind: vllm, url: http://h:1, sleep: 3, models: {m: {vram: 1GiB}}}", "tenants.t.sleep: must be"),
        (
            "{kind: ollama, control: command, url: http://h:1, models: {m: {vram: 1GiB}}}",
            "control: command needs command: the server's program and its arguments",
        ),
        (
            "{kind: ollama, command: [ollama], url: http://h:1, models: {m: {vram: 1GiB}}}",
            "is never run with control: attach",
        ),
        (
            "{kind: openai, url: http://h:1, vram: 2GiB, models: {m: {vram: 1GiB}}}",
            "stands with its models as well; write it once",
        ),
        (
            "{kind: ollama, url: http://h:1, models: {m: {vram: 1GiB}}, hooks: {before_load: beep}}",
            "must be a command and its arguments, like [notify-send, loaded], or a list of such lists",
        ),
        (
            "{kind: ollama, url: http://h:1, models: {m: {vram: 1GiB}}, hooks: {before_load: [[a], b]}}",
            "must be a command and its arguments",
        ),
        ("{kind: ollama, url: http://h:1, models: {m: {vram: 1GiB}}, keep_alive: often}", "tenants.t.keep_alive"),
        ("{kind: openai, url: 'http://127.0.0.1:9292', models: {m: {vram: 1GiB}}}", "is swapper's own address"),
    ],
)
def test_mistakes_are_said_with_what_to_write(tenant: str, said: str) -> None:
    assert said in refused(f"  t: {tenant}")


@pytest.mark.parametrize(("given", "ms"), [("-1", None), ("null", None), ("30m", 1_800_000)])
def test_an_ollama_may_keep_what_is_loaded_for_a_time(given: str, ms: int | None) -> None:
    config = read(OLLAMA[:-1] + f", keep_alive: {given}}}")
    assert config.tenants["o"].keep_alive_ms == ms


def test_what_a_sleeping_server_keeps_is_told_of() -> None:
    config = read(OPENAI.replace("openai", "vllm").replace("}}}", "}}, sleep: 1}"))
    assert any("add it to the reserve of card gpu0" in one for one in config.notices)
    text = OPENAI.replace("openai", "vllm").replace("}}}", "}}, sleep: 1}")
    assert read(text, cards="{gpu0: {vram: 24GiB, reserve: 1GiB}}").notices == ()


@pytest.mark.parametrize(("second", "ttl_ms"), [(", ttl: 5m", 300_000), ("", None)])
def test_a_server_of_several_names_leaves_once_none_of_them_was_called_for_so_long(
    tmp_path: Path, second: str, ttl_ms: int | None
) -> None:
    models = f"models: {{one: {{vram: 1GiB, ttl: 1m}}, two: {{vram: 1GiB{second}}}}}"
    server = f"kind: vllm, sleep: 1, url: 'http://127.0.0.1:9', {models}"
    text = f"cards: {{gpu0: {{vram: 24GiB}}}}\ntenants: {{v: {{{server}}}}}"
    assert loads(text, folder=tmp_path, environ={}).spec().tenants["v"].ttl_ms == ttl_ms
