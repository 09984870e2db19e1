"""Which snapshots of a folder may go, and which are the last ones of their conversation.

Invariant: pure over manifests. A conversation is known by its links; of a snapshot without them nobody can ask for what
is in it, so that it counts for the swap that made it only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from swapper.core.conversations import WORTH_TOKENS, Strategy
from swapper.snapshots.manifest import Manifest

REREAD = 8
"""Tokens by which a conversation that went on may be shorter: its last ones are read anew, perhaps as fewer."""


def holds(new: Manifest, old: Manifest) -> bool:
    """Whether all of `old` is in `new`, which is on the disk to stay and of use wherever `old` is.

    One conversation only grows: `new` goes on from the very last link of `old`, or ends at the same. A branch does not,
    nor does whatever was used before `old`, or saved before it. A hybrid model goes on only from where it was saved:
    a copy taken back to its last request is replaced by another such one.
    """
    of_one = old.tenant == new.tenant and old.id != "" and old.id in (*new.links, new.id)
    later = (new.last_ms, new.saved_ms, new.snapshot) > (old.last_ms, old.saved_ms, old.snapshot)
    if not (of_one and later and new.saved_ms >= old.saved_ms):
        return False
    as_useful = new.strategy in (old.strategy, Strategy.REWIND) and new.fingerprint == old.fingerprint
    return new.digest is not None and as_useful and new.tokens >= old.tokens - REREAD


def superseded(manifests: Iterable[Manifest], sound: Collection[str]) -> Mapping[str, str]:
    """Snapshot -> one that holds all of it. `sound`: those whose files are as they were saved, as far as is known."""
    found: dict[str, str] = {}
    by_link: defaultdict[tuple[str, str], list[Manifest]] = defaultdict(list)
    manifests = list(manifests)
    for one in manifests:
        if one.snapshot in sound:
            for link in {*one.links, one.id} - {""}:
                by_link[one.tenant, link].append(one)
    for old in manifests:
        newer = [new for new in by_link[old.tenant, old.id] if new.snapshot != old.snapshot and holds(new, old)]
        if newer:
            found[old.snapshot] = max(newer, key=lambda m: (m.last_ms, m.saved_ms, m.snapshot)).snapshot
    return found


def went_on(old: Manifest, new: Manifest) -> bool:
    """Whether what was saved from a slot may be what had been restored into it.

    Where it is known whose that was, nothing but links will do: else a stranger took the slot. Of what nobody can ask
    for tokens have to: a conversation that went on only grows, while a stranger has mostly fewer.
    """
    if old.tenant != new.tenant or new.tokens < old.tokens - REREAD:
        return False
    return not old.id or old.id in (*new.links, new.id)


def only_copies(manifests: Sequence[Manifest], current: Collection[str], copies: Collection[str]) -> set[str]:
    """Those that may be the last of their conversation.

    Of a conversation that is known the newest copy, and each older one until that is on the disk to stay; none of those
    among `copies`, which are in the server as well. Of one that nobody knows those that were not restored and are among
    `current` or of the newest swap that left any of their tenant: older ones were told of as lost when their tenant
    came back without them.
    """
    alone = [m for m in manifests if m.snapshot not in copies]
    unknown = [m for m in alone if not m.id and m.restored_ms is None]
    newest = {m.tenant: m.token for m in sorted(alone, key=lambda m: m.saved_ms) if m.restored_ms is None}
    spared = {m.snapshot for m in unknown if m.snapshot in current or m.token == newest[m.tenant]}
    durable = [m for m in manifests if m.digest is not None]
    last: dict[tuple[str, str], tuple[int, int, str]] = {}
    for one in durable:
        for link in (*one.links, one.id):
            last[one.tenant, link] = max(_order(one), last.get((one.tenant, link), (0, 0, "")))
    return spared | {m.snapshot for m in alone if m.id and last.get((m.tenant, m.id), (0, 0, "")) <= _order(m)}


def _order(manifest: Manifest) -> tuple[int, int, str]:
    return manifest.last_ms, manifest.saved_ms, manifest.snapshot


def short_and_left(manifests: Sequence[Manifest], copies: Collection[str]) -> set[str]:
    """Those that nobody would bring back, and that were in no slot when their tenant left last."""
    of_swaps = sorted((m for m in manifests if m.snapshot not in copies), key=lambda m: m.saved_ms)
    newest = {m.tenant: m.token for m in of_swaps}
    left_ms: dict[str, int] = {}
    for manifest in of_swaps:
        if manifest.token == newest[manifest.tenant]:
            left_ms.setdefault(manifest.tenant, manifest.saved_ms)
    short = [m for m in manifests if m.tokens < WORTH_TOKENS and m.tenant in left_ms]
    return {m.snapshot for m in short if max(m.saved_ms, m.restored_ms or 0) < left_ms[m.tenant]}
