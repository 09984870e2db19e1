"""A command line of a plain server reads like the one a router gives its child."""

from __future__ import annotations

import pytest

from workers.llama.argv import long_names, serves_one
from workers.llama.fingerprint import Args


@pytest.mark.parametrize(
    ("written", "long"),
    [
        (["-c", "4096"], ["--ctx-size", "4096"]),
        (["-ctk", "q8_0", "-fa", "on"], ["--cache-type-k", "q8_0", "--flash-attn", "on"]),
        (["--ctx_size", "4096"], ["--ctx-size", "4096"]),
        (["-no-kvu"], ["--no-kv-unified"]),
        (["-kvu"], ["--kv-unified"]),
        (["-ngl", "-1", "-m", "x.gguf"], ["--n-gpu-layers", "-1", "--model", "x.gguf"]),
        (["--of-tomorrow", "3"], ["--of-tomorrow", "3"]),
    ],
)
def test_every_option_has_its_long_name(written: list[str], long: list[str]) -> None:
    assert long_names(["llama-server", *written]) == ["llama-server", *long]


def test_a_value_is_never_taken_for_an_option() -> None:
    assert long_names(["-a", "-m"]) == ["--alias", "-m"]


def test_what_decides_over_saved_state_is_found_under_its_short_name() -> None:
    args = Args.of(long_names(["llama-server", "-m", "x", "-np", "2", "-kvu", "-md", "d.gguf", "-mm", "v.gguf"]))
    assert args.kv_unified()
    assert (args.last("--model-draft"), args.last("--mmproj")) == ("d.gguf", "v.gguf")


def test_a_shell_serves_nothing() -> None:
    assert serves_one(long_names(["llama-server", "-hf", "org/model"]))
    assert not serves_one(long_names(["sh", "-c", "llama-server -m x; true"]))
