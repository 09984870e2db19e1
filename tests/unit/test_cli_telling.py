"""What `swapper events` and `swapper swaps` say to people: who, what became of it and why, in columns, and no JSON."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import subprocess
import sys
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from typing import cast

import pytest

from swapper.api.events import frame
from swapper.cli.telling import moves, talks, told, took
from swapper.core.commit import Alert, AlertKind, Commit, Committed
from swapper.core.conversations import Conversation, ProofResult
from swapper.core.jobs import Job
from swapper.core.types import Card, Fault, Gate, Hold, Step, StepOutcome, StepRecord, WorkClass
from tests.support.api import Served, served
from tests.unit.test_api_status import SWAP
from tests.unit.test_cli import swapper

Json = dict[str, object]
ON_DISK = Conversation("llama/med", -1, "b.kv", 900, 9, saved=True, kept=True, reason="on disk: it comes back")
WARM = Conversation("llama/med", 2, "a.kv", 4138, 9, restored=True, result=ProofResult.WARM, cache_n=4100)
COLD = replace(WARM, result=ProofResult.COLD, cache_n=0, reason="slot taken")


@pytest.fixture
async def api() -> AsyncGenerator[Served]:
    async with served() as running:
        yield running


async def after(api: Served, commit: Commit) -> list[tuple[str, Json]]:
    """The type and the after-image, as the API sends it, of each event of a commit."""
    assert await api.store.commit(commit) == Committed()
    images = [frame(event).decode().splitlines() for event in await api.store.events(after="0", limit=99, block_ms=0)]
    return [(kind.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for _, kind, data, _ in images]


async def words(api: Served, commit: Commit) -> list[tuple[str, str, str]]:
    """Who, the state and the text of each event of a commit."""
    said = [told(kind, data) for kind, data in await after(api, commit)]
    return [(one.who, one.state, one.text) for one in said]


@pytest.mark.parametrize(
    ("ms", "text"), [(0, "0 ms"), (999, "999 ms"), (3_870, "3.9 s"), (59_949, "59.9 s"), (59_950, "1 min 0 s")]
)
def test_a_time_has_its_unit(ms: int, text: str) -> None:
    assert took(ms) == text


async def test_a_swap_that_runs_tells_who_moves_for_whom_and_how_long_its_last_step_took(api: Served) -> None:
    saving = StepRecord(Step.DRAIN, "llama/med", 1_900_000_000_000, 1_250, None, StepOutcome.DONE)
    running = replace(SWAP, outcome=None, ended_ms=None, stage=Step.SAVE, steps=(saving,), conversations=())
    [(who, state, text)] = await words(api, Commit(swaps=(running,)))
    assert (who, state) == ("sw_1", "save")
    assert text == "gpu0: llama/med out; drain took 1.2 s (lease ls_1)"


async def test_a_swap_that_ended_tells_its_time_and_what_became_of_the_conversations(api: Served) -> None:
    back = replace(SWAP, from_=("comfyui",), to=("llama/med",), conversations=(WARM, WARM, COLD, ON_DISK))
    [(_, state, text)] = await words(api, Commit(swaps=(back,)))
    assert state == "done"
    became = "in 200 ms, conversations: 2 warm, 1 cold, 1 on disk"
    assert text == f"gpu0: comfyui out, llama/med in; {became} (lease ls_1)"


async def test_a_swap_that_did_not_end_well_says_why(api: Served) -> None:
    [(_, state, text)] = await words(api, Commit(swaps=(replace(SWAP, outcome="fault", reason="pid 7 stays"),)))
    assert (state, text.endswith(", conversations: 1 saved: pid 7 stays (lease ls_1)")) == ("fault", True)


def test_what_is_not_saved_is_not_called_saved_and_nobody_who_moves_is_a_dash() -> None:
    nobody: Json = {"from": [], "to": []}
    unsaved: Json = {"result": None, "reason": None, "saved": False}
    assert (moves(nobody), talks([]), talks([unsaved])) == ("-", "", "1 not saved")


async def test_a_card_tells_what_is_on_it_who_holds_it_and_what_comes_back(api: Served) -> None:
    held = Card("gpu0", holds=(Hold("ls_1", "render", None, None, granted=True),), return_to=("llama/med",))
    [(who, state, text)] = await words(api, Commit(cards=(held,)))
    assert (who, state, text) == ("gpu0", "hold", "no tenant on it; held by ls_1; comes back: llama/med")


async def test_a_card_at_fault_says_why(api: Served) -> None:
    fault = Card("gpu0", fault=Fault("pid 7 (blender) keeps 3 GiB", 1024, 5))
    [(_, state, text)] = await words(api, Commit(cards=(fault,)))
    assert (state, text) == ("fault", "pid 7 (blender) keeps 3 GiB")


async def test_a_gate_tells_what_becomes_of_calls(api: Served) -> None:
    [(who, state, text)] = await words(api, Commit(gates={"llama/med": Gate(3, open=False)}))
    assert (who, state, text) == ("llama/med", "closed", "its calls wait")


async def test_a_conversation_is_told_by_its_model_and_with_what_was_reused_of_it(api: Served) -> None:
    [warm, cold] = await words(api, Commit(conversations=(WARM, COLD)))
    assert warm == ("llama/med", "warm", "4,138 tokens in slot 2, 4,100 reused")
    assert cold == ("llama/med", "cold", "4,138 tokens in slot 2, 0 reused: slot taken")


async def test_an_alert_is_told_by_its_kind_and_its_end_as_over(api: Served) -> None:
    fault = Alert("gpu0", "pid 7 keeps\n3 GiB", kind=AlertKind.FOREIGN_VRAM)
    first, last = await words(api, Commit(alerts=(fault, replace(fault, text="it is gone", over=True))))
    assert first == ("gpu0", "foreign vram", "pid 7 keeps 3 GiB")
    assert last == ("gpu0", "over", "it is gone")


async def test_a_job_is_told_with_its_recipe_and_why_it_failed(api: Served) -> None:
    queued = Job("jb_1", "encode", "ann", WorkClass.NORMAL, "main", 0, "ls_1", {"input": "/a"}, {})
    await api.store.put_job(queued)
    [event] = await api.store.events(after="0", limit=9, block_ms=0)
    data = cast("Json", json.loads(event.data))
    assert told("job", data).text == "encode of ann"
    assert told("job", {**data, "state": "failed", "reason": "exit status 1"}).text == "encode of ann: exit status 1"


async def test_a_lease_is_told_with_what_it_has_and_whose_it_is(api: Served) -> None:
    await swapper("lease", "request", "--label", "encode", "--vram", "12GiB", "--url", api.url)
    last = (await swapper("events", "--url", api.url)).stdout.splitlines()[-1]
    assert last.endswith("  queued     12 GiB of any card, local 'encode'")


@pytest.mark.parametrize("data", [{}, {"id": "x"}, {"id": "x", "state": "new", "text": "two\nlines"}])
@pytest.mark.parametrize("kind", ["lease", "swap", "card", "tenant", "conversation", "job", "alert", "window", "other"])
def test_an_event_of_another_release_is_told_by_what_every_event_has(kind: str, data: Mapping[str, str]) -> None:
    said = told(kind, dict(data))
    assert "\n" not in said.text
    assert said.who == data.get("id", "")
    assert said.text == ("two lines" if "text" in data and kind != "tenant" else "")


async def test_events_stand_in_columns_and_no_line_shows_json(api: Served) -> None:
    request = ("lease", "request", "--label", "one", "--url", api.url)
    await swapper(*request)
    await api.store.commit(Commit(swaps=(SWAP,), cards=(Card("gpu0"),), conversations=(WARM,)))
    lines = (await swapper("events", "--url", api.url)).stdout.splitlines()
    assert len(lines) == 4
    starts = {line.index(state) for line, state in zip(lines, ("queued", "steady", "done ", "warm"), strict=True)}
    assert len(starts) == 1
    assert not [line for line in lines if "{" in line or "null" in line]


async def test_colours_are_for_a_terminal_alone_and_not_where_they_are_not_wanted(api: Served) -> None:
    await api.store.commit(Commit(swaps=(SWAP,)))
    command = [sys.executable, "-m", "swapper", "events", "--url", api.url]

    async def shown(**env: str) -> str:
        return await asyncio.to_thread(_on_a_terminal, command, {**os.environ, **env})

    environ = {"NO_COLOR": ""}
    assert "\x1b[32mdone" in await shown(**environ)
    assert "\x1b" not in await shown(NO_COLOR="1")
    assert "\x1b" not in (await swapper("events", "--url", api.url)).stdout


def _on_a_terminal(command: list[str], env: Mapping[str, str]) -> str:
    main, side = pty.openpty()
    process = subprocess.Popen(command, stdout=side, stdin=subprocess.DEVNULL, env=env)
    os.close(side)
    seen = b""
    try:
        while chunk := os.read(main, 4096):
            seen += chunk
    except OSError:  # the other end is closed
        pass
    finally:
        os.close(main)
        assert process.wait(30) == 0
    return seen.decode()


async def test_the_list_of_swaps_says_who_moved_in_what_time_and_what_came_of_it(api: Served) -> None:
    assert await api.store.commit(Commit(swaps=(replace(SWAP, conversations=(WARM, COLD)),))) == Committed()
    head, line = (await swapper("swaps", "--url", api.url)).stdout.splitlines()
    assert head.split() == ["id", "age", "card", "who", "outcome", "took", "conversations", "cause"]
    assert " ".join(line.split()) == "sw_1 0 s gpu0 llama/med out done 200 ms 1 warm, 1 cold lease ls_1"
