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
    if problem := problem_of(os.fstat(fd)):
        os.close(fd)
        raise TierFailed(f"{named} {problem}")
    return fd


def problem_of(found: os.stat_result) -> str:
    """Why a directory cannot hold a tier of this process, as the end of a sentence; empty if it can."""
    if found.st_uid != os.geteuid():
        return f"belongs to uid {found.st_uid}, not to this process"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"has mode {stat.S_IMODE(found.st_mode):04o}: others could write to it; chmod it to 0700"
    return ""
