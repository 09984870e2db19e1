"""API keys: the secrets that the configuration only names, fetched once at load.

Invariant: a secret comes from the environment or a file, and its value never appears in a message or a repr.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from swapper.config.schema import Auth, KeyEntry
from swapper.config.yamltext import Loc
from swapper.core.types import WorkClass


@dataclass(frozen=True, slots=True)
class ApiKey:
    """Who a caller is and what it may do. `default_class` None: the API's own default for the call."""

    name: str
    secret: str = field(repr=False)
    scopes: frozenset[str]
    classes: frozenset[WorkClass]
    default_class: WorkClass | None


def resolve_keys(auth: Auth, environ: Mapping[str, str]) -> tuple[tuple[ApiKey, ...], list[tuple[Loc, str]]]:
    """The keys with their secrets, and what is wrong with them as (path, sentence)."""
    keys: list[ApiKey] = []
    problems: list[tuple[Loc, str]] = []
    for index, entry in enumerate(auth.keys):
        loc: Loc = ("auth", "keys", index)
        secret, problem = _secret(entry, environ, loc)
        if problem is not None:
            problems.append(problem)
        elif any(key.secret == secret for key in keys):
            problems.append((loc, f"{entry.name} has the same secret as another key; owners could not be told apart"))
        if any(key.name == entry.name for key in keys):
            problems.append(((*loc, "name"), f"{entry.name!r} is the name of another key"))
        if entry.default_class is not None and entry.default_class not in entry.classes:
            problems.append(((*loc, "default_class"), f"{entry.default_class} is not among its classes"))
        classes = frozenset(entry.classes)
        keys.append(ApiKey(entry.name, secret, frozenset(entry.scopes), classes, entry.default_class))
    return tuple(keys), problems


def _secret(entry: KeyEntry, environ: Mapping[str, str], loc: Loc) -> tuple[str, tuple[Loc, str] | None]:
    if (entry.key_env is None) == (entry.key_file is None):
        return "", (loc, f"{entry.name} needs either key_env or key_file")
    if entry.key_env is not None:
        secret = environ.get(entry.key_env, "")
        missing = f"the environment variable {entry.key_env} is not set"
        return secret, None if secret else ((*loc, "key_env"), missing)
    assert entry.key_file is not None
    try:
        secret = entry.key_file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        return "", ((*loc, "key_file"), f"{entry.key_file} cannot be read: {error}")
    return secret, None if secret else ((*loc, "key_file"), f"{entry.key_file} is empty")
