"""The values that stand in swapper.yaml and how each is read: sizes, durations, paths, addresses, commands.

Invariant: what a value must be is said in one sentence; a value with a unit is read into the unit that its type's name
says. Nothing here opens a file; paths become absolute by the folder and home given in the validation context.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Annotated, Literal, cast

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, PlainValidator, ValidationInfo

from swapper.config.units import duration_ms, size_bytes, size_mib
from swapper.core.types import WorkClass

ALL = "all"
CORS = ("auto", "local", "any", "none")
"""Words for which pages may call models."""


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


def gpu_names(value: object) -> tuple[str, ...]:
    """One GPU or a list of them, by index or UUID."""
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


def listed(value: object) -> object:
    """One of something stands for a list of it."""
    return [value] if isinstance(value, str | dict) else value  # pyright: ignore[reportUnknownVariableType]


def _cors(value: object) -> tuple[str, ...]:
    """Words, and origins of pages; one of them stands for a list."""
    written = cast("list[object]", value) if isinstance(value, list) else [value]
    return tuple(_page(one) for one in written)


def _page(value: object) -> str:
    if value in (*CORS, "*"):
        return "any" if value == "*" else str(value)
    text = str(value)
    scheme, separator, rest = text.rstrip("/").partition("://")
    if separator and re.fullmatch(r"[a-z][a-z0-9+.-]*", scheme) and rest and not set("/?#@* ") & set(rest):
        return text.rstrip("/")
    near = difflib.get_close_matches(text.lower(), CORS, n=1, cutoff=0.6)
    hint = f"; did you mean {near[0]}?" if near else ""
    like = "the address of pages without a path, like https://chat.example.org"
    raise ValueError(f"{value!r} is none of {', '.join(CORS)}, nor {like}{hint}")


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
Cors = Annotated[tuple[str, ...], PlainValidator(_cors)]
Class = Annotated[WorkClass, PlainValidator(_class)]

Kind = Literal["llama-router", "llama-server", "comfyui", "ollama", "vllm", "sglang", "llama-swap", "openai", "none"]
Control = Literal["attach", "command", "docker", "kubernetes", "systemd"]
Probe = Literal["nvml", "amdgpu", "unified", "declared"]
OnOver = Literal["alert", "restart", "evict"]


class Section(BaseModel):
    """Base of all sections: frozen, unknown keys refused, values with units read under their key's name."""

    model_config = ConfigDict(extra="forbid", frozen=True)
