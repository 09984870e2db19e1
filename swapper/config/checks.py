"""What needs more than one section to judge, and what this version cannot do yet.

Invariant: pure over the document except for looking at whether named files exist; gives every problem at once, as
(path, sentence), and notices for settings that are accepted but not acted on: nothing is ignored in silence.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from swapper.config import comfyui, controls, kinds, needs, recipes
from swapper.config.controls import CONTROLS, ON_OFF
from swapper.config.schema import CardEntry, Document, SnapshotsEntry, TenantEntry
from swapper.config.served import ONE_MODEL, served
from swapper.config.source import Source
from swapper.config.units import show_mib
from swapper.config.yamltext import Loc

KINDS = kinds.SERVED | {"llama-router", "llama-server", ON_OFF, comfyui.KIND}
LATER = "is not supported by this version"
LATER_SECTIONS = ("windows",)

Said = tuple[Loc, str]

_ORDER = "this version orders by class and then by arrival"
_KEPT = {
    "overhead": _ORDER,
    "patience": _ORDER,
    "max_call": "this version ends no call for its length alone",
}

_COMMON = frozenset({"kind", "control", "card", "evict", "grace", "hooks", "on_over", "ram"})
_EVERY = frozenset({"0.0.0.0", "::"})
_LEAST_EVERY_MS = 10_000
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
_LLAMA = _COMMON | {"command", "url", "api_key_env", "slot_dir", "path_map", "snapshots", "models"}
_KEYS = {
    "llama-router": _LLAMA | {"preset"},
    "llama-server": _LLAMA | {"vram"},
    **{name: _COMMON | keys for name, keys in kinds.KEYS.items()},
    ON_OFF: _COMMON | controls.ON_OFF_KEYS,
    comfyui.KIND: _COMMON | comfyui.KEYS,
}


_WHO = {"llama-router": "llama-server router", "llama-server": "llama-server", comfyui.KIND: comfyui.WHO} | kinds.WHO


@dataclass(frozen=True, slots=True)
class Found:
    """Problems refuse the configuration; notices are said at start and by `check`."""

    problems: list[Said]
    notices: list[Said]


def check(document: Document, source: Source, environ: Mapping[str, str]) -> Found:
    """Judge the sections against each other and against what this version can do."""
    problems = [
        *_sections(document),
        *_redis(document, source),
        *_notify(document, source),
        *_cards(document),
        *_tenants(document, source, environ),
        *_shared(document),
        *_names(document),
        *recipes.judged(document),
    ]
    return Found(problems, list(_notices(document, source)))


def _sections(document: Document) -> Iterator[Said]:
    for name in LATER_SECTIONS:
        if getattr(document, name):
            yield (name,), f"{name} {LATER}; remove it"


def _redis(document: Document, source: Source) -> Iterator[Said]:
    if document.redis is None:
        return
    loc: Loc = ("redis",)
    scheme, separator, rest = document.redis.partition("://")
    if not separator or scheme not in ("redis", "rediss", "unix"):
        yield loc, "must be redis://, rediss:// or unix://, or null for the embedded store"
    elif ":" in rest.rpartition("@")[0] and loc not in source.variables:
        yield loc, "a password does not belong in the file; set the whole address in SWAPPER__REDIS"


def _notify(document: Document, source: Source) -> Iterator[Said]:
    for index, entry in enumerate(document.notify):
        loc: Loc = ("notify", index)
        authority = (entry.url or "").partition("://")[2].partition("/")[0]
        if ":" in authority.rpartition("@")[0] and source.line(loc):
            yield loc, "a password does not belong in the file; write {url_env: NAME} or {url_file: PATH}"


def _cards(document: Document) -> Iterator[Said]:
    if not document.cards:
        yield ("cards",), "at least one card is needed"
    owners: dict[tuple[str, str], str] = {}
    for name, card in document.cards.items():
        loc: Loc = ("cards", name)
        yield from _card(card, loc)
        if len(set(card.gpus)) < len(card.gpus):
            yield (*loc, "index" if card.index else "uuid"), "names a GPU twice; name each once"
        for gpu in dict.fromkeys(card.gpus):
            other = owners.setdefault((card.host, gpu.lower()), name)
            if other != name:
                key = "index" if card.index else "uuid"
                yield (*loc, key), f"GPU {gpu} is already in card {other}; a GPU belongs to one card"
    yield from _alike(document)


def _alike(document: Document) -> Iterator[Said]:
    """Cards that one probe would read as the same memory."""
    first: dict[tuple[str, str], str] = {}
    for name, card in document.cards.items():
        if card.read_by == "declared":
            continue
        other = first.setdefault((card.host, card.read_by), name)
        if other == name:
            continue
        if card.read_by == "unified":
            yield ("cards", name), f"the machine's memory is already card {other}; make one card of the two"
        elif not (card.gpus and document.cards[other].gpus):
            said = f"{other} and {name} are both read by {card.read_by}: say which GPU each is, like index: 0"
            yield ("cards", name), said


def _card(card: CardEntry, loc: Loc) -> Iterator[Said]:
    if card.read_by == "declared" and not card.vram_mib:
        yield loc, "probe: declared needs vram: SIZE, like vram: 24GiB"
    elif card.vram_mib is not None and card.reserve_mib >= card.vram_mib:
        yield (*loc, "reserve"), f"leaves nothing of {show_mib(card.vram_mib)}"
    if card.index and card.uuid:
        yield (*loc, "uuid"), "stands beside index; name the GPU by one of the two"
    if card.host != "main":
        yield (*loc, "host"), f"an agent on another host {LATER}; leave host out"


def _tenants(document: Document, source: Source, environ: Mapping[str, str]) -> Iterator[Said]:
    for name, entry in document.tenants.items():
        loc: Loc = ("tenants", name)
        if "/" in name:
            yield loc, "the name of a server may not hold a /"
        if entry.card not in document.cards:
            yield (*loc, "card"), f"there is no card {entry.card!r}; cards are {', '.join(document.cards)}"
        if entry.kind not in KINDS:
            yield (*loc, "kind"), f"kind: {entry.kind} {LATER}; supported: {', '.join(sorted(KINDS))}"
            continue
        if entry.control not in CONTROLS:
            said = f"control: {entry.control} {LATER}; supported: {', '.join(sorted(CONTROLS))}"
            yield (*loc, "control"), said
        given: dict[str, object] = source.data["tenants"][name]
        for key in given:
            known = (_KEYS[entry.kind] - {"command"}) | controls.KEYS.get(entry.control, frozenset())
            if key not in known and entry.control in CONTROLS:
                yield (*loc, key), f"is not a key of kind {entry.kind} with control {entry.control}"
        yield from controls.check(entry, loc)
        if entry.kind == ON_OFF:
            yield from controls.on_off(entry, loc)
        elif entry.kind == comfyui.KIND:
            yield from comfyui.check(document, entry, loc, _is_own)
        elif entry.kind in kinds.SERVED:
            yield from kinds.check(entry, loc, environ)
        else:
            yield from _llama(entry, loc, environ)
            yield from _plain(entry, loc) if entry.kind in ONE_MODEL else _router(entry, loc)
        if entry.url is not None and _is_own(document.listen, entry.url):
            said = f"is swapper's own address (listen: {document.listen}); write that of the {_WHO[entry.kind]}"
            yield (*loc, "url"), f"{said}, and give the two different ports"
        yield from needs.check(document, name, entry)


def _shared(document: Document) -> Iterator[Said]:
    """One server is one entry, nobody else ends it, and nobody else deletes what it saved."""
    servers: dict[tuple[str, int, str], str] = {}
    things: dict[tuple[str, str], str] = {}
    folders: dict[str, str] = {}
    for name, entry in document.tenants.items():
        place = _place(entry.url) if entry.url is not None else None
        other = name if place is None else servers.setdefault(place, name)
        if other != name:
            yield ("tenants", name, "url"), f"is that of tenants.{other}, too: write one server as one entry"
        if (thing := controls.thing(entry)) is not None and (other := things.setdefault(thing, name)) != name:
            said = f"is that of tenants.{other}, too, and a release of one would end both: write it as one tenant"
            yield ("tenants", name, thing[0]), said
        if entry.slot_dir is None or entry.snapshots.strategy == "off":
            continue
        other = folders.setdefault(os.path.realpath(entry.slot_dir), name)
        if other != name:
            said = f"is that of tenants.{other}, too, and each deletes by its own budget and age what lies there"
            yield ("tenants", name, "slot_dir"), f"{said}: give each server a folder of its own"


def _place(url: str) -> tuple[str, int, str] | None:
    """Host, port and path, loopback by one name; None where the text is no address."""
    parts = urlsplit(url)
    host = (parts.hostname or "").rstrip(".")
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        return None
    return "localhost" if host in _LOOPBACK else host, port, parts.path.rstrip("/")


def _is_own(listen: str, url: str) -> bool:
    """Whether calls to `url` would come to who listens at `listen`, as far as the texts tell."""
    host, _, port = listen.rpartition(":")
    host = host.strip("[]")
    place = _place(url)
    if place is None:
        return False
    there, number, _ = place
    same = there == host or (there in _LOOPBACK | _EVERY and host in _LOOPBACK | _EVERY)
    return same and number == int(port)


def _llama(entry: TenantEntry, loc: Loc, environ: Mapping[str, str]) -> Iterator[Said]:
    if entry.control == "command" and not entry.command:
        yield loc, "control: command needs command: the server's program and its arguments"
    if entry.control == "attach" and entry.command:
        yield (*loc, "command"), "is never run with control: attach; write control: command, or remove it"
    if entry.url is None:
        yield loc, f"needs url: the address of the {_WHO[entry.kind]}, like http://127.0.0.1:8080"
    if entry.api_key_env is not None and not environ.get(entry.api_key_env):
        yield (*loc, "api_key_env"), f"the environment variable {entry.api_key_env} is not set"
    yield from _snapshots(entry, (*loc, "snapshots"))


def _router(entry: TenantEntry, loc: Loc) -> Iterator[Said]:
    if entry.preset is not None and not entry.preset.is_file():
        yield (*loc, "preset"), f"{entry.preset} does not exist"
    if not entry.models:
        yield loc, "needs models: the names of the router's models, each with its vram"


def _plain(entry: TenantEntry, loc: Loc) -> Iterator[Said]:
    if entry.control == "attach" and entry.evict != "never":
        said = "cannot be ended with control: attach; write control: command and how it is started, or evict: never"
        yield (*loc, "control"), said
    if len(entry.models) > 1:
        yield (*loc, "models"), f"a {entry.kind} has one model; leave {', '.join(list(entry.models)[1:])} out"
    if entry.vram_mib is not None and any(one.vram_mib is not None for one in entry.models.values()):
        yield (*loc, "vram"), "stands with its model as well; write it once"


def _snapshots(entry: TenantEntry, loc: Loc) -> Iterator[Said]:
    keep: SnapshotsEntry = entry.snapshots
    if keep.every_ms is not None and keep.strategy in ("off", "replay"):
        yield (*loc, "every"), f"does nothing with strategy: {keep.strategy}, which saves no slots; remove it"
    elif keep.every_ms is not None and keep.every_ms < _LEAST_EVERY_MS:
        said = f"must be {_LEAST_EVERY_MS // 1000}s or longer, for each save keeps all slots of the model waiting"
        yield (*loc, "every"), f"{said}; null saves none by the clock"
    if keep.bodies == "disk" and keep.privacy == "strict":
        said = "disk keeps the text of requests, and privacy: strict keeps none"
        yield (*loc, "bodies"), f"{said}; write bodies: memory, or privacy: normal"
    if keep.required and (keep.privacy == "strict" or not keep.sweep):
        why = "privacy: strict keeps no text" if keep.privacy == "strict" else "sweep: false saves slots only"
        said = f"{why}, so that a conversation that lies in no slot would hold the card for ever"
        yield (*loc, "required"), f"{said}; write required: false, or leave that out"
    if keep.strategy == "off":
        if keep.required:
            yield (*loc, "required"), "cannot be true with strategy: off"
    elif entry.slot_dir is None and keep.strategy != "replay":
        yield loc[:-1], "needs slot_dir: the folder of --slot-save-path (or snapshots: {strategy: off})"


def _names(document: Document) -> Iterator[Said]:
    owners: dict[str, str] = {}
    for server, entry in document.tenants.items():
        for one in served(server, entry):
            for name in one.names:
                by_name = name in one.entry.filters.by_name and name not in one.entry.aliases
                place = (*one.loc, "filters", "by_name", name) if by_name else one.loc
                place = (*one.loc, "aliases") if name in one.entry.aliases else place
                other = owners.setdefault(name, one.tenant)
                if other != one.tenant:
                    yield place, f"{name!r} is already a name of {other}; names and aliases are unique"


def _notices(document: Document, source: Source) -> Iterator[Said]:
    policy: dict[str, object] = source.data.get("policy") or {}
    for key, said in _KEPT.items():
        if key in policy:
            yield ("policy", key), f"is read, but {said}; leave it out"
    yield from _defaults(document)
    for name, card in document.cards.items():
        if "foreign" in source.data["cards"][name] and card.read_by not in needs.MEASURES:
            yield ("cards", name, "foreign"), "is read, but its probe does not tell who holds what; leave it out"
    for name, entry in document.tenants.items():
        card = document.cards.get(entry.card)
        yield from kinds.notices(entry, source.data["tenants"][name], ("tenants", name), card)
        yield from comfyui.notices(document, entry, ("tenants", name))
        if entry.control == "attach" and "grace" in source.data["tenants"][name]:
            yield ("tenants", name, "grace"), "is read, but with control: attach swapper stops nothing; leave it out"


def _defaults(document: Document) -> Iterator[Said]:
    """Defaults are loaded at start when they fit, in the file's order: say which will not."""
    for card_name, card in document.cards.items():
        if not card.vram_mib:
            continue  # how much it has only its probe tells
        room = (card.vram_mib or 0) - card.reserve_mib
        taken = 0
        for server, entry in document.tenants.items():
            for found in served(server, entry):
                one = found.entry
                if entry.card != card_name or not one.default or one.vram_mib is None:
                    continue
                need = one.vram_mib if isinstance(one.vram_mib, int) else room
                if taken + need > room:
                    said = f"does not fit beside the other defaults of {card_name} ({show_mib(room - taken)} left)"
                    mend = "take default: true from it, or from one before it"
                    yield (*found.loc, "default"), f"{said}, so that it waits for its first call; {mend}"
                else:
                    taken += need
