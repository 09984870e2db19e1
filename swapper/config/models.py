"""What stands in swapper.yaml under one model: what it takes, what it is called, and what its calls are given.

Invariant: as in schema.py. Parameters of calls are values as JSON has them, and `model` is none of them.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, BeforeValidator, Field, StrictBool, StrictInt

from swapper.config.values import Mib, OnOver, OptionalMs, Section, Text, Vram

_MODEL = "model"


def _names(value: object) -> object:
    """A list, or as llama-swap has it one text with commas."""
    return [one.strip() for one in value.split(",") if one.strip()] if isinstance(value, str) else value


def _parameter(name: str) -> str:
    if name.partition(".")[0].lower() == _MODEL:
        raise ValueError("model stays as it was called; write another name under aliases, or under by_name")
    if not all(name.split(".")):
        raise ValueError(f"{name!r} is no parameter's name; a dot leads into an object, as in chat_template_kwargs.x")
    if not name.isprintable() or '"' in name:
        raise ValueError(f"{name!r} is no parameter's name")
    return name


def _parameters(value: dict[str, Any]) -> dict[str, Any]:
    for name, one in value.items():
        _parameter(name)
        _json(name, one)
    return value


def _json(name: str, value: object) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} must be a value that JSON has, not {value}")
    if isinstance(value, dict):
        value = list(cast("dict[str, object]", value).values())
    for one in cast("list[object]", value) if isinstance(value, list) else ():
        _json(name, one)


def _metadata(value: dict[str, Any]) -> dict[str, Any]:
    for name, one in value.items():
        _json(name, one)
    return value


Metadata = Annotated[dict[str, Any], AfterValidator(_metadata)]
Modality = Literal["text", "image", "audio", "video"]
Parameters = Annotated[dict[str, Any], AfterValidator(_parameters)]
Names = Annotated[tuple[Annotated[Text, AfterValidator(_parameter)], ...], BeforeValidator(_names)]


class FiltersEntry(Section):
    """What the bodies of a model's calls are given: `strip` takes parameters out, then `set` sets some.

    Last come those of the name that was called (`by_name`), which is a name of the model by standing there.
    """

    strip: Names = ()
    set: Parameters = Field(default_factory=dict)
    by_name: dict[str, Parameters] = Field(default_factory=dict)


class CapabilitiesEntry(Section):
    """What a model can do, for who lists the models: what is not written is found out where it can be.

    `in`, `out`: text, image, audio, video. `context`: tokens that a call may have.
    """

    inputs: tuple[Modality, ...] | None = Field(default=None, alias="in")
    outputs: tuple[Modality, ...] | None = Field(default=None, alias="out")
    tools: StrictBool | None = None
    embeddings: StrictBool | None = None
    reranker: StrictBool | None = None
    context: Annotated[StrictInt, Field(ge=1)] | None = None


class ModelEntry(Section):
    """One model of a server that serves several by name. `api_key_env`, `on_over`: where it is not the server's.

    `ram`: what it takes of the machine's memory beside its card. `filters`: what of its calls' bodies is changed.

    `name`, `description`, `metadata`, `capabilities`: what `/v1/models` tells of it; `unlisted`: it is left out there,
    and called all the same.
    """

    vram_mib: Vram | None = Field(default=None, alias="vram")
    ram_mib: Mib | None = Field(default=None, alias="ram")
    aliases: tuple[Text, ...] = ()
    ttl_ms: OptionalMs = Field(default=None, alias="ttl")
    default: StrictBool = False
    concurrency: Annotated[StrictInt, Field(ge=1)] | None = None
    api_key_env: Text | None = None
    on_over: OnOver | None = None
    filters: FiltersEntry = FiltersEntry()
    name: Text | None = None
    description: Text | None = None
    metadata: Metadata = Field(default_factory=dict)
    unlisted: StrictBool = False
    capabilities: CapabilitiesEntry = CapabilitiesEntry()

    @property
    def other_names(self) -> tuple[str, ...]:
        """What it is called beside its own name: each once, also those that only parameters belong to."""
        return tuple(dict.fromkeys((*self.aliases, *self.filters.by_name)))
