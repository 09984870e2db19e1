"""The raw configuration: the file's data with the `SWAPPER__A__B` environment laid over it, and where each came from.

Invariant: `where(path)` names the line or the variable a value came from, for every path in `data`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from swapper.config.yamltext import Loc, YamlProblem, parse
from swapper.errors import ConfigError

PREFIX = "SWAPPER__"
Branch = dict[str, Any] | list[Any]


@dataclass(frozen=True, slots=True)
class Source:
    """`data` is plain dicts, lists and scalars; `lines` are 1-based; `variables` are the environment's overrides."""

    name: str
    data: dict[str, Any]
    lines: dict[Loc, int] = field(default_factory=dict[Loc, int])
    variables: dict[Loc, str] = field(default_factory=dict[Loc, str])

    def line(self, loc: Loc) -> int:
        """Line of the value or of the nearest section around it; 0 for one from the environment."""
        for length in range(len(loc), -1, -1):
            if loc[:length] in self.variables:
                return 0
            if loc[:length] in self.lines:
                return self.lines[loc[:length]]
        return 1

    def where(self, loc: Loc) -> str:
        """`swapper.yaml:12`, or the environment variable."""
        for length in range(len(loc), 0, -1):
            if loc[:length] in self.variables:
                return self.variables[loc[:length]]
            if loc[:length] in self.lines:
                break
        return f"{self.name}:{self.line(loc)}"

    def problem(self, loc: Loc, text: str) -> str:
        """One sentence with the place in front: `swapper.yaml:12: cards.gpu0.probe: text`."""
        path = ".".join(str(part) for part in loc)
        return f"{self.where(loc)}: {path}: {text}" if path else f"{self.where(loc)}: {text}"


def read(text: str, name: str, environ: Mapping[str, str]) -> Source:
    """Parse YAML text and lay the environment over it.

    Raises ConfigError: the YAML is broken, a key stands twice, the top level is no mapping, a variable fits nowhere.
    """
    try:
        root, lines = parse(text)
    except YamlProblem as problem:
        raise ConfigError([f"{name}:{problem.line}: {problem}"]) from None
    if root is not None and not isinstance(root, dict):
        raise ConfigError([f"{name}:1: the file must be keys with values, like `cards:`"])
    source = Source(name, cast("dict[str, Any]", root or {}), lines)
    problems = overlay(source, environ)
    if problems:
        raise ConfigError(problems)
    return source


def overlay(source: Source, environ: Mapping[str, str]) -> list[str]:
    """Lay every `SWAPPER__A__B` over `source.data`; gives the problems, an empty list when all fitted.

    A part of the name meets an existing key when they are equal once letter case and signs are ignored
    (`QWEN3_6_27B` meets `qwen3.6-27b`); else it is a new key in lower case. Values are YAML.
    """
    problems: list[str] = []
    for variable in sorted(name for name in environ if name.startswith(PREFIX)):
        parts = variable[len(PREFIX) :].split("__")
        if not all(parts):
            problems.append(f"{variable}: write it as {PREFIX}SECTION__KEY")
            continue
        try:
            _put(source, parts, variable, _value(environ[variable]))
        except ValueError as error:
            problems.append(f"{variable}: {error}")
    return problems


def _value(text: str) -> object:
    try:
        return parse(text)[0]
    except YamlProblem:
        return text


def _put(source: Source, parts: list[str], variable: str, value: object) -> None:
    here: Branch = source.data
    loc: Loc = ()
    for depth, part in enumerate(parts[:-1]):
        key = _key(here, part)
        loc = (*loc, key)
        inside = _get(here, key)
        if inside is None:
            inside = cast("Branch", [] if parts[depth + 1] == "0" else {})
            _set(here, key, inside)
            source.variables[loc] = variable
        if not isinstance(inside, dict | list):
            raise ValueError(f"{'.'.join(map(str, loc))} has a value, not keys")
        here = cast("Branch", inside)
    key = _key(here, parts[-1])
    _set(here, key, value)
    source.variables[(*loc, key)] = variable


def _key(here: Branch, part: str) -> str | int:
    if isinstance(here, list):
        if not re.fullmatch(r"[0-9]{1,9}", part) or int(part) > len(here):
            raise ValueError(f"{part} must be a number from 0 to {len(here)} here")
        return int(part)
    same = [key for key in here if _flat(key) == _flat(part)]
    if len(same) > 1:
        raise ValueError(f"{part} fits both {' and '.join(same)}; set it in the file")
    return same[0] if same else part.lower()


def _get(here: Branch, key: str | int) -> object:
    if isinstance(here, dict):
        return here.get(str(key))
    index = int(key)
    return here[index] if index < len(here) else None


def _set(here: Branch, key: str | int, value: object) -> None:
    if isinstance(here, dict):
        here[str(key)] = value
    elif int(key) == len(here):
        here.append(value)
    else:
        here[int(key)] = value


def _flat(key: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", key.lower())
