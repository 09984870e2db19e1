from __future__ import annotations

from pathlib import Path

import pytest

from presets import (
    Level,
    ModelOptions,
    RouterOptions,
    effective,
    from_child_args,
    losses,
    parse,
    router_losses,
)
from presets.names import lookup

FILE = """\
[*]
ngl = 99
c = 1000
[a]
model = a.gguf
ctx-size = 8192
np = 2
alias = first, one
no-mmap = true
[b]
model = b.gguf
"""


def of(section: str, cli: list[str] | None = None, environ: dict[str, str] | None = None) -> ModelOptions:
    return effective(parse(f"[m]\nmodel = x\n{section}"), "m", cli or [], environ)


@pytest.mark.parametrize("digits", ["\u00b2", "\u0664", "9" * 5000])
def test_a_number_that_llama_server_cannot_read_is_none(digits: str) -> None:
    assert of(f"parallel = {digits}").number("parallel") is None
    (said,) = parse(f"[m]\nmodel = x\nparallel = {digits}").problems
    assert "is not a whole number" in said.text


def test_a_section_beats_the_defaults() -> None:
    ini = parse(FILE)
    assert effective(ini, "a").n_ctx == 8192
    assert effective(ini, "b").n_ctx == 1000
    assert effective(ini, "b").text("n-gpu-layers") == "99"


def test_the_routers_command_line_beats_every_section() -> None:
    options = effective(parse(FILE), "a", ["llama-server", "-c", "2048", "--metrics"])
    assert (options.n_ctx, options.metrics) == (2048, True)
    assert options.settings["ctx-size"].origin == "the router's command line"


def test_the_environment_comes_last() -> None:
    environ = {"LLAMA_ARG_CTX_SIZE": "512", "LLAMA_ARG_N_PARALLEL": "3", "HOME": "/"}
    options = effective(parse(FILE), "b", [], environ)
    assert (options.n_ctx, options.n_parallel) == (1000, 3)


def test_a_setting_knows_where_it_was_made() -> None:
    setting = effective(parse(FILE), "a").settings["parallel"]
    assert (setting.value, setting.origin, setting.line) == ("2", "[a] line 7", 7)


def test_a_model_is_found_by_its_alias_and_has_its_own_aliases_only() -> None:
    options = effective(parse(FILE), "one")
    assert (options.model, options.aliases) == ("a", ("first", "one"))


def test_a_model_without_a_section_has_the_defaults_and_the_command_line() -> None:
    options = effective(parse(FILE), "org/x:q8_0", ["-np", "1"])
    assert (options.model, options.n_ctx, options.n_parallel, options.aliases) == ("org/x:Q8_0", 1000, 1, ())


def test_names_that_say_no_are_turned_round() -> None:
    assert effective(parse(FILE), "a").text("mmap") == "false"
    assert of("no-kv-unified = false\nnp = 2").kv_unified
    assert not of("np = 2", ["--no-kv-unified"]).kv_unified


def test_of_two_names_of_one_option_the_later_in_the_alphabet_wins() -> None:
    assert of("ctx-size = 1\nc = 2").n_ctx == 1
    assert of("ctk = q8_0\ncache-type-k = f16").text("cache-type-k") == "q8_0"


def test_what_the_router_keeps_to_itself_is_not_the_models() -> None:
    options = of("host = 1.2.3.4", ["--port", "1", "--models-max", "0", "--api-key", "k", "--no-models-autoload"])
    assert set(options.settings) == {"model"}


@pytest.mark.parametrize(
    ("section", "slots", "unified", "context"),
    [
        ("c = 4000", 4, True, 4096),  # seen on b10434, this and the following
        ("c = 4000\nkvu = off", 4, True, 4096),
        ("c = 4000\nnp = -1", 4, True, 4096),
        ("c = 4196\nnp = 3", 3, False, 1536),
        ("c = 4196\nnp = 3\nkvu = on", 3, True, 4352),
        ("c = 4096\nnp = 2", 2, False, 2048),
        ("np = 2", 2, False, 32_768),
        ("c = 0\nnp = 2", 2, False, 32_768),
        ("c = 1024\nnp = 2", 2, False, 512),
        ("c = 200000\nnp = 2", 2, False, 65_536),
    ],
)
def test_slots_and_their_context_are_those_the_server_makes(
    section: str, slots: int, unified: bool, context: int
) -> None:
    options = of(section)
    assert (options.n_parallel, options.kv_unified) == (slots, unified)
    assert options.context_per_slot(n_ctx_train=65_536) == context


def test_a_context_that_only_the_model_knows_is_not_guessed() -> None:
    assert of("np = 2").context_per_slot() is None
    assert of("np = 2").n_ctx is None


def test_a_running_models_own_arguments_are_read() -> None:
    args = "llama-server --host 127.0.0.1 --metrics --port 4711 --slot-save-path /s --alias m --cache-ram -1"
    options = from_child_args([*args.split(), "--no-kv-unified", "--parallel", "2", "--ctx_size", "8192"])
    assert (options.model, options.slot_save_path, options.cache_ram_mib) == ("m", "/s", -1)
    assert (options.n_parallel, options.kv_unified, options.n_ctx, options.metrics) == (2, False, 8192, True)


def test_an_option_newer_than_our_list_does_not_upset_the_next() -> None:
    options = from_child_args(["--brand-new", "7", "--newer-flag", "--ctx-size", "8192"])
    assert (options.n_ctx, options.text("brand-new"), options.text("newer-flag")) == (8192, "7", "true")


def test_the_router_is_read_from_its_command_line_its_environment_or_its_props() -> None:
    args = ["llama-server", "--no-models-autoload", "--models-max", "0"]
    assert RouterOptions.from_args(args) == RouterOptions(autoload=False, models_max=0)
    assert RouterOptions.from_args(["llama-server"]) == RouterOptions(autoload=True, models_max=4)
    environ = {"LLAMA_ARG_MODELS_MAX": "2", "LLAMA_ARG_MODELS_AUTOLOAD": "false"}
    assert RouterOptions.from_args(["llama-server"], environ) == RouterOptions(autoload=False, models_max=2)
    props = {"role": "router", "max_instances": 0, "models_autoload": False}
    assert RouterOptions.from_props(props) == RouterOptions(autoload=False, models_max=0)


def test_every_name_needed_for_a_snapshots_fingerprint_is_known() -> None:
    pairs = {"ctk": "cache-type-k", "fa": "flash-attn", "md": "model-draft", "mm": "mmproj", "m": "model"}
    assert {short: option.canonical for short in pairs if (option := lookup(short)) is not None} == pairs
    for name in ("rope-freq-base", "rope-scaling", "yarn-orig-ctx", "lora", "swa-full", "chat-template"):
        assert lookup(name) is not None


SAFE = "np = 2\nsps = 0.5\nkvu = false\nmetrics = true\nslot-save-path = /slots\n"
ROUTER = RouterOptions(autoload=False, models_max=0)


def lost(
    section: str,
    router: RouterOptions | None = ROUTER,
    slot_dir: str = "/slots",
    path_map: dict[str, str] | None = None,
) -> list[str]:
    found = losses(of(section), router, slot_dir=Path(slot_dir), folder=Path("/run"), path_map=path_map)
    return [finding.code for finding in found]


def test_a_server_set_up_for_handovers_loses_nothing() -> None:
    assert lost(SAFE) == []
    assert lost(SAFE.replace("kvu = false", "kvu = true") + "cache-idle-slots = false\n") == []
    assert lost(SAFE.replace("kvu = false", "kvu = true") + "cram = 0\n") == []


@pytest.mark.parametrize(
    ("section", "code"),
    [
        (SAFE.replace("kvu = false", "kvu = true"), "kv-unified"),
        (SAFE.replace("np = 2\n", ""), "kv-unified"),
        (SAFE.replace("slot-save-path = /slots\n", ""), "no-slot-save-path"),
        (SAFE.replace("metrics = true\n", ""), "no-metrics"),
        (SAFE.replace("sps = 0.5\n", ""), "slot-prompt-similarity"),
        (SAFE + "no-slots = true\n", "no-slots"),
        (SAFE + "no-cache-prompt = true\n", "no-cache-prompt"),
        (SAFE + "sleep-idle-seconds = 60\n", "sleep"),
        (SAFE + "load-on-startup = true\n", "load-on-startup"),
        (SAFE.replace("/slots", "/elsewhere"), "slot-dir"),
    ],
)
def test_a_setting_that_loses_conversations_is_told(section: str, code: str) -> None:
    assert lost(section) == [code]


def test_a_router_that_decides_for_itself_is_told() -> None:
    assert lost(SAFE, RouterOptions()) == ["autoload", "models-max"]
    assert lost(SAFE, None) == []


def test_a_models_limit_is_told_with_what_it_costs() -> None:
    (found,) = router_losses(RouterOptions(autoload=False, models_max=3))
    assert "once 3 are loaded" in found.text
    assert "although its client hung up" in found.text
    assert found.mend == "start it with --models-max 0"


def test_load_on_startup_without_a_limit_is_an_error_because_the_router_refuses() -> None:
    options = of(SAFE + "load-on-startup = true\n")
    assert [finding.level for finding in losses(options, ROUTER)] == [Level.ERROR]
    assert [finding.level for finding in losses(options, None)] == [Level.WARNING]


def test_the_slot_folder_is_compared_as_swapper_sees_it() -> None:
    relative = SAFE.replace("/slots", "kept")
    assert lost(relative, slot_dir="/run/kept") == []
    assert lost(SAFE, slot_dir="/srv/s", path_map={"/slots": "/srv/s"}) == []
    assert lost(SAFE.replace("/slots", "/slots/a"), slot_dir="/srv/s/a", path_map={"/slots/": "/srv/s/"}) == []
    assert lost(SAFE, slot_dir="/srv/s", path_map={"/slo": "/srv/s"}) == ["slot-dir"]


def test_every_loss_says_what_to_do() -> None:
    for finding in losses(of("load-on-startup = true\n"), RouterOptions()):
        assert finding.mend
        assert len(finding.sentence()) < 300
