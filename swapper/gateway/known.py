"""A call's place among the conversations: what it goes on with, and what of it may be kept once it is answered.

Invariant: no byte of a body is held but the request's own, which is counted by whoever holds it: the budget of bodies
until the answer has passed, then the index. What was found is remembered by name, so that it keeps no older body.
"""

from __future__ import annotations

from dataclasses import dataclass

from swapper.snapshots.chain import Chain
from swapper.snapshots.conversation import NEW, Match, Relation, Request
from swapper.snapshots.index import Index


@dataclass(frozen=True, slots=True)
class _Found:
    """A match, as of the index' `version`."""

    version: int
    relation: Relation
    name: str
    links: int


class Known:
    """`request` is None where nothing may be kept of the call, and once it was handed on."""

    __slots__ = ("_found", "chain", "request", "tenant")

    def __init__(self, tenant: str, chain: Chain, request: Request | None) -> None:
        self.tenant = tenant
        self.chain = chain
        self.request = request
        self._found: _Found | None = None

    def match(self, index: Index) -> Match:
        """What it goes on with as things stand; looked for anew only where conversations came or went since."""
        version = index.version(self.tenant)
        before = self._before(index)
        if before is not None and self._found is not None and self._found.version == version:
            return before
        match = index.find(self.tenant, self.chain)
        if before is not None and self.chain.is_text and self.chain.text is None:
            match = max(match, before, key=lambda one: one.closeness)  # only the text's bytes would show that
        name = "" if match.conversation is None else match.conversation.id
        self._found = _Found(version, match.relation, name, match.links)
        return match

    def _before(self, index: Index) -> Match | None:
        """What was found last, as it stands now; None where it is gone or nothing was looked for."""
        found = self._found
        if found is None:
            return None
        if not found.name:
            return NEW
        talk = index.conversation(self.tenant, found.name)
        return None if talk is None else Match(found.relation, talk, found.links)

    def sent(self, *, keep: bool) -> None:
        """The body is sent: nothing of it stays, but the request where there is room to `keep` it."""
        self.chain = self.chain.without_text()
        if not keep:
            self.request = None

    def handed_on(self) -> Request | None:
        """The request, which is the index' from here on."""
        request, self.request = self.request, None
        return request
