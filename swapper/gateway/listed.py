"""What is told of a model to who lists the models, in the words of OpenAI, llama-server and llama-swap together.

Invariant: values only; what is not known is left out, not guessed. `meta.llamaswap` has llama-swap's name, since
clients of that look there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_TEXT = ("text",)


@dataclass(frozen=True, slots=True)
class Traits:
    """What a model takes and gives (`text`, `image`, `audio`, `video`; None: not known), and what else it can do.

    `written`: what it takes stands in the configuration, whatever its server tells.
    """

    inputs: tuple[str, ...] | None = None
    outputs: tuple[str, ...] | None = None
    tools: bool = False
    embeddings: bool = False
    reranker: bool = False
    written: bool = False

    def sensed(self, inputs: Sequence[str] | None) -> Traits:
        """With what its server tells that it takes."""
        if inputs is None or self.written:
            return self
        outputs = self.outputs or (None if self.embeddings or self.reranker else _TEXT)
        return Traits(tuple(inputs), outputs, self.tools, self.embeddings, self.reranker)

    def told(self) -> dict[str, object]:
        """The fields of a line that tell of it."""
        told: dict[str, object] = {}
        if self.inputs is not None and self.outputs is not None:
            modality = f"{'+'.join(self.inputs)}->{'+'.join(self.outputs)}"
            told["architecture"] = {
                "input_modalities": list(self.inputs),
                "output_modalities": list(self.outputs),
                "modality": modality,
            }
        if can := self._can():
            told["capabilities"] = dict.fromkeys(can, True)
        if self.tools:
            told["supported_parameters"] = ["tools", "tool_choice"]
        return told

    def _can(self) -> list[str]:
        """In llama-swap's words, and `embeddings`, for which it has none."""
        inputs, outputs = self.inputs or (), self.outputs or ()
        abilities = {
            "vision": "image" in inputs and "text" in outputs,
            "audio_transcriptions": "audio" in inputs and "text" in outputs,
            "audio_speech": "audio" in outputs,
            "image_generation": "image" in outputs,
            "image_to_image": "image" in inputs and "image" in outputs,
            "function_calling": self.tools,
            "embeddings": self.embeddings,
            "reranker": self.reranker,
        }
        return [name for name, can in abilities.items() if can]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A line of `/v1/models`: the id people use, its other names, tokens of context per slot where known.

    `ttl_s`: seconds without a call after which it leaves its card, 0 for never. `command`: what starts its server,
    where swapper does, without its secrets. `unlisted`: told of only when it is asked for by its name.
    """

    id: str
    tenant: str
    aliases: tuple[str, ...] = ()
    context_length: int | None = None
    ttl_s: int = 0
    name: str = ""
    description: str = ""
    metadata: Mapping[str, object] = field(default_factory=dict[str, object])
    unlisted: bool = False
    traits: Traits = Traits()
    command: str = ""

    def line(
        self, *, loaded: bool, created: int, context: int | None, inputs: Sequence[str] | None, asked: str | None = None
    ) -> dict[str, object]:
        """Its line. `context`, `inputs`: what its server tells; `asked`: the name that it was asked for by."""
        tokens = context or self.context_length
        meta: dict[str, object] = {}
        if self.metadata:
            meta["llamaswap"] = {**self.metadata, "type": "model", "aliases": list(self.aliases)}
        line: dict[str, object] = {"id": asked or self.id, "object": "model", "created": created, "owned_by": "swapper"}
        line |= {name: text for name, text in (("name", self.name), ("description", self.description)) if text}
        line |= {"aliases": list(self.aliases), "status": {"value": "loaded" if loaded else "unloaded"}}
        line |= self.traits.sensed(inputs).told()
        if tokens is not None:
            line["context_length"] = tokens
            meta["n_ctx"] = tokens
        return {**line, "meta": meta} if meta else line
