"""`swapper serve` that takes a card for held by somebody after 2 s, instead of a minute.

    python -m tests.support.hasty serve -c swapper.yaml

The shipped program; only that number is another.
"""

from __future__ import annotations

from functools import partial

from swapper.config import config

VACATE_MS = 2_000

if __name__ == "__main__":
    config.PolicySpec = partial(config.PolicySpec, vacate_ms=VACATE_MS)  # pyright: ignore[reportAttributeAccessIssue]
    from swapper.__main__ import main

    main()
