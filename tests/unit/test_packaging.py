"""A wheel built from the tree and installed elsewhere works like the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from presets import READY_MADE

ROOT = Path(__file__).parents[2]
PACKAGES = ("swapper", "workers", "presets")


def _run(command: Sequence[str], cwd: Path, **env: str) -> str:
    done = subprocess.run(command, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--disable-pip-version-check"]
    _run([*pip, "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT)], folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def elsewhere(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel installed into it."""
    folder = tmp_path_factory.mktemp("elsewhere")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    _run([*pip, "--no-deps", "--target", str(folder), str(wheel)], folder)
    return folder


def files_of_the_tree() -> set[str]:
    found = {path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.is_file()}
    return {str(path.relative_to(ROOT)) for path in found if "__pycache__" not in path.parts}


def test_the_wheel_holds_every_file_of_the_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == files_of_the_tree()


def test_what_is_not_python_is_among_them(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    typed = {f"{package}/py.typed" for package in ("swapper", "workers")}
    assert {"swapper/store/library.lua", "presets/chat.ini", "presets/chat.swapper.yaml", *typed} <= names


def test_the_wheel_carries_its_licence_and_is_called_gpu_swapper(wheel: Path) -> None:
    assert wheel.name.startswith("gpu_swapper-")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert any(name.endswith(".dist-info/licenses/LICENSE") for name in archive.namelist())


@pytest.mark.parametrize("by", ["its script", "python -m"])
def test_the_installed_command_answers_outside_the_checkout(elsewhere: Path, tmp_path: Path, by: str) -> None:
    command = [sys.executable, "-m", "swapper"] if by == "python -m" else [str(elsewhere / "bin" / "swapper")]
    said = _run([*command, "--help"], tmp_path, PYTHONPATH=str(elsewhere))
    for name in ("demo", "serve", "run", "lease", "status", "check"):
        assert name in said


def test_every_installed_command_can_be_asked_for_help(elsewhere: Path, tmp_path: Path) -> None:
    ask = """
from click.testing import CliRunner
from swapper.cli import COMMANDS, cli
for name in COMMANDS:
    result = CliRunner().invoke(cli, [name, "--help"])
    assert result.exit_code == 0, (name, result.output, result.exception)
    assert "Usage:" in result.output, name
"""
    _run([sys.executable, "-c", ask], tmp_path, PYTHONPATH=str(elsewhere))


def test_only_the_demo_needs_what_its_extra_brings(elsewhere: Path, tmp_path: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert not [one for one in project["dependencies"] if one.startswith(("gguf", "numpy"))]
    assert [one for one in extras["demo"] if one.startswith("gguf")]
    assert "gpu-swapper[demo]" in extras["test"]
    ask = """
import importlib, pkgutil, sys
sys.modules["gguf"] = sys.modules["numpy"] = None
for package in ("swapper", "workers", "presets"):
    for found in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)
"""
    _run([sys.executable, "-c", ask], tmp_path, PYTHONPATH=str(elsewhere))


def test_the_installed_packages_find_their_data(elsewhere: Path, tmp_path: Path) -> None:
    ask = """
import presets, swapper, workers
from importlib.resources import files
print(swapper.__file__)
print(workers.__file__)
for name in presets.READY_MADE:
    assert presets.path(name).read_text(), name
    print(presets.path(name))
assert files("swapper.store").joinpath("library.lua").read_text()
"""
    lines = _run([sys.executable, "-c", ask], tmp_path, PYTHONPATH=str(elsewhere)).splitlines()
    assert len(lines) == 2 + len(READY_MADE)
    assert all(line.startswith(str(elsewhere)) for line in lines)
