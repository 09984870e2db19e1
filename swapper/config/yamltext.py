"""YAML 1.2 text to plain dicts, lists and scalars, with the line every key and list entry stands on.

Invariant: `off`, `on`, `yes` and `no` stay words, a key given twice is an error, and no Python object is ever built.
"""

from __future__ import annotations

import io
import re
from typing import Any, cast

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError

Loc = tuple[str | int, ...]


class YamlProblem(ValueError):
    """Text that is not usable YAML; `line` is 1-based."""

    def __init__(self, line: int, text: str) -> None:
        super().__init__(text)
        self.line = line


def parse(text: str) -> tuple[object, dict[Loc, int]]:
    """The plain data and the 1-based lines of its paths; () is the document itself.

    Raises YamlProblem.
    """
    lines: dict[Loc, int] = {(): 1}
    return _plain(_load(text), (), lines), lines


def _load(text: str) -> object:
    yaml: Any = YAML(typ="rt", pure=True)
    try:
        return yaml.load(io.StringIO(text))
    except DuplicateKeyError as error:
        found = re.search(r'duplicate key "(.*?)"', _field(error, "problem"))
        key = f"{found[1]}: " if found else ""
        raise YamlProblem(_line(error), f"{key}stands twice in the same section; keep one") from None
    except MarkedYAMLError as error:
        said = _field(error, "problem") or _field(error, "context")
        raise YamlProblem(_line(error), f"this is not YAML: {said}") from None
    except YAMLError as error:
        raise YamlProblem(1, f"this is not YAML: {str(error).splitlines()[0]}") from None


def _field(error: object, name: str) -> str:
    return str(getattr(error, name, None) or "")


def _line(error: object) -> int:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    return int(getattr(mark, "line", 0)) + 1


def _plain(node: Any, loc: Loc, lines: dict[Loc, int]) -> object:  # noqa: ANN401
    if isinstance(node, CommentedMap):
        return {str(key): _entry(node, key, (*loc, str(key)), lines) for key in cast("dict[Any, Any]", node)}
    if isinstance(node, CommentedSeq):
        size = len(cast("list[Any]", node))
        return [_entry(node, index, (*loc, index), lines) for index in range(size)]
    if isinstance(node, bool) or node is None:
        return node
    for plain in (str, int, float):
        if isinstance(node, plain):
            return plain(node)
    return str(node)


def _entry(parent: Any, key: Any, loc: Loc, lines: dict[Loc, int]) -> object:  # noqa: ANN401
    try:
        places: Any = parent.lc
        at = places.item(key) if isinstance(key, int) and isinstance(parent, list) else places.key(key)
        lines[loc] = int(at[0]) + 1
    except (KeyError, TypeError):
        pass  # merged by `<<`: the section around it is near enough
    return _plain(parent[key], loc, lines)
