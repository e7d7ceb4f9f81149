"""The directory of a tier: nobody but its owner may write to it."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from kvsidecar.errors import TierFailed


def open_directory(path: Path, tier: str) -> int:
    """Open it; made, with mode 0700, if only its last part is missing.

    Args:
        tier: ``disk`` or ``shared``, for the text of an error.

    Raises:
        TierFailed: it cannot be used; the text is one sentence.
    """
    named = f"the {tier} tier's directory {path}"
    try:
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise TierFailed(f"{named} cannot be opened: {error.strerror}") from error
    is_ = os.fstat(fd)
    problem = ""
    if is_.st_uid != os.geteuid():
        problem = f"belongs to uid {is_.st_uid}, not to this process"
    elif is_.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        problem = f"has mode {stat.S_IMODE(is_.st_mode):04o}: others could write to it; chmod it to 0700"
    if problem:
        os.close(fd)
        raise TierFailed(f"{named} {problem}")
    return fd
