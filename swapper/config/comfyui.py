"""What may stand under a ComfyUI, and what would not work or let somebody past its gate.

Invariant: pure over the document; gives every problem at once, as (path, sentence).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from swapper.config.schema import Document, TenantEntry
from swapper.config.units import show_mib
from swapper.config.yamltext import Loc

Said = tuple[Loc, str]

KIND = "comfyui"
WHO = "ComfyUI"
KEYS = frozenset({"command", "url", "gate", "linger", "vram"})
"""Keys of its own, beside those of every tenant."""
LINGER_MS = 20_000
IDLE_MIB = 512
"""What a ComfyUI with no model loaded keeps at least: its CUDA context."""

_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


def check(document: Document, entry: TenantEntry, loc: Loc, is_at: Callable[[str, str], bool]) -> Iterator[Said]:
    """Problems of one. `is_at`: whether calls to a URL, the second, would come to who listens at the first."""
    if entry.url is None:
        yield loc, "needs url: the address of the ComfyUI, like http://127.0.0.1:8188"
    if entry.control == "command" and not entry.command:
        yield loc, "control: command needs command: how it is started, like [python, main.py, --port, '8188']"
    if entry.control == "attach" and entry.command:
        yield (*loc, "command"), "is never run with control: attach; write control: command, or remove it"
    if entry.evict == "never":
        yield (*loc, "evict"), "never cannot be: it is on its card only while its prompts are; remove it"
    if entry.gate is None:
        yield loc, "needs gate: where its clients come to in its place, like 127.0.0.1:8189"
        return
    if entry.url is not None and is_at(entry.gate, entry.url):
        yield (*loc, "gate"), "is ComfyUI's own address (url); give the gate another port"
    gate = f"http://{entry.gate}"
    if is_at(document.listen, gate) and not entry.gate.endswith(":0"):
        yield (*loc, "gate"), f"is swapper's own address (listen: {document.listen}); give the gate another port"
    for name, other in document.tenants.items():
        if other is entry:
            break
        if other.gate is not None and is_at(other.gate, gate) and not entry.gate.endswith(":0"):
            yield (*loc, "gate"), f"is that of tenants.{name}, too; give each its own port"


def notices(document: Document, entry: TenantEntry, loc: Loc) -> Iterator[Said]:
    """What is accepted and had better be known."""
    if entry.kind != KIND:
        return
    if entry.control == "attach":
        said = "cannot be restarted, so VRAM that it keeps after /free stays taken and its card goes to fault"
        yield loc, f"{said}; write control: docker, command or systemd, and how"
    host = (entry.gate or "").rpartition(":")[0].strip("[]")
    if entry.gate is not None and host not in _LOOPBACK:
        said = "whoever reaches it may use ComfyUI, which knows no keys, and have the card for it"
        yield (*loc, "gate"), f"{said}; let it listen on 127.0.0.1, or keep strangers out before it"
    card = document.cards.get(entry.card)
    if card is not None and card.read_by != "declared" and card.reserve_mib < IDLE_MIB:
        said = (
            f"is {show_mib(card.reserve_mib)}, and an idle {loc[-1]} keeps more of it while it runs (its CUDA context)"
        )
        mend = f"a whole lease would wait for that; write reserve: {show_mib(2 * IDLE_MIB).replace(' ', '')}"
        yield ("cards", entry.card, "reserve"), f"{said}: {mend}"
