"""The C library keeps what is freed: bodies of megabytes come and go, and their memory is not asked for anew each time.

Invariant: only glibc is asked, and nothing depends on its answer. By default it gives every larger block back to the
kernel, which clears its pages again for the next: half a millisecond for a body of 2 MB (tests/bench/README.md).
"""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
LARGEST_BYTES, KEPT_BYTES = 8 << 20, 32 << 20
"""Blocks up to the one are kept, up to the other in all at the end of the heap."""


def keep_freed() -> None:
    """For the life of this process."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return  # another C library
    mallopt(M_MMAP_THRESHOLD, LARGEST_BYTES)
    mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
