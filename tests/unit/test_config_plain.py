"""A plain llama-server in the configuration: one entry, one tenant, under its own name."""

from __future__ import annotations

from pathlib import Path

import pytest

from swapper.config import Config, loads
from swapper.config.advice import advise, model_options
from swapper.errors import ConfigError

GOOD = """\
cards:
  gpu0: {probe: declared, vram: 24GiB}
tenants:
  chat:
    kind: llama-server
    control: command
    command: [llama-server, -m, models/chat.gguf, -c, "8192", -np, "2", --slot-save-path, slots, --port, "8080"]
    card: gpu0
    url: http://127.0.0.1:8080
    slot_dir: slots
    vram: 6GiB
"""
MODEL = "    models: {qwen3.6-27b: {vram: 6GiB, aliases: [gpt-4o], default: true}}\n"


def parsed(text: str) -> Config:
    return loads(text, folder=Path("/etc/swapper"), environ={"HOME": "/home/ann"})


def problem(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parsed(text)
    [said] = caught.value.problems
    return said


def test_its_entry_is_its_tenant_and_its_name_is_what_callers_say() -> None:
    config = parsed(GOOD)
    spec = config.spec()
    assert list(spec.tenants) == ["chat"]
    tenant = spec.tenants["chat"]
    assert (tenant.server, tenant.card, tenant.need_mib, tenant.kind) == ("chat", "gpu0", 6144, "llama-server")
    assert (tenant.default, tenant.save) == (False, True)
    assert config.models() == {"chat": "chat"}
    assert config.name_of("chat") == "chat"


def test_its_model_has_names_of_its_own_beside_that_of_the_entry() -> None:
    config = parsed(GOOD.replace("    vram: 6GiB\n", MODEL))
    assert config.models() == {"qwen3.6-27b": "chat", "chat": "chat", "gpt-4o": "chat"}
    assert config.name_of("chat") == "qwen3.6-27b"
    assert config.spec().tenants["chat"].default
    assert config.model("chat").vram_mib == 6144


def test_the_model_may_be_named_and_the_entry_say_what_it_takes() -> None:
    config = parsed(GOOD + "    models: {qwen3.6-27b: {aliases: [gpt-4o]}}\n")
    assert config.spec().tenants["chat"].need_mib == 6144


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("    vram: 6GiB\n", "", "swapper.yaml:4: tenants.chat: needs vram: what it takes on the card"),
        ("vram: 6GiB", "vram: 32GiB", "swapper.yaml:11: tenants.chat.vram: 32 GiB do not fit card gpu0"),
        ("    vram: 6GiB\n", "    vram: 6GiB\n" + MODEL, "tenants.chat.vram: stands with its model as well"),
        ("    vram: 6GiB\n", "    models: {a: {vram: 1GiB}, b: {vram: 1GiB}}\n", "has one model; leave b out"),
        ("    vram: 6GiB\n", "    vram: 6GiB\n    preset: p.ini\n", "preset: is not a key of kind llama-server"),
        ("    url: http://127.0.0.1:8080\n", "", "tenants.chat: needs url: the address of the llama-server, like"),
        ("    slot_dir: slots\n", "", "tenants.chat: needs slot_dir: the folder of --slot-save-path"),
        ("http://127.0.0.1:8080", "http://127.0.0.1:9292", "write that of the llama-server, and give the two"),
    ],
)
def test_what_does_not_fit_is_told_where_it_stands(old: str, new: str, said: str) -> None:
    assert said in problem(GOOD.replace(old, new))


def test_one_that_is_attached_cannot_leave_so_it_must_be_said_that_it_never_does() -> None:
    command = next(line for line in GOOD.splitlines(keepends=True) if "command: [" in line)
    attached = GOOD.replace("control: command", "control: attach").replace(command, "")
    said = problem(attached)
    assert said.startswith("swapper.yaml:6: tenants.chat.control: cannot be ended with control: attach; ")
    assert said.endswith("or evict: never")
    assert parsed(attached + "    evict: never\n").spec().tenants["chat"].evict_never


def test_its_names_are_not_those_of_a_routers_model() -> None:
    router = "{kind: llama-router, card: gpu0, url: http://x:1, slot_dir: s, models: {chat: {vram: 1GiB}}}"
    said = problem(GOOD + f"  llama: {router}\n")
    assert "'chat' is already a name of chat; names and aliases are unique" in said


def test_a_replay_needs_no_folder_and_whatever_is_asked_for_is_taken() -> None:
    text = GOOD.replace("slot_dir: slots", "snapshots: {strategy: replay}")
    assert parsed(text).tenants["chat"].snapshots.strategy == "replay"
    rewind = GOOD.replace("slot_dir: slots", "slot_dir: slots\n    snapshots: {strategy: rewind}")
    assert parsed(rewind).tenants["chat"].snapshots.strategy == "rewind"


def test_its_command_tells_its_context_and_is_judged() -> None:
    config = parsed(GOOD)
    options = model_options(config, "chat", {})
    assert options is not None
    assert (options.context_per_slot(), options.n_parallel) == (4096, 2)
    lacking = parsed(GOOD.replace("--slot-save-path, slots, ", ""))
    assert any(one.error and "slot-save-path" in str(one) for one in advise(lacking, {}))
    assert not any("models-max" in str(one) or "autoload" in str(one) for one in advise(config, {}))


NAMELESS = "chat: its answers have the path of the model file as their model: start it with --alias"


@pytest.mark.parametrize(
    ("more", "model", "said"),
    [
        ("", "", [f"{NAMELESS} chat"]),
        ("", MODEL, [f"{NAMELESS} qwen3.6-27b"]),
        ("--alias, chat, ", MODEL, []),
        ("-a, 'gpt-4o,chat', ", MODEL, []),
        (
            "--alias, big, ",
            MODEL,
            [
                "chat: its answers have the name big, which no client asks for, as their model: "
                "start it with --alias qwen3.6-27b"
            ],
        ),
    ],
)
def test_its_answers_should_name_the_model_as_clients_do(more: str, model: str, said: list[str]) -> None:
    text = GOOD.replace("-c, ", f"{more}-c, ")
    config = parsed(text.replace("    vram: 6GiB\n", model) if model else text)
    assert [str(one) for one in advise(config, {}) if "their model" in str(one)] == said
    assert not any(one.error for one in advise(config, {}))


def test_a_variable_that_its_process_inherits_may_name_it_and_nobody_judges_one_that_somebody_else_starts() -> None:
    assert not any("their model" in str(one) for one in advise(parsed(GOOD), {"LLAMA_ARG_ALIAS": "chat"}))
    command = next(line for line in GOOD.splitlines(keepends=True) if "command: [" in line)
    attached = GOOD.replace("control: command", "control: attach").replace(command, "") + "    evict: never\n"
    assert advise(parsed(attached), {}) == []
