"""Finding, reading and judging swapper.yaml: the way in from a path and an environment to a `Config`.

Invariant: whatever is wrong comes out as one ConfigError that lists every problem with its line. Reads the file, the
preset and the secrets it names; writes nothing.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from swapper.config.checks import LATER_SECTIONS, check
from swapper.config.config import Config
from swapper.config.keys import resolve_keys
from swapper.config.recipients import resolve_recipients
from swapper.config.schema import Document
from swapper.config.source import PREFIX, Source, read
from swapper.config.yamltext import Loc
from swapper.errors import ConfigError
from swapper.wrong import wrong

SEARCH = ("swapper.yaml", "~/.config/swapper/swapper.yaml", "/etc/swapper/swapper.yaml")
WHERE = ("listen", "state_dir", "auth")
"""The sections that tell where a serve is and how to be let in."""
_HINTS = {
    "key": "a secret is never written here; name it with key_env or key_file",
    "api_key": "a secret is never written here; name its environment variable with api_key_env",
    "stripParams": "here it is called strip",
    "setParams": "here it is called set",
    "setParamsByID": "here it is called by_name",
}


def load(
    path: Path | None, environ: Mapping[str, str], *, judge: bool = True, only: Collection[str] | None = None
) -> Config:
    """Read the configuration at `path`, or the first that exists of ./swapper.yaml, ~/.config/swapper and /etc/swapper.

    Without any file the environment alone may give it (`SWAPPER__CARDS__...`). `judge` False is for who only wants to
    find something in it: each key must be known and each value right, but the sections are not judged together, and
    keys whose secrets cannot be had here are left out. `only` are the sections that matter: of the others no
    more than their names is looked at.

    Raises ConfigError with every problem found, each as `file:line: path: what (and what to do)`.
    """
    found = path if path is not None else find(environ)
    if found is None:
        if not any(name.startswith(PREFIX) for name in environ):
            raise ConfigError([f"no configuration: none of {', '.join(SEARCH)} exists; give one with -c FILE"])
        return loads("", folder=Path.cwd(), environ=environ, name="environment", judge=judge, only=only)
    try:
        text = found.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError([f"{found}: not UTF-8 text (byte {error.start})"]) from None
    except OSError as error:
        raise ConfigError([f"{found}: cannot be read: {error.strerror or error}"]) from None
    folder, whole = found.absolute().parent, found.absolute()
    return loads(text, folder=folder, environ=environ, name=str(found), path=whole, judge=judge, only=only)


def find(environ: Mapping[str, str]) -> Path | None:
    """The first file of the search that exists."""
    for name in SEARCH:
        candidate = Path(environ.get("HOME", "/nonexistent")) / name[2:] if name.startswith("~/") else Path(name)
        if candidate.is_file():
            return candidate
    return None


def loads(
    text: str,
    *,
    folder: Path,
    environ: Mapping[str, str],
    name: str = "swapper.yaml",
    path: Path | None = None,
    judge: bool = True,
    only: Collection[str] | None = None,
) -> Config:
    """A `Config` from YAML text; `folder` (absolute) is what relative paths in it are relative to.

    Raises ConfigError as `load` does.
    """
    source = read(text, name, environ)
    if only is not None:
        others = Document.model_fields.keys() - only
        source = replace(source, data={k: v for k, v in source.data.items() if k not in others} | {"cards": {}})
    context = {"folder": folder, "home": Path(environ.get("HOME") or "~").expanduser()}
    try:
        document = Document.model_validate(source.data, context=context)
    except ValidationError as error:
        raise ConfigError(_ordered(source, [_problem(detail, source) for detail in error.errors()])) from None
    keys, key_problems = resolve_keys(document.auth, environ)
    if not judge:
        return Config(document=document, folder=folder, path=path, keys=tuple(key for key in keys if key.secret))
    recipients, recipient_problems = resolve_recipients(document.notify, environ)
    found = check(document, source, environ)
    problems = key_problems + recipient_problems + found.problems
    if problems:
        raise ConfigError(_ordered(source, problems))
    notices = tuple(source.problem(loc, said) for loc, said in found.notices)
    return Config(document=document, folder=folder, path=path, keys=keys, recipients=recipients, notices=notices)


def _ordered(source: Source, problems: Iterable[tuple[Loc, str]]) -> list[str]:
    return [source.problem(loc, said) for loc, said in sorted(problems, key=lambda one: source.line(one[0]))]


def _problem(detail: ErrorDetails, source: Source) -> tuple[Loc, str]:
    """One pydantic error as a sentence of ours, with the nearest right word where there is one."""
    loc: Loc = tuple(detail["loc"])
    match detail["type"]:
        case "extra_forbidden":
            return loc, _unknown(loc)
        case "missing":
            return loc, wrong(detail)
        case "literal_error":
            words = [str(word) for word in _literals(_annotation(loc))]
            near = nearest(str(detail["input"]), words)
            return loc, f"{detail['input']!r} is not one of {', '.join(words)}" + near
        case "value_error":
            return loc, wrong(detail)
        case _:
            return loc, wrong(detail) + _given(detail["input"])


def _given(value: object) -> str:
    return "" if isinstance(value, dict | list) else f", not {value!r}" if value is not None else ", not empty"


def _unknown(loc: Loc) -> str:
    key = str(loc[-1])
    owner = _annotation(loc[:-1])
    fields = owner.model_fields.items() if _is_model(owner) else ()
    known = [field.alias or name for name, field in fields if name not in LATER_SECTIONS]
    if key in _HINTS:
        return f"unknown key; {_HINTS[key]}"
    near = nearest(key, known)
    return "unknown key" + (near or f"; known here: {', '.join(known)}")


def nearest(word: str, words: Iterable[str]) -> str:
    """`; did you mean nvml?`, or nothing when no word is near."""
    close = difflib.get_close_matches(word.lower(), list(words), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def _annotation(loc: Loc) -> Any:  # noqa: ANN401
    """The type the schema gives to a path; None where the path leaves the schema."""
    here: Any = Document
    for part in loc:
        here = _stripped(here)
        if _is_model(here):
            fields = {field.alias or name: field for name, field in here.model_fields.items()}
            if part not in fields:
                return None
            here = fields[str(part)].annotation
        elif get_origin(here) in (dict, tuple):
            here = get_args(here)[1 if get_origin(here) is dict else 0]
        else:
            return None
    return _stripped(here)


def _stripped(annotation: Any) -> Any:  # noqa: ANN401
    while get_origin(annotation) in (Annotated, Union, types.UnionType):
        inner = [arg for arg in get_args(annotation) if arg is not type(None)]
        annotation = inner[0]
    return annotation


def _is_model(annotation: object) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _literals(annotation: object) -> tuple[object, ...]:
    return cast("tuple[object, ...]", get_args(annotation)) if get_origin(annotation) is Literal else ()
