"""What a llama-server would run with if it were started now: as much of a fingerprint as is certain before that.

Invariant: told is only what files, the command and the program's own `--version` say; the chat template and whatever
the server chooses itself (slots, context) are not. The program is run with `--version` and in no other way, and only
where its name says that it is a llama-server.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from presets import ModelOptions
from presets.names import lookup
from workers.llama.argv import long_names, serves_one
from workers.llama.fingerprint import Args, Files, Shape
from workers.llama.gguf import GgufIdentities

VERSION_S = 10.0
_VERSION = re.compile(r"version: (?:\S+ \(build )?(?P<build>[0-9]+)(?:, commit | \()(?P<commit>[0-9a-f]+)\)")
BUILD = re.compile(r"b[0-9]+-[0-9a-f]+")
"""A build as llama-server names itself to its callers."""
_REPEATED = ("rope", "lora")
"""Made of arguments that may be given several times, of which `ModelOptions` has the last."""

Known = Mapping[str, object]
"""Fields of a Fingerprint, those that are certain."""


def arguments(options: ModelOptions, environ: Mapping[str, str]) -> Args:
    """Those of a router's child with these options, which are without the environment's."""
    words: list[str] = []
    for name, setting in options.settings.items():
        option = lookup(name)
        if option is not None and option.flag:
            words.append(f"--no-{name}" if setting.value == "false" else f"--{name}")
        else:
            words += [f"--{name}", setting.value]
    return Args.of(words, _pairs(environ))


def own_arguments(command: Sequence[str], environ: Mapping[str, str]) -> Args | None:
    """Those of a server with one model; None where the command is that of something around it."""
    words = long_names(command)
    return Args.of(words, _pairs(environ)) if serves_one(words) else None


def known(
    args: Args,
    options: ModelOptions,
    command: Sequence[str],
    identities: GgufIdentities,
    local: Callable[[str], str],
) -> Known:
    """What is certain but for the build. `options` as `args`; `command` is the server's. Blocking: reads headers."""
    path = args.last("--model")
    files = Files.of(path, args, identities, local)
    found: dict[str, object] = {**asdict(Shape.of(args)), "lora": files.lora, "drafter": files.drafter}
    if files.gguf.known:
        found["gguf"] = files.gguf
    if path:  # else what is downloaded may bring a projector along
        found["mmproj"] = files.mmproj
    if not options.auto_parallel:
        facts = identities.facts(local(path)) or {}
        trained = facts.get(f"{facts.get('general.architecture')}.context_length")
        found["n_parallel"] = options.n_parallel
        if options.n_ctx and isinstance(trained, int):
            found["n_ctx_slot"] = options.context_per_slot(trained)
    if max(Counter(word for word in command if word.startswith("-")).values(), default=0) > 1:
        return {name: value for name, value in found.items() if name not in _REPEATED}
    return found


def build_of(command: Sequence[str], folder: Path | None) -> str | None:
    """The build of the llama-server that `command` starts, as it names itself (`b10434-7e4c0a9`); None: not known.

    Blocking, at most VERSION_S seconds.
    """
    program = _program(command)
    if program is None:
        return None
    try:
        answer = subprocess.run(
            [*program, "--version"],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=VERSION_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = _VERSION.search(answer.stderr + answer.stdout)
    return f"b{found['build']}-{found['commit']}" if found is not None and answer.returncode == 0 else None


def _program(command: Sequence[str]) -> list[str] | None:
    """The program, with variables that `env` sets for it before it; None where it is not called llama-server."""
    words = list(command)
    ahead = 1 if words and Path(words[0]).name == "env" else 0
    while ahead and ahead < len(words) and "=" in words[ahead]:
        ahead += 1
    named = ahead < len(words) and Path(words[ahead]).name.startswith("llama-server")
    return words[: ahead + 1] if named else None


def _pairs(environ: Mapping[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in sorted(environ.items())]
