"""Separates the blocks of different versions of an engine's weights. Engine-independent.

A namespace identifies the weights that an engine was started with. A trainer changes them in place while the engine
runs, one replica after the other. The namespace cannot change then, but the keys can: each version of the weights masks
the engine's hashes with its own bits. An engine never finds blocks of another version, whoever stores them and whenever
the job ends. Nothing has to be cleared, waited for or agreed upon.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
from collections.abc import Callable, Iterable

import numpy as np

_log = logging.getLogger("kvsidecar")

MAX_NAME_BYTES = 1024
REMEMBERED_NAMES = 4096


class WeightsVersion:
    """The current version of one engine's weights. Pure except for the token.

    Two engines share blocks while their versions are equal: both as started, or both with the same name.

    Args:
        hash_bytes: width of a hash.
        name: the name of the weights at the start; None for none.
        used: names from before the start, which therefore name older weights.
        token: makes a unique name.
    """

    def __init__(
        self,
        hash_bytes: int,
        name: str | None = None,
        *,
        used: Iterable[str] = (),
        token: Callable[[], str] = lambda: secrets.token_hex(32),
    ) -> None:
        self._hash_bytes, self._token = hash_bytes, token
        self._used = dict.fromkeys([*used, *([name] if name is not None else [])])
        self._mask = self._first = None if name is None else self._mask_of("named", name)

    def advance(self, name: str | None = None) -> bool:
        """Begin a new version: the weights may have changed.

        Args:
            name: the name of the new weights. A name that this engine has used before counts as none: it names other
                weights, or was not updated.

        Returns:
            Whether the version has the name. If not, no other engine shares it.
        """
        if name is None or name in self._used:
            self._mask = self._mask_of("own", self._token())
            return False
        self._used[name] = None
        if len(self._used) > REMEMBERED_NAMES:
            del self._used[next(iter(self._used))]
        self._mask = self._mask_of("named", name)
        return True

    @property
    def is_first(self) -> bool:
        """Whether no other version has begun since the start."""
        return self._mask is self._first

    def return_to_first(self) -> None:
        """Return to the weights of the start."""
        self._mask = self._first

    @property
    def unmasked(self) -> bool:
        """Whether keys equal the hashes: the weights are those of the start, without a name."""
        return self._mask is None

    def keys(self, hashes: bytes) -> bytes:
        """The keys of joined hashes, joined as well."""
        if self._mask is None:
            return hashes
        return (np.frombuffer(hashes, np.uint8).reshape(-1, self._hash_bytes) ^ self._mask).tobytes()

    def _mask_of(self, kind: str, name: str) -> np.typing.NDArray[np.uint8]:
        bits = hashlib.shake_256(f"kvsidecar generation {kind} {name}".encode()).digest(self._hash_bytes)
        return np.frombuffer(bits, np.uint8)


def read_name(path: str | None) -> str | None:
    """The name of the weights in a file: its text, stripped. None without a file or text, and, with a warning, if the
    file cannot be read or is too long."""
    if path is None:
        return None
    try:
        # O_NONBLOCK: a reset must not wait for the writer of a pipe.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            text = file.read(MAX_NAME_BYTES + 1)
        if len(text) > MAX_NAME_BYTES:
            _log.warning("kvsidecar: %s has more than %d bytes: not used as a name of weights", path, MAX_NAME_BYTES)
            return None
        return text.decode().strip() or None
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        _log.warning("kvsidecar: the name of the weights cannot be read from %s: %s", path, error)
        return None
