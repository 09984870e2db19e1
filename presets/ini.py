"""The preset INI of llama-server's router, read as llama.cpp reads it (not as any INI library would).

Invariant: `parse` accepts exactly the lines that the router's parser accepts; one line it cannot read makes the whole
file fail there, and an error here. Every key keeps its line and column. Pure: text in, value out.
The grammar was tried against a real llama-server b10434: `;` and `#` start a comment anywhere in a value, a leading
space fails, blanks before a section's name are dropped and those after it are kept, a section opened twice is reset.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from presets.finding import Finding, Level
from presets.lint import lint

_EOL = r"[ \t]*(?P<comment>[;#].*)?"
_HEADER = re.compile(r"\[[ \t]*+(?P<name>[^\]]+)\]" + _EOL)
_KEY = re.compile(r"(?P<key>[A-Za-z_][A-Za-z0-9_.-]*)[ \t]*=[ \t]*(?P<value>.*)")
_NOTHING = re.compile(_EOL)
_CUT = re.compile(r"[ \t]*(?P<comment>[;#].*)$|[ \t]+$")
_BREAK = re.compile(r"\r\n|\n|\r")

DEFAULTS = "*"
UNNAMED = "default"


@dataclass(frozen=True, slots=True)
class Entry:
    """One `key = value` as written; `line` and `column` of the key are 1-based, `cut` is the comment that ended it."""

    key: str
    value: str
    line: int
    column: int = 1
    cut: str | None = None


@dataclass(frozen=True, slots=True)
class IniSection:
    """A section. `name` is the model's id as the router calls it (tag in capitals); keys before any: `default`."""

    name: str
    line: int
    entries: tuple[Entry, ...] = ()
    written: str = ""


@dataclass(frozen=True, slots=True)
class Ini:
    """What the router makes of the text: the last opening of each section, in the order first seen, and problems."""

    sections: tuple[IniSection, ...]
    problems: tuple[Finding, ...]

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the models, `[*]` left out."""
        return tuple(section.name for section in self.sections if section.name != DEFAULTS)

    @property
    def errors(self) -> tuple[Finding, ...]:
        """Those problems with which the router, or a model at load, fails."""
        return tuple(problem for problem in self.problems if problem.level is Level.ERROR)

    def section(self, name: str) -> IniSection | None:
        """The section of a model by its id (a tag in any case), or `[*]`."""
        wanted = canonical_model(name)
        return next((section for section in self.sections if section.name == wanted), None)


def parse(text: str) -> Ini:
    """Read a preset file's text; every problem is in the result, nothing is raised."""
    problems: list[Finding] = []
    sections: dict[str, IniSection] = {}
    if text.startswith("\ufeff"):
        said = "the file starts with a byte order mark, and the router refuses it"
        problems.append(Finding(Level.ERROR, "syntax", said, "save it as UTF-8 without one", line=1, column=1))
        text = text[1:]
    current: str | None = None
    for number, line in enumerate(_BREAK.split(text), start=1):
        if _NOTHING.fullmatch(line):
            continue
        header = _HEADER.fullmatch(line)
        if header is not None:
            section = IniSection(canonical_model(header["name"]), number, written=header["name"])
            problems.extend(_reopened(sections.get(section.name), number))
            sections[section.name] = section
            current = section.name
            continue
        entry = _entry(line, number)
        if entry is None:
            problems.append(_unreadable(line, number))
            continue
        if current is None:
            if entry.key == "version":
                continue
            current = UNNAMED
            sections[UNNAMED] = IniSection(UNNAMED, number)
        section = sections[current]
        sections[current] = replace(section, entries=(*section.entries, entry))
    ordered = tuple(sections.values())
    unreadable = any(problem.code == "syntax" for problem in problems)
    found = [*problems, *(one for one in lint(ordered) if not (unreadable and one.code == "no-model"))]
    return Ini(ordered, tuple(sorted(found, key=lambda one: (one.line or 0, one.column or 0))))


def canonical_model(name: str) -> str:
    """The id the router gives a section: a tag after the last `:` is upper-cased."""
    head, colon, tag = name.rpartition(":")
    return f"{head}:{tag.upper()}" if colon else name


def _entry(line: str, number: int) -> Entry | None:
    found = _KEY.fullmatch(line)
    if found is None:
        return None
    raw = found["value"]
    cut = _CUT.search(raw)
    if cut is None:
        return Entry(found["key"], raw, number)
    return Entry(found["key"], raw[: cut.start()], number, cut=raw[cut.start() :] if cut["comment"] else None)


def _reopened(before: IniSection | None, line: int) -> list[Finding]:
    if before is None:
        return []
    said = f"the section was already opened in line {before.line}, and all it held there is dropped"
    return [Finding(Level.ERROR, "section-twice", said, "put its keys together", before.name, line, 1)]


def _unreadable(line: str, number: int) -> Finding:
    body = line.lstrip(" \t")
    column = len(line) - len(body) + 1
    if column > 1 and (_HEADER.fullmatch(body) or _KEY.fullmatch(body)):
        what, mend = "the line starts with a blank", "remove the blank"
    elif body.startswith("-"):
        what, mend = "a key is written with dashes in front", "write the option's name without them"
    elif re.match(r"[A-Za-z_][\w.-]*\s*:", body):
        what, mend = "`:` does not separate a key from its value here", "write key = value"
    elif body.startswith("["):
        what, mend = "this is not a section's name", "write [name], with nothing but a comment behind it"
    else:
        what, mend = "this is neither a section nor key = value", "write key = value (a switch too: metrics = true)"
    said = f"{what}, and with one such line the router refuses the whole file"
    return Finding(Level.ERROR, "syntax", said, mend, line=number, column=column)
