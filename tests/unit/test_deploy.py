"""The files under deploy/ say what the product can do: the unit's commands exist and its limits fit together."""

from __future__ import annotations

import configparser
import importlib
import shlex
from pathlib import Path

import click
import pytest

from swapper.cli import COMMANDS
from swapper.config.units import duration_ms

UNIT = Path(__file__).parents[2] / "deploy" / "swapper.service"


@pytest.fixture
def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, delimiters=("=",), comment_prefixes=("#", ";"))
    parser.optionxform = str  # pyright: ignore[reportAttributeAccessIssue]
    parser.read_string(UNIT.read_text())  # strict: a key given twice is an error
    return parser


def _command(unit: configparser.ConfigParser, key: str) -> tuple[str, click.Context]:
    """The command of a line of the unit, its arguments read as the command itself reads them."""
    program, name, *arguments = shlex.split(unit["Service"][key])
    assert Path(program).name == "swapper"
    command = getattr(importlib.import_module(COMMANDS[name][0]), name)
    assert isinstance(command, click.Command)
    return name, command.make_context(name, arguments)


def test_the_unit_has_the_three_sections_and_is_wanted_at_boot(unit: configparser.ConfigParser) -> None:
    assert unit.sections() == ["Unit", "Service", "Install"]
    assert unit["Install"]["WantedBy"] == "multi-user.target"


def test_it_starts_serve_and_stops_it_with_stop_on_the_same_configuration(unit: configparser.ConfigParser) -> None:
    start, serving = _command(unit, "ExecStart")
    stop, stopping = _command(unit, "ExecStop")
    assert (start, stop) == ("serve", "stop")
    assert serving.params["path"] == stopping.params["path"] == Path("/etc/swapper/swapper.yaml")


def test_stopping_swapper_does_not_kill_the_servers_it_started(unit: configparser.ConfigParser) -> None:
    assert unit["Service"]["KillMode"] == "process"
    assert unit["Service"]["KillSignal"] == "SIGTERM"


def test_systemd_waits_longer_than_the_stop_command_does(unit: configparser.ConfigParser) -> None:
    _, stopping = _command(unit, "ExecStop")
    assert duration_ms(f"{unit['Service']['TimeoutStopSec']}s") > stopping.params["timeout"] * 1000


def test_a_crash_brings_it_back_and_a_stop_does_not(unit: configparser.ConfigParser) -> None:
    assert unit["Service"]["Restart"] == "on-failure"


def test_it_runs_without_privileges_but_reaches_the_gpu(unit: configparser.ConfigParser) -> None:
    service = unit["Service"]
    assert service["User"] == "swapper"
    assert service["NoNewPrivileges"] == "yes"
    assert service["ProtectSystem"] == "strict"
    assert service["CapabilityBoundingSet"] == ""
    assert {"video", "render"} <= set(service["SupplementaryGroups"].split())
    assert "PrivateDevices" not in service, "the GPU's device files would be hidden"
    assert "MemoryDenyWriteExecute" not in service, "CUDA and Vulkan drivers compile at run time"


def test_its_state_folder_is_its_own_and_stays_over_restarts(unit: configparser.ConfigParser) -> None:
    service = unit["Service"]
    assert (service["StateDirectory"], service["StateDirectoryMode"]) == ("swapper", "0700")
    assert service["WorkingDirectory"] == "/var/lib/swapper"
