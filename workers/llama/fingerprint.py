"""The fingerprint of a running model, from what its own child says and from the arguments it runs with.

Invariant: taken from the running child (`status.args`, `/props`, `/slots`, its environment where it can be read),
never from a configuration file, which may have changed since the child was started.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from swapper.snapshots.manifest import Fingerprint, GgufIdentity
from workers.llama.gguf import GgufIdentities
from workers.llama.http import Model, RouterHttp

_ENV = "LLAMA_ARG_"
_SHAPING = (  # arguments that change positions, attention or weights, and so what saved state means
    "--rope-", "--yarn-", "--override-kv", "--swa-full", "--grp-attn-", "--control-vector", "--pooling",
    "--attention",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Args:
    """A child's arguments as name -> values, the environment's beneath. Flags have the value ''."""

    named: dict[str, tuple[str, ...]]

    @classmethod
    def of(cls, args: Sequence[str], environ: Sequence[str] = ()) -> Args:
        """From a command line (names as llama-server's router writes them) and `LLAMA_ARG_X=value` strings."""
        named: dict[str, tuple[str, ...]] = {}
        for pair in environ:
            name, _, value = pair.partition("=")
            if name.startswith(_ENV):
                named["--" + name.removeprefix(_ENV).lower().replace("_", "-")] = (value,)
        given: dict[str, tuple[str, ...]] = {}
        for name, value in _pairs(args):
            given[name] = (*given.get(name, ()), value)
        return cls({**named, **given})

    def last(self, *names: str, default: str = "") -> str:
        """The value given last under any of the names."""
        for name in names:
            if name in self.named:
                return self.named[name][-1]
        return default

    def kv_unified(self) -> bool:
        """Whether all slots share one cache: as given, else llama-server's default (only with automatic slots)."""
        if "--kv-unified" in self.named:
            return self.last("--kv-unified").lower() not in {"0", "false", "off"}
        if "--no-kv-unified" in self.named:
            return False
        return self.last("--parallel", "--n-parallel", default="-1") in {"-1", "auto", "0"}

    def matching(self, *prefixes: str) -> tuple[str, ...]:
        """`name value` of every argument whose name begins so, sorted."""
        return tuple(
            f"{name} {value}".strip()
            for name, values in sorted(self.named.items())
            if name.startswith(prefixes)
            for value in values
        )


def _pairs(args: Sequence[str]) -> Iterator[tuple[str, str]]:
    name, values = "", list[str]()
    for word in args:
        if word.startswith("--"):
            if name:
                yield name, " ".join(values)
            name, values = word, []
        else:
            values.append(word)
    if name:
        yield name, " ".join(values)


@dataclass(frozen=True, slots=True)
class Shape:
    """What a fingerprint takes from the arguments alone."""

    kv_unified: bool
    cache_types: tuple[str, str]
    flash_attn: str
    rope: tuple[str, ...]

    @classmethod
    def of(cls, args: Args) -> Shape:
        """Defaults are llama-server's own."""
        return cls(
            kv_unified=args.kv_unified(),
            cache_types=(args.last("--cache-type-k", default="f16"), args.last("--cache-type-v", default="f16")),
            flash_attn=args.last("--flash-attn", default="auto"),
            rope=args.matching(*_SHAPING),
        )


@dataclass(frozen=True, slots=True)
class Files:
    """What a fingerprint takes from the disk."""

    gguf: GgufIdentity
    lora: tuple[str, ...]
    drafter: str
    mmproj: str

    @classmethod
    def of(cls, path: str, args: Args, identities: GgufIdentities, local: Callable[[str], str]) -> Files:
        """`path` is the model's as the server names it, `local` turns such a path into one of this host. Blocking."""
        kinds = args.matching("--spec-type", "--draft", "--spec-draft", "--hf-repo-draft")
        loras = (given.partition(" ") for given in args.matching("--lora"))
        return cls(
            gguf=identities.identity(local(path)),
            lora=tuple(f"{name} {_stamp(value, local)}".strip() for name, _, value in loras),
            drafter=" ".join([*kinds, _stamp(args.last("--model-draft", "--spec-draft-model"), local)]).strip(),
            mmproj=_stamp(args.last("--mmproj", "--mmproj-url"), local),
        )


def _stamp(value: str, local: Callable[[str], str]) -> str:
    """A side file as `path size mtime`; the text itself where it is no file we can see."""
    if not value:
        return ""
    try:
        stat = Path(local(value)).stat()
    except OSError:
        return value
    return f"{value} {stat.st_size} {stat.st_mtime_ns}"


def local_path(path: str, path_map: Mapping[str, str], folder: Path | None) -> str:
    """A path as the server names it, as this host sees it: mapped, else relative to the `folder` it was started in."""
    for theirs in sorted(path_map, key=len, reverse=True):
        root = theirs.rstrip("/")
        if path == theirs or path.startswith(root + "/"):
            return path_map[theirs].rstrip("/") + path[len(root) :]
    return str(folder / path) if folder is not None else path


class Fingerprints:
    """Fingerprints of the models that run now, each computed once for its run."""

    def __init__(self, http: RouterHttp, identities: GgufIdentities, local_path: Callable[[str], str]) -> None:
        self._http = http
        self._identities = identities
        self._local = local_path
        self._known: dict[tuple[str, str], Fingerprint] = {}

    async def of(self, model: Model, environ: Sequence[str] = ()) -> Fingerprint:
        """Fingerprint of a loaded model; `environ` is its child's environment where known. Raises BackendError."""
        args = Args.of(model.status.args, environ)
        key = (model.id, model.run)
        if not model.run or key not in self._known:
            self._known = {k: v for k, v in self._known.items() if k[0] != model.id}
            self._known[key] = await self._take(model.id, args)
        return self._known[key]

    async def _take(self, model: str, args: Args) -> Fingerprint:
        props = await self._http.props(model)
        path = props.model_path or args.last("--model")
        files = await asyncio.to_thread(Files.of, path, args, self._identities, self._local)
        shape = Shape.of(args)
        n_ctx, n_slots = props.default_generation_settings.n_ctx, props.total_slots
        if not n_ctx or not n_slots:  # a build that does not tell them here
            slots = await self._http.slots(model)
            n_ctx, n_slots = min((slot.n_ctx for slot in slots), default=0), len(slots)
        template = hashlib.sha256(props.chat_template.encode()).hexdigest() if props.chat_template else ""
        return Fingerprint(
            model=model,
            gguf=files.gguf,
            build=props.build_info,
            n_ctx_slot=n_ctx,
            n_parallel=n_slots,
            kv_unified=shape.kv_unified,
            cache_types=shape.cache_types,
            flash_attn=shape.flash_attn,
            rope=shape.rope,
            lora=files.lora,
            drafter=files.drafter,
            mmproj=files.mmproj,
            template=template,
        )
