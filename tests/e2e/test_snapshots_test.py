"""`swapper snapshots test` on a real server: each strategy proved or not, and everything as it was afterwards."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import cast

import pytest

from tests.e2e.test_conversations import cache_n, said, text
from tests.support.matrix import back, eventually
from tests.support.plain import PlainServe, with_its_own_server
from tests.support.server import KINDS, Json, Server

WARM = {"alpha": {"slots", "rewind", "replay"}, "lfm": {"rewind", "replay"}, "gemma": {"replay"}}
"""What b10434 brings back of each kind of model."""
SERVES = {"OF_SERVE_ALONE": "1"}
"""A variable that serve has and the command has not."""


@pytest.fixture
def plain(tmp_path: Path, models: dict[str, Path]) -> Iterator[Callable[[str], PlainServe]]:
    """Starts a serve over a plain llama-server."""
    with ExitStack() as stack:
        yield lambda model: stack.enter_context(with_its_own_server(tmp_path, models[model], env=SERVES))


def command(server: Server, model: str, *options: str) -> list[str]:
    which = ("-c", str(server.config), "--tokens", "1500")
    return [sys.executable, "-m", "swapper", "snapshots", "test", model, *which, *options]


def tried(
    server: Server, model: str, *options: str, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(server, model, *options), capture_output=True, text=True, timeout=100, env=os.environ | (env or {})
    )


def ours(server: Server) -> list[str]:
    return [path.name for path in server.slot_dir.iterdir() if path.name.startswith("swapper-test-")]


def steady(server: Server) -> None:
    """Whoever was there before is back, and nobody has the card."""
    server.until(
        lambda status: [
            card
            for card in cast("list[Json]", status["cards"])
            if card["phase"] == "steady" and card["residents"] and not status["leases"]
        ]
    )


@pytest.mark.parametrize("model", list(KINDS))
def test_each_strategy_is_tried_and_the_conversations_of_others_come_back(
    serve: Callable[[str], Server], model: str
) -> None:
    server = serve(model)
    first = said(server.chat(model, text(1)))
    result = tried(server, model, "--json")
    assert result.returncode == 0, (result.stdout, result.stderr)
    report = json.loads(result.stdout)
    assert (report["ok"], report["strategy"]) == (True, KINDS[model])
    found = {one["strategy"]: one for one in report["strategies"]}
    assert {name for name, one in found.items() if one["result"] == "warm"} == WARM[model]
    for name in WARM[model]:
        assert found[name]["cache_n"] >= 0.95 * 1500
    assert ours(server) == []
    steady(server)
    if model == "gemma":  # it is read again once nobody calls
        server.until(lambda _: [c for c in cast("list[Json]", server.swaps()[0]["conversations"]) if c["restored"]])
    assert cache_n(server.chat(model, text(1), first.strip()[:-1], "and then?")) >= 0.95 * 1500


def test_a_person_is_shown_a_table_and_a_verdict(serve: Callable[[str], Server]) -> None:
    server = serve("alpha")
    result = tried(server, "alpha")
    assert result.returncode == 0, (result.stdout, result.stderr)
    assert "slots (in use)" in result.stdout
    assert "slots, which is in use, came back warm; warm: slots, rewind, replay" in result.stdout
    assert "loading alpha to restore it (slots)" in result.stderr
    assert result.stderr.count(": loading alpha ") == 5, "as the help and README say"


def test_under_a_lease_of_ones_own_it_takes_no_other_and_leaves_that_one(serve: Callable[[str], Server]) -> None:
    server = serve("alpha")
    lease = server.lease("window", wait=60)
    env = {"SWAPPER_LEASE": str(lease["id"]), "SWAPPER_TOKEN": str(lease["token"])}
    result = tried(server, "alpha", "--json", env=env)
    assert result.returncode == 0, (result.stdout, result.stderr)
    assert server.get(f"/api/leases/{lease['id']}")["state"] == "granted"
    server.until(lambda status: [t for t in cast("list[Json]", status["tenants"]) if t["state"] == "unloaded"])
    server.release(lease)
    steady(server)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_leaves_no_model_no_file_and_no_lease(
    serve: Callable[[str], Server], number: signal.Signals
) -> None:
    server = serve("alpha")
    with subprocess.Popen(command(server, "alpha"), stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        assert any("to restore it (slots)" in line for line in iter(running.stderr.readline, ""))
        assert len(ours(server)) == 2
        running.send_signal(number)
        rest = running.stderr.read()
        assert running.wait(60) == 128 + number, rest
    assert ours(server) == []
    steady(server)


def test_a_card_that_is_not_to_be_had_in_time_is_left_alone(serve: Callable[[str], Server]) -> None:
    server = serve("alpha")
    lease = server.lease("somebody", wait=60)
    result = tried(server, "alpha", "--wait", "1s")
    assert result.returncode == 75, result.stderr
    assert "the wait ran out" in result.stderr
    assert server.get("/api/leases?state=queued")["items"] == []
    server.release(lease)


def test_a_model_that_nobody_knows_is_told_by_name(serve: Callable[[str], Server]) -> None:
    result = tried(serve("alpha"), "beta")
    assert result.returncode == 2
    assert "'beta' is no model of" in result.stderr


@pytest.mark.parametrize("model", list(KINDS))
def test_each_strategy_is_tried_on_a_plain_server_that_is_started_for_it_and_ended(
    plain: Callable[[str], PlainServe], model: str
) -> None:
    server = plain(model)
    first = said(server.chat("chat", text(1)))
    result = tried(server, "alpha", "--json")
    assert result.returncode == 0, (result.stdout, result.stderr)
    report = json.loads(result.stdout)
    assert (report["ok"], report["model"], report["strategy"]) == (True, "chat", KINDS[model])
    found = {one["strategy"]: one for one in report["strategies"]}
    assert {name for name, one in found.items() if one["result"] == "warm"} == WARM[model]
    for name in WARM[model]:
        assert found[name]["cache_n"] >= 0.95 * 1500
    assert ours(server) == []
    steady(server)
    started = server.control.log_path().read_text().count("listening on")
    back_again = [one for one in found.values() if one["restore_ms"] is not None]
    assert started == 4 + len(back_again), "each its own process; to save from, to read anew, before it and after it"
    if model == "gemma":
        server.until(lambda _: [c for c in cast("list[Json]", server.swaps()[0]["conversations"]) if c["restored"]])
    assert cache_n(server.chat("chat", text(1), first.strip()[:-1], "and then?")) >= 0.95 * 1500


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_leaves_no_process_of_a_plain_server(
    plain: Callable[[str], PlainServe], number: signal.Signals
) -> None:
    server = plain("alpha")
    lease = server.lease("window", wait=60)
    env = os.environ | {"SWAPPER_LEASE": str(lease["id"]), "SWAPPER_TOKEN": str(lease["token"])}
    with subprocess.Popen(command(server, "alpha"), stderr=subprocess.PIPE, text=True, env=env) as running:
        assert running.stderr is not None
        assert any("to restore it (slots)" in line for line in iter(running.stderr.readline, ""))
        assert len(ours(server)) == 2
        eventually(server.control.pid, "its process is started again")
        assert server.process().environ().items() >= SERVES.items()
        running.send_signal(number)
        rest = running.stderr.read()
        assert running.wait(60) == 128 + number, rest
    assert server.control.pid() is None
    assert ours(server) == []
    assert server.get(f"/api/leases/{lease['id']}")["state"] == "granted"
    server.release(lease)
    back(server, "chat")


def test_a_plain_server_that_somebody_else_started_is_neither_used_nor_ended(
    plain: Callable[[str], PlainServe],
) -> None:
    server = plain("alpha")
    lease = server.lease("window", wait=60)
    asyncio.run(server.control.ensure())
    process = server.process()
    result = tried(server, "alpha", env={"SWAPPER_LEASE": str(lease["id"]), "SWAPPER_TOKEN": str(lease["token"])})
    assert result.returncode == 1, (result.stdout, result.stderr)
    assert f"the server of chat (process {process.pid}) runs though its card is lent to this test" in result.stderr
    assert server.process() == process
    asyncio.run(server.control.stop())
    server.release(lease)
    back(server, "chat")
