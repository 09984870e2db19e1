from __future__ import annotations

from pathlib import Path

import pytest

from swapper.config import ApiKey, Config, loads
from swapper.core.types import WorkClass
from swapper.errors import ConfigError

BASE = """\
cards: {gpu0: {vram: 24GiB}}
tenants:
  llama:
    kind: llama-router
    card: gpu0
    url: http://127.0.0.1:8080
    slot_dir: /slots
    models:
      qwen3.6-27b: {vram: 19.5GiB}
"""


def parsed(environ: dict[str, str], text: str = BASE, folder: Path = Path("/x")) -> Config:
    return loads(text, folder=folder, environ=environ)


def problems(environ: dict[str, str], text: str = BASE, folder: Path = Path("/x")) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parsed(environ, text, folder)
    return caught.value.problems


def test_a_variable_overrides_a_key_of_the_file() -> None:
    assert parsed({"SWAPPER__CARDS__GPU0__VRAM": "32GiB"}).cards["gpu0"].vram_mib == 32 * 1024


def test_a_variable_meets_a_name_with_signs_in_it() -> None:
    config = parsed({"SWAPPER__TENANTS__LLAMA__MODELS__QWEN3_6_27B__VRAM": "10GiB"})
    assert config.model("llama/qwen3.6-27b").vram_mib == 10 * 1024


def test_a_variable_adds_keys_and_whole_sections() -> None:
    config = parsed({"SWAPPER__POLICY__DRAIN__BATCH": "5m", "SWAPPER__LISTEN": "0.0.0.0:80"})
    assert config.policy.drain.batch_ms == 300_000
    assert config.listen == ("0.0.0.0", 80)


def test_the_values_of_variables_are_yaml() -> None:
    environ = {
        "SWAPPER__TENANTS__LLAMA__MODELS__QWEN3_6_27B": "{vram: 1GiB, aliases: [a, b]}",
        "SWAPPER__REDIS": "null",
    }
    config = parsed(environ, BASE + "redis: redis://x\n")
    assert config.model("llama/qwen3.6-27b").aliases == ("a", "b")
    assert config.redis is None


def test_a_list_grows_by_its_numbers() -> None:
    environ = {
        "SWAPPER__AUTH__KEYS__0__NAME": "ann",
        "SWAPPER__AUTH__KEYS__0__KEY_ENV": "ANN",
        "SWAPPER__AUTH__KEYS__1": "{name: bob, key_env: BOB}",
        "ANN": "a",
        "BOB": "b",
    }
    assert [key.name for key in parsed(environ).keys] == ["ann", "bob"]


def test_a_whole_configuration_may_come_from_the_environment() -> None:
    assert parsed({"SWAPPER__CARDS__GPU0__VRAM": "8GiB"}, "").spec().cards["gpu0"].total_mib == 8192


def test_a_wrong_value_is_told_with_the_name_of_its_variable() -> None:
    assert problems({"SWAPPER__CARDS__GPU0__PROBE": "nvmll"}) == [
        "SWAPPER__CARDS__GPU0__PROBE: cards.gpu0.probe: 'nvmll' is not one of nvml, amdgpu, unified, declared;"
        " did you mean nvml?"
    ]


def test_a_variable_for_an_unknown_key_is_an_error() -> None:
    (said,) = problems({"SWAPPER__LISTN": "x:1"})
    assert said == "SWAPPER__LISTN: listn: unknown key; did you mean listen?"


@pytest.mark.parametrize(
    ("variable", "said"),
    [
        ("SWAPPER__CARDS__GPU0__VRAM__X", "cards.gpu0.vram has a value, not keys"),
        ("SWAPPER__CARDS__", "write it as SWAPPER__SECTION__KEY"),
        ("SWAPPER__NOTIFY__\u00b2", "\u00b2 must be a number from 0 to 1 here"),
        ("SWAPPER__NOTIFY__5", "5 must be a number from 0 to 1 here"),
    ],
)
def test_a_variable_that_fits_nowhere_is_an_error(variable: str, said: str) -> None:
    assert problems({variable: "1"}, BASE + "notify: [a]\n") == [f"{variable}: {said}"]


def test_variables_with_one_underscore_are_not_configuration() -> None:
    assert parsed({"SWAPPER_URL": "http://x", "SWAPPER_KEY": "k"}).redis is None


def test_a_password_for_the_store_may_come_from_the_environment() -> None:
    assert parsed({"SWAPPER__REDIS": "redis://:pw@x"}).redis == "redis://:pw@x"


KEYS = "auth: {keys: [{name: ann, key_env: ANN_KEY, scopes: [models], classes: [normal], default_class: normal}]}\n"


def test_a_key_is_resolved_from_its_variable_and_hides_its_secret() -> None:
    (key,) = parsed({"ANN_KEY": "s3cret"}, BASE + KEYS).keys
    assert key == ApiKey("ann", "s3cret", frozenset({"models"}), frozenset({WorkClass.NORMAL}), WorkClass.NORMAL)
    assert "s3cret" not in repr(key)


def test_a_key_is_resolved_from_a_file_beside_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "ops.key").write_text("from-file\n")
    text = BASE + "auth: {keys: [{name: ops, key_file: ops.key, scopes: [admin]}]}\n"
    (key,) = parsed({}, text, tmp_path).keys
    assert key.secret == "from-file"


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("{name: a, key_env: NOPE}", "auth.keys.0.key_env: the environment variable NOPE is not set"),
        ("{name: a, key_file: /nonexistent}", "auth.keys.0.key_file: /nonexistent cannot be read"),
        ("{name: a}", "auth.keys.0: a needs either key_env or key_file"),
        ("{name: a, key: s3cret}", "auth.keys.0.key: unknown key; a secret is never written here"),
        ("{name: a, key_env: A, scopes: [root]}", "'root' is not one of models, leases, admin"),
        ("{name: a, key_env: A, classes: [fast]}", "'fast' is not one of interactive, normal, batch, maintenance"),
        ("{name: a, key_env: A, classes: [batch], default_class: normal}", "normal is not among its classes"),
        ("{name: a, key_env: A}, {name: b, key_env: A}", "b has the same secret as another key"),
        ("{name: a, key_env: A}, {name: a, key_env: B}", "'a' is the name of another key"),
    ],
)
def test_a_wrong_key_is_told_without_its_secret(entry: str, said: str) -> None:
    found = "\n".join(problems({"A": "aaa", "B": "bbb"}, BASE + f"auth: {{keys: [{entry}]}}\n"))
    assert said in found
    assert "aaa" not in found


def test_the_key_of_a_server_must_be_in_the_environment() -> None:
    (said,) = problems({}, BASE.replace("slot_dir", "api_key_env: LLAMA_KEY\n    slot_dir"))
    assert "tenants.llama.api_key_env: the environment variable LLAMA_KEY is not set" in said
