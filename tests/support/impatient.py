"""`swapper serve` that takes a server for hung after 4 s without a sign of life, instead of 20, a load after 3 of 120.

    python -m tests.support.impatient serve -c swapper.yaml

The shipped program; only those numbers are others. The looks it takes stay as many.
"""

from __future__ import annotations

from workers import patience

HUNG_S = 4.0
STALL_S = 3.0

if __name__ == "__main__":
    patience.STALL_S = STALL_S  # before anybody takes it over

    from workers.llama import hung, server

    hung.HUNG_S = server.HUNG_S = HUNG_S
    from swapper.__main__ import main

    main()
