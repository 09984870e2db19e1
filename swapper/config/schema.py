"""The keys of swapper.yaml as pydantic models: one class a section, with the unit in each attribute's name.

Invariant: every documented key is known here, unknown ones are errors; what needs more than one section to judge is in
checks.py. A key whose value has a unit keeps its plain name in the file (`vram`) and is read as `vram_mib` in code.
How values are read is in values.py, what stands under one model in models.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import BeforeValidator, Field, PlainValidator, StrictBool, StrictInt, model_validator

from swapper.config.models import ModelEntry
from swapper.config.values import (
    Bytes,
    Class,
    Commands,
    Control,
    Cors,
    FilePath,
    HttpUrl,
    KeepAliveMs,
    Kind,
    Listen,
    Mib,
    Ms,
    OnOver,
    OptionalMs,
    Probe,
    Section,
    Text,
    Variable,
    Vram,
    gpu_names,
    listed,
)
from swapper.core.types import WorkClass


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
    index: Annotated[tuple[str, ...], PlainValidator(gpu_names)] | None = None
    uuid: Annotated[tuple[str, ...], PlainValidator(gpu_names)] | None = None
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
    """Limits of model-by-name calls: waiting in ms, bodies in bytes.

    `cors`: the pages that may call models. `auto`: any where calls need a key, else as `local`: those of this machine,
    and of the host that they call.
    """

    max_wait_ms: Ms = Field(default=600_000, alias="max_wait")
    keepalive_ms: Ms = Field(default=10_000, alias="keepalive")
    keepalive_style: Literal["data", "comment"] = "data"
    body_limit_bytes: Bytes = Field(default=64 * 1024**2, alias="body_limit")
    body_budget_bytes: Bytes = Field(default=512 * 1024**2, alias="body_budget")
    cors: Cors = ("auto",)


class Document(Section):
    """The whole file, before the sections are judged against each other."""

    listen: Listen = "127.0.0.1:9292"
    state_dir: FilePath = Field(default=cast("Path", "~/.local/state/swapper"), validate_default=True)
    redis: Text | None = None
    auth: Auth = Auth()
    notify: Annotated[tuple[NotifyEntry, ...], BeforeValidator(listed)] = ()
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
