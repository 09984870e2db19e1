"""Which snapshots are of one conversation: an older copy has its name among the last links of a newer one.

Invariant: pure over manifests. What was saved before edits, or longer ago than the links of a manifest go back, counts
as a conversation of its own: it may still be of use as one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from swapper.snapshots.conversation import Conversation
from swapper.snapshots.manifest import Manifest


def newer(manifests: Iterable[Manifest]) -> Mapping[str, str]:
    """Snapshot -> the newest one of the same conversation, for each that is not that one itself."""
    found: dict[str, str] = {}
    newest: dict[tuple[str, str], str] = {}
    for one in sorted(manifests, key=lambda one: (one.last_ms, one.saved_ms, one.snapshot), reverse=True):
        if not one.id:
            continue  # nobody knew what it is of
        of = newest.get((one.tenant, one.id), one.snapshot)
        if of != one.snapshot:
            found[one.snapshot] = of
        for link in (*one.links, one.id):
            newest.setdefault((one.tenant, link), of)
    return found


def away(known: Iterable[Conversation], manifests: Collection[Manifest]) -> tuple[int, int]:
    """Of a tenant that is not loaded: how many of its conversations are on disk, and how many are nowhere.

    `known`: those a gateway knows; `manifests`: all of the tenant's.
    """
    older = newer(manifests)
    on_disk = frozenset(link for one in manifests for link in (*one.links, one.id) if link)
    ids = frozenset(one.id for one in manifests if one.id)
    lost = (talk for talk in known if talk.id not in on_disk and not talk.went_on_from(ids))
    return len(manifests) - len(older), sum(1 for _ in lost)
