from __future__ import annotations

import pytest

from presets import Level, parse


def codes(text: str) -> list[tuple[str, int | None]]:
    return [(problem.code, problem.line) for problem in parse(text).problems]


def sentences(text: str) -> str:
    return "\n".join(problem.sentence() for problem in parse(text).problems)


def values(text: str, model: str) -> dict[str, str]:
    section = parse(text).section(model)
    assert section is not None
    return {entry.key: entry.value for entry in section.entries}


def test_sections_keys_and_comments_are_read_with_their_places() -> None:
    ini = parse("; top\n\n[*]\nngl = 99\n[a] ; first\n\t # more\nmodel = /m/a.gguf\t; its file\nc=4096\n")
    assert ini.models == ("a",)
    assert ini.problems == ()
    section = ini.section("a")
    assert section is not None
    assert [(entry.key, entry.value, entry.line) for entry in section.entries] == [
        ("model", "/m/a.gguf", 7),
        ("c", "4096", 8),
    ]


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_every_kind_of_line_end_ends_a_line(newline: str) -> None:
    assert values(newline.join(["[a]", "model = x", "c = 1"]), "a") == {"model": "x", "c": "1"}


def test_keys_before_any_section_belong_to_a_model_named_default() -> None:
    ini = parse("version = 1\nmodel = x\n")
    assert ini.models == ("default",)
    assert values("version = 1\nmodel = x\n", "default") == {"model": "x"}


def test_a_version_alone_makes_no_model() -> None:
    assert parse("version = 1\n[a]\nmodel = x\n").models == ("a",)


def test_defaults_meant_for_everybody_but_written_before_any_section_are_told() -> None:
    assert "put them under [*] to make them everybody's defaults" in sentences("c = 512\n[a]\nmodel = x\n")


def test_the_tag_of_a_name_is_upper_cased_as_the_router_does() -> None:
    ini = parse("[org/x:q4_k_m]\nmodel = x\n")
    assert ini.models == ("org/x:Q4_K_M",)
    assert ini.section("org/x:q4_k_m") is ini.section("org/x:Q4_K_M")
    assert codes("[org/x:q4_k_m]\nmodel = x\n") == [("name", 1)]


def test_a_name_may_hold_blanks_but_not_end_with_one() -> None:
    assert parse("[ my model]\nmodel = x\n").problems == ()
    assert parse("[ my model]\nmodel = x\n").models == ("my model",)
    assert codes("[my model ]\nmodel = x\n") == [("name", 1)]


def test_a_section_opened_twice_is_reset_not_merged() -> None:
    text = "[a]\nmodel = x\nalias = b\n[c]\nmodel = y\n[a]\nmodel = z\n"
    assert values(text, "a") == {"model": "z"}
    assert codes(text) == [("section-twice", 6)]
    assert "already opened in line 1, and all it held there is dropped" in sentences(text)


@pytest.mark.parametrize(
    ("line", "column", "said"),
    [
        (" c = 1", 2, "the line starts with a blank"),
        ("\tc = 1", 2, "the line starts with a blank"),
        ("  [b]", 3, "the line starts with a blank"),
        ("c : 1", 1, "`:` does not separate"),
        ("--ctx-size = 1", 1, "a key is written with dashes in front"),
        ("[b] x", 1, "this is not a section's name"),
        ("[b", 1, "this is not a section's name"),
        ("[]", 1, "this is not a section's name"),
        ("[ ]", 1, "this is not a section's name"),
        ("metrics", 1, "this is neither a section nor key = value"),
        ("1c = 2", 1, "this is neither a section nor key = value"),
        ("ключ = 1", 1, "this is neither a section nor key = value"),
    ],
)
def test_a_line_that_fails_the_whole_file_is_told_with_its_place(line: str, column: int, said: str) -> None:
    (problem,) = parse(f"[a]\nmodel = x\n{line}\n").problems
    assert (problem.level, problem.code, problem.line, problem.column) == (Level.ERROR, "syntax", 3, column)
    assert said in problem.text
    assert "the router refuses the whole file" in problem.text


def test_a_byte_order_mark_is_told() -> None:
    assert codes("\ufeff[a]\nmodel = x\n") == [("syntax", 1)]


@pytest.mark.parametrize(
    ("value", "left"),
    [
        ("/m/al#pha.gguf", "/m/al"),
        ('"/m/a;b.gguf"', '"/m/a'),
        ('{"a": 1, #"b": 2}', '{"a": 1,'),
        ('{"sep": ";"}', '{"sep": "'),
    ],
)
def test_a_value_cut_by_a_comment_sign_is_told_with_what_is_left(value: str, left: str) -> None:
    text = f"[a]\nmodel = x\nchat-template-kwargs = {value}\n"
    assert values(text, "a")["chat-template-kwargs"] == left
    assert codes(text) == [("value-cut", 3)]
    assert repr(left) in sentences(text)


def test_a_comment_behind_a_blank_is_only_a_comment() -> None:
    assert codes("[a]\nmodel = x # the small one\n") == []


def test_quotes_are_part_of_the_value() -> None:
    text = '[a]\nmodel = "x.gguf"\n'
    assert values(text, "a") == {"model": '"x.gguf"'}
    assert codes(text) == [("quotes", 2)]


def test_an_equals_sign_may_stand_in_a_value_and_the_value_may_be_missing() -> None:
    assert values("[a]\nmodel = x\not = blk=CPU\ntags =\n", "a") == {"model": "x", "ot": "blk=CPU", "tags": ""}


@pytest.mark.parametrize(
    ("key", "mend"),
    [
        ("ctx", "write ctx-size = N (or c = N)"),
        ("cache_type_k", "write cache-type-k = TYPE (or ctk = TYPE)"),
        ("mtp", "write spec-type = draft-mtp"),
        ("flash_attn", "write flash-attn"),
        ("ctx-sise", "write ctx-size"),
        ("Ctx-Size", "write ctx-size"),
        ("zzzzz", "see llama-server --help"),
    ],
)
def test_an_unknown_key_is_told_with_the_right_one(key: str, mend: str) -> None:
    text = f"[a]\nmodel = x\n{key} = 1\n"
    assert codes(text) == [("unknown-key", 3)]
    assert f"presets.ini:3: [a] {key} is not an option of llama-server" in sentences(text)
    assert mend in sentences(text)


@pytest.mark.parametrize("key", ["c", "ctx-size", "LLAMA_ARG_CTX_SIZE", "ngl", "gpu-layers", "stop-timeout"])
def test_short_long_and_variable_names_are_known(key: str) -> None:
    assert codes(f"[a]\nmodel = x\n{key} = 1\n") == []


def test_a_removed_key_is_told() -> None:
    assert "write spec-draft-n-max = N" in sentences("[a]\nmodel = x\ndraft-max = 4\n")


def test_a_variable_that_says_no_is_told_because_the_router_reads_it_as_yes() -> None:
    text = "[a]\nmodel = x\nLLAMA_ARG_NO_KV_UNIFIED = 1\n"
    assert codes(text) == [("negated-variable", 3)]
    assert "write kv-unified = false" in sentences(text)


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("c = abc", "bad-value"),
        ("c =", "bad-value"),
        ("np = 0", "bad-value"),
        ("metrics = maybe", "bad-value"),
        ("host = 0.0.0.0", "dropped-key"),
        ("models-max = 2", "dropped-key"),
        ("dedup-cache-models = true", "newer-key"),
    ],
)
def test_values_and_keys_the_router_lets_through_are_judged(line: str, code: str) -> None:
    assert codes(f"[a]\nmodel = x\n{line}\n") == [(code, 3)]


def test_one_option_set_twice_is_told_with_the_one_that_wins() -> None:
    said = sentences("[a]\nmodel = x\nctx-size = 1\nc = 2\nngl = 1\nngl = 2\n")
    assert "c and ctx-size (line 3) are one option; ctx-size wins in any order" in said
    assert "ngl stands already in line 5; the last one wins" in said


def test_a_section_without_a_model_is_told_unless_the_defaults_have_one() -> None:
    assert codes("[a]\nc = 1\n") == [("no-model", 1)]
    assert codes("[*]\nhf-repo = o/r\n[a]\nc = 1\n") == []


def test_names_that_clash_are_told() -> None:
    assert codes("[a]\nmodel = x\nalias = p, q\n[b]\nmodel = y\nalias = q\n") == [("alias-clash", 6)]
    assert codes("[a]\nmodel = x\n[b]\nmodel = y\nalias = a\n") == [("alias-clash", 5)]


def test_an_empty_file_is_fine() -> None:
    assert parse("").sections == parse("# nothing\n").problems == ()
