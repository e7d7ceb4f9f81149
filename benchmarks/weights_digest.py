"""What it costs at an engine's start to know which weights it has: synthetic checkpoints, read in places.

python benchmarks/weights_digest.py [--gib 4] [--directory DIR] [--repeats 3]

Columns: ``cold`` with none of the files in the page cache, ``warm`` with all of them, as an engine finds them that has
just loaded them, ``known`` when they were read by an earlier start, and ``whole`` to read and hash every byte, warm.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvsidecar.integrations.digest_cache import DigestCache
from kvsidecar.integrations.weights import digest_of
from kvsidecar.support.units import GiB, MiB

SHARDS = 4


def write(directory: Path, tensors: int, nbytes: int) -> None:
    """A checkpoint of so many tensors of one size in safetensors files."""
    noise = os.urandom(16 * MiB)
    for shard in range(SHARDS):
        count = tensors // SHARDS
        size = nbytes // tensors
        header = json.dumps(
            {
                f"model.layers.{i}.weight": {
                    "dtype": "BF16",
                    "shape": [size // 2],
                    "data_offsets": [i * size, (i + 1) * size],
                }
                for i in range(count)
            }
        ).encode()
        with (directory / f"model-{shard}.safetensors").open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            left = count * size
            while left:
                left -= file.write(noise[:left])
            file.flush()
            os.fsync(file.fileno())
    (directory / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')


def write_opaque(directory: Path, nbytes: int) -> None:
    """The same bytes in files whose tensors are not known."""
    write(directory, SHARDS, nbytes)
    for each in directory.glob("*.safetensors"):
        each.rename(each.with_suffix(".bin"))


def set_cached(directory: Path, cached: bool) -> None:
    """Whether the page cache has the files."""
    for each in directory.iterdir():
        with each.open("rb") as file:
            if cached:
                while file.read(16 * MiB):
                    pass
            else:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def whole(directory: Path) -> None:
    for each in directory.iterdir():
        with each.open("rb") as file:
            hashlib.file_digest(file, "blake2b")


def seconds(run: Callable[[], object], repeats: int, before: Callable[[], object] = lambda: None) -> float:
    """Median."""
    taken = []
    for _ in range(repeats):
        before()
        started = time.perf_counter()
        run()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def measure(model: Path, cache: Path, repeats: int) -> tuple[float, float, float, float]:
    """Seconds: cold, warm, known, whole."""
    nothing = DigestCache(None)
    cold = seconds(lambda: digest_of(model, nothing), repeats, lambda: set_cached(model, cached=False))
    set_cached(model, cached=True)
    warm = seconds(lambda: digest_of(model, nothing), repeats)
    digest_of(model, DigestCache(cache, settled_seconds=0.0))
    if not cache.exists():
        raise RuntimeError("nothing was kept")
    known = seconds(lambda: digest_of(model, DigestCache(cache)), repeats)
    return cold, warm, known, seconds(lambda: whole(model), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=4.0, help="size of each checkpoint")
    parser.add_argument("--directory", help="where they are written; by default the system's for temporary files")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    nbytes = int(options.gib * GiB)
    cases: dict[str, Callable[[Path], None]] = {
        "288 tensors": lambda directory: write(directory, 288, nbytes),
        "36864 tensors (experts)": lambda directory: write(directory, 36864, nbytes),
        ".bin": lambda directory: write_opaque(directory, nbytes),
    }
    table = Table("checkpoint", "files", "cold", "warm", "known", "whole", box=None, pad_edge=False)
    for name, make in cases.items():
        with tempfile.TemporaryDirectory(dir=options.directory, prefix="kvsidecar-weights-") as root:
            model = Path(root) / "model"
            model.mkdir()
            make(model)
            taken = measure(model, Path(root) / "cache.json", options.repeats)
            cells = [f"{each * 1e3:.1f} ms" if each < 10 else f"{each:.1f} s" for each in taken]
            table.add_row(name, f"{options.gib:g} GiB", *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
