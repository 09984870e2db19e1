"""The digest chain of a request: what shares links, what does not, and what changes nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swapper.gateway import parse
from swapper.gateway.parse import Ask, parse_body
from swapper.snapshots import chain as room
from swapper.snapshots.chain import BLOCK_BYTES, Chain, chain_of

Body = dict[str, Any]
CHAT, ANTHROPIC, TEXT = "/v1/chat/completions", "/v1/messages", "/v1/completions"
EPHEMERAL = {"type": "ephemeral"}


def maybe(body: Body, path: str = CHAT, **how: Any) -> Chain | None:  # noqa: ANN401
    ask = parse_body(json.dumps({"model": "alpha", **body}, **how).encode())
    assert isinstance(ask, Ask)
    assert ask.fields is not None
    return chain_of(path, ask.fields)


def chain(body: Body, path: str = CHAT, **how: Any) -> Chain:  # noqa: ANN401
    found = maybe(body, path, **how)
    assert found is not None
    return found


def said(*texts: str, system: str | None = None) -> Body:
    """A chat in which user and assistant speak in turn."""
    lines = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]
    return {"messages": [*([{"role": "system", "content": system}] if system else []), *lines]}


def shared(one: Chain, other: Chain) -> int:
    return len(set(one.links) & set(other.links))


def test_each_message_is_one_link_and_a_longer_chat_begins_with_the_links_of_the_shorter() -> None:
    short, long = chain(said("a", "b", "c")), chain(said("a", "b", "c", "d", "e"))
    assert len(short.links) == 3
    assert long.links[:3] == short.links
    assert long.id == long.links[-1].hex()


def test_from_a_message_that_differs_on_nothing_is_shared() -> None:
    assert shared(chain(said("a", "b", "c", "d")), chain(said("a", "B", "c", "d"))) == 1


def test_what_stands_in_one_message_is_not_what_stands_in_two() -> None:
    one = chain({"messages": [{"role": "user", "content": "a", "name": "b"}]})
    other = chain({"messages": [{"role": "user", "content": "b", "name": "a"}]})
    assert one.links != other.links


def test_leading_system_messages_are_no_links_but_what_all_links_lie_on() -> None:
    plain, terse, other = chain(said("a")), chain(said("a", system="Be terse.")), chain(said("b", system="Be terse."))
    assert len(terse.links) == 1
    assert shared(plain, terse) == 0
    assert shared(terse, other) == 0


def test_a_system_message_in_the_middle_is_a_link_and_one_alone_as_well() -> None:
    middle = [*said("a", "b")["messages"], {"role": "system", "content": "s"}, {"role": "user", "content": "c"}]
    assert len(chain({"messages": middle}).links) == 4
    assert len(chain({"messages": middle[2:3]}).links) == 1


@pytest.mark.parametrize(
    "shape",
    [
        {"tools": [{"type": "function", "function": {"name": "look"}}]},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "high"},
        {"thinking": {"type": "enabled", "budget_tokens": 100}},
        {"lora": [{"id": 0, "scale": 0.5}]},
    ],
)
def test_what_shapes_the_prompt_before_the_messages_makes_another_chain(shape: Body) -> None:
    assert shared(chain(said("a", "b")), chain(said("a", "b") | shape)) == 0


@pytest.mark.parametrize(
    "aside", [{"temperature": 0.5}, {"max_tokens": 1}, {"stream": True}, {"tool_choice": "none"}, {"tools": None}]
)
def test_what_does_not_shape_the_prompt_changes_nothing(aside: Body) -> None:
    assert chain(said("a", "b") | aside) == chain(said("a", "b"))


def test_white_space_nulls_the_order_of_keys_and_keys_that_are_not_read_change_nothing() -> None:
    plain = chain({"messages": [{"role": "user", "content": "a"}]})
    wide = {"messages": [{"id": 7, "content": "a", "name": None, "role": "user"}]}
    assert chain(wide, indent=3, separators=(" , ", " : ")) == plain


@pytest.mark.parametrize("path", [CHAT, ANTHROPIC])
def test_a_cache_mark_that_moves_to_the_newest_message_leaves_the_older_links_as_they_were(path: str) -> None:
    def marked(text: str) -> list[Body]:
        return [{"type": "text", "text": text, "cache_control": EPHEMERAL}]

    def turn(*texts: str) -> Body:
        body = said(*texts)
        body["messages"][-1]["content"] = marked(texts[-1])
        return body

    assert chain(turn("a", "b", "c"), path).links[:1] == chain(turn("a"), path).links


def test_a_cache_mark_on_a_block_that_is_not_alone_changes_nothing_either() -> None:
    def blocks(**mark: Body) -> Body:
        text, result = {"type": "text", "text": "a"}, {"type": "tool_result", "tool_use_id": "x", "content": "y"}
        return {"messages": [{"role": "user", "content": [text, result | mark]}]}

    assert chain(blocks(cache_control=EPHEMERAL), ANTHROPIC) == chain(blocks(), ANTHROPIC)
    assert chain(blocks(content={"z": 1}), ANTHROPIC) != chain(blocks(), ANTHROPIC)


def test_the_system_prompt_of_the_anthropic_api_is_in_its_seed_without_marks_and_stamps() -> None:
    def system(text: str, **mark: Body) -> Body:
        return said("a") | {"system": [{"type": "text", "text": text, **mark}]}

    stamp = "x-anthropic-billing-header: cc_version=2.1; cch={}; You are"
    plain = chain(system("Be terse."), ANTHROPIC)
    assert plain == chain(system("Be terse.", cache_control=EPHEMERAL), ANTHROPIC)
    assert plain == chain(said("a") | {"system": "Be terse."}, ANTHROPIC)
    assert plain.links != chain(system("Be verbose."), ANTHROPIC).links
    assert chain(system(stamp.format("ab12c")), ANTHROPIC) == chain(system(stamp.format("99999")), ANTHROPIC)
    assert chain(system(stamp.format("ab12c")), ANTHROPIC) != chain(system(stamp.format("99999") + "!"), ANTHROPIC)


def test_the_same_messages_by_another_api_are_another_prompt() -> None:
    assert shared(chain(said("a")), chain(said("a"), ANTHROPIC)) == 0


def test_a_text_is_a_link_for_each_block_and_one_for_the_rest() -> None:
    text = "x" * (2 * BLOCK_BYTES + 7)
    found = chain({"prompt": text}, TEXT)
    assert len(found.links) == 3
    assert found.sizes == (BLOCK_BYTES, 2 * BLOCK_BYTES, 2 * BLOCK_BYTES + 7)
    assert chain({"prompt": text}, "/completion") == found
    assert chain({"prompt": text + "y"}, TEXT).links[:2] == found.links[:2]


@given(st.text(max_size=40), st.text(max_size=40), st.integers(0, 2 * BLOCK_BYTES))
def test_a_text_knows_the_end_of_every_text_that_it_goes_on_from(begin: str, more: str, padding: int) -> None:
    begin = "." * padding + begin
    short, long = chain({"prompt": begin}, TEXT), chain({"prompt": begin + more + "!"}, TEXT)
    block = len(short.links) - 1
    assert begin == "" or short.links[-1] in (*long.links, *long.ends(block))
    assert short.links[-1] not in chain({"prompt": "?" + begin[1:]}, TEXT).ends(block) or begin[:1] in ("", "?")


def test_tokens_are_a_text_as_well_and_one_token_is_not_the_beginning_of_another() -> None:
    short, long = chain({"prompt": [1, 12]}, TEXT), chain({"prompt": [1, 12, 3]}, TEXT)
    assert short.id in {one.hex() for one in long.ends(0)}
    assert short.id not in {one.hex() for one in chain({"prompt": [1, 123]}, TEXT).ends(0)}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/infill", {"prompt": "a"}),
        ("/v1/embeddings", {"input": "a"}),
        (CHAT, {"prompt": "a"}),
        (CHAT, {"messages": []}),
        (TEXT, said("a")),
        (TEXT, {"prompt": ["a", "b"]}),
        (TEXT, {"prompt": [[1], [2]]}),
        (TEXT, {"prompt": {"prompt_string": "a", "multimodal_data": ["b"]}}),
        (TEXT, {"prompt": 7}),
    ],
)
def test_what_is_no_one_conversation_has_no_chain(path: str, body: Body) -> None:
    assert maybe(body, path) is None


@pytest.mark.parametrize("messages", ["hello", 3, {"role": "user"}, ["hello"], [[]], None])
def test_messages_of_the_wrong_type_are_left_to_the_server_and_have_no_chain(messages: object) -> None:
    ask = parse_body(json.dumps({"model": "alpha", "stream": True, "messages": messages}).encode())
    assert isinstance(ask, Ask)
    assert (ask.model, ask.stream) == ("alpha", True)
    assert ask.fields is None or chain_of(CHAT, ask.fields) is None


@pytest.mark.parametrize("content", [["a"], [{"type": "text", "text": "a"}, 3], {"text": "a"}, 3, True])
def test_content_of_any_type_is_taken_as_it_stands(content: object) -> None:
    body = {"messages": [{"role": "user", "content": content}]}
    assert chain(body) == chain(body)
    assert chain(body) != chain(said("a"))


def test_sizes_count_what_lies_before_the_messages_and_never_shrink() -> None:
    found = chain(said("a" * 10, "b" * 100, system="s" * 1000))
    assert found.sizes[0] > 1010
    assert found.sizes[1] - found.sizes[0] > 100
    assert len(found.sizes) == len(found.links)
    assert chain(said("a") | {"tools": [{"name": "n" * 500}]}).sizes[0] > 500


def test_of_a_body_with_very_many_messages_nothing_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    body = json.dumps({"model": "alpha", **said(*"abcdefgh")}).encode()
    monkeypatch.setattr(parse, "MESSAGES", 8)
    assert parse_body(body) == Ask("alpha", stream=False)
    assert getattr(parse_body(body), "fields", 1) is None
    monkeypatch.setattr(room, "MESSAGES", 3)
    assert maybe(said("a", "b")) is not None
    assert maybe(said("a", "b", "c", "d")) is None
