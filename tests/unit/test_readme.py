"""What the READMEs show is true: the configuration is accepted, commands and options exist, and so do tests named."""

from __future__ import annotations

import importlib
import importlib.util
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import click
import pytest

import presets
from presets import RouterOptions, effective, losses, parse
from swapper.cli import COMMANDS
from swapper.config import load, loads
from swapper.config.advice import advise

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
SHOWN = README + (ROOT / "deploy" / "README.md").read_text()


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def _lines() -> list[str]:
    """The lines of its shell blocks, without comments, continued ones joined."""
    blocks = "".join(re.findall(r"^```sh\n(.*?)^```", SHOWN, re.MULTILINE | re.DOTALL)).replace("\\\n", "")
    return [line.partition("#")[0].strip() for line in blocks.splitlines()]


def _commands() -> list[str]:
    inline = re.findall(r"`(swapper [a-z][^`]*)`", SHOWN)
    found = [line.removeprefix("/opt/swapper/bin/") for line in (*_lines(), *inline)]
    return sorted({line for line in found if line.startswith("swapper ")})


def test_the_configuration_it_shows_is_accepted_without_a_notice(tmp_path: Path) -> None:
    path = tmp_path / "swapper.yaml"
    path.write_text("".join(block for block in _blocks("yaml") if "tenants:" not in block or "llama-router" in block))
    (tmp_path / "presets.ini").write_text(_blocks("ini")[0])
    (tmp_path / "ops.key").write_text("secret of ops\n")
    config = load(path, {"HOME": str(tmp_path), "ANN_KEY": "secret of ann"})
    assert config.notices == ()
    assert [key.name for key in config.keys] == ["ann", "ops"]
    assert [str(one) for one in advise(config, {}) if one.error] == []
    assert list(config.spec().tenants) == ["llama/qwen3-32b"]
    assert config.models()["chat"] == "llama/qwen3-32b"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed here")
def test_the_key_file_it_makes_is_read_by_nobody_else(tmp_path: Path) -> None:
    [line] = [line for line in _lines() if "> ops.key" in line]
    subprocess.run(["sh", "-c", f"umask 022; {line}"], cwd=tmp_path, check=True, timeout=30)
    made = tmp_path / "ops.key"
    assert (made.stat().st_mode & 0o777, len(made.read_text().strip())) == (0o600, 32)


def test_the_plain_server_it_shows_is_accepted_and_loses_no_conversation() -> None:
    [block] = [block for block in _blocks("yaml") if "kind: llama-server\n    control: command" in block]
    config = loads(block, folder=Path("/"), environ={"HOME": "/"})
    assert config.notices == ()
    assert [str(one) for one in advise(config, {})] == []
    assert config.models() == {"qwen3-32b": "chat", "chat": "chat"}
    assert config.spec().tenants["chat"].default


def test_the_servers_of_other_kinds_it_shows_are_accepted_without_a_notice() -> None:
    [block] = [block for block in _blocks("yaml") if "kind: ollama" in block]
    config = loads(block, folder=Path("/"), environ={"HOME": "/"})
    assert config.notices == ()
    assert set(config.spec().tenants) == {"ollama/qwen3:8b", "ollama/nomic-embed-text", "big", "speech"}
    assert config.models()["small"] == "ollama/qwen3:8b"


def test_the_containers_units_and_deployments_it_shows_are_accepted_without_a_notice() -> None:
    [block] = [block for block in _blocks("yaml") if "control: kubernetes" in block]
    config = loads(block, folder=Path("/"), environ={"HOME": "/"})
    assert config.notices == ()
    assert set(config.spec().tenants) == {"immich-ml", "triage", "whisper", "frigate", "chat"}
    assert config.models() == {"chat": "chat"}
    assert config.spec().tenants["frigate"].evict_never


def test_what_it_shows_of_needs_is_accepted_without_a_notice() -> None:
    [block] = [block for block in _blocks("yaml") if "on_over" in block]
    config = loads(block, folder=Path("/"), environ={"HOME": "/"})
    assert config.notices == ()
    assert [str(one) for one in advise(config, {}) if one.error] == []
    tenants = config.spec().tenants
    assert [(t.need_from, t.on_over) for t in tenants.values()] == [("unknown", "alert"), ("declared", "restart")]


def test_what_it_shows_of_a_models_entry_is_accepted_without_a_notice() -> None:
    [block] = [block for block in _blocks("yaml") if "filters:" in block]
    config = loads(block, folder=Path("/"), environ={"HOME": "/"})
    assert config.notices == ()
    assert set(config.models()) == {"qwen3-32b", "llama", "chat", "qwen3-32b-fast"}


def test_a_router_started_as_it_shows_loses_no_conversation() -> None:
    [line] = [line for line in _lines() if line.startswith("llama-server ")]
    program, *arguments = shlex.split(line)
    options = effective(parse(_blocks("ini")[0]), "qwen3-32b", arguments, {})
    assert losses(options, RouterOptions.from_args([program, *arguments], {})) == []


@pytest.mark.parametrize("line", _commands())
def test_the_commands_it_shows_can_be_read_as_they_stand(line: str) -> None:
    _, name, *arguments = shlex.split(line)
    command: object = getattr(importlib.import_module(COMMANDS[name][0]), name)
    assert isinstance(command, click.Command)
    while isinstance(command, click.Group) and arguments:
        command = command.commands[arguments.pop(0)]
    if arguments and "CMD..." not in arguments:
        command.make_context(name, arguments)


def test_what_it_points_to_is_there() -> None:
    """Sections by their anchors, files by their paths, ready-made ones by their names."""
    headings = re.findall(r"^#+ (.+)$", README, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    pointed = re.findall(r"\]\((?!http)([^)]+)\)", README)
    assert [one for one in pointed if one.startswith("#") and one[1:] not in anchors] == []
    assert [one for one in pointed if not one.startswith("#") and not (ROOT / one).exists()] == []
    assert set(re.findall(r"`([a-z-]+\.swapper\.yaml)`", README)) == {
        name for name in presets.READY_MADE if name.endswith(".yaml")
    }


def test_modules_it_runs_are_there() -> None:
    named = [words[2] for words in map(str.split, _lines()) if words[:2] == ["python", "-m"]]
    assert "swapper.demo.tiny" in named
    assert [name for name in named if importlib.util.find_spec(name) is None] == []


def test_every_test_the_table_of_promises_names_exists() -> None:
    folder = ROOT / "tests"
    named = re.findall(r"`([a-z0-9_/]+\.py)::(test_\w+)`", (folder / "README.md").read_text())
    assert named
    absent = [(file, test) for file, test in named if f"def {test}(" not in (folder / file).read_text()]
    assert not absent
