"""The fingerprint of a running model, from what its own child says and from the arguments it runs with.

Invariant: taken from the running child (`status.args`, `/props`, `/slots`, its environment where it can be read),
never from a configuration file, which may have changed since the child was started.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterator, Sequence
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
class _Files:
    """What a fingerprint takes from the disk."""

    gguf: GgufIdentity
    lora: tuple[str, ...]
    drafter: str
    mmproj: str


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
        files = await asyncio.to_thread(self._files, props.model_path or args.last("--model"), args)
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
            kv_unified=args.kv_unified(),
            cache_types=(args.last("--cache-type-k", default="f16"), args.last("--cache-type-v", default="f16")),
            flash_attn=args.last("--flash-attn", default="auto"),
            rope=args.matching(*_SHAPING),
            lora=files.lora,
            drafter=files.drafter,
            mmproj=files.mmproj,
            template=template,
        )

    def _files(self, path: str, args: Args) -> _Files:
        return _Files(
            gguf=self._identities.identity(self._local(path)),
            lora=self._stamps(args.matching("--lora")),
            drafter=self._drafter(args),
            mmproj=self._stamp(args.last("--mmproj", "--mmproj-url")),
        )

    def _drafter(self, args: Args) -> str:
        kinds = args.matching("--spec-type", "--draft", "--spec-draft", "--hf-repo-draft")
        return " ".join([*kinds, self._stamp(args.last("--model-draft", "--spec-draft-model"))]).strip()

    def _stamps(self, arguments: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(f"{name} {self._stamp(value)}".strip() for name, _, value in (a.partition(" ") for a in arguments))

    def _stamp(self, value: str) -> str:
        """A side file as `path size mtime`; the text itself where it is no file we can see."""
        if not value:
            return ""
        try:
            stat = Path(self._local(value)).stat()
        except OSError:
            return value
        return f"{value} {stat.st_size} {stat.st_mtime_ns}"
