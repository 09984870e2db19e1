"""Recipes: what a caller may give, and the command that follows. The caller never sends a command.

Invariant: a value is one argument, or part of one, never more; it is checked by its type before anything is queued. A
path, with its links followed, lies below one of the recipe's roots. No shell is ever asked. `checked` and `problems`
look at the disk (blocking); the rest is pure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PLACE = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")
"""A parameter's place in the words of a command; other braces are what they are."""
OUTPUT = "output"
_RANGE = re.compile(r"(int|number)(?:\s+(-?[0-9.]+)\.\.(-?[0-9.]+))?")
_MOST_TEXT = 4096


class Refused(ValueError):
    """A parameter that a recipe does not take as it is: `name`, and what is wrong with it."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(text)
        self.name = name


@dataclass(frozen=True, slots=True)
class Param:
    """What a parameter may be. `kind`: path | output | int | number | text | choice; None for no bound or default."""

    kind: str
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    default: str | None = None

    @staticmethod
    def of(name: str, text: str) -> Param:
        """From the configuration: `path`, `output`, `int 1..51`, `number`, `text`, `fast|slow`; `= value` is a default.

        A `path` called `output` is one. Raises ValueError with what is understood.
        """
        kind, equals, default = (part.strip() for part in text.partition("="))
        given = default if equals else None
        if kind in ("path", "output", "text"):
            return Param(OUTPUT if kind == "path" and name == OUTPUT else kind, default=given)
        if found := _RANGE.fullmatch(kind):
            low, high = (None if one is None else float(one) for one in found.groups()[1:])
            if low is not None and high is not None and low > high:
                raise ValueError(f"{text!r} is a range without a number in it")
            return Param(found[1], low, high, default=given)
        if "|" in kind:
            return Param("choice", choices=tuple(one.strip() for one in kind.split("|")), default=given)
        raise ValueError(f"{text!r} is none of path, output, int, int 1..51, number, text, or a choice like fast|slow")


@dataclass(frozen=True, slots=True)
class Recipe:
    """A recipe as configured. `vram_mib` None: the whole card. `follows`: ffmpeg's way of telling its progress.

    `env`: what its command gets of swapper's environment beside what every job does, see environment.py.
    """

    name: str
    command: tuple[str, ...]
    params: Mapping[str, Param]
    roots: tuple[Path, ...]
    card: str | None
    vram_mib: int | None
    max_hold_ms: int
    grace_ms: int
    follows: bool = False
    env: tuple[str, ...] = ()

    def checked(self, given: Mapping[str, object]) -> dict[str, str]:
        """Every parameter as it goes into the command, defaults filled in, paths absolute. Raises Refused."""
        for name in given:
            if name not in self.params:
                known = ", ".join(self.params) or "none"
                raise Refused(name, f"is no parameter of {self.name}, which has {known}")
        values: dict[str, object] = {name: param.default for name, param in self.params.items()}
        values |= {name: value for name, value in given.items() if value is not None}
        return {name: _value(name, self.params[name], value, self.roots) for name, value in values.items()}

    def outputs(self, params: Mapping[str, str]) -> dict[str, str]:
        """The files it is to leave, by parameter."""
        return {name: params[name] for name, param in self.params.items() if param.kind == OUTPUT}

    def argv(self, params: Mapping[str, str]) -> tuple[str, ...]:
        """The command with its parameters in place."""
        return tuple(PLACE.sub(lambda found: params.get(found[1], found[0]), word) for word in self.command)


def _value(name: str, param: Param, value: object, roots: tuple[Path, ...], *, now: bool = True) -> str:
    """As it goes into the command; `now` False: what a path needs to be there may come yet. Raises Refused."""
    if value is None:
        raise Refused(name, "is missing")
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise Refused(name, "must be a text or a number")
    text = str(value)
    if "\0" in text or len(text) > _MOST_TEXT:
        raise Refused(name, f"must be at most {_MOST_TEXT} characters, none of them NUL")
    match param.kind:
        case "path" | "output":
            return _path(name, text, roots, output=param.kind == OUTPUT, now=now)
        case "int" | "number":
            return _number(name, param, text)
        case "choice":
            if text not in param.choices:
                raise Refused(name, f"{text!r} is none of {', '.join(param.choices)}")
            return text
        case _:
            if text.startswith("-"):
                raise Refused(name, "must not begin with -, which a program takes for an option")
            return text


def _path(name: str, text: str, roots: tuple[Path, ...], *, output: bool, now: bool) -> str:
    """Absolute, with its links followed; a relative one is below the first root."""
    path = Path(text) if Path(text).is_absolute() else roots[0] / text
    try:
        real = path.resolve(strict=now and not output)
        if not any(real.is_relative_to(root.resolve()) for root in roots):
            raise Refused(name, f"{text} is not below {', '.join(map(str, roots))}")
        if output and real.is_dir():
            raise Refused(name, f"{text} is a folder; name the file")
        if output and now and not real.parent.is_dir():
            raise Refused(name, f"{text}: there is no folder {real.parent}")
    except (OSError, RuntimeError) as error:
        why = error.strerror if isinstance(error, OSError) else "its links lead nowhere"
        where = "" if Path(text).is_absolute() else f" (looked for below {roots[0]}; write its whole path)"
        raise Refused(name, f"{text} cannot be used: {why}{where}") from None
    return str(real)


def _number(name: str, param: Param, text: str) -> str:
    try:
        value = int(text) if param.kind == "int" else float(text)
    except ValueError:
        raise Refused(name, f"{text!r} is no {'whole number' if param.kind == 'int' else 'number'}") from None
    if isinstance(value, float) and not math.isfinite(value):
        raise Refused(name, f"{text!r} is no number")
    low, high = param.low, param.high
    if not (float("-inf") if low is None else low) <= value <= (float("inf") if high is None else high):
        raise Refused(name, f"{text} is not between {low:g} and {high:g}")
    return str(value)


def problems(name: str, command: tuple[str, ...], params: Mapping[str, str], roots: tuple[Path, ...]) -> list[str]:
    """What is wrong with a recipe of the configuration, a sentence each. Follows the links of paths (blocking)."""
    found: list[str] = []
    if not command:
        found.append("needs command: the program and its arguments, a list")
    places = {place for word in command for place in PLACE.findall(word)}
    parsed: dict[str, Param] = {}
    for one, text in params.items():
        try:
            parsed[one] = Param.of(one, text)
        except ValueError as error:
            found.append(f"params.{one}: {error}")
    found += [f"{{{place}}} stands in command and is none of params" for place in sorted(places - params.keys())]
    found += [f"params.{one} is in no place of command; write {{{one}}} there" for one in params if one not in places]
    if command and PLACE.search(command[0]):
        found.append("the program itself may not be a parameter")
    if not roots and any(param.kind in ("path", OUTPUT) for param in parsed.values()):
        found.append("has paths and no roots: the folders they may lie in, like roots: [/srv/media]")
        return found
    for one, param in parsed.items():
        if param.default is not None:
            try:
                _value(one, param, param.default, roots, now=False)
            except Refused as refused:
                found.append(f"params.{one}: its default {param.default!r} is refused: {refused}")
    return found
