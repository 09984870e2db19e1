"""How a model's conversations are kept is read from its file first: what a slot file of it would be worth."""

from __future__ import annotations

import pytest

from workers.llama.strategy import Attention, Scalar, attention, strategies


def facts(arch: str, **more: Scalar) -> dict[str, Scalar]:
    own = {f"{arch}.{key.replace('__', '.')}": value for key, value in more.items()}
    return {"general.architecture": arch, f"{arch}.block_count": 4, **own}


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3moe", "deepseek2", "glm4moe", "gemma"])
def test_dense_models_keep_their_slots(arch: str) -> None:
    assert attention(facts(arch)) is Attention.DENSE


@pytest.mark.parametrize("arch", ["gemma3", "gemma3n", "gemma4", "gpt-oss", "cohere2", "an-arch-of-tomorrow"])
def test_whoever_names_a_window_uses_it(arch: str) -> None:
    assert attention(facts(arch, attention__sliding_window=1024)) is Attention.WINDOW


@pytest.mark.parametrize("arch", ["gemma2", "llama4"])
def test_some_have_a_window_without_naming_one(arch: str) -> None:
    assert attention(facts(arch)) is Attention.WINDOW


@pytest.mark.parametrize("arch", ["gemma3", "llama4", "olmo2"])
def test_a_window_of_nothing_is_none(arch: str) -> None:
    assert attention(facts(arch, attention__sliding_window=0)) is Attention.DENSE


def test_the_window_that_phi3_names_is_not_used() -> None:
    assert attention(facts("phi3", attention__sliding_window=262_144)) is Attention.DENSE


@pytest.mark.parametrize("arch", ["mamba", "rwkv7", "qwen3next", "qwen35moe", "falcon-h1", "nemotron_h"])
def test_recurrent_and_hybrid_models_are_known_by_name(arch: str) -> None:
    assert attention(facts(arch)) is Attention.RECURRENT


@pytest.mark.parametrize("key", ["ssm__state_size", "shortconv__l_cache", "wkv__head_size", "kda__head_dim"])
def test_and_those_of_tomorrow_by_their_keys(key: str) -> None:
    assert attention(facts("an-arch-of-tomorrow", **{key: 3})) is Attention.RECURRENT


def test_a_window_beside_a_recurrent_state_is_a_window() -> None:
    both = facts("an-arch-of-tomorrow", ssm__state_size=16, attention__sliding_window=512)
    assert attention(both) is Attention.WINDOW


def test_auto_begins_with_what_is_best_and_falls_back_to_replay() -> None:
    windowed = facts("gemma3", attention__sliding_window=1024)
    assert strategies("auto", facts("llama"), can_save=True) == ("slots", "replay")
    assert strategies("auto", facts("lfm2"), can_save=True) == ("rewind", "replay")
    assert strategies("auto", windowed, can_save=True) == ("replay",)


def test_of_a_file_nobody_can_read_the_slots_are_tried() -> None:
    assert strategies("auto", None, can_save=True) == ("slots", "replay")


@pytest.mark.parametrize("named", ["slots", "rewind", "replay"])
def test_what_is_asked_for_by_name_is_the_only_way(named: str) -> None:
    assert strategies(named, facts("gemma2"), can_save=True) == (named,)


def test_without_files_nothing_is_kept_unless_replay_is_asked_for() -> None:
    assert strategies("auto", facts("llama"), can_save=False) == ()
    assert strategies("slots", facts("llama"), can_save=False) == ()
    assert strategies("replay", facts("llama"), can_save=False) == ("replay",)
    assert strategies("off", facts("llama"), can_save=True) == ()
