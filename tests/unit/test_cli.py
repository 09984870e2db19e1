"""The commands that talk to the API, and the table they stand in."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner, Result
from fakeredis import FakeAsyncRedis

from swapper.cli import COMMANDS, cli
from swapper.core.commit import Commit, Committed
from swapper.core.conversations import Conversation, ProofResult
from swapper.core.types import Card, Gate, LeaseState
from tests.support.api import Served, key, served
from tests.unit.test_api_status import HOLDERS, SWAP

CONFIG = """
listen: 127.0.0.1:{port}
state_dir: state
cards: {{gpu0: {{probe: declared, vram: 24GiB}}}}
tenants: {{}}
"""


@pytest.fixture
async def api() -> AsyncGenerator[Served]:
    async with served() as running:
        yield running


async def swapper(*args: str, env: Mapping[str, str | None] | None = None) -> Result:
    """Run a command in a thread, as its own event loop wants it."""
    return await asyncio.to_thread(CliRunner().invoke, cli, list(args), env=env, prog_name="swapper")


def test_help_names_every_command_and_imports_none() -> None:
    code = (
        "import sys\nfrom click.testing import CliRunner\nfrom swapper.cli import cli\n"
        "print(CliRunner().invoke(cli, ['--help']).output)\n"
        "print([m for m in ('aiohttp', 'rich', 'pydantic', 'redis') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert all(f"  {name} " in out for name in COMMANDS)
    assert out.endswith("[]\n")


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "demo"])
async def test_every_command_has_help_with_an_example(name: str) -> None:
    result = await swapper(name, "--help")
    assert result.exit_code == 0
    assert f"Example: swapper {name}" in " ".join(result.output.split())


async def test_a_lease_by_hand(api: Served) -> None:
    env = {"SWAPPER_URL": api.url}
    granting = asyncio.create_task(api.granted_when_queued())
    asked = await swapper("lease", "request", "--card", "gpu0", "--label", "by hand", "--wait", "60s", env=env)
    assert asked.exit_code == 0, asked.output
    lease = await granting
    assert f"{lease} granted on gpu0 (whole card, local) 'by hand'" in asked.output
    shown = await swapper("lease", "show", lease, "--json", env=env)
    token = json.loads(shown.stdout)["token"]
    beaten = await swapper("lease", "heartbeat", lease, "--token", str(token), env=env)
    assert f"{lease} lives until" in beaten.output
    cancelled = await swapper("lease", "cancel", lease, env=env)
    assert cancelled.exit_code == 1
    assert "Error: The lease" in cancelled.stderr
    released = await swapper("lease", "release", lease, env=env)
    assert f"{lease} released" in released.output
    beaten = await swapper("lease", "heartbeat", lease, "--token", str(token), env=env)
    assert (beaten.exit_code, "has ended" in beaten.stderr) == (1, True)
    listed = await swapper("lease", "list", env=env)
    assert "by hand" in listed.output


async def test_a_request_that_is_not_granted_in_time_ends_with_75(api: Served) -> None:
    result = await swapper("lease", "request", "--wait", "50ms", "--json", "--url", api.url)
    assert result.exit_code == 75
    lease = json.loads(result.stdout)
    assert lease["state"] == "queued"
    explained = await swapper("explain", lease["id"], "--url", api.url)
    assert explained.stdout.startswith("queued, number 1: ")
    cancelled = await swapper("lease", "cancel", lease["id"], "--url", api.url)
    assert "cancelled" in cancelled.output


async def test_a_request_whose_lease_fails_ends_with_1_and_its_reason(api: Served) -> None:
    asking = asyncio.create_task(swapper("lease", "request", "--wait", "60s", "--json", "--url", api.url))
    queued = next(iter(await api.store.events(after="0", limit=1, block_ms=20_000)))
    await api.change(queued.subject, LeaseState.FAILED, reason="a conversation could not be saved")
    result = await asking
    assert result.exit_code == 1
    assert json.loads(result.stdout)["state"] == "failed"
    assert result.stderr == "Error: the lease is failed: a conversation could not be saved\n"


async def test_what_is_only_recorded_is_said_to_be(api: Served) -> None:
    said = " ".join((await swapper("lease", "request", "--help")).output.split())
    assert "Recorded; this version does not revoke for it." in said
    assert "recorded, not used yet" in said


async def test_the_status_is_for_people_or_for_programs(api: Served) -> None:
    api.live.cards["gpu0"] = {"total_mib": 24576, "used_mib": 6144, "free_mib": 18432, "holders": HOLDERS}
    api.live.wrong.append("the agent of host main has not reported yet")
    commit = Commit(
        cards=(Card("gpu0", residents=("llama/med",)),), swaps=(SWAP,), gates={"llama/med": Gate(1, open=True)}
    )
    assert await api.store.commit(commit) == Committed()
    shown = await swapper("status", "--url", api.url)
    assert "gpu0: steady, 6 GiB used of 24 GiB" in shown.stdout
    held = "VRAM held by: llama/med; ffmpeg (2) (pid 12), foreign; pid 13, foreign; llama/other, foreign"
    assert held in " ".join(shown.stdout.split())
    assert "1 (4096 tokens)" in shown.stdout
    assert "warning: the agent of host main" in shown.stderr
    programs = await swapper("status", "--json", "--url", api.url)
    assert json.loads(programs.stdout)["cards"][0]["name"] == "gpu0"


async def test_a_conversation_that_stays_on_disk_is_told_without_a_slot_and_with_nothing_but_its_reason(
    api: Served,
) -> None:
    on_disk = Conversation("llama/med", -1, "a.kv", 4138, 9, saved=True, kept=True, reason="on disk: it comes back")
    cold = replace(on_disk, slot=1, result=ProofResult.COLD, reason="its file is gone")
    assert await api.store.commit(Commit(swaps=(replace(SWAP, conversations=(on_disk, cold)),))) == Committed()
    lines = (await swapper("swaps", "sw_1", "--url", api.url)).output.splitlines()[-2:]
    kept, gone = (line.split() for line in lines)
    assert kept == ["llama/med", "4,138", "9", "B", "yes", "no", "on", "disk:", "it", "comes", "back"]
    assert " ".join(gone) == "llama/med 1 4,138 9 B yes no cold: its file is gone"


async def test_a_swap_is_drawn_step_by_step(api: Served) -> None:
    assert "no swaps yet" in (await swapper("swaps", "--url", api.url)).output
    assert await api.store.commit(Commit(swaps=(SWAP,))) == Committed()
    assert "lease ls_1" in (await swapper("swaps", "--url", api.url)).output
    one = await swapper("swaps", "sw_1", "--url", api.url)
    assert "sw_1 on gpu0: done in 200 ms; cause: lease ls_1\n  llama/med out; began 2030-03-17" in one.output
    assert "━" in one.output
    assert one.output.splitlines()[-1].split() == ["llama/med", "0", "4,096", "1", "MiB", "yes", "no"]
    missing = await swapper("swaps", "sw_2", "--url", api.url)
    kept = "one that moved no model is kept only while it runs"
    assert (missing.exit_code, missing.stderr) == (1, f"Error: There is no swap 'sw_2'; {kept}.\n")


async def test_the_event_log_can_be_read_from_any_place(api: Served) -> None:
    for label in ("one", "two"):
        await swapper("lease", "request", "--label", label, "--url", api.url)
    lines = (await swapper("events", "--json", "--url", api.url)).stdout.splitlines()
    first, second = (json.loads(line) for line in lines)
    assert first["data"]["label"] == "one"
    later = await swapper("events", "--since", first["id"], "--url", api.url)
    assert second["data"]["id"] in later.output
    assert first["data"]["id"] not in later.output


@pytest.mark.parametrize("text", ["yesterday", "sw_01J", "1-2-3", "-1"])
async def test_what_is_no_events_id_is_told_with_what_is_one(api: Served, text: str) -> None:
    refused = await swapper("events", "--since", text, "--url", api.url)
    assert refused.exit_code == 2
    said = " ".join(refused.stderr.split())
    assert f"--since: {text!r} is not the id of an event; write one as this command prints it" in said
    assert "or 0 for all that is kept" in said


async def test_who_asks_from_a_place_that_the_log_has_no_more_is_told_where_it_begins(api: Served) -> None:
    for label in ("one", "two", "three"):
        await swapper("lease", "request", "--label", label, "--url", api.url)
    first, second, third = await api.store.events(after="0", limit=3, block_ms=0)
    redis = FakeAsyncRedis(server=api.redis)
    (log,) = await redis.keys("*:events")  # pyright: ignore[reportUnknownMemberType]
    await redis.xtrim(log, minid=third.id, approximate=False)
    await redis.aclose()
    cut = await swapper("events", "--since", first.id, "--url", api.url)
    assert cut.stdout.split()[0] == third.id
    kept = f"the log goes back to {third.id} only"
    assert cut.stderr == f"warning: {kept}; what came between {first.id} and that is not told\n"
    for since in (third.id, "0", "0-0"):
        assert (await swapper("events", "--since", since, "--url", api.url)).stderr == ""
    assert (await swapper("events", "--url", api.url)).stderr == ""
    assert second.id not in cut.stdout


async def test_an_absent_server_is_69_and_one_sentence(unused_tcp_port: int) -> None:
    result = await swapper("status", "--url", f"http://127.0.0.1:{unused_tcp_port}")
    assert result.exit_code == 69
    assert result.stderr.startswith("Error: swapper does not answer at")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("given", "command", "said"),
    [
        (None, ["status"], "A key is needed; give one of the server's with --key or SWAPPER_KEY"),
        ("wrong", ["status"], "This key is not known here; give one of the server's with --key or SWAPPER_KEY"),
        (
            "bob-secret",
            ["snapshots", "prune"],
            "The key 'bob' has no scope 'admin'; give another key with --key or SWAPPER_KEY",
        ),
        ("bob-secret", ["lease", "request"], "The key 'bob' has no scope 'leases'; give another key with"),
    ],
)
async def test_who_has_no_key_or_one_of_too_few_rights_is_told_how_to_give_one(
    given: str | None, command: list[str], said: str
) -> None:
    async with served((key("bob", "models"),)) as api:
        name, *more = command
        env = {"SWAPPER_KEY": given, "SWAPPER_URL": api.url}
        refused = await swapper(name, *more, env=env)
    assert refused.exit_code == 1
    assert f"Error: {said}" in refused.stderr


async def test_server_and_key_come_from_the_configuration(tmp_path: Path) -> None:
    keys = (key("ann", "leases"), key("ops", "admin"))
    async with served(keys) as api:
        config = tmp_path / "swapper.yaml"
        port = api.url.rpartition(":")[2]
        auth = "auth: {keys: [{name: ann, key_env: ANN, scopes: [leases]}, {name: ops, key_env: OPS, scopes: [admin]}]}"
        config.write_text(CONFIG.format(port=port) + auth)
        env = {"ANN": "ann-secret", "OPS": "ops-secret"}
        by_config = await swapper("lease", "request", "--json", "-c", str(config), env=env)
        assert json.loads(by_config.stdout)["owner"] == "ops"
        by_option = await swapper("lease", "request", "--json", "-c", str(config), "--key", "ann-secret", env=env)
        assert json.loads(by_option.stdout)["owner"] == "ann"
        elsewhere = await swapper("status", "-c", str(config), "--url", api.url, env=env)
        assert "A key is needed; give one of the server's with --key or SWAPPER_KEY" in elsewhere.stderr


async def test_a_wrong_configuration_is_2_with_its_line(tmp_path: Path) -> None:
    config = tmp_path / "swapper.yaml"
    config.write_text("listn: 127.0.0.1:9292\n")
    result = await swapper("status", "-c", str(config))
    assert result.exit_code == 2
    assert "swapper.yaml:1: listn" in result.stderr


async def test_check_names_what_fails_and_what_only_costs(tmp_path: Path, unused_tcp_port: int) -> None:
    config = tmp_path / "swapper.yaml"
    config.write_text(
        f"""
listen: 0.0.0.0:9292
state_dir: state
cards: {{gpu0: {{probe: declared, vram: 24GiB}}}}
tenants:
  llama:
    kind: llama-router
    card: gpu0
    url: http://127.0.0.1:{unused_tcp_port}
    slot_dir: slots
    models: {{med: {{vram: 6GiB}}}}
"""
    )
    result = await swapper("check", "-c", str(config))
    assert result.exit_code == 1, result.output
    assert f"error: tenants.llama.url: http://127.0.0.1:{unused_tcp_port}" in result.stdout
    assert "slots is not a folder here" in result.stdout
    assert "warning: listen: 0.0.0.0:9292 without auth.keys" in result.stdout
    programs = await swapper("check", "-c", str(config), "--json")
    assert json.loads(programs.stdout)["ok"] is False


async def test_check_is_content_with_a_sound_configuration(tmp_path: Path) -> None:
    config = tmp_path / "swapper.yaml"
    config.write_text(CONFIG.format(port=9292))
    result = await swapper("check", "-c", str(config))
    assert (result.exit_code, result.stdout) == (0, f"{config}: 0 errors, 0 warnings; 1 card, 0 models\n")


async def test_stop_ends_the_process_that_serves_and_waits_for_it(tmp_path: Path) -> None:
    config = tmp_path / "swapper.yaml"
    config.write_text(CONFIG.format(port=9292))
    none = await swapper("stop", "-c", str(config))
    assert (none.exit_code, "no swapper serve runs" in none.output) == (0, True)
    serving = await asyncio.create_subprocess_exec(sys.executable, "-c", "import signal; signal.pause()")
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "serve.pid").write_text(f"{serving.pid} {psutil.Process(serving.pid).create_time()}\n")
    result = await swapper("stop", "-c", str(config), "--json")
    assert json.loads(result.stdout) == {"stopped": True, "pid": serving.pid}
    assert await serving.wait() == -15


async def test_stop_leaves_a_stranger_with_a_reused_number_alone(tmp_path: Path) -> None:
    config = tmp_path / "swapper.yaml"
    config.write_text(CONFIG.format(port=9292))
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "serve.pid").write_text(f"{os.getpid()} 1000.0\n")
    result = await swapper("stop", "-c", str(config), "--json")
    assert json.loads(result.stdout)["stopped"] is False
