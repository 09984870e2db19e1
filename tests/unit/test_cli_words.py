"""What the commands say and take: helps that are true, durations, ids, and configurations without their secrets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace
from pathlib import Path

import click
import pytest

from swapper.cli import COMMANDS, cli
from swapper.cli.common import SEARCHED, Duration
from swapper.config.load import SEARCH
from swapper.core.commit import Commit, Committed
from swapper.core.types import Demand, LeaseRequest, LeaseState, WorkClass
from tests.support.api import Served, key, served
from tests.unit.test_api_status import SWAP
from tests.unit.test_cli import CONFIG, swapper

AUTH = "auth: {keys: [{name: ann, key_env: ANN, scopes: [leases]}, {name: ops, key_env: OPS, scopes: [admin]}]}\n"


@pytest.fixture
async def api() -> AsyncGenerator[Served]:
    async with served() as running:
        yield running


def _every(command: click.Command, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        for name in command.list_commands(click.Context(command)):
            inner = command.get_command(click.Context(command), name)
            assert inner is not None
            yield from _every(inner, (*path, name))


EVERY = dict(_every(cli, ("swapper",)))


def test_there_is_a_help_for_every_command_of_the_table_and_for_those_below() -> None:
    assert {path[1] for path in EVERY if len(path) > 1} == set(COMMANDS)
    assert ("swapper", "lease", "heartbeat") in EVERY


@pytest.mark.parametrize("path", EVERY, ids=" ".join)
def test_every_help_has_an_example_that_the_command_takes_and_a_word_on_each_option(path: tuple[str, ...]) -> None:
    command = EVERY[path]
    assert command.epilog is not None
    example = command.epilog.partition("Example: ")[2]
    words = example.split()
    assert tuple(words[: len(path)]) == path
    longest = max((other for other in EVERY if tuple(words[: len(other)]) == other), key=len)
    EVERY[longest].make_context(longest[-1], words[len(longest) :])
    options = [one for one in command.params if isinstance(one, click.Option)]
    assert [one.name for one in options if not one.help] == []


def test_the_helps_name_the_places_where_a_configuration_is_searched() -> None:
    assert [place for place in SEARCH if place not in SEARCHED] == []


@pytest.mark.parametrize(("text", "seconds"), [("10", 10.0), ("0.5", 0.5), ("10s", 10.0), ("5m", 300.0), ("0", 0.0)])
def test_a_duration_without_a_unit_is_in_seconds_as_other_commands_take_it(text: str, seconds: float) -> None:
    assert Duration().convert(text, None, None) == seconds


@pytest.mark.parametrize("text", ["ten", "-1", "1.5.2", "10x", "\u0663", ""])
def test_a_wrong_duration_is_told_with_right_ones(text: str) -> None:
    with pytest.raises(click.BadParameter, match=r"10m|unit"):
        Duration().convert(text, None, None)


async def test_a_swap_can_be_explained_too(api: Served) -> None:
    running = replace(SWAP, id="sw_2", outcome=None, ended_ms=None)
    assert await api.store.commit(Commit(swaps=(SWAP, running))) == Committed()
    ended = await swapper("explain", "sw_1", "--url", api.url)
    said = "gpu0: done in 200 ms; cause: lease ls_1; from llama/med to nobody; its steps: swapper swaps sw_1\n"
    assert (ended.exit_code, ended.stdout) == (0, said)
    json_ = await swapper("explain", "sw_2", "--json", "--url", api.url)
    assert json.loads(json_.stdout)["state"] == "vacate"
    assert "gpu0: running: vacate; cause: lease ls_1" in json.loads(json_.stdout)["explain"]


async def test_what_is_no_id_of_a_lease_or_a_swap_is_told_which_ids_there_are(api: Served) -> None:
    result = await swapper("explain", "llama/med", "--url", api.url)
    assert result.exit_code == 2
    assert "'llama/med' is no id of a lease (ls_...) or of a swap (sw_...)" in result.stderr


async def test_one_call_is_not_called_calls_and_an_empty_card_has_nothing_used(api: Served) -> None:
    api.live.cards["gpu0"] = {"total_mib": 24576, "used_mib": 0, "free_mib": 24576, "holders": []}
    waiting = (
        Demand("g1", "llama/med", WorkClass.INTERACTIVE, 1, 0, 5_000),
        Demand("g1", "llama/med", WorkClass.BATCH, 2, 0, 5_000),
    )
    await api.store.beat("g1", waiting, ttl_ms=60_000)
    shown = (await swapper("status", "--url", api.url)).stdout
    assert "1 interactive call: " in shown
    assert "2 batch calls: " in shown
    assert "gpu0: steady, nothing used of 24 GiB" in shown


async def test_a_serve_is_stopped_though_the_secrets_of_its_configuration_are_not_set_here(tmp_path: Path) -> None:
    config = tmp_path / "swapper.yaml"
    config.write_text(CONFIG.format(port=9292) + AUTH)
    result = await swapper("stop", "-c", str(config), env={"ANN": None, "OPS": None})
    assert (result.exit_code, result.stdout) == (0, f"no swapper serve runs with {tmp_path / 'state'}\n")
    config.write_text(CONFIG.format(port=9292) + "policy: {drian: 3}\n")
    of_another_section = await swapper("stop", "-c", str(config))
    assert (of_another_section.exit_code, of_another_section.stdout) == (0, result.stdout)
    config.write_text("state_dri: state\n" + CONFIG.format(port=9292))
    wrong = await swapper("stop", "-c", str(config))
    assert (wrong.exit_code, "did you mean state_dir?" in wrong.stderr) == (2, True)


async def test_a_client_needs_one_key_and_not_every_secret_of_the_configuration(tmp_path: Path) -> None:
    async with served((key("ann", "leases"), key("ops", "admin"))) as api:
        config = tmp_path / "swapper.yaml"
        config.write_text(CONFIG.format(port=api.url.rpartition(":")[2]) + AUTH)
        ask = ("lease", "request", "--json", "-c", str(config))
        none = {"ANN": None, "OPS": None}
        given = await swapper(*ask, "--key", "ann-secret", env=none)
        assert json.loads(given.stdout)["owner"] == "ann"
        had = await swapper(*ask, env={"ANN": "ann-secret", "OPS": None})
        assert json.loads(had.stdout)["owner"] == "ann"
        absent = await asyncio.wait_for(swapper(*ask, env=none), 30)
    assert absent.exit_code == 2
    assert absent.stderr == "a key is needed: give one with --key or SWAPPER_KEY, or set ANN or OPS\n"


async def test_the_event_of_a_lease_that_ended_says_why_it_ended_and_not_how_it_was_granted(api: Served) -> None:
    granting = asyncio.create_task(api.granted_when_queued())
    await swapper("lease", "request", "--wait", "60s", "--url", api.url)
    await api.change(await granting, LeaseState.EXPIRED, reason="no heartbeat for 30 s")
    last = (await swapper("events", "--url", api.url)).stdout.splitlines()[-1]
    assert last.endswith("  expired    no heartbeat for 30 s (all of gpu0, local)")


async def test_the_status_names_the_tenant_whose_lease_it_is(api: Served) -> None:
    request = LeaseRequest("local", card="gpu0", label="comfyui: 2 prompts", holder="comfyui")
    await api.store.enqueue(request, lease_id="ls_RENDER", max_queue=10)
    shown = (await swapper("status", "--url", api.url)).stdout
    assert "ls_RENDER queued on gpu0 (whole card, local) 'comfyui: 2 prompts' for comfyui" in shown
