"""What llama-servers tell of their models beside how they are: tokens of context per slot, and what they take.

Invariant: what was told once is believed until something else is told; what cannot be read tells nothing. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from workers.llama.http import Model, Props

_MEDIA = {"vision": "image", "audio": "audio", "video": "video"}


class Told:
    """By tenant and model as the server calls it, like `workers.backend.Sized` and `Sensing`."""

    def __init__(self) -> None:
        self.contexts: dict[str, dict[str, int]] = {}
        self.inputs: dict[str, dict[str, tuple[str, ...]]] = {}

    def models(self, tenants: Mapping[str, str], models: Mapping[str, Model]) -> None:
        """A fresh `/models` of a router; `tenants` maps ids to its names."""
        for tenant, name in tenants.items():
            model = models.get(name)
            if model is not None and model.meta is not None:
                self._context(tenant, name, model.meta.n_ctx)
            if model is not None and model.architecture is not None:
                self._inputs(tenant, name, model.architecture.input_modalities)

    def props(self, tenant: str, name: str, props: Props) -> None:
        """A plain server's `/props`, while its model is loaded."""
        self._context(tenant, name, props.default_generation_settings.n_ctx)
        if isinstance(props.modalities, dict):
            said = cast("dict[object, object]", props.modalities)
            self._inputs(tenant, name, ["text", *(word for key, word in _MEDIA.items() if said.get(key) is True)])

    def _context(self, tenant: str, name: str, tokens: object) -> None:
        if isinstance(tokens, int) and not isinstance(tokens, bool) and tokens > 0:
            self.contexts.setdefault(tenant, {})[name] = tokens

    def _inputs(self, tenant: str, name: str, words: object) -> None:
        given = cast("list[object]", words) if isinstance(words, list) else []
        if given and all(isinstance(word, str) for word in given):
            self.inputs.setdefault(tenant, {})[name] = tuple(map(str, given))
