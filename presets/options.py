"""What a model of the router really runs with: its options after every rule of precedence, and what follows from them.

Invariant: pure. Names are canonical long ones (`ctx-size`, never `c`); on/off options read `true` or `false`.
Precedence, tried on b10434: router's command line, then the model's section, then `[*]`, then LLAMA_ARG_* variables.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from presets.ini import DEFAULTS, Ini, IniSection, canonical_model
from presets.lint import WHOLE, split_aliases
from presets.names import FALSE, TRUE, lookup

AUTO_SLOTS = 4
"""Slots a server without `parallel` makes; it then unifies its KV memory, whatever `kv-unified` says."""
_PAD = 256
_NOT_THE_MODELS = ("models-", "ssl-", "api-key", "host", "port", "alias", "reuse-port")


@dataclass(frozen=True, slots=True)
class Setting:
    """A value and where it was set: `the router's command line`, `[qwen] line 4`, `[*] line 2`, `LLAMA_ARG_...`."""

    value: str
    origin: str
    line: int | None = None


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """The options of one model. `aliases` are those of its own section."""

    model: str
    settings: Mapping[str, Setting] = field(default_factory=dict[str, Setting])
    aliases: tuple[str, ...] = ()

    def text(self, name: str) -> str | None:
        """The value of a canonical name, None where the server's default holds."""
        setting = self.settings.get(name)
        return setting.value if setting is not None else None

    def number(self, name: str) -> int | None:
        """A whole number, None where it is not set or is none."""
        value = self.text(name)
        return int(value) if value is not None and WHOLE.fullmatch(value) else None

    def flag(self, name: str, default: bool) -> bool:
        """An on/off option."""
        value = self.text(name)
        return default if value is None or value not in ("true", "false") else value == "true"

    @property
    def n_ctx(self) -> int | None:
        """Context of all slots together in tokens; None: the model's own (or what `fit` leaves of it)."""
        return self.number("ctx-size") or None

    @property
    def auto_parallel(self) -> bool:
        """True where the server chooses the slots itself."""
        chosen = self.number("parallel")
        return chosen is None or chosen < 0

    @property
    def n_parallel(self) -> int:
        """Number of slots."""
        chosen = self.number("parallel")
        return AUTO_SLOTS if chosen is None or chosen < 0 else chosen

    @property
    def kv_unified(self) -> bool:
        """True where all slots share one KV memory."""
        return self.auto_parallel or self.flag("kv-unified", False)

    def context_per_slot(self, n_ctx_train: int | None = None) -> int | None:
        """Tokens one conversation may have; `n_ctx_train` is the model's own context, the upper bound if given.

        The server rounds up to 256 twice: the whole, and each slot's share of it. None without any context known.
        """
        total = self.n_ctx or n_ctx_train
        if total is None:
            return None
        share = _padded(total) if self.kv_unified else _padded(_padded(total) // max(self.n_parallel, 1))
        return share if n_ctx_train is None else min(share, n_ctx_train)

    @property
    def slot_save_path(self) -> str | None:
        """Folder the server writes slots to, as the server sees it; relative to the router's working folder."""
        return self.text("slot-save-path") or None

    @property
    def cache_ram_mib(self) -> int:
        """MiB of RAM for conversations beyond the slots; 0: none, -1: no limit."""
        given = self.number("cache-ram")
        return 8192 if given is None else given

    @property
    def cache_idle_slots(self) -> bool:
        """True where idle slots are moved to that RAM when another call comes."""
        return self.cache_ram_mib != 0 and self.flag("cache-idle-slots", True)

    @property
    def metrics(self) -> bool:
        """True where /metrics answers."""
        return self.flag("metrics", False)


@dataclass(frozen=True, slots=True)
class RouterOptions:
    """How the router itself was started. `models_max` 0: no limit."""

    autoload: bool = True
    models_max: int = 4

    @classmethod
    def from_args(cls, args: Sequence[str], environ: Mapping[str, str] | None = None) -> RouterOptions:
        """From its command line (with or without the program in front) and environment."""
        given = ModelOptions("", dict(_environment(environ or {}, router=True) | dict(_command_line(args))))
        limit = given.number("models-max")
        return cls(given.flag("models-autoload", True), 4 if limit is None else limit)

    @classmethod
    def from_props(cls, props: Mapping[str, object]) -> RouterOptions:
        """From the answer of a router's `GET /props`."""
        limit = props.get("max_instances")
        return cls(props.get("models_autoload") is not False, limit if isinstance(limit, int) else 4)


def effective(
    ini: Ini, model: str, cli_args: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> ModelOptions:
    """The options `model` (a section's name or alias) would be started with by a router with these `cli_args`.

    A model without a section has `[*]` and the command line only, as one from the router's own folder or cache has.
    """
    own = _find(ini, model)
    settings = _environment(environ or {})
    for section in (ini.section(DEFAULTS), own):
        if section is not None:
            settings |= _section(section)
    settings |= dict(_command_line(cli_args))
    aliases = _own_aliases(own) if own is not None else ()
    return ModelOptions(own.name if own is not None else canonical_model(model), _of_the_model(settings), aliases)


def from_child_args(args: Sequence[str]) -> ModelOptions:
    """The options of a model from its `status.args` in the router's `GET /models`."""
    settings = dict(_command_line(args, "its own command line"))
    name = settings.get("alias")
    return ModelOptions(name.value if name is not None else "", _of_the_model(settings))


def named(args: Sequence[str], environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """The names a server without a router gives its model in its answers; none: that of its file."""
    given = _environment(environ or {}) | dict(_command_line(args))
    return split_aliases(given["alias"].value) if "alias" in given else ()


def _find(ini: Ini, model: str) -> IniSection | None:
    named = ini.section(model)
    if named is not None:
        return named
    return next((section for section in ini.sections if model in _own_aliases(section)), None)


def _own_aliases(section: IniSection) -> tuple[str, ...]:
    setting = _section(section).get("alias")
    return split_aliases(setting.value) if setting is not None else ()


def _section(section: IniSection) -> dict[str, Setting]:
    """The last of equal keys wins; of two names of one option the one later in the alphabet does (a sorted map)."""
    last = {entry.key: entry for entry in section.entries}
    settings: dict[str, Setting] = {}
    for key in sorted(last):
        entry = last[key]
        origin = f"[{section.name}] line {entry.line}"
        settings |= _one(key, entry.value, origin, entry.line)
    return settings


def _one(name: str, value: str, origin: str, line: int | None = None) -> dict[str, Setting]:
    option = lookup(name)
    if option is None:
        return {name: Setting(value, origin, line)}
    if option.flag:
        low = value.lower()
        if low in TRUE | FALSE:
            value = "true" if (low in TRUE) != option.negative else "false"
    return {option.canonical: Setting(value, origin, line)}


def _command_line(args: Sequence[str], origin: str = "the router's command line") -> Iterable[tuple[str, Setting]]:
    words = list(args)
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if not word.startswith("-") or word == "-":
            continue
        name = word.lstrip("-").replace("_", "-") if word.startswith("--") else word[1:]
        option = lookup(name)
        if option is None:
            takes = index < len(words) and not words[index].startswith("-")
            yield name, Setting(words[index] if takes else "true", origin)
            index += takes
            continue
        value = "true" if option.flag else " ".join(words[index : index + option.arity])
        index += option.arity
        yield from _one(name, value, origin).items()


def _environment(environ: Mapping[str, str], *, router: bool = False) -> dict[str, Setting]:
    settings: dict[str, Setting] = {}
    for name in sorted(environ):
        option = lookup(name) if name.startswith("LLAMA_ARG_") else None
        if option is None or option.canonical.startswith("models-") != router:
            continue
        settings |= _one(name, environ[name], f"the variable {name}")
    return settings


def _of_the_model(settings: Mapping[str, Setting]) -> dict[str, Setting]:
    return {name: setting for name, setting in settings.items() if not name.startswith(_NOT_THE_MODELS)}


def _padded(tokens: int) -> int:
    return -(-tokens // _PAD) * _PAD
