"""The parts of the demo that need no llama-server: models, preset, finding the server, reading answers, verdict."""

from __future__ import annotations

import hashlib
import json
import shlex
import stat
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import presets
from swapper.cli.demo import TTL_S, what_to_try
from swapper.config import load
from swapper.config.advice import advise
from swapper.demo import server, show, tiny
from swapper.demo.models import SHAPES, make_models, write_preset
from swapper.demo.show import Outcome
from swapper.demo.table import as_json
from swapper.demo.talk import Reading, Turn, story
from swapper.errors import SwapperError

WARM = Turn(text="x", ttft_ms=50.0, cache_n=3_938, prompt_n=29)
COLD = replace(WARM, cache_n=0, prompt_n=3_967, ttft_ms=5_000.0)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_model_is_the_same_bytes_every_time_and_another_name_is_another_model(tmp_path: Path) -> None:
    first = make_models(tmp_path / "a", ["alpha", "beta"])
    again = make_models(tmp_path / "b", ["alpha"])
    assert _digest(first["alpha"]) == _digest(again["alpha"]) != _digest(first["beta"])


def test_fewer_layers_make_a_smaller_model(tmp_path: Path) -> None:
    whole = make_models(tmp_path / "whole", ["alpha"])["alpha"]
    half = make_models(tmp_path / "half", ["alpha"], layers=1)["alpha"]
    assert half.stat().st_size < whole.stat().st_size


def test_an_unknown_model_name_says_which_there_are(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"no model is called alpah; there are {', '.join(SHAPES)}"):
        make_models(tmp_path, ["alpah"])
    assert not list(tmp_path.iterdir())


def test_the_preset_keeps_to_the_processor_and_loses_no_conversation(tmp_path: Path) -> None:
    path = write_preset(tmp_path / "p.ini", {"med": tmp_path / "med.gguf"}, parallel=3, ctx=9_000)
    ini = presets.parse(path.read_text())
    assert not ini.problems
    med = presets.effective(ini, "med", ["--slot-save-path", str(tmp_path), "--metrics"])
    assert not presets.losses(med, slot_dir=tmp_path)
    assert (med.text("device"), med.number("n-gpu-layers"), med.number("parallel"), med.n_ctx) == ("none", 0, 3, 9_000)


def test_where_no_wheel_is_built_the_demo_says_so_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "PROGRAM", "no-such-llama-server")
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    with pytest.raises(SwapperError, match=r"^The demo needs Linux on x86-64.*this is Darwin on arm64\.$"):
        server.find_llama_server()


def test_where_the_wheel_is_missing_the_demo_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "PROGRAM", "no-such-llama-server")
    monkeypatch.setattr("platform.system", lambda: "Linux")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    with pytest.raises(SwapperError, match=r"pip install -e '\.\[demo\]'"):
        server.find_llama_server()


def test_where_gguf_is_missing_the_demo_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(SwapperError, match=r"pip install -e '\.\[demo\]'"):
        make_models(tmp_path, ["alpha"])


@pytest.fixture
def old_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A llama-server on PATH that cannot start, for want of a younger glibc."""
    program = tmp_path / "old-llama-server"
    program.write_text("#!/bin/sh\necho \"version 'GLIBC_2.34' not found\" >&2\nexit 1\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(server, "PROGRAM", program.name)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr("platform.libc_ver", lambda: ("glibc", "2.31"))


@pytest.mark.usefixtures("old_machine")
def test_where_glibc_is_too_old_the_demo_names_both_versions() -> None:
    with pytest.raises(SwapperError, match=r"needs glibc 2\.35 or newer, and this machine has 2\.31"):
        server.find_llama_server()


def test_a_processor_without_avx2_is_named_as_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_processor_flags", lambda: frozenset({"fma", "f16c", "bmi2"}))
    with pytest.raises(SwapperError, match="needs a processor with AVX2; this one lacks AVX2"):
        server.find_llama_server()


def test_an_answer_is_timed_from_its_first_text_and_proved_by_its_last_chunk() -> None:
    reading = Reading()
    for delta in ({"role": "assistant", "content": None}, {}, {"content": "ab"}, {"content": "c"}):
        reading.take(json.dumps({"choices": [{"delta": delta}]}))
    reading.take(json.dumps({"choices": [{"delta": {}}], "timings": {"cache_n": 7, "prompt_n": 2}}))
    reading.take("[DONE]")
    turn = reading.turn()
    assert (turn.text, turn.cache_n, turn.prompt_n, turn.prompt) == ("abc", 7, 2, 9)
    assert turn.ttft_ms > 0


def test_an_answer_that_breaks_off_is_no_answer() -> None:
    reading = Reading()
    reading.take(json.dumps({"choices": [{"delta": {"content": "ab"}}]}))
    with pytest.raises(SwapperError, match="ended before it was complete"):
        reading.turn()


def test_an_error_inside_a_stream_is_passed_on_in_the_servers_words() -> None:
    with pytest.raises(SwapperError, match="the context is full"):
        Reading().take(json.dumps({"error": {"message": "the context is full"}}))


def test_stories_have_the_length_asked_for_and_differ_from_the_first_character() -> None:
    one, two = story(1, 3_900), story(2, 4_100)
    assert (len(one), len(two)) == (3_900, 4_100)
    assert one[0] != two[0]
    assert one.isascii()


def _talk(tokens: int, result: str = "warm") -> dict[str, Any]:
    name = f"{tokens}.kv"
    return {"model": "llama/med", "snapshot": name, "tokens": tokens, "bytes": 9, "strategy": "slots", "result": result}


def _outcome(first: Turn, second: Turn, *talks: dict[str, Any]) -> Outcome:
    back = {"outcome": "done", "conversations": list(talks)}
    lease = {"id": "ls_1", "token": 5}
    return Outcome((first, second), (COLD, COLD), {"outcome": "done"}, back, lease, 400.0, "busy child process")


SECOND = replace(WARM, cache_n=4_138, ttft_ms=60.0)


def test_the_demo_succeeds_only_if_both_are_proved_warm_and_their_answers_agree() -> None:
    assert _outcome(WARM, SECOND, _talk(3_938), _talk(4_138)).ok
    assert not _outcome(WARM, SECOND, _talk(3_938), _talk(4_138, "cold")).ok
    assert not _outcome(WARM, replace(SECOND, cache_n=100, prompt_n=4_067), _talk(3_938), _talk(4_138)).ok
    assert not _outcome(WARM, SECOND, _talk(3_938)).ok
    assert not _outcome(WARM, SECOND).ok


def test_each_turn_is_shown_beside_its_own_conversation_whatever_their_order() -> None:
    result = as_json(_outcome(WARM, SECOND, _talk(4_138), _talk(3_938)), version="b1", seconds=1.0)
    assert [(talk["tokens_saved"], talk["cache_n"]) for talk in result["conversations"]] == [
        (3_938, 3_938),
        (4_138, 4_138),
    ]
    assert result["conversations"][0]["reread_ttft_ms"] == 5_000.0


async def test_without_a_working_ffmpeg_the_media_job_is_a_child_that_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "ffmpeg"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(show, "WORK_S", 0.01)
    assert await show.work() == "busy child process"


async def test_a_media_job_that_can_do_nothing_at_all_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(SwapperError, match="media job failed"):
        await show.work()


def test_what_may_be_tried_by_hand_says_when_the_card_comes_back_and_how_to_give_it_back() -> None:
    lines = what_to_try("http://h:1", "http://h:2", grace_s=40)
    said = " ".join(lines)
    assert f"expires after {TTL_S} s without a heartbeat; 40 s later the model comes back" in said
    assert lines[-1] == "  curl -s -X DELETE 'http://h:1/api/leases/ID?token=TOKEN'"
    bodies = [json.loads(line.rpartition(" -d ")[2].strip("'")) for line in lines if " -d " in line]
    assert [body.get("ttl_s") for body in bodies] == [None, TTL_S]


def test_a_folder_to_try_in_is_one_that_serve_takes_and_its_command_stands_there_for_a_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama = server.LlamaServer(("env", "LD_PRELOAD=/a b.so", "llama-server-vulkan"), "1", portable=True)
    monkeypatch.setattr(tiny, "find_llama_server", lambda: llama)
    folder = tmp_path / "my try"
    said = tiny.lay_out(folder)
    config = load(folder / "swapper.yaml", {})
    assert [str(one) for one in advise(config, {}) if one.error] == []
    assert config.tenants["llama"].command[-1] == str(tiny.PORT)
    assert f"swapper serve -c '{folder / 'swapper.yaml'}'" in said
    assert shlex.split(said.splitlines()[-1]) == [*config.tenants["llama"].command]
    assert (folder / "slots").is_dir()


def test_a_configuration_that_is_there_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "swapper.yaml"
    path.write_text("mine")
    assert tiny.main([str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"Error: {path} is there already; choose another folder, or remove it\n"
    assert path.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [path]
    assert tiny.main([]) == 2
    assert "usage: python -m swapper.demo.tiny FOLDER" in capsys.readouterr().err
