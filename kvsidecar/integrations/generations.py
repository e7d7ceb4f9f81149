"""Generations keep an engine from the KV of other weights after its own were changed in place. Engine-independent.

A namespace says which weights an engine was started with. A trainer changes them while the engine runs, one replica
after the other; the namespace cannot follow, but the keys can. Each such change begins a *generation*: the keys of its
blocks are the engine's hashes, masked with bits of their own. What another generation stored, or stores later, is found
by nobody here, whoever stored it and whenever the job ends. Nothing has to be cleared, waited for or agreed upon.
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


class Generations:
    """The generation of one engine, and the next. Pure but for the token.

    Two engines share blocks while they are of one generation: both as they were started, or both of one name.

    Args:
        hash_bytes: width of a hash.
        name: of the weights that the engine is started with, beside what the namespace says; None for none.
        had: names that were given before the engine was started, and so not to the weights that it will have.
        token: makes a name that nobody else has.
    """

    def __init__(
        self,
        hash_bytes: int,
        name: str | None = None,
        *,
        had: Iterable[str] = (),
        token: Callable[[], str] = lambda: secrets.token_hex(32),
    ) -> None:
        self._hash_bytes, self._token = hash_bytes, token
        self._had = dict.fromkeys([*had, *([name] if name is not None else [])])
        self._mask = None if name is None else self._mask_of("named", name)

    def next(self, name: str | None = None) -> bool:
        """The weights may have changed: begin another generation.

        Args:
            name: of the weights as they are from now on. A name that this engine has had before was given to other
                weights, or is one that somebody forgot to change: it counts as none.

        Returns:
            Whether the generation is that of the name. If not, it is this engine's alone.
        """
        fresh = name is not None and name not in self._had
        if name is not None and fresh:
            self._had[name] = None
            if len(self._had) > REMEMBERED_NAMES:
                del self._had[next(iter(self._had))]
            self._mask = self._mask_of("named", name)
        else:
            self._mask = self._mask_of("own", self._token())
        return fresh

    @property
    def first(self) -> bool:
        """Whether keys are the hashes themselves: the generation of engines as they were started, without a name."""
        return self._mask is None

    def keys(self, hashes: bytes) -> bytes:
        """The keys of hashes that are joined to one string, joined as well."""
        if self._mask is None:
            return hashes
        return (np.frombuffer(hashes, np.uint8).reshape(-1, self._hash_bytes) ^ self._mask).tobytes()

    def _mask_of(self, kind: str, name: str) -> np.typing.NDArray[np.uint8]:
        bits = hashlib.shake_256(f"kvsidecar generation {kind} {name}".encode()).digest(self._hash_bytes)
        return np.frombuffer(bits, np.uint8)


def read_name(path: str | None) -> str | None:
    """The name that a file gives to the weights: its text without the white space around it. None if there is no file,
    or no text in it, or it cannot be read; the log says which of them is a mistake."""
    if path is None:
        return None
    try:
        # A reset must not wait for whoever would write to a pipe.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            text = file.read(MAX_NAME_BYTES + 1)
        if len(text) > MAX_NAME_BYTES:
            _log.warning("kvsidecar: %s has more than %d bytes: no name of weights", path, MAX_NAME_BYTES)
            return None
        return text.decode().strip() or None
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        _log.warning("kvsidecar: the name of the weights cannot be read from %s: %s", path, error)
        return None
