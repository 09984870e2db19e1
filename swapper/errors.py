"""The exceptions of swapper, all of them.

SwapperError
├── ConfigError        the configuration is wrong; `problems` says where and how to mend it (exit status 2)
├── StoreDown          the store does not answer; nothing was acknowledged
├── BackendError       a tenant's server or its control answered with an error, or not at all
│   ├── BackendDown    it could not be reached (retry may help)
│   │   └── BackendGone nobody listens there: no server runs
│   ├── BackendStalled it is there, and what was asked of it does not move (its process is to be ended)
│   └── BackendRefused it answered and refused (retry will not help); `status` is the HTTP status, if any
│       └── BackendBusy it is at work for somebody, who goes first (retry later)
└── ApiError           a client's view of swapper: it answered with a refusal, or not at all
    ├── ApiDown        it could not be reached, or failed to answer (5xx); retry may help
    └── ApiRefused     it refused (retry will not help); `status` and `problem` say how

Expected outcomes (a conflict, a full queue, a wrong token) are values, not exceptions: see store/protocol.py.
"""

from __future__ import annotations


class SwapperError(Exception):
    """Base of all of them; its text is one sentence for a person."""


class ConfigError(SwapperError):
    """One or more mistakes in the configuration, each as `file:line: path: what (and what to do)`."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class StoreDown(SwapperError):
    """The store could not be reached, or lost the connection before it answered."""


class BackendError(SwapperError):
    """A tenant's server, or the control that starts and stops it, failed."""


class BackendDown(BackendError):
    """Not reachable: connection refused, reset or timed out."""


class BackendGone(BackendDown):
    """Connection refused at once: there is no server, as opposed to one that hangs."""


class BackendStalled(BackendError):
    """A verb gave up: nothing of what it waits for moved for as long as anything alive would."""


class BackendRefused(BackendError):
    """An answer that is a refusal. `status` is the HTTP status where there was one."""

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status


class BackendBusy(BackendRefused):
    """Refused, or given up, because of a call that goes first."""


class ApiError(SwapperError):
    """A call of swapper's own HTTP API failed."""


class ApiDown(ApiError):
    """Not reachable, or it answered with a 5xx: nothing is known of the call's effect."""


class ApiRefused(ApiError):
    """A refusal. `status` is the HTTP status, `problem` the RFC 9457 object (empty when there was none)."""

    def __init__(self, text: str, status: int, problem: dict[str, object]) -> None:
        super().__init__(text)
        self.status = status
        self.problem = problem
