"""The keys of swapper.yaml as pydantic models: one class a section, with the unit in each attribute's name.

Invariant: every documented key is known here, unknown ones are errors; what needs more than one section to judge is in
checks.py. A key whose value has a unit keeps its plain name in the file (`vram`) and is read as `vram_mib` in code.
Nothing here opens a file; paths become absolute by the folder and home given in the validation context.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    StrictBool,
    StrictInt,
    ValidationInfo,
    model_validator,
)

from swapper.config.units import duration_ms, size_bytes, size_mib
from swapper.core.types import WorkClass

ALL = "all"


def _text(value: object) -> object:
    return str(value) if type(value) is int else value


def _vram(value: object) -> int | Literal["all"]:
    return "all" if value == ALL else size_mib(value)


def _optional_ms(value: object) -> int | None:
    return None if value is None else duration_ms(value)


def _keep_alive_ms(value: object) -> int | None:
    return None if value is None or (type(value) is int and value == -1) else duration_ms(value)


def _commands(value: object) -> tuple[tuple[str, ...], ...]:
    """One command, or a list of them; each is a list of texts."""
    items = cast("list[object]", value) if isinstance(value, list) else []
    commands = [cast("list[object]", one) for one in items if isinstance(one, list)]
    if not commands and items:
        commands = [items]
    elif len(commands) != len(items) or not all(commands) or not commands:
        raise ValueError("must be a command and its arguments, like [notify-send, loaded], or a list of such lists")
    if any(isinstance(part, bool) or not isinstance(part, str | int) for one in commands for part in one):
        raise ValueError("must be made of texts: it is run without a shell")
    return tuple(tuple(str(part) for part in one) for one in commands)


def _gpus(value: object) -> tuple[str, ...]:
    entries: list[object] = list(value) if isinstance(value, list) else [value]  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    for entry in entries:
        if isinstance(entry, bool) or not isinstance(entry, int | str):
            raise ValueError("must be a GPU's index, its UUID, or a list of them")
    return tuple(str(entry) for entry in entries)


def _path(value: object, info: ValidationInfo) -> Path:
    if not isinstance(value, str) or not value:
        raise ValueError("must be a path")
    context: dict[str, Path] = info.context or {}
    home = context.get("home")
    if home is not None and (value == "~" or value.startswith("~/")):
        return home / value[2:]
    return context.get("folder", Path()) / value


def _listen(value: str) -> str:
    host, colon, port = value.rpartition(":")
    if not colon or not host or not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
        raise ValueError(f"{value!r} is not host:port; write it like 127.0.0.1:9292")
    return value


def _variable(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*(=[^\0]*)?", value):
        raise ValueError(f"{value!r} is no variable; write NAME, or NAME=value")
    return value


def _http(value: str) -> str:
    if not value.startswith(("http://", "https://")) or len(value.split("://", 1)[1].strip("/")) == 0:
        raise ValueError(f"{value!r} is not a server's address; write it like http://127.0.0.1:8080")
    return value.rstrip("/")


def _class(value: object) -> WorkClass:
    try:
        return WorkClass(str(value))
    except ValueError:
        raise ValueError(f"{value!r} is not one of {', '.join(WorkClass)}") from None


def _listed(value: object) -> object:
    return [value] if isinstance(value, str | dict) else value  # pyright: ignore[reportUnknownVariableType]


Text = Annotated[str, BeforeValidator(_text)]
Mib = Annotated[int, PlainValidator(size_mib)]
Bytes = Annotated[int, PlainValidator(size_bytes)]
Ms = Annotated[int, PlainValidator(duration_ms)]
OptionalMs = Annotated[int | None, PlainValidator(_optional_ms)]
KeepAliveMs = Annotated[int | None, PlainValidator(_keep_alive_ms)]
Commands = Annotated[tuple[tuple[str, ...], ...], PlainValidator(_commands)]
Vram = Annotated[int | Literal["all"], PlainValidator(_vram)]
FilePath = Annotated[Path, PlainValidator(_path)]
Variable = Annotated[Text, AfterValidator(_variable)]
Listen = Annotated[Text, AfterValidator(_listen)]
HttpUrl = Annotated[Text, AfterValidator(_http)]
Class = Annotated[WorkClass, PlainValidator(_class)]

Kind = Literal["llama-router", "llama-server", "comfyui", "ollama", "vllm", "sglang", "llama-swap", "openai", "none"]
Control = Literal["attach", "command", "docker", "kubernetes", "systemd"]
Probe = Literal["nvml", "amdgpu", "unified", "declared"]
OnOver = Literal["alert", "restart", "evict"]


class Section(BaseModel):
    """Base of all sections: frozen, unknown keys refused, values with units read under their key's name."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class KeyEntry(Section):
    """An API key: who (`name`), what it may do (`scopes`), and where the secret is found, never the secret."""

    name: Text
    key_env: Text | None = None
    key_file: FilePath | None = None
    scopes: tuple[Literal["models", "leases", "admin"], ...] = ("models", "leases")
    classes: tuple[Class, ...] = (WorkClass.INTERACTIVE, WorkClass.NORMAL, WorkClass.BATCH)
    default_class: Class | None = None


class Auth(Section):
    """Without keys every caller is the owner `local`."""

    keys: tuple[KeyEntry, ...] = ()


class NotifyEntry(Section):
    """A server to tell, by its apprise URL (`url`, or written plainly), or where that is found: it may be a secret."""

    url: Annotated[str, Field(strict=True)] | None = Field(default=None, repr=False)
    url_env: Text | None = None
    url_file: FilePath | None = None

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, value: object) -> object:
        return {"url": value} if isinstance(value, str | int) else value


class CardEntry(Section):
    """A GPU or a named set of GPUs (`index` or `uuid`: of one or several). Without `vram` its probe tells how much.

    `foreign`: a process that is nobody's and holds more than that is told of.
    """

    probe: Probe | None = None
    index: Annotated[tuple[str, ...], PlainValidator(_gpus)] | None = None
    uuid: Annotated[tuple[str, ...], PlainValidator(_gpus)] | None = None
    vram_mib: Mib | None = Field(default=None, alias="vram")
    reserve_mib: Mib = Field(default=0, alias="reserve")
    foreign_mib: Mib = Field(default=256, alias="foreign")
    host: Text = "main"

    @property
    def gpus(self) -> tuple[str, ...]:
        """Its GPUs as the configuration names them; none: it does not."""
        return self.index or self.uuid or ()

    @property
    def read_by(self) -> Probe:
        """The probe that reads it: the one that is named, else `declared` where `vram` says what is to be counted."""
        return self.probe or ("nvml" if self.vram_mib is None else "declared")


class SnapshotsEntry(Section):
    """How the conversations of a server are kept. `required`: rather no handover than a lost conversation.

    `sweep`: those in no slot are saved too. `privacy: strict`: no request's text is kept, so that only what lies in a
    slot can be saved. `bodies: disk`: the texts are kept in the state folder as well, and outlive a restart. `every`:
    so often the idle slots of a model that serves are saved, so that a crash of its server costs no more; a hybrid
    model's next turn then reads its last answer again, and of a model that is only replayed nothing is saved.
    """

    strategy: Literal["auto", "slots", "rewind", "replay", "off"] = "auto"
    required: StrictBool = False
    budget_mib: Mib | None = Field(default=None, alias="budget")
    keep_ms: OptionalMs = Field(default=None, alias="keep")
    sweep: StrictBool = True
    privacy: Literal["normal", "strict"] = "normal"
    bodies: Literal["memory", "disk"] = "memory"
    every_ms: OptionalMs = Field(default=None, alias="every")


class HooksEntry(Section):
    """Commands around a load and a release, run on the agent without a shell; `timeout` is for each of them."""

    before_load: Commands = ()
    after_load: Commands = ()
    before_release: Commands = ()
    after_release: Commands = ()
    timeout_ms: Ms = Field(default=60_000, alias="timeout")
    on_failure: Literal["fail", "ignore"] = "fail"


class ModelEntry(Section):
    """One model of a server that serves several by name. `api_key_env`, `on_over`: where it is not the server's.

    `ram`: what it takes of the machine's memory beside its card.
    """

    vram_mib: Vram | None = Field(default=None, alias="vram")
    ram_mib: Mib | None = Field(default=None, alias="ram")
    aliases: tuple[Text, ...] = ()
    ttl_ms: OptionalMs = Field(default=None, alias="ttl")
    default: StrictBool = False
    concurrency: Annotated[StrictInt, Field(ge=1)] | None = None
    api_key_env: Text | None = None
    on_over: OnOver | None = None


class TenantEntry(Section):
    """Something that can live on a card: `kind` says how to talk to it, `control` how it is started and stopped.

    `sleep`: a vLLM or SGLang gives its VRAM back without ending; 1 keeps its weights in host memory, 2 reads them
    from disk again. `keep_alive`: how long an Ollama keeps what swapper loaded, null: until it is released. `on_over`:
    what is done once it takes more than its `vram`, beside telling it. `ram`: what it takes of the machine's memory
    while it is loaded, of one with `sleep: 1` while it sleeps.
    """

    kind: Kind
    control: Control = "attach"
    card: Text
    command: tuple[Text, ...] = ()
    container: Text | None = None
    namespace: Text | None = None
    deployment: Text | None = None
    unit: Text | None = None
    user: StrictBool = False
    url: HttpUrl | None = None
    api_key_env: Text | None = None
    preset: FilePath | None = None
    slot_dir: FilePath | None = None
    path_map: dict[str, Text] = Field(default_factory=dict)
    snapshots: SnapshotsEntry = SnapshotsEntry()
    models: dict[str, ModelEntry] = Field(default_factory=dict)
    gate: Listen | None = None
    vram_mib: Vram | None = Field(default=None, alias="vram")
    ram_mib: Mib | None = Field(default=None, alias="ram")
    linger_ms: OptionalMs = Field(default=None, alias="linger")
    grace_ms: Ms = Field(default=30_000, alias="grace")
    evict: Literal["auto", "never"] = "auto"
    on_over: OnOver = "alert"
    sleep: Annotated[StrictInt, Field(ge=1, le=2)] | None = None
    keep_alive_ms: KeepAliveMs = Field(default=None, alias="keep_alive")
    hooks: HooksEntry = HooksEntry()


class RecipeEntry(Section):
    """A command run under a lease with checked parameters (`swapper.jobs.recipes` has their types).

    `card` None: any. `progress: auto` follows ffmpeg. `grace`: so long it may take to end when it is asked to. `env`:
    variables that its command gets beside the usual ones, `NAME` as swapper has it or `NAME=value`.
    """

    command: tuple[Text, ...]
    params: dict[str, Text] = Field(default_factory=dict)
    roots: tuple[FilePath, ...] = ()
    env: tuple[Variable, ...] = ()
    card: Text | None = None
    vram_mib: Vram = Field(default="all", alias="vram")
    max_hold_ms: Ms = Field(default=3_600_000, alias="max_hold")
    grace_ms: Ms = Field(default=30_000, alias="grace")
    progress: Literal["auto", "ffmpeg", "none"] = "auto"


class WindowEntry(Section):
    """A maintenance window: a whole lease at a time given by `cron` in the zone `tz`."""

    cron: Text
    tz: Text = "UTC"
    card: Text
    duration_ms: Ms = Field(default=3_600_000, alias="duration")
    run: tuple[tuple[Text, ...], ...] = ()
    suspend: tuple[Text, ...] = ()
    slack_ms: Ms = Field(default=600_000, alias="slack")
    on_missed: Literal["run_once", "skip"] = "run_once"
    on_overrun: Literal["kill", "extend"] = "kill"


class Patience(Section):
    """Longest wait a class should see before the card turns to it, in ms."""

    interactive_ms: Ms = Field(default=60_000, alias="interactive")
    normal_ms: Ms = Field(default=600_000, alias="normal")
    batch_ms: Ms = Field(default=14_400_000, alias="batch")


class Drain(Section):
    """How long calls of a class may take to end once their card is wanted, in ms."""

    interactive_ms: Ms = Field(default=600_000, alias="interactive")
    normal_ms: Ms = Field(default=600_000, alias="normal")
    batch_ms: Ms = Field(default=600_000, alias="batch")


class PolicyEntry(Section):
    """The numbers of the policy. `ram_floor`: so much of the machine's memory no load takes."""

    overhead: Annotated[float, Field(gt=0, lt=1)] = 0.1
    patience: Patience = Patience()
    drain: Drain = Drain()
    on_drain_limit: Literal["end", "reopen"] = "end"
    max_call_ms: Ms = Field(default=3_600_000, alias="max_call")
    max_hold_ms: Ms = Field(default=3_600_000, alias="max_hold")
    idle_restore_ms: Ms = Field(default=120_000, alias="idle_restore")
    grace_ms: Ms = Field(default=30_000, alias="grace")
    max_queue: Annotated[StrictInt, Field(ge=1)] = 10_000
    ram_floor_mib: Mib = Field(default=1024, alias="ram_floor")


class GatewayEntry(Section):
    """Limits of model-by-name calls: waiting in ms, bodies in bytes."""

    max_wait_ms: Ms = Field(default=600_000, alias="max_wait")
    keepalive_ms: Ms = Field(default=10_000, alias="keepalive")
    keepalive_style: Literal["data", "comment"] = "data"
    body_limit_bytes: Bytes = Field(default=64 * 1024**2, alias="body_limit")
    body_budget_bytes: Bytes = Field(default=512 * 1024**2, alias="body_budget")


class Document(Section):
    """The whole file, before the sections are judged against each other."""

    listen: Listen = "127.0.0.1:9292"
    state_dir: FilePath = Field(default=cast("Path", "~/.local/state/swapper"), validate_default=True)
    redis: Text | None = None
    auth: Auth = Auth()
    notify: Annotated[tuple[NotifyEntry, ...], BeforeValidator(_listed)] = ()
    cards: dict[str, CardEntry]
    tenants: dict[str, TenantEntry] = Field(default_factory=dict)
    recipes: dict[str, RecipeEntry] = Field(default_factory=dict)
    windows: dict[str, WindowEntry] = Field(default_factory=dict)
    policy: PolicyEntry = PolicyEntry()
    gateway: GatewayEntry = GatewayEntry()

    @model_validator(mode="before")
    @classmethod
    def _implied(cls, data: object) -> object:
        """What goes without saying: the only card there is, and that what nobody here can end is never evicted."""
        document = cast("dict[str, Any]", data) if isinstance(data, dict) else {}
        cards, tenants = document.get("cards"), document.get("tenants")
        if not isinstance(tenants, dict):
            return data  # pyright: ignore[reportUnknownVariableType]
        implied = dict(document)
        implied["tenants"] = {name: _implied(entry, cards) for name, entry in cast("dict[str, Any]", tenants).items()}
        return implied


def _implied(entry: object, cards: object) -> object:
    if not isinstance(entry, dict):
        return entry  # pyright: ignore[reportUnknownVariableType]
    given, implied = cast("dict[str, Any]", entry), dict[str, Any]()
    if isinstance(cards, dict) and len(cast("dict[str, Any]", cards)) == 1:
        implied["card"] = next(iter(cast("dict[str, Any]", cards)))
    if given.get("kind") == "openai" and given.get("control", "attach") == "attach":
        implied["evict"] = "never"
    return {**implied, **given}
