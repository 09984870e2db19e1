from __future__ import annotations

from pathlib import Path

import pytest

import presets
from swapper.config import Config, load, loads
from swapper.config.advice import Advice, advise, advise_live, model_options, read_preset
from swapper.core import plan

ENVIRON = {"HOME": "/home/ann"}


def said(found: list[Advice]) -> str:
    return "\n".join(str(one) for one in found)


def test_the_ready_made_preset_has_no_problem() -> None:
    ini = presets.parse(presets.path(presets.CHAT_INI).read_text())
    assert ini.problems == ()
    assert ini.models == ("qwen3-32b", "qwen3-4b")


def test_the_ready_made_pair_fits_and_loses_nothing() -> None:
    config = load(presets.path(presets.CHAT_YAML), ENVIRON)
    assert config.notices == ()
    assert advise(config, ENVIRON) == []
    assert config.models()["chat"] == "llama/qwen3-32b"


@pytest.mark.parametrize("name", [name for name in presets.READY_MADE if name.endswith(".yaml")])
def test_each_ready_made_configuration_is_accepted_and_loses_no_conversation(name: str) -> None:
    config = load(presets.path(name), ENVIRON)
    assert config.notices == ()
    assert said(advise(config, ENVIRON)) == ""


@pytest.mark.parametrize("name", [name for name in presets.READY_MADE if name.endswith(".ini")])
def test_each_ready_made_preset_is_read_without_a_problem(name: str) -> None:
    assert presets.parse(presets.path(name).read_text()).problems == ()


def test_every_ready_made_file_is_named() -> None:
    folder = Path(presets.__file__).parent
    assert {path.name for path in folder.iterdir() if path.suffix in (".ini", ".yaml")} == set(presets.READY_MADE)


def test_on_one_card_what_serves_all_day_fits_side_by_side_and_an_encode_beside_it() -> None:
    spec = load(presets.path("one-card.swapper.yaml"), ENVIRON).spec().learned({"gpu0": 24_564})  # an RTX 4090
    always = [spec.tenants[name].need_mib for name in ("llama/qwen3-14b", "immich-ml")]
    encode = 2048
    assert sum(always) + encode <= plan.capacity(spec, "gpu0")


def test_on_two_cards_each_server_is_told_the_gpu_of_its_card() -> None:
    config = load(presets.path("two-cards.swapper.yaml"), ENVIRON)
    for name, place in (("llama", "0"), ("coder", "1")):
        entry = config.document.tenants[name]
        assert f"CUDA_VISIBLE_DEVICES={place}" in entry.command
        assert config.document.cards[entry.card].gpus == (place,)


def test_the_ready_made_preset_gives_each_conversation_the_context_its_comment_says() -> None:
    config = load(presets.path(presets.CHAT_YAML), ENVIRON)
    options = model_options(config, "llama/qwen3-32b", ENVIRON)
    assert options is not None
    assert (options.n_parallel, options.kv_unified, options.context_per_slot()) == (4, False, 8192)


def test_an_unknown_ready_made_file_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        presets.path("../swapper/app.py")


YAML = """\
cards: {gpu0: {vram: 24GiB}}
tenants:
  llama:
    kind: llama-router
    control: command
    command: [llama-server, --models-preset, p.ini, --no-models-autoload, --models-max, "0", --metrics,
              --slot-save-path, slots]
    card: gpu0
    url: http://127.0.0.1:8080
    slot_dir: slots
    models: {med: {vram: 2GiB}}
"""
INI = "[med]\nmodel = x.gguf\nnp = 2\nsps = 0.5\n"


def made(folder: Path, yaml: str = YAML, ini: str = INI) -> Config:
    (folder / "p.ini").write_text(ini)
    return loads(yaml, folder=folder, environ=ENVIRON)


def test_a_fitting_configuration_gives_no_advice(tmp_path: Path) -> None:
    assert said(advise(made(tmp_path), ENVIRON)) == ""


def test_the_preset_is_found_by_the_command_when_it_is_not_named(tmp_path: Path) -> None:
    ini = read_preset(made(tmp_path), "llama")
    assert ini is not None
    assert ini.models == ("med",)


def test_advice_names_the_file_and_the_line(tmp_path: Path) -> None:
    config = made(tmp_path, ini=INI + "ctx = 4096\n")
    assert said(advise(config, ENVIRON)).startswith(f"{tmp_path}/p.ini:5: [med] ctx is not an option")


def test_a_model_the_preset_does_not_have_is_an_error_with_the_near_name(tmp_path: Path) -> None:
    config = made(tmp_path, YAML.replace("med:", "mid:"))
    (one,) = advise(config, ENVIRON)
    assert one.error
    assert str(one).endswith("has no section for it: did you mean med?")


def test_a_slot_folder_the_server_does_not_write_to_is_an_error(tmp_path: Path) -> None:
    config = made(tmp_path, YAML.replace("slot_dir: slots", "slot_dir: other"))
    (one,) = advise(config, ENVIRON)
    assert one.error
    assert f"writes its slots to slots, but swapper looks in {tmp_path}/other" in str(one)


def test_a_preset_other_than_the_commands_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "q.ini").write_text(INI)
    config = made(tmp_path, YAML.replace("slot_dir:", "preset: q.ini\n    slot_dir:"))
    assert "give both the same file" in said(advise(config, ENVIRON))


def test_a_preset_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    config = loads(YAML, folder=tmp_path, environ=ENVIRON)
    (found,) = advise(config, ENVIRON)
    assert "cannot be read from here, so that its settings are not judged: give who runs swapper the" in str(found)


def test_without_saving_the_losses_of_saving_are_not_told(tmp_path: Path) -> None:
    yaml = YAML.replace("slot_dir: slots", "snapshots: {strategy: off}").replace("--slot-save-path, slots", "--jinja")
    assert said(advise(made(tmp_path, yaml), ENVIRON)) == ""


def test_the_variables_serve_would_hand_down_count(tmp_path: Path) -> None:
    found = advise(made(tmp_path), ENVIRON | {"LLAMA_ARG_CACHE_PROMPT": "0"})
    assert "cache-prompt is off" in said(found)


ATTACHED = """\
cards: {gpu0: {vram: 24GiB}}
tenants:
  llama: {kind: llama-router, card: gpu0, url: http://x:1, slot_dir: /slots, models: {med: {vram: 2GiB}}}
"""
PROPS = {"role": "router", "max_instances": 0, "models_autoload": False}


def running(*args: str) -> list[dict[str, object]]:
    own = ["llama-server", "--alias", "med", "--parallel", "2", "--slot-prompt-similarity", "0.5", "--metrics", *args]
    return [{"id": "med", "aliases": ["m"], "status": {"value": "loaded", "args": own}}]


def test_a_running_router_is_judged_by_what_it_says_of_itself() -> None:
    config = loads(ATTACHED, folder=Path("/x"), environ=ENVIRON)
    assert advise_live(config, "llama", running("--slot-save-path", "/slots"), PROPS) == []
    found = said(advise_live(config, "llama", running(), {"role": "router", "max_instances": 4}))
    assert "--no-models-autoload" in found
    assert "--models-max 0" in found
    assert "--slot-save-path /slots" in found


def test_a_model_the_running_router_does_not_have_is_told() -> None:
    config = loads(ATTACHED.replace("med:", "mad:"), folder=Path("/x"), environ=ENVIRON)
    (one,) = advise_live(config, "llama", running("--slot-save-path", "/slots"), PROPS)
    assert str(one) == "llama: [mad] the running router has no such model: did you mean med?"
