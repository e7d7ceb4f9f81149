"""Identifies the weights that a model's name or path refers to. Engine-independent."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvsidecar.integrations.weights import digest_of, hub_snapshot


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The weights that a model's name or path refers to."""

    name: str
    """The name for people; equal for equal weights."""
    identity: str


def checkpoint_of(model: str, hf_config: Any) -> Checkpoint:
    """Identify a hub's model, or its directory in the hub's cache, by name and commit; other files and directories by
    their content, wherever they are; and weights from elsewhere by the model's name.

    Raises:
        ValueError: the files cannot be read.
    """
    try:
        if (snapshot := hub_snapshot(model)) is not None:
            return Checkpoint(snapshot[0], repr(snapshot))
        if os.path.exists(model):  # False, not an error, for names that cannot be paths
            if (digest := digest_of(model)) is not None:
                kind = (getattr(hf_config, "architectures", None) or ["model"])[0]
                return Checkpoint(f"{kind}-{digest[:12]}", digest)
            return Checkpoint(model, _listing_of(model))
    except OSError as error:
        raise ValueError(f"the weights of {model} cannot be identified: {error}") from error
    return Checkpoint(model, repr((model, getattr(hf_config, "_commit_hash", None))))


def _listing_of(model: str) -> str:
    """The listing of a directory without weights."""
    found = [(each.name, each.stat()) for each in Path(model).iterdir() if each.is_file()]
    return repr((model, sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in found)))
