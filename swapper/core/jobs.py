"""A job: a recipe of the configuration that runs under a lease. Frozen values, no I/O.

queued -> running -> done | failed | cancelled; queued -> failed | cancelled
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from swapper.core.types import WorkClass


class JobState(StrEnum):
    """Where a job is; a final state has a reason, but for `done`."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


FINAL = frozenset({JobState.DONE, JobState.FAILED, JobState.CANCELLED})


@dataclass(frozen=True, slots=True)
class Job:
    """One run of a recipe.

    `params` as they were checked, paths absolute. `lease` is the id of the lease it runs under, chosen before that is
    asked for. `output`: the files it is to leave, by parameter. `exit`: its exit
    status, negative for the signal that ended it. `cancelled`: somebody asked for its end. `version` counts its changes
    in the store.
    """

    id: str
    recipe: str
    owner: str
    klass: WorkClass
    host: str
    created_ms: int
    lease: str
    params: Mapping[str, str]
    output: Mapping[str, str]
    state: JobState = JobState.QUEUED
    reason: str | None = None
    exit: int | None = None
    started_ms: int | None = None
    ended_ms: int | None = None
    cancelled: bool = False
    version: int = 0

    @property
    def over(self) -> bool:
        """Whether it has reached a final state."""
        return self.state in FINAL
