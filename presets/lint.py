"""What is wrong with a preset file that the router's parser lets through, or refuses without a line number.

Invariant: pure over the parsed sections; every finding says what really happens (facts tried on b10434) and the mend.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from presets.finding import Finding, Level
from presets.names import FALSE, TRUE, lookup, suggestion

if TYPE_CHECKING:
    from presets.ini import Entry, IniSection

WHOLE = re.compile(r"-?[0-9]{1,18}")
"""A whole number as llama-server reads one: its own digits only."""
_SOURCES = frozenset({"model", "model-url", "hf-repo", "docker-repo"})
_WHOLE = frozenset({"ctx-size", "parallel", "cache-ram", "batch-size", "ubatch-size", "stop-timeout"})
_DROPPED = frozenset({"host", "port", "api-key", "api-key-file", "ssl-key-file", "ssl-cert-file"})


def lint(sections: Sequence[IniSection]) -> Iterator[Finding]:
    """Every finding of all sections."""
    for section in sections:
        for entry in section.entries:
            yield from _entry(section, entry)
        yield from _twice(section)
        yield from _name(section)
    yield from _source(sections)
    yield from _aliases(sections)


def _entry(section: IniSection, entry: Entry) -> Iterator[Finding]:
    def said(level: Level, code: str, text: str, mend: str) -> Finding:
        return Finding(level, code, text, mend, section.name, entry.line, entry.column)

    option = lookup(entry.key)
    if option is None:
        yield _unknown(section, entry)
        return
    if option.removed:
        better = suggestion(entry.key)
        text = f"{entry.key} was removed from llama-server; the router starts, but the model fails at load"
        yield said(Level.ERROR, "removed-key", text, f"write {better}" if better else "remove it")
    if option.canonical == "dedup-cache-models":
        text = "builds up to b10434 do not know dedup-cache-models and refuse to start with it"
        yield said(Level.WARNING, "newer-key", text, "remove it unless your build is newer")
    if option.canonical in _DROPPED or option.canonical.startswith("models-"):
        text = f"{entry.key} has no effect here, the router drops it"
        yield said(Level.WARNING, "dropped-key", text, "give it on the router's command line")
    if entry.key.startswith("LLAMA_ARG_NO_") and lookup(entry.key[len("LLAMA_ARG_") :]) is None:
        text = f"the router does not read {entry.key} as a no: {entry.value} is taken for {option.canonical} itself"
        yield said(Level.ERROR, "negated-variable", text, f"write {option.canonical} = false")
    if option.flag and entry.value.lower() not in TRUE | FALSE:
        text = f"{entry.value!r} is neither true nor false"
        yield said(Level.ERROR, "bad-value", text, f"write {entry.key} = true or {entry.key} = false")
    if option.canonical in _WHOLE and not _is_whole(entry.value):
        text = f"{entry.key} = {entry.value or '(nothing)'} is not a whole number; the router starts, the model fails"
        yield said(Level.ERROR, "bad-value", text, "write a number")
    if option.canonical == "parallel" and entry.value == "0":
        yield said(Level.ERROR, "bad-value", "with 0 slots the model fails at load", "write 1 or more, or leave it out")
    yield from _value(section, entry)


def _value(section: IniSection, entry: Entry) -> Iterator[Finding]:
    value, cut = entry.value, entry.cut
    open_ended = value.count('"') % 2 or value.count("{") != value.count("}") or value.count("[") != value.count("]")
    if cut is not None and (not cut[0].isspace() or open_ended):
        text = f"{cut.lstrip()[0]!r} starts a comment even inside a value, quotes or not: only {value!r} is left"
        mend = "rename the file" if "/" in value or value.endswith(".gguf") else "keep ; and # out of the value"
        yield Finding(Level.ERROR, "value-cut", text, mend, section.name, entry.line, entry.column)
    elif len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
        text = f"the quotes around {entry.key}'s value are taken as part of it"
        yield Finding(Level.ERROR, "quotes", text, "remove them", section.name, entry.line, entry.column)


def _unknown(section: IniSection, entry: Entry) -> Finding:
    better = suggestion(entry.key)
    mend = f"write {better}" if better else "remove it, or see llama-server --help for the name"
    text = f"{entry.key} is not an option of llama-server, and the router refuses to start with it"
    return Finding(Level.ERROR, "unknown-key", text, mend, section.name, entry.line, entry.column)


def _twice(section: IniSection) -> Iterator[Finding]:
    seen: dict[str, Entry] = {}
    for entry in section.entries:
        option = lookup(entry.key)
        name = option.canonical if option is not None else entry.key
        before = seen.get(name)
        seen[name] = entry
        if before is None:
            continue
        if before.key == entry.key:
            text = f"{entry.key} stands already in line {before.line}; the last one wins"
        else:
            winner = max(before.key, entry.key)
            text = f"{entry.key} and {before.key} (line {before.line}) are one option; {winner} wins in any order"
        yield Finding(Level.WARNING, "key-twice", text, "keep one", section.name, entry.line, entry.column)


def _name(section: IniSection) -> Iterator[Finding]:
    if section.written and section.written != section.name:
        text = f"the router calls this model {section.name!r}"
        yield Finding(
            Level.WARNING, "name", text, "write its tag in capitals everywhere", section.name, section.line, 1
        )
    if section.written != section.written.rstrip():
        text = "the blank before ] belongs to the model's name"
        yield Finding(Level.ERROR, "name", text, "remove it", section.name, section.line, 1)


def _source(sections: Sequence[IniSection]) -> Iterator[Finding]:
    def given(section: IniSection) -> bool:
        options = (lookup(entry.key) for entry in section.entries)
        return any(option is not None and option.canonical in _SOURCES for option in options)

    if any(section.name == "*" and given(section) for section in sections):
        return
    for section in sections:
        if section.name != "*" and not given(section):
            text = "no model or hf-repo, so its server would start as a router itself and stay in loading"
            mend = "write model = FILE"
            if not section.written:
                text = f"keys before the first section make a model named {section.name}, and it has no model file"
                mend = "put them under [*] to make them everybody's defaults"
            yield Finding(Level.ERROR, "no-model", text, mend, section.name, section.line, 1)


def _aliases(sections: Sequence[IniSection]) -> Iterator[Finding]:
    names = {section.name: section.name for section in sections}
    for section in sections:
        for entry in section.entries:
            option = lookup(entry.key)
            if option is None or option.canonical != "alias":
                continue
            for alias in split_aliases(entry.value):
                owner = names.setdefault(alias, section.name)
                if owner != section.name:
                    text = f"alias {alias!r} is already a name of [{owner}], and the router refuses to start"
                    mend = "give it to one of them"
                    yield Finding(Level.ERROR, "alias-clash", text, mend, section.name, entry.line, entry.column)


def split_aliases(value: str) -> tuple[str, ...]:
    """The names in a comma list."""
    return tuple(name.strip() for name in value.split(",") if name.strip())


def _is_whole(value: str) -> bool:
    return WHOLE.fullmatch(value) is not None
