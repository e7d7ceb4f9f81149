"""What benchmarks with engines share: a daemon and engines as processes, options of the command line, tables."""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.peers import servers
from benchmarks.vllm import peers
from benchmarks.vllm.engine import kv_bytes_per_token, model_config, transfer_config
from kvsidecar.bench.machine import facts as machine_facts
from kvsidecar.bench.processes import BenchChild, PrivateDaemon, private_daemon
from kvsidecar.cli.size.kv import kv_of
from kvsidecar.cli.size.models import load
from kvsidecar.support.units import parse_size

MODES = ("none", "empty", "simple", "offload", "kvsidecar")
WORKLOADS = (*MODES, *peers.PEERS, "resident")
"""Modes of the benchmarks whose KV is larger than the GPU's: other daemons, and a GPU that is not kept small."""
RESIDENT_TINY = 8
"""On the CPU, how much more KV fits into ``resident``."""
SHARED_MEMORY = 0.05
"""Share of a GPU that vLLM asks for where several engines use it: that much must be free when each of them starts."""
START_SECONDS = 600.0
"""An engine that compiles its graphs takes minutes."""

Shape = Mapping[str, tuple[int, int]]
"""By option: its default, and that with ``--tiny``."""

console = Console()
if not console.is_terminal:
    console = Console(width=150)  # a log has room


def arguments(description: str | None, known: Sequence[str] = MODES) -> argparse.ArgumentParser:
    peer_modes = "; pegaflow, lmcache: their servers; resident: no connector, KV in all of --memory"
    parser = common_arguments(description, ", ".join(known) + (peer_modes if known == WORKLOADS else ""))
    parser.add_argument(
        "--extra",
        default="{}",
        help="JSON: options of this project's connector, and of others' (pegaflow.NAME, lmcache.NAME)",
    )
    parser.add_argument("--llm", default="{}", help="JSON: further options of vllm.LLM")
    return parser


def common_arguments(description: str | None, known: str) -> argparse.ArgumentParser:
    """Those of the benchmarks of every engine."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", default="", help=f"comma-separated: {known}")
    parser.add_argument("--tiny", action="store_true", help="a model for the CPU: shows that everything works")
    parser.add_argument("--pool-size", default="", help="host memory, of the daemon or of the engine's own offload")
    parser.add_argument("--serve", default="", help="further flags of kvsidecar serve, separated by spaces")
    parser.add_argument("--logs", type=Path, default=None, help="folder for the logs of daemon and engines")
    parser.add_argument("--json", type=Path, default=None, help="file for the results")
    return parser


def parsed(parser: argparse.ArgumentParser, *shapes: Shape) -> argparse.Namespace:
    """The command line, which also has an option for each number of a shape."""
    numbers = {name: both for shape in shapes for name, both in shape.items()}
    for name, (value, tiny) in numbers.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=None, help=f"{value}; tiny: {tiny}")
    options = parser.parse_args()
    for name, (value, tiny) in numbers.items():
        if getattr(options, name) is None:
            setattr(options, name, tiny if options.tiny else value)
    return options


@contextmanager
def folder(options: argparse.Namespace, name: str = "") -> Iterator[Path]:
    """That of ``--logs``, or one that is removed again; of this name in it."""
    with tempfile.TemporaryDirectory(prefix="kvs-") as temporary:
        found: Path = (options.logs or Path(temporary)) / name
        found.mkdir(parents=True, exist_ok=True)
        yield found


def llm_options(options: argparse.Namespace, *, max_model_len: int, resident: bool = False) -> dict[str, Any]:
    """Of ``vllm.LLM``, for ``options.gpu_tokens`` of KV in a share ``options.memory`` of the GPU.

    Args:
        max_model_len: of the real model; the tiny one has 768.
        resident: as much KV as that share of the GPU holds, or ``options.resident_tokens``.
    """
    block = 32 if options.tiny else 16
    found: dict[str, Any] = {
        "max_model_len": getattr(options, "max_tokens", 768) if options.tiny else max_model_len,
        "max_num_batched_tokens": 1024 if options.tiny else 8192,
        "max_num_seqs": 64,
        "block_size": block,
        "enforce_eager": options.tiny,
    }
    several = getattr(options, "at_once", 1) > 1
    if getattr(options, "gpu_bytes", 0):  # of a shape whose tokens have no bytes of their own
        held = options.resident_bytes if resident else options.gpu_bytes
        share = {} if options.tiny else {"gpu_memory_utilization": SHARED_MEMORY}
        del found["block_size"]
        return {**found, **share, "kv_cache_memory_bytes": held, **options.llm_of_shape}
    tokens = options.gpu_tokens
    if resident:
        tokens = getattr(options, "resident_tokens", 0) or (tokens * RESIDENT_TINY if options.tiny else 0)
    if options.tiny or several:
        found["kv_cache_memory_bytes"] = bytes_per_token(options) * tokens // getattr(options, "tp", 1)
    elif tokens:
        found["num_gpu_blocks_override"] = tokens // block
    if not options.tiny:
        found["gpu_memory_utilization"] = SHARED_MEMORY if several else options.memory
    return found


def bytes_per_token(options: argparse.Namespace) -> int:
    """Of KV, on all ranks together: of tokens that attention keeps whole, if there is a ``--model``."""
    if model := getattr(options, "model", ""):
        return int(kv_of(load(model), tp=getattr(options, "tp", 1)).token_bytes)
    return kv_bytes_per_token(options.tiny)


def modes(
    options: argparse.Namespace, default: Sequence[str], known: Sequence[str] = MODES, *, policies: bool = False
) -> list[str]:
    """Those to run. Raises SystemExit if one cannot.

    Args:
        policies: whether ``kvsidecar:POLICY`` is one.
    """
    names: list[str] = options.modes.split(",") if options.modes else list(default)
    for name in names:
        if name not in known and not (policies and name.startswith("kvsidecar:")):
            raise SystemExit(f"--modes: {name!r} is none of {', '.join(known)}")
    for name in set(names) & peers.PEERS.keys():
        peers.check(name, options.tiny)
    return names


@contextmanager
def daemon(
    options: argparse.Namespace, directory: Path, pool_bytes: int, flags: Sequence[str] = ()
) -> Iterator[PrivateDaemon]:
    """A daemon that is ready."""
    device = "host" if options.tiny else "cuda"
    with private_daemon(directory, device, pool_bytes, [*options.serve.split(), *flags]) as running:
        console.print(f"daemon ready after {running.times['ready'] - running.started:.1f} s")
        yield running


def offloads_to(
    options: argparse.Namespace, directory: Path, mode: str, pool_bytes: int, flags: Sequence[str] = ()
) -> AbstractContextManager[PrivateDaemon | servers.Server | None]:
    """What the engine of a mode needs beside it, ready: the daemon, another one, or nothing."""
    if mode == "kvsidecar":
        return daemon(options, directory, pool_bytes, flags)
    if mode in peers.PEERS:
        return peers.server(mode, directory, pool_bytes, getattr(options, "tp", 1))
    return nullcontext()


def model_folder(directory: Path, config: Mapping[str, Any]) -> Path:
    """A model of random weights, the same for all engines of a run: rewritten it would be another checkpoint, whose KV
    is not shared."""
    model = directory / "model"
    if not model.exists():
        model.mkdir()
        (model / "config.json").write_text(json.dumps(config))
    return model


def engine(
    options: argparse.Namespace,
    directory: Path,
    mode: str,
    pool_bytes: int,
    running: PrivateDaemon | servers.Server | None,
    *,
    time_hooks: bool = True,
    **llm: Any,
) -> AbstractContextManager[BenchChild]:
    """An engine that starts; its `started` waits."""
    extra = extra_of(mode, json.loads(options.extra))
    config = {
        "model": getattr(options, "model", "")
        or str(model_folder(directory, getattr(options, "config", None) or model_config(options.tiny))),
        "transfer": transfer_config(mode, pool_bytes, running.socket if running else None, extra),
        "options": {**llm, **json.loads(options.llm)},
        "time_hooks": time_hooks,
    }
    return closing(BenchChild("benchmarks.vllm.engine", config, directory))


def extra_of(mode: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Of ``--extra``, what belongs to the connector of a mode: a peer's options begin with its name."""
    if mode != "kvsidecar" and mode not in peers.PEERS:
        return {}
    whose = {name: prefix if (prefix := name.partition(".")[0]) in peers.PEERS else "kvsidecar" for name in given}
    return {name: value for name, value in given.items() if whose[name] == mode}


def ask(child: BenchChild, do: str, **arguments: Any) -> dict[str, Any]:
    """As `BenchChild.call`, with the patience that an engine needs."""
    child.ask(do, **arguments)
    return child.answer(START_SECONDS)


def pool_bytes(options: argparse.Namespace, default: int) -> int:
    return parse_size(options.pool_size) if options.pool_size else default


def p50(values: Sequence[float]) -> float:
    return statistics.median(values)


def p90(values: Sequence[float]) -> float:
    return _at(values, 0.9)


def p99(values: Sequence[float]) -> float:
    return _at(values, 0.99)


def _at(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    drawn = Table(title=title)
    for index, column in enumerate(columns):
        drawn.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        drawn.add_row(*(f"{cell:,.1f}" if isinstance(cell, float) else str(cell) for cell in row))
    console.print(drawn)


def show_gpu_tokens(found: Mapping[str, Mapping[str, Any]]) -> None:
    """By mode, from what has its ``facts``: how many tokens of KV its GPU holds."""
    held = (f"{mode} {each['facts']['gpu_tokens']:,}" for mode, each in found.items())
    console.print(f"Tokens of KV that fit on the GPU: {', '.join(held)}")


def hooks_table(timed: Iterable[tuple[str, str, dict[str, Any]]]) -> None:
    """What the connectors' hooks take of the engine's thread: (mode, phase, what `Hooks.take` gave)."""
    rows: list[list[object]] = []
    for mode, phase, found in timed:
        steps = found.get("steps_us")
        if not steps or not found["hooks_us"]:
            continue
        most = sorted(found["worst_us"].items(), key=lambda each: -each[1])[:4]
        slowest = ", ".join(f"{name} {us:,.0f}" for name, us in most)
        rows.append([mode, phase, len(steps), p50(steps), p99(steps), max(steps), slowest])
    if rows:
        columns = ["mode", "phase", "steps", "p50 us", "p99 us", "max us", "slowest calls, us"]
        table("In the connector's hooks, by step of the engine", columns, rows)


def save(options: argparse.Namespace, results: dict[str, Any]) -> None:
    if options.json is None:
        return
    # Results are published: they name files, and not where these lie.
    given = {name: value.name if isinstance(value, Path) else value for name, value in vars(options).items()}
    options.json.write_text(json.dumps({"options": given, "machine": machine_facts(None), **results}, indent=1))
