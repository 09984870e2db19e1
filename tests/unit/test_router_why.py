"""Which lines of llama-server's log say why a model could not be loaded; the logs are of a real one (b10434)."""

from __future__ import annotations

from pathlib import Path

import pytest

from swapper.errors import BackendError
from tests.support.virtual_time import virtual
from workers.llama.events import RouterEvents
from workers.llama.http import Model, RouterHttp, Status
from workers.llama.known import Known
from workers.llama.lifecycle import Lifecycle, Limits
from workers.llama.why import SHOWN, complains, reasons

PORT = "40873"
BEFORE = """\
0.00.347.795 I srv          load:   --port
0.00.347.795 I srv          load:   40873
0.00.347.947 I srv          load:   0.5
[40873] 0.00.039.155 I cmn  common_param: common_params_print_info: verbosity = 3 (adjust with the `-lv N` CLI arg)
[40873] 0.00.039.594 W srv  llama_server: this can be a security risk (cross-origin attacks)
[40873] cmd_child_to_router:state:{"state":"loading","payload":{"stages":["text_model"],"value":0.0}}
"""
AFTER = """\
[40873] 0.00.041.624 I srv    operator(): operator(): cleaning up before exit...
[40873] 0.00.042.034 E srv  llama_server: exiting due to model loading error
0.00.399.088 I srv    operator(): instance name=med exited with status 1
"""
ABSENT = """\
[40873] 0.00.041.264 E gguf_init_from_file: failed to open GGUF file '/m/nope.gguf' (No such file or directory)
[40873] 0.00.041.341 E llama_model_load: error loading model: llama_model_loader: failed to load model from /m/nope.gguf
[40873] 0.00.041.345 E llama_model_load_from_file_impl: failed to load model
[40873] 0.00.041.598 E common_fit_params: encountered an error while trying to fit params to free device memory: failed
[40873] 0.00.041.610 E gguf_init_from_file: failed to open GGUF file '/m/nope.gguf' (No such file or directory)
[40873] 0.00.041.617 E llama_model_load: error loading model: llama_model_loader: failed to load model from /m/nope.gguf
[40873] 0.00.041.617 E llama_model_load_from_file_impl: failed to load model
[40873] 0.00.041.620 E cmn  common_init_: failed to load model '/m/nope.gguf'
[40873] 0.00.041.622 E srv    load_model: failed to load model, '/m/nope.gguf'
"""
QUANTISED = """\
[40873] 0.00.105.714 E llama_init_from_model: quantized V cache requires flash_attn to be enabled
[40873] 0.00.111.344 E llama_init_from_model: quantized V cache requires flash_attn to be enabled
[40873] 0.00.111.346 E cmn  common_init_: failed to create context with model '/m/alpha.gguf'
[40873] 0.00.111.349 E srv    load_model: failed to create_context with model '/m/alpha.gguf'
"""
USAGE = """\
[40873] error while handling argument "--ctx-size": stoi
[40873]
[40873] usage:
[40873] -c,    --ctx-size N                     size of the prompt context (default: 0, 0 = loaded from model)
[40873]                                         (env: LLAMA_ARG_CTX_SIZE)
[40873]
[40873] to show complete usage, run with -h
0.01.991.145 I srv    operator(): instance name=med exited with status 1
"""


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (
            ABSENT + AFTER,
            [
                "gguf_init_from_file: failed to open GGUF file '/m/nope.gguf' (No such file or directory)",
                "llama_model_load: error loading model: llama_model_loader: failed to load model from /m/nope.gguf",
            ],
        ),
        (QUANTISED + AFTER, ["llama_init_from_model: quantized V cache requires flash_attn to be enabled"]),
        (USAGE, ['error while handling argument "--ctx-size": stoi']),
    ],
)
def test_the_lines_that_say_why_stand_once_without_times_and_without_what_every_failure_says(
    said: str, why: list[str]
) -> None:
    assert reasons((BEFORE + said).splitlines(), PORT) == why


def test_of_many_errors_the_first_two_stand_and_the_last_which_may_be_an_assertion() -> None:
    errors = [f"[{PORT}] 0.00.041.264 E part {number}: failed" for number in range(20)]
    last = f"[{PORT}] /src/ggml.c:123: GGML_ASSERT(nread <= state_size) failed"
    found = reasons([*errors, last, f"[{PORT}] #1  0x00007f in ?? ()"], PORT)
    assert found == ["part 0: failed", "part 1: failed", "/src/ggml.c:123: GGML_ASSERT(nread <= state_size) failed"]
    assert len(found) == SHOWN


def test_what_another_model_says_meanwhile_is_not_taken_for_the_reason() -> None:
    other = "[50001] 0.00.041.264 E srv  update_slots: failed to decode"
    assert reasons([*BEFORE.splitlines(), other, *QUANTISED.splitlines()], PORT) == [
        "llama_init_from_model: quantized V cache requires flash_attn to be enabled"
    ]


def test_what_an_earlier_process_on_the_same_port_said_is_over() -> None:
    log = (BEFORE + ABSENT + AFTER + BEFORE + QUANTISED + AFTER).splitlines()
    assert reasons(log, PORT) == ["llama_init_from_model: quantized V cache requires flash_attn to be enabled"]


def test_where_every_failure_says_the_same_the_last_of_it_stands() -> None:
    assert reasons((BEFORE + AFTER).splitlines(), PORT) == ["srv  llama_server: exiting due to model loading error"]


def test_one_that_died_without_a_word_is_shown_with_its_last_line() -> None:
    quiet = f"[{PORT}] 0.00.053.648 I srv    load_model: loading model '/m/med.gguf'"
    assert reasons([*BEFORE.splitlines(), quiet], PORT) == ["srv    load_model: loading model '/m/med.gguf'"]
    assert reasons([], PORT) == []


def test_what_a_child_tells_its_router_is_no_reason() -> None:
    said = BEFORE.splitlines()
    assert reasons(said[-1:], PORT) == []
    assert not complains(said, PORT)
    assert complains((BEFORE + ABSENT).splitlines(), PORT)


class Late:
    """The control of a router that passes its child's words on after it has told of its end."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    async def ensure(self) -> None: ...

    def alive(self) -> bool:
        return True

    def pid(self) -> None: ...

    def log_path(self) -> Path:
        return Path("log")

    async def restart(self, grace_ms: int | None = None) -> None: ...

    def log_tail(self, n: int) -> list[str]:
        del n
        self.looks -= 1
        return [*(BEFORE if self.looks > 0 else BEFORE + ABSENT).splitlines()]


class Told(Known):
    """A model that is told to have failed."""

    async def look(self, name: str) -> Model:
        return Model(name, Status("unloaded", failed=True, exit_code=1), name=name, run=PORT)


@pytest.mark.parametrize(("looks", "why"), [(3, "No such file or directory"), (1000, "cross-origin attacks")])
@virtual
async def test_what_the_router_has_not_yet_passed_on_is_waited_for_a_moment(looks: int, why: str) -> None:
    http = RouterHttp("http://fake")
    events = RouterEvents(http)
    lifecycle = Lifecycle(http, events, Told(http, events), Late(looks), Limits())
    with pytest.raises(BackendError, match=why):
        await lifecycle.loaded("med")
