"""A job gets little of swapper's environment: what is needed to run and to find the GPU, and what its recipe names."""

from __future__ import annotations

from pathlib import Path

import pytest

from swapper.config import loads
from swapper.errors import ConfigError
from swapper.jobs.environment import doubts, passed_on
from tests.unit.test_cli import swapper

OURS = {
    "PATH": "/bin",
    "HOME": "/home/ann",
    "LC_TIME": "C",
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    "LD_LIBRARY_PATH": "/opt/cuda",
}
SECRETS = {
    "HF_TOKEN": "x",
    "ANN_KEY": "x",
    "SWAPPER_KEY": "x",
    "SWAPPER__REDIS": "redis://:x@store",
    "NVIDIA_API_KEY": "x",
    "HTTPS_PROXY": "http://ann:x@proxy",
}


def test_of_swappers_environment_only_what_every_command_needs_is_passed_on() -> None:
    assert passed_on(OURS | SECRETS, ()) == OURS


def test_what_a_recipe_names_is_passed_on_or_set() -> None:
    named = ("HF_TOKEN", "OMP_NUM_THREADS=4", "PATH=/usr/bin", "NOT_THERE")
    assert passed_on(OURS | SECRETS, named) == OURS | {"HF_TOKEN": "x", "OMP_NUM_THREADS": "4", "PATH": "/usr/bin"}


def test_a_command_that_reads_what_it_does_not_get_is_told_of() -> None:
    script = "for FILE in $HOME/*; do OUT=$FILE.x; use $FILE ${OUT} $SWAPPER_LEASE ${HF_TOKEN} $i; done"
    (said,) = doubts(("sh", "-c", script), (), OURS)
    assert said == "its command reads $HF_TOKEN, which a job does not get; name it in env: [HF_TOKEN]"
    assert list(doubts(("sh", "-c", script), ("HF_TOKEN",), SECRETS)) == []
    (said,) = doubts(("sh", "-c", script), ("HF_TOKEN",), OURS)
    assert said == "env names HF_TOKEN, which is not set here; where serve has it neither the command runs without it"


TEXT = """
state_dir: state
cards: {{gpu0: {{probe: declared, vram: 8GiB}}}}
recipes:
  say: {{command: [sh, -c, "echo $HF_TOKEN"], env: [{}]}}
"""


@pytest.mark.parametrize("wrong", ["'TWO WORDS'", "1ST", "-x"])
def test_what_is_no_variable_is_refused(tmp_path: Path, wrong: str) -> None:
    with pytest.raises(ConfigError, match="is no variable; write NAME, or NAME=value"):
        loads(TEXT.format(wrong), folder=tmp_path, environ={})


async def test_check_says_what_a_command_will_lack(tmp_path: Path) -> None:
    path = tmp_path / "swapper.yaml"
    path.write_text(TEXT.format("A=1"))
    result = await swapper("check", "-c", str(path))
    assert "warning: recipes.say: its command reads $HF_TOKEN, which a job does not get" in result.stdout
    path.write_text(TEXT.format("HF_TOKEN=x"))
    assert "HF_TOKEN" not in (await swapper("check", "-c", str(path))).stdout
