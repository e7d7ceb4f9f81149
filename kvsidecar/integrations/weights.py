"""Identifies the weights in a directory or file by their content: copies of one download are equal. Engine-independent.

Reading all of it would take as long as loading it, so samples of every tensor are read: a fine-tune, or an adapter
merged into a tensor, changes nearly all of its bytes. A change of a few rows of one tensor may go unnoticed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvsidecar.integrations.digest_cache import VERSION, DigestCache, default_path, mount_of, times_tell

PIECE = 4096
"""Bytes of one sample."""
PIECES = 8
"""Samples of a tensor. A tensor of no more bytes is read whole."""
MANY_TENSORS = 4096
PIECES_OF_MANY = 2
"""Samples of a tensor in a file with more than ``MANY_TENSORS``: experts would take seconds."""
STRIDE = 1 << 20
"""Bytes between samples in a file of unknown format."""
TAIL = 1 << 20
"""Bytes at the end of such a file that are read whole: a torch checkpoint has its tensor list and checksums there."""
CHUNK = 1 << 20
MAX_HEADER = 100_000_000
"""Bytes of a safetensors header; the format's own limit."""
MAX_TEXT = 16 << 20
"""Longer text files are sampled."""
READERS = 8
"""Files that are read in parallel."""

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".ckpt", ".npz")
TEXTS = (".json", ".py", ".yaml", ".yml")
"""Suffixes of files that are read whole: configuration and code of the model. All other files are sampled."""
HUB_SNAPSHOT = re.compile(r".*/models--(?P<name>[^/]*)/snapshots/(?P<commit>[0-9a-f]{40})", re.DOTALL)
"""Path of a model's directory in the hub's local cache."""
IGNORED_NAMES = (
    "tokenizer", "tekken", "special_tokens_map", "added_tokens", "vocab", "merges", "chat_template",
    "generation_config", "readme", "license", "notice",
)  # fmt: skip
IGNORED_SUFFIXES = (
    ".md", ".txt", ".jinja", ".tiktoken", ".png", ".jpg", ".jpeg", ".gif", ".svg", ".webp", ".pdf", ".html", ".lock",
)  # fmt: skip
"""Files that do not affect KV. Blocks are hashed by token ids, so tokenizers do not matter."""


def digest_of(model: str | Path, cache: DigestCache | None = None) -> str | None:
    """The hexadecimal digest of the weights and configuration in a directory, or of a single file.

    Args:
        cache: digests of files read before; by default the user's.

    Returns:
        None if there are no weights of a known format: the engine loads them from elsewhere.

    Raises:
        OSError: a file cannot be read, or was modified meanwhile.
    """
    files = files_of(Path(model))
    if Path(model).is_dir() and not any(each.suffix in WEIGHTS for each in files):
        return None
    cache = DigestCache(default_path()) if cache is None else cache
    with ThreadPoolExecutor(READERS, thread_name_prefix="kvsidecar-weights") as readers:
        digests = list(readers.map(lambda file: _digest_of_file(file, cache), files))
    cache.save()
    names = [each.name for each in files] if Path(model).is_dir() else ["weights"]
    listing = json.dumps([VERSION, *zip(names, digests, strict=True)])
    return hashlib.blake2b(listing.encode(), digest_size=32).hexdigest()


def files_of(model: Path) -> list[Path]:
    """The files of a directory that are read, in the order of their names; for a file, the file itself."""
    if not model.is_dir():
        return [model]
    return sorted(
        each
        for each in model.iterdir()
        if each.is_file()
        and not each.name.startswith(".")
        and not each.name.lower().startswith(IGNORED_NAMES)
        and each.suffix.lower() not in IGNORED_SUFFIXES
    )


def hub_snapshot(model: str | Path) -> tuple[str, str] | None:
    """Name and commit of a Hugging Face Hub model, if this is its directory in the hub's local cache: symbolic links to
    files that never change."""
    directory = Path(os.path.abspath(model))
    found = HUB_SNAPSHOT.fullmatch(str(directory))
    if found is None or not directory.is_dir() or not all(each.is_symlink() for each in files_of(directory)):
        return None
    return found["name"].replace("--", "/"), found["commit"]


def _digest_of_file(path: Path, cache: DigestCache) -> str:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        before = os.fstat(fd)
        text = path.suffix in TEXTS and before.st_size <= MAX_TEXT
        kept = not text and times_tell(before, mount_of(fd))
        digest = cache.get(before) if kept else None
        if digest is None:
            if not text:
                # Without this, each sample would be read with the pages around it.
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
            spans = iter([(0, before.st_size)]) if text else _samples(fd, before.st_size, path)
            digest = _digest_of_spans(fd, before.st_size, spans)
            after = os.fstat(fd)
            if any(getattr(before, name) != getattr(after, name) for name in ("st_size", "st_mtime_ns", "st_ctime_ns")):
                raise OSError(f"{path} was written to while it was read: try again")
            if kept:
                cache.put(before, digest)
        return digest
    finally:
        os.close(fd)


def _digest_of_spans(fd: int, size: int, spans: Iterator[tuple[int, int]]) -> str:
    found = hashlib.blake2b(str(size).encode(), digest_size=32)
    for offset, length in spans:
        while length > 0:
            data = os.pread(fd, min(length, CHUNK), offset)
            if not data:
                break  # truncated: its timestamps show it
            found.update(data)
            offset, length = offset + len(data), length - len(data)
    return found.hexdigest()


def _samples(fd: int, size: int, path: Path) -> Iterator[tuple[int, int]]:
    """Offsets and lengths of the samples of a file."""
    tensors = _tensors(fd, size) if path.suffix == ".safetensors" else None
    if tensors is None:
        yield from ((offset, PIECE) for offset in range(0, max(0, size - TAIL), STRIDE))
        yield max(0, size - TAIL), min(size, TAIL)
        return
    header, spans = tensors
    yield 0, header
    pieces = PIECES if len(spans) <= MANY_TENSORS else PIECES_OF_MANY
    for begin, end in spans:
        yield from ((header + begin + offset, length) for offset, length in samples_of_tensor(end - begin, pieces))


def samples_of_tensor(nbytes: int, pieces: int = PIECES) -> Iterator[tuple[int, int]]:
    """Offsets and lengths of the samples of a tensor."""
    if nbytes <= PIECE * pieces:
        yield 0, nbytes
        return
    for i in range(pieces):
        yield (nbytes - PIECE) * i // (pieces - 1), PIECE


def _tensors(fd: int, size: int) -> tuple[int, list[tuple[int, int]]] | None:
    """The length of a safetensors header, and begin and end of each tensor in the data; None if it is not one."""
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    if size < 8 or length > min(size - 8, MAX_HEADER):
        return None
    try:
        entries = json.loads(os.pread(fd, length, 8))
        entries.pop("__metadata__", None)
        spans = sorted((begin, end) for begin, end in (each["data_offsets"] for each in entries.values()))
        if any(not 0 <= begin <= end <= size - 8 - length for begin, end in spans):
            return None
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    return 8 + length, spans
