"""Names of the namespaces on a disk: the index has only their digests, and shares name namespaces.

One line of JSON each, appended before the first shard of a namespace is written. A line counts if its digest is in the
index, so that nothing about the file need be believed. Nothing is synchronised: a namespace whose line was lost is
known again from the first call that names it.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Final

from kvsidecar.support import log, private_files
from kvsidecar.tiers.backend import namespace_digest
from kvsidecar.types import Namespace

NAMES: Final = "kvsidecar-disk-names"
_NEW: Final = "kvsidecar-disk-names.new"
MAX_BYTES: Final = 64 << 20
"""A larger file was not written here."""

_log = log.get("disk tier")


class KeptNames:
    """The file of one directory, which this process alone uses. Its methods may be called in any thread, and never
    fail: what cannot be kept is logged.

    Args:
        directory: descriptor; it must stay open.
        path: of the directory, for the log.
        limit: lines beyond which those of namespaces without a shard are removed.
    """

    def __init__(self, directory: int, path: Path, limit: int) -> None:
        self._directory, self._path, self._limit = directory, path, limit
        self._lock = threading.Lock()
        self._kept: dict[str, Namespace] = {}
        self._fd: int | None = None

    def open(self, digests: Iterable[str]) -> dict[str, Namespace]:
        """The namespaces of an earlier run with these digests, by digest. The others are removed."""
        wanted = set(digests)
        found = {namespace_digest(each): each for each in self._read()} if wanted else {}
        with self._lock:
            self._rewrite({digest: each for digest, each in found.items() if digest in wanted})
            return dict(self._kept)

    def add(self, namespace: Namespace, there: Callable[[], Iterable[str]]) -> None:
        """Keep this one, too.

        Args:
            there: the digests of those that have shards.
        """
        digest = namespace_digest(namespace)
        if digest in self._kept:
            return
        with self._lock:
            if len(self._kept) >= self._limit:
                wanted = set(there())
                self._rewrite({digest: each for digest, each in self._kept.items() if digest in wanted})
            self._kept[digest] = namespace
            if self._fd is not None:
                try:
                    os.write(self._fd, _line(namespace))
                except OSError as error:
                    self._failed(error)

    def close(self) -> None:
        with self._lock:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None

    def _read(self) -> list[Namespace]:
        try:
            fd = private_files.open_file(NAMES, self._directory)
        except FileNotFoundError:
            return []
        except OSError as error:
            self._failed(error)
            return []
        with os.fdopen(fd, "rb") as file:
            lines = file.read(MAX_BYTES).splitlines()
        return [namespace for line in lines if (namespace := _namespace(line)) is not None]

    def _rewrite(self, kept: dict[str, Namespace]) -> None:
        """A new file in the place of the earlier one. With the lock held."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        self._kept = kept
        try:
            with suppress(FileNotFoundError):
                os.unlink(_NEW, dir_fd=self._directory)
            self._fd = private_files.make_file(_NEW, self._directory, 0)
            os.write(self._fd, b"".join(map(_line, kept.values())))
            os.rename(_NEW, NAMES, src_dir_fd=self._directory, dst_dir_fd=self._directory)
        except OSError as error:
            self._failed(error)

    def _failed(self, error: OSError) -> None:
        _log.warning(
            "the disk tier cannot keep the names of its namespaces: after a start, they count for their shares from "
            "the first call that names them",
            directory=str(self._path),
            reason=error.strerror or str(error),
        )


def _line(namespace: Namespace) -> bytes:
    return json.dumps(asdict(namespace)).encode() + b"\n"


def _namespace(line: bytes) -> Namespace | None:
    try:
        facts = json.loads(line)
        if isinstance(facts, dict) and all(isinstance(each, str | int) for each in facts.values()):
            return Namespace(**facts)
    except (ValueError, TypeError, RecursionError):
        pass
    return None  # torn by a power failure, or of another version
