"""Which settings of a server would lose conversations under swapper, each with the mend in words.

Invariant: pure over the effective options; the same findings for a preset file, a command line and a running model.
"""

from __future__ import annotations

import os.path
from collections.abc import Iterator, Mapping
from pathlib import Path

from presets.finding import Finding, Level
from presets.options import ModelOptions, RouterOptions


def losses(
    options: ModelOptions,
    router: RouterOptions | None = None,
    *,
    slot_dir: Path | None = None,
    folder: Path | None = None,
    path_map: Mapping[str, str] | None = None,
) -> list[Finding]:
    """Everything about `options` and `router` (None: not known) with which a handover loses conversations.

    Arguments as in `model_losses`.
    """
    found = router_losses(router) if router is not None else []
    return found + model_losses(options, router, slot_dir=slot_dir, folder=folder, path_map=path_map)


def model_losses(
    options: ModelOptions,
    router: RouterOptions | None = None,
    *,
    slot_dir: Path | None = None,
    folder: Path | None = None,
    path_map: Mapping[str, str] | None = None,
) -> list[Finding]:
    """The part of `losses` that concerns the one model.

    `slot_dir` is the folder swapper was told, `folder` the router's working folder, for a relative slot-save-path.
    `path_map` maps folders as the server sees them to folders as swapper sees them.
    """
    return [
        *_slot_folder(options, slot_dir, folder, path_map or {}),
        *_model(options),
        *_startup(options, router),
    ]


def router_losses(router: RouterOptions) -> list[Finding]:
    """What is wrong with the router itself, once for all its models."""
    found: list[Finding] = []
    if router.autoload:
        text = "the router loads models on its own at any request, also while the card is given to somebody else"
        found.append(Finding(Level.ERROR, "autoload", text, "start it with --no-models-autoload"))
    if router.models_max != 0:
        text = (
            f"the router unloads the model used least once {router.models_max} are loaded, with its conversations, and "
            "every call must go through it, which answers a call to its end although its client hung up"
        )
        found.append(Finding(Level.WARNING, "models-max", text, "start it with --models-max 0"))
    return found


def _slot_folder(
    options: ModelOptions, slot_dir: Path | None, folder: Path | None, path_map: Mapping[str, str]
) -> Iterator[Finding]:
    said = options.slot_save_path
    if said is None:
        wanted = str(slot_dir) if slot_dir is not None else "DIR"
        text = "no slot-save-path: the server refuses to save conversations (501), all are lost at an unload"
        yield _at(options, Level.ERROR, "no-slot-save-path", text, f"start the server with --slot-save-path {wanted}")
        return
    if slot_dir is None:
        return
    seen = _mapped(os.path.join(folder, said) if folder is not None else said, path_map)
    if not os.path.isabs(seen):
        return
    if os.path.realpath(seen) != os.path.realpath(slot_dir):
        text = f"the server writes its slots to {said}, but swapper looks in {slot_dir}"
        mend = "give both the same folder, or map it with path_map"
        yield _at(options, Level.ERROR, "slot-dir", text, mend, "slot-save-path")


def _mapped(path: str, path_map: Mapping[str, str]) -> str:
    for inside in sorted(path_map, key=len, reverse=True):
        root = inside.rstrip("/")
        if path == root or path.startswith(root + "/"):
            return path_map[inside].rstrip("/") + path[len(root) :]
    return path


def _model(options: ModelOptions) -> Iterator[Finding]:
    if options.kv_unified and options.cache_idle_slots and options.n_parallel > 1:
        why = "without parallel the server takes 4 slots with one KV memory" if options.auto_parallel else "kv-unified"
        text = f"{why}, and cache-idle-slots empties every idle slot at each call: only one conversation can be saved"
        mend = "write parallel = N and kv-unified = false" if options.auto_parallel else "write kv-unified = false"
        yield _at(options, Level.WARNING, "kv-unified", text, f"{mend}, or cache-idle-slots = false", "kv-unified")
    similarity = options.settings.get("slot-prompt-similarity")
    if similarity is None and options.n_parallel > 1:
        text = (
            "a prompt that shares a tenth with a used slot takes that slot, also while others are free, "
            "and a system prompt in common is enough"
        )
        yield _at(options, Level.WARNING, "slot-prompt-similarity", text, "write slot-prompt-similarity = 0.5")
    if not options.metrics:
        text = "no metrics: calls that wait inside the server cannot be seen before it is unloaded"
        yield _at(options, Level.WARNING, "no-metrics", text, "start the server with --metrics", "metrics")
    if not options.flag("slots", True):
        text = "slots are hidden, so that which conversations it holds cannot be seen"
        yield _at(options, Level.ERROR, "no-slots", text, "remove no-slots", "slots")
    if not options.flag("cache-prompt", True):
        text = "cache-prompt is off: a restored conversation is read again all the same"
        yield _at(options, Level.WARNING, "no-cache-prompt", text, "remove no-cache-prompt", "cache-prompt")
    if (options.number("sleep-idle-seconds") or -1) > 0:
        text = "a server that goes to sleep drops its conversations, and nothing can save them before"
        yield _at(options, Level.WARNING, "sleep", text, "remove sleep-idle-seconds", "sleep-idle-seconds")


def _startup(options: ModelOptions, router: RouterOptions | None) -> Iterator[Finding]:
    if not options.flag("load-on-startup", False):
        return
    mend = "remove it and write default: true for the model in swapper.yaml"
    if router is not None and router.models_max == 0:
        text = "load-on-startup with --models-max 0: the router refuses to start"
        yield _at(options, Level.ERROR, "load-on-startup", text, mend, "load-on-startup")
    else:
        text = "load-on-startup takes the card whenever the router starts, whoever has it then"
        yield _at(options, Level.WARNING, "load-on-startup", text, mend, "load-on-startup")


def _at(options: ModelOptions, level: Level, code: str, text: str, mend: str, name: str | None = None) -> Finding:
    setting = options.settings.get(name) if name is not None else None
    return Finding(level, code, text, mend, options.model or None, setting.line if setting is not None else None)
