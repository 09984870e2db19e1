"""What `swapper check` finds on this machine before it is needed: programs, ports, folders, space."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from swapper.cli.local import relied_on, relied_on_by_recipes
from swapper.config import Config, loads

CARD = "cards: {gpu0: {vram: 24GiB}}\n"


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def configured(folder: Path, text: str) -> Config:
    return loads(CARD + text, folder=folder, environ={})


def said(config: Config) -> list[tuple[bool, str]]:
    return [one for name, entry in config.tenants.items() for one in relied_on(config, name, entry)]


def plain(folder: Path, command: str, snapshots: str = "{}") -> Config:
    (folder / "slots").mkdir(exist_ok=True)
    return configured(
        folder,
        f"""
tenants:
  chat: {{kind: llama-server, control: command, command: {command}, url: 'http://127.0.0.1:8080', slot_dir: slots,
    snapshots: {snapshots}, models: {{med: {{vram: 6GiB}}}}}}
""",
    )


def test_a_command_that_listens_elsewhere_than_its_url_says_is_told(tmp_path: Path) -> None:
    assert said(plain(tmp_path, "[sh, -m, med.gguf, --port, '8080']")) == []
    assert said(plain(tmp_path, "[sh, -m, med.gguf]")) == []
    [(error, text)] = said(plain(tmp_path, "[sh, -m, med.gguf, --port, '8098']"))
    wanted = "its command listens on port 8098, and url is http://127.0.0.1:8080: write the same port in both"
    wanted += ", unless something passes it on"
    assert (error, text) == (False, f"tenants.chat: {wanted}")


@pytest.mark.parametrize(("required", "loss"), [(True, "each lease would fail"), (False, "would come back cold")])
def test_a_slot_folder_without_space_is_told_before_a_lease_fails_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, required: bool, loss: str
) -> None:
    config = plain(tmp_path, "[sh, -m, med.gguf]", f"{{required: {str(required).lower()}}}")

    def full(_: object) -> Usage:
        return Usage(1 << 40, 1 << 40, 300 << 20)

    monkeypatch.setattr(shutil, "disk_usage", full)
    [(error, text)] = said(config)
    assert error is required
    assert "has 300 MiB free, the floor is 512 MiB" in text
    assert loss in text


def test_what_nothing_ever_starts_is_told_with_what_would_start_it(tmp_path: Path) -> None:
    entry = "tenants: {jelly: {kind: none, control: command, command: [sh], card: gpu0, vram: 1GiB%s}}"
    [(error, text)] = said(configured(tmp_path, entry % ""))
    assert (error, "evict: never" in text) == (False, True)
    assert said(configured(tmp_path, entry % ", evict: never")) == []


def test_a_recipe_whose_program_or_root_is_not_here_is_told_before_it_is_submitted(tmp_path: Path) -> None:
    recipe = "recipes: {encode: {command: [%s, '{input}'], params: {input: path}, roots: [%s]}}"
    assert list(relied_on_by_recipes(configured(tmp_path, recipe % ("sh", tmp_path)))) == []
    found = list(relied_on_by_recipes(configured(tmp_path, recipe % ("ffmpg-of-nobody", tmp_path / "absent"))))
    assert [error for error, _ in found] == [True, True]
    assert "ffmpg-of-nobody is not a program" in found[0][1]
    assert f"{tmp_path / 'absent'} is not a folder here" in found[1][1]


def test_a_recipes_program_beside_the_configuration_is_the_one_that_is_started(tmp_path: Path) -> None:
    """A job runs in a folder of its own: what is relative to the file is not relative to that."""
    (tmp_path / "encode.sh").write_text("#!/bin/sh\n")
    (tmp_path / "encode.sh").chmod(0o755)
    recipe = "recipes: {encode: {command: [%s, '{input}'], params: {input: path}, roots: [.]}}"
    config = configured(tmp_path, recipe % "./encode.sh")
    assert list(relied_on_by_recipes(config)) == []
    assert config.recipes()["encode"].command == (str(tmp_path / "encode.sh"), "{input}")
    assert configured(tmp_path, recipe % "sh").recipes()["encode"].command[0] == "sh"
