"""What a model's entry changes in the bodies of its calls, and what it leaves as it came."""

from __future__ import annotations

import json
from typing import Any

import pytest

from swapper.front import filters_of
from swapper.gateway.filters import Filter, filter_of
from swapper.gateway.form import form_with, parse_form
from swapper.gateway.parse import Ask
from tests.unit.gateway_doubles import ALPHA, CHAT, Served, answer, serve
from tests.unit.test_config import GOOD, parsed, problems

FORM = "multipart/form-data; boundary=edge"
FILTERS = """
        filters:
          strip: "temperature, top_k"
          set: {top_p: 0.9, chat_template_kwargs.enable_thinking: false}
          by_name: {sharp: {top_p: 0.1, stop: [END]}, gpt-4o: {seed: 7}}
"""


def configured(filters: str) -> str:
    return GOOD.replace("aliases: [gpt-4o, chat], default: true}", "aliases: [gpt-4o, chat]}").replace(
        "      qwen3.6-27b: {vram: 19.5GiB, aliases: [gpt-4o, chat]}",
        "      qwen3.6-27b:\n        vram: 19.5GiB\n        aliases: [gpt-4o, chat]" + filters,
    )


def made(body: bytes, *, strip: tuple[str, ...] = (), **put: object) -> bytes:
    found = filter_of(strip, put)
    return body if found is None else found.body(body)


def test_what_is_set_and_what_is_taken_out_changes_and_all_else_keeps_its_bytes() -> None:
    body = b'{"model":"a", "temperature": 1, "messages": [ {"role" : "user","content":"\\u00e9"} ],"top_p":1.50}'
    changed = made(body, strip=("temperature",), seed=3, top_p=0.5)
    assert {*json.loads(changed)} == {"model", "messages", "top_p", "seed"}
    assert b'[ {"role" : "user","content":"\\u00e9"} ]' in changed
    assert json.loads(changed)["top_p"] == 0.5
    assert "temperature" not in json.loads(changed)


@pytest.mark.parametrize("body", [b'{ "model": "a" }', b'{"model": "a", "options": 5}', b'{"model":"a","options":{}}'])
def test_a_body_without_what_is_taken_out_is_the_same_bytes(body: bytes) -> None:
    assert made(body, strip=("temperature", "options.seed")) is body


def test_a_dot_leads_into_an_object_which_is_made_where_there_is_none() -> None:
    put: dict[str, object] = {"a.b.c": 1, "d.e": [True]}
    found = filter_of(("a.gone",), put)
    assert found is not None
    changed = found.body(b'{"a": {"gone": 1, "kept":  2, "b": 3}, "d": 4}')
    assert json.loads(changed) == {"a": {"kept": 2, "b": {"c": 1}}, "d": {"e": [True]}}


def test_a_parameter_is_found_however_its_name_is_written_in_the_json() -> None:
    assert json.loads(made(b'{"te\\u006dperature": 1, "x": 2}', strip=("temperature",))) == {"x": 2}


def test_the_order_is_strip_then_set_then_what_belongs_to_the_name() -> None:
    found = filter_of(("top_p",), {"top_p": 1, "seed": 1}, {"top_p": 2})
    assert found is not None
    assert json.loads(found.body(b'{"top_p": 9}')) == {"top_p": 2, "seed": 1}


def test_of_a_form_fields_are_set_and_taken_out_and_files_stay() -> None:
    part = b'--edge\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n'
    file = b'--edge\r\nContent-Disposition: form-data; name="prompt"; filename="prompt"\r\n\r\n\x00\xff\r\n'
    end = b"--edge--\r\n"
    body = part % (b"model", b"a") + part % (b"temperature", b"1") + part % (b"language", b"de") + file + end
    found = Filter(("temperature", "prompt"), {"language": b'"en"', "vad": b"true"})
    changed = form_with(body, found.form(), FORM)
    assert changed == part % (b"model", b"a") + part % (b"language", b"en") + file + part % (b"vad", b"true") + end
    assert parse_form(changed, FORM) == Ask("a", stream=False)


# ---- in the configuration


def test_a_model_is_called_by_the_names_that_parameters_belong_to_and_each_has_its_own() -> None:
    config = parsed(configured(FILTERS))
    names = config.models()
    assert {name for name, tenant in names.items() if tenant == "llama/qwen3.6-27b"} == {
        *("qwen3.6-27b", "gpt-4o", "chat", "sharp")
    }
    filters = filters_of(config)
    assert filters.keys() == {"qwen3.6-27b", "gpt-4o", "chat", "sharp"}
    sharp = json.loads(filters["sharp"].body(b'{"temperature": 1, "top_k": 2, "x": 1}'))
    assert sharp == {"x": 1, "top_p": 0.1, "chat_template_kwargs": {"enable_thinking": False}, "stop": ["END"]}
    assert json.loads(filters["chat"].body(b"{}")) == {"top_p": 0.9, "chat_template_kwargs": {"enable_thinking": False}}
    assert json.loads(filters["gpt-4o"].body(b"{}"))["seed"] == 7


@pytest.mark.parametrize(
    ("filters", "said"),
    [
        ("strip: [model]", "model stays as it was called"),
        ("set: {model: other}", "model stays as it was called"),
        ("set: {Model: other}", "model stays as it was called"),
        ("by_name: {sharp: {model.x: 1}}", "model stays as it was called"),
        ("set: {a..b: 1}", "'a..b' is no parameter's name"),
        ("set: {x: [{y: .inf}]}", "x must be a value that JSON has"),
        ("stripp: [x]", "unknown key; did you mean strip?"),
        ("setParams: {x: 1}", "unknown key; here it is called set"),
        ("by_name: {small: {x: 1}}", "'small' is already a name of llama/qwen3.6-27b"),
        ("by_name: {small: 7}", "must be a section with keys"),
    ],
)
def test_what_is_no_filter_is_refused_with_what_to_write(filters: str, said: str) -> None:
    [problem] = problems(configured(f"\n        filters: {{{filters}}}\n"))
    assert said in problem


# ---- through the gateway


async def called(served: Served, body: dict[str, Any], path: str = "/v1/chat/completions") -> bytes:
    assert (await served.call(body, path)).status == 200
    return served.upstream.seen[-1].body


async def test_a_call_reaches_its_server_filtered_and_under_its_servers_name() -> None:
    async with serve() as served:
        served.ctx.filters = {"gpt-4o": Filter(("temperature",), {"top_p": b"0.5"})}
        body = {**CHAT, "model": "gpt-4o", "temperature": 2}
        assert json.loads(await called(served, body)) == {**CHAT, "top_p": 0.5}
        assert json.loads(await called(served, {**CHAT, "temperature": 2})) == {**CHAT, "temperature": 2}


async def test_what_goes_to_a_models_own_server_is_not_filtered() -> None:
    async with serve() as served:
        served.ctx.filters = {"alpha": Filter(("temperature",), {"top_p": b"0.5"})}
        body = {**CHAT, "temperature": 2}
        assert json.loads(await called(served, body, "/upstream/alpha/v1/chat/completions")) == body


async def test_a_conversation_is_followed_as_the_server_reads_it() -> None:
    """What is set decides the prompt too: two clients that differ in what is stripped have one conversation."""
    timed = {"timings": {"cache_n": 1, "prompt_n": 20, "predicted_n": 3}}
    async with serve() as served:
        served.upstream.scripts = [answer(timed)]
        served.ctx.filters = {"alpha": Filter(("tools",), {"chat_template_kwargs": b'{"enable_thinking":false}'})}
        for tools in ([], [{"type": "function", "function": {"name": "f"}}]):
            await called(served, {**CHAT, "tools": tools})
        await served.ctx.talks.idle()
        [talk] = served.ctx.talks.index.conversations(ALPHA)
        assert talk.request is not None
        sent = json.loads(talk.request.body)
        assert sent["chat_template_kwargs"] == {"enable_thinking": False}
        assert "tools" not in sent


async def test_a_filter_that_makes_a_call_stream_makes_its_keepalives_too() -> None:
    async with serve() as served:
        served.ctx.filters = {"alpha": Filter((), {"stream": b"true"})}
        await called(served, CHAT)
        assert json.loads(served.upstream.seen[-1].body)["stream"] is True


async def test_a_filter_stays_within_the_budget_of_bodies_and_gives_back_what_it_took() -> None:
    async with serve() as served:
        limit = 200
        served.ctx.budget.limit = limit
        served.ctx.filters = {"alpha": Filter((), {"x": b'"' + b"y" * limit + b'"'})}
        refused = await served.call(CHAT)
        assert (refused.status, refused.error()["code"]) == (429, "body_budget")
        assert served.ctx.budget.used == 0
        served.ctx.budget.limit = 10 * limit
        assert (await served.call(CHAT)).status == 200
        assert served.ctx.budget.used == 0
