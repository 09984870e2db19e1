"""What a snapshot says of itself, and whether it may enter a running model: pure values, no I/O.

Invariant: a snapshot is restored only into a model whose fingerprint equals the one it was saved under; every
difference is named (`refusal`), because llama-server itself checks neither model, rope nor build (it answers 200
and continues with garbage). The manifest lies beside the slot file and is the truth about it.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, fields
from datetime import UTC, datetime

import msgspec
import xxhash

MANIFEST_SUFFIX = ".manifest.json"
VERSION = 1
MAX_LINKS = 8
"""So much of a conversation's chain is kept with its snapshot: enough to find it after its last turns were edited."""
_UNSAFE = re.compile(r'[\x00-\x1f\x7f/\\:*?"<>|]')
_SPLIT = re.compile(r"-[0-9]{5}-of-([0-9]{5})\.gguf$")
_MAX_NAME = 255 - len(MANIFEST_SUFFIX) - len(".tmp")


@dataclass(frozen=True, slots=True)
class GgufIdentity:
    """Which weights: sha256 (hex) of each file's header and tensor table, total bytes, newest change (ns).

    `digest` is empty where the file could not be read on this host: such an identity equals none, itself included.
    """

    path: str
    digest: str = ""
    size: int = 0
    mtime_ns: int = 0

    @property
    def known(self) -> bool:
        """False when the file could not be read here."""
        return self.digest != ""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Everything that decides whether saved state means the same in a running model.

    `n_ctx_slot` is in tokens. `cache_types` are (K, V). `rope` holds every argument that changes positions or
    attention, `lora` adapters with their scales, `template` the sha256 of the chat template.
    """

    model: str
    gguf: GgufIdentity
    build: str
    n_ctx_slot: int
    n_parallel: int
    kv_unified: bool
    cache_types: tuple[str, str] = ("f16", "f16")
    flash_attn: str = "auto"
    rope: tuple[str, ...] = ()
    lora: tuple[str, ...] = ()
    drafter: str = ""
    mmproj: str = ""
    template: str = ""


@dataclass(frozen=True, slots=True)
class Manifest:
    """One snapshot. `tokens` and `bytes` are the server's own figures; times are ms since the epoch.

    `id` is the link of the conversation's last request, "" where nobody knew it; `links` are the last `MAX_LINKS` of
    its chain, the oldest first; `used_ms` is when it was last used (0: not known). `sidecars` are the files that the
    server wrote beside it, with their bytes.
    `digest` (xxh3-128, hex) is None until it was computed; `boot` is the boot id of the machine at the save, so
    that a file without a digest is not trusted across a crash of the machine. `token` is the swap's.
    """

    snapshot: str
    tenant: str
    fingerprint: Fingerprint
    slot: int
    tokens: int
    bytes: int
    saved_ms: int
    strategy: str = "slots"
    token: int = 0
    boot: str = ""
    digest: str | None = None
    restored_ms: int | None = None
    version: int = VERSION
    id: str = ""
    links: tuple[str, ...] = ()
    used_ms: int = 0
    sidecars: tuple[tuple[str, int], ...] = ()

    @property
    def last_ms(self) -> int:
        """When it was last used, as far as is known: not later than its save."""
        return self.used_ms or self.saved_ms

    @property
    def room(self) -> int:
        """Bytes of the snapshot on the disk, its sidecars included."""
        return self.bytes + sum(size for _, size in self.sidecars)


_WORDS = {
    "model": "another model",
    "build": "another llama-server build",
    "n_ctx_slot": "another context size per slot",
    "n_parallel": "another number of slots",
    "kv_unified": "another kv-unified setting",
    "cache_types": "other cache types",
    "flash_attn": "another flash-attn setting",
    "rope": "other rope or attention arguments",
    "lora": "other LoRA adapters",
    "drafter": "another draft model",
    "mmproj": "another multimodal projector",
    "template": "another chat template",
}


def short_digest(fingerprint: Fingerprint) -> str:
    """16 hex characters that are the same for equal fingerprints only: what was seen to work is remembered by them."""
    return xxhash.xxh3_64_hexdigest(msgspec.json.encode(fingerprint))


def refusal(saved: Manifest, now: Fingerprint) -> str | None:
    """Why `saved` must not be restored into the model that runs now, or None when it may."""
    then = saved.fingerprint
    if saved.version != VERSION:
        return f"its manifest is of version {saved.version}, this swapper reads version {VERSION}"
    if not then.gguf.known or not now.gguf.known:
        return f"the model file {now.gguf.path} cannot be read here, so nothing proves that it is the same model"
    if (then.gguf.digest, then.gguf.size) != (now.gguf.digest, now.gguf.size):
        return _other_file(then.gguf, now.gguf)
    if then.gguf.mtime_ns != now.gguf.mtime_ns:
        return _other_date(then.gguf, now.gguf)
    for field in fields(Fingerprint):
        before, after = getattr(then, field.name), getattr(now, field.name)
        if field.name != "gguf" and before != after:
            return f"saved under {_WORDS[field.name]} ({_show(before)}, now {_show(after)})"
    if saved.tokens > now.n_ctx_slot:
        return f"its {saved.tokens} tokens do not fit the {now.n_ctx_slot} tokens of a slot"
    return None


def _other_file(then: GgufIdentity, now: GgufIdentity) -> str:
    if then.path != now.path:
        return f"saved under another model file ({then.path}, now {now.path})"
    return f"saved under another model file: {now.path} had {_stat(then)} then, now it has {_stat(now)}"


def _other_date(then: GgufIdentity, now: GgufIdentity) -> str:
    """Weights are not compared, only their names, shapes and sizes, which another tuning of a model has as well."""
    seconds, ns = divmod(then.mtime_ns, 10**9)
    part, path = _SPLIT.search(now.path), shlex.quote(now.path)
    if part is not None:  # the newest of them counts, so that all may have one date
        path = f"{shlex.quote(now.path[: part.start()])}-?????-of-{part[1]}.gguf"
    return (
        f"the model file {now.path} may be another one: it is of {_date(now)}, that of the save was of {_date(then)}, "
        f"and weights are not compared; if it is the same one, this gives it its date back: "
        f"touch -d @{seconds}.{ns:09d} {path}"
    )


def _stat(file: GgufIdentity) -> str:
    return f"{file.size:,} bytes of {_date(file)}"


def _date(file: GgufIdentity) -> str:
    return f"{datetime.fromtimestamp(file.mtime_ns // 10**9, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _show(value: object) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "none"  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return str(value) or "none"


def name_problem(name: str) -> str | None:
    """Why llama-server (or we) would not take `name` as a file name, or None. It must be one plain path component."""
    if not name or len(name.encode()) > _MAX_NAME:
        return f"a snapshot name has 1 to {_MAX_NAME} bytes"
    if _UNSAFE.search(name):
        return f"{name!r} holds a character that llama-server refuses in a file name"
    if ".." in name or name.startswith((".", " ")) or name.endswith((".", " ")):
        return f"{name!r} begins or ends with a dot or space, or holds '..'"
    if name.endswith((MANIFEST_SUFFIX, ".tmp")):
        return f"{name!r} ends like a manifest"
    return None


def encode(manifest: Manifest) -> bytes:
    """The manifest as it lies on disk: indented JSON."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n"


def decode(data: bytes) -> Manifest:
    """Read a manifest; raises ValueError with the place when it is not one."""
    manifest = msgspec.json.decode(data, type=Manifest)
    numbers = (manifest.slot, manifest.tokens, manifest.bytes, manifest.saved_ms, manifest.used_ms)
    if any(not 0 <= number < 1 << 63 for number in numbers):
        raise ValueError("a manifest has a number that nothing can have")
    return manifest
