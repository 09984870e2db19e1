"""`swapper serve` that takes a server for hung after 4 s without a sign of life, instead of 20.

    python -m tests.support.impatient serve -c swapper.yaml

The shipped program; only that number is another. The looks it takes stay as many.
"""

from __future__ import annotations

from workers.llama import hung, server

HUNG_S = 4.0

if __name__ == "__main__":
    hung.HUNG_S = server.HUNG_S = HUNG_S
    from swapper.__main__ import main

    main()
