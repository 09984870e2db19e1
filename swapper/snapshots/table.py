"""The conversations of one tenant, as the index finds them: by their root, by a manifest's word, by their slot.

Invariant: at most one is known to stand in a slot; each is in `roots` or in `told`. Whoever puts one here keeps both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from swapper.snapshots.conversation import Conversation, Sought
from swapper.snapshots.reread import Counts


@dataclass(slots=True)
class Table:
    """`roots`: root -> ids; `told`: the ids of which a manifest tells; `slots`: slot -> id.

    `load`: the swap that loaded the tenant, whose server all of this is about; "" where nobody knows of one,
    None where nothing was noted or told of it either.
    """

    talks: dict[str, Conversation] = field(default_factory=dict[str, Conversation])
    roots: defaultdict[bytes, set[str]] = field(default_factory=lambda: defaultdict[bytes, set[str]](set))
    told: set[str] = field(default_factory=set[str])
    slots: dict[int, str] = field(default_factory=dict[int, str])
    counts: Counts = field(default_factory=Counts)
    version: int = 0
    load: str | None = None

    def take_slot(self, slot: int, name: str) -> None:
        """Who stood in the slot stands in none that is known, if it is in the server at all."""
        before = self.slots.get(slot)
        if before is not None and before != name:
            self.talks[before] = replace(self.talks[before], slot=None, passed=True)
        self.slots[slot] = name

    def candidates(self, sought: Sought) -> Iterator[str]:
        """Who can share anything with the chain: its root's, of a text the shorter ones, and whom a manifest tells.

        All texts shorter than a block have one root, and each one link, which is its name: by that they are looked up.
        """
        chain = sought.chain
        if chain.root == chain.links[0]:
            yield from self.roots.get(chain.root, ())
        if chain.is_text and (short := self.roots.get(chain.seed)):
            yield from short & {chain.links[0].hex(), *(end.hex() for end in sought.ends(0))}
        yield from self.told
