"""The named supervisor: the one place of the agent where an unexpected exception is caught.

Invariant: what it catches is logged with its traceback and handed back as a value; cancellation passes through.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import structlog
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, retry_if_result, wait_random_exponential

from swapper.errors import StoreDown

T = TypeVar("T")

log = structlog.stdlib.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Crash:
    """An exception nobody expected; `text` is one line for a report, the traceback is in the log."""

    text: str


async def supervised(what: str, work: Awaitable[T]) -> T | Crash:
    """Await `work`; an exception becomes a `Crash`, its traceback goes to the log under the name `what`."""
    try:
        return await work
    except Exception as error:
        log.exception("unexpected error", what=what)
        return Crash(f"{what}: {type(error).__name__}: {error}")


async def kept_running(what: str, work: Callable[[], Awaitable[None]]) -> None:
    """Run a loop that must not end by an accident: after a crash it starts again, after a growing pause (up to 5 s)."""

    async def attempt() -> Crash | None:
        return await supervised(what, work())

    await AsyncRetrying(retry=retry_if_result(_crashed), wait=wait_random_exponential(multiplier=0.1, max=5))(attempt)


async def until_stored(what: str, work: Callable[[], Awaitable[T]]) -> T:
    """The result of `work` once the store answers: StoreDown is waited out, in growing pauses (up to 2 s)."""

    def tell(state: RetryCallState) -> None:
        log.warning("the store does not answer", what=what, attempt=state.attempt_number)

    retrying = AsyncRetrying(
        retry=retry_if_exception_type(StoreDown),
        wait=wait_random_exponential(multiplier=0.1, max=2),
        before_sleep=tell,
    )

    async def attempt() -> T:
        return await work()

    with suppress(StoreDown):  # tenacity only where it is needed: it costs more than a short call itself
        return await work()
    return await retrying(attempt)


def _crashed(outcome: object) -> bool:
    return isinstance(outcome, Crash)
