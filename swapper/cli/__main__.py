"""`python -m swapper.cli` is the command `swapper`."""

from swapper.cli import main

main()
