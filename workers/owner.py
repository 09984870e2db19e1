"""Whose an agent's marks are: an id that every run on them has in common, and no run on anything else.

Invariant: marks that were lost, copied, or moved to another machine are another owner's, since what it did before is
not known there. The id is kept in the lock file of the marks, by whoever has it locked; nothing else is touched.
"""

from __future__ import annotations

import os
import socket
import uuid

from workers.control.launcher import boot_id


def owner_of(lock: int, *, lost: bool) -> str:
    """The id in the locked file; a new one where there is none of this place, or where the marks were `lost`.

    The place is the file itself, on a machine that has the same name (a container changes it) or is in the same boot.
    Raises OSError.
    """
    host, boot, inode = socket.gethostname(), boot_id(), str(os.fstat(lock).st_ino)
    words = os.pread(lock, 1024, 0).decode(errors="replace").split()
    if not lost and len(words) == 4 and words[3] == inode and (words[1] == host or words[2] == boot):
        return words[0]
    owner = uuid.uuid4().hex
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{owner} {host} {boot} {inode}\n".encode(), 0)
    os.fsync(lock)
    return owner
