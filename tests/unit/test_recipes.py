"""Recipes: a caller gives values, each one argument; a path stays below the roots, whatever its links say."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from swapper.config import loads
from swapper.errors import ConfigError
from swapper.jobs.recipes import Param, Recipe, Refused, problems

COMMAND = ("ffmpeg", "-i", "{input}", "-vf", "scale=-2:{height}", "-q={quality}", "{output}")
PARAMS = {"input": "path", "output": "path", "height": "480|720 = 720", "quality": "int 1..51 = 23"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    media = (tmp_path / "media").resolve()
    media.mkdir()
    (media / "in.mkv").write_text("x")
    (tmp_path / "secret").write_text("x")
    (media / "out").symlink_to(tmp_path)
    (media / "loop").symlink_to(media / "loop")
    return media


def recipe(root: Path, params: Mapping[str, str] = PARAMS, command: tuple[str, ...] = COMMAND) -> Recipe:
    parsed = {name: Param.of(name, text) for name, text in params.items()}
    return Recipe("encode", command, parsed, (root,), None, None, 3_600_000, 30_000)


def test_each_value_is_one_argument_or_a_part_of_one(root: Path) -> None:
    found = recipe(root)
    params = found.checked({"input": str(root / "in.mkv"), "output": "b c; rm -rf.mp4", "height": 480})
    assert params == {"input": f"{root}/in.mkv", "output": f"{root}/b c; rm -rf.mp4", "height": "480", "quality": "23"}
    words = ("ffmpeg", "-i", f"{root}/in.mkv", "-vf", "scale=-2:480", "-q=23", f"{root}/b c; rm -rf.mp4")
    assert found.argv(params) == words
    assert found.outputs(params) == {"output": f"{root}/b c; rm -rf.mp4"}


def test_braces_that_are_no_parameter_stay_and_a_value_is_not_looked_through_again(root: Path) -> None:
    found = recipe(root, {"text": "text"}, ("say", "{text}", "{}", "%{n}", "{text}{text}"))
    assert found.argv({"text": "{text}"}) == ("say", "{text}", "{}", "%{n}", "{text}{text}")


@pytest.mark.parametrize(
    ("given", "name", "said"),
    [
        ({"output": "b"}, "input", "is missing"),
        ({"input": "in.mkv", "output": "b", "codec": "x"}, "codec", "is no parameter of encode, which has input, out"),
        ({"input": "missing", "output": "b"}, "input", "missing cannot be used: No such file"),
        ({"input": "../secret", "output": "b"}, "input", "../secret is not below"),
        ({"input": "out/secret", "output": "b"}, "input", "out/secret is not below"),
        ({"input": "/etc/passwd", "output": "b"}, "input", "/etc/passwd is not below"),
        ({"input": "loop", "output": "b"}, "input", "cannot be used"),
        ({"input": "in.mkv", "output": "out/b"}, "output", "out/b is not below"),
        ({"input": "in.mkv", "output": "."}, "output", ". is a folder; name the file"),
        ({"input": "in.mkv", "output": "no/b"}, "output", "there is no folder"),
        ({"input": "in.mkv", "output": "b", "height": "481"}, "height", "'481' is none of 480, 720"),
        ({"input": "in.mkv", "output": "b", "quality": "52"}, "quality", "52 is not between 1 and 51"),
        ({"input": "in.mkv", "output": "b", "quality": "4.5"}, "quality", "'4.5' is no whole number"),
        ({"input": "in.mkv", "output": "b", "quality": True}, "quality", "must be a text or a number"),
        ({"input": "in\0.mkv", "output": "b"}, "input", "none of them NUL"),
        ({"input": "x" * 5000, "output": "b"}, "input", "at most 4096 characters"),
        ({"input": "in.mkv", "output": "x" * 300}, "output", "cannot be used: File name too long"),
    ],
)
def test_what_a_recipe_does_not_take_is_named(root: Path, given: dict[str, object], name: str, said: str) -> None:
    with pytest.raises(Refused) as refused:
        recipe(root).checked(given)
    assert refused.value.name == name
    assert said in str(refused.value)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_what_is_no_finite_number_is_no_number(root: Path, value: str) -> None:
    with pytest.raises(Refused, match="is no number"):
        recipe(root, {"speed": "number"}).checked({"speed": value})


def test_a_text_is_no_option(root: Path) -> None:
    found = recipe(root, {"title": "text", "gain": "number -1..1 = 0"}, ("say", "{title}", "{gain}"))
    assert found.checked({"title": "hello", "gain": -0.5}) == {"title": "hello", "gain": "-0.5"}
    with pytest.raises(Refused, match="must not begin with -"):
        found.checked({"title": "--exec"})


@pytest.mark.parametrize(
    ("command", "params", "roots", "said"),
    [
        ((), {}, (), "needs command"),
        (("a", "{b}"), {}, (), "{b} stands in command and is none of params"),
        (("a",), {"b": "text"}, (), "params.b is in no place of command; write {b} there"),
        (("{b}",), {"b": "text"}, (), "the program itself may not be a parameter"),
        (("a", "{b}"), {"b": "path"}, (), "has paths and no roots"),
        (("a", "{b}"), {"b": "file"}, (), "params.b: 'file' is none of path, output, int"),
        (("a", "{b}"), {"b": "int 5..1"}, (), "params.b: 'int 5..1' is a range without a number in it"),
    ],
)
def test_what_is_wrong_with_a_recipe_is_said_when_it_is_read(
    command: tuple[str, ...], params: dict[str, str], roots: tuple[Path, ...], said: str
) -> None:
    assert any(said in problem for problem in problems("encode", command, params, roots))


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("int 1..51 = 52", "its default '52' is refused: 52 is not between 1 and 51"),
        ("int = fast", "its default 'fast' is refused: 'fast' is no whole number"),
        ("number = nan", "its default 'nan' is refused: 'nan' is no number"),
        ("480|720 = 721", "its default '721' is refused: '721' is none of 480, 720"),
        ("text = --exec", "its default '--exec' is refused: must not begin with -"),
        ("path = /etc/passwd", "its default '/etc/passwd' is refused: /etc/passwd is not below"),
        ("path = ../secret", "its default '../secret' is refused: ../secret is not below"),
        ("path = out/secret", "its default 'out/secret' is refused: out/secret is not below"),
        ("output = .", "its default '.' is refused: . is a folder; name the file"),
    ],
)
def test_a_default_that_its_own_type_refuses_is_told_when_the_recipe_is_read(root: Path, kind: str, said: str) -> None:
    (problem,) = problems("encode", ("say", "{b}"), {"b": kind}, (root,))
    assert problem.startswith(f"params.b: {said}")


@pytest.mark.parametrize("kind", ["path = later.mkv", "output = later/b", "int 1..51 = 51", "fast|slow = fast"])
def test_a_default_that_may_be_right_by_the_time_it_is_used_is_taken(root: Path, kind: str) -> None:
    assert problems("encode", ("say", "{b}"), {"b": kind}, (root,)) == []


def test_a_right_one_has_no_problems() -> None:
    assert problems("encode", COMMAND, PARAMS, (Path("/srv"),)) == []


def test_a_configuration_with_a_default_that_is_refused_is_not_read(root: Path) -> None:
    text = f"""
cards: {{gpu0: {{probe: declared, vram: 8GiB}}}}
recipes:
  encode: {{command: [say, "{{b}}"], params: {{b: path = /etc/passwd}}, roots: [{root}]}}
"""
    with pytest.raises(ConfigError, match=r"recipes.encode: params.b: its default '/etc/passwd' is refused"):
        loads(text, folder=root, environ={})
