"""``kvsidecar size``. Its modules are imported when it runs, so that help is fast."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from kvsidecar.cli.common import EXIT_CONFIG, connected, daemon_options, fail
from kvsidecar.support.units import Size, format_size, parse_count, parse_size

if TYPE_CHECKING:
    from kvsidecar.cli.size.kv import KV

HOST_SHARE = "80%"
"""Share of this machine's memory that the daemon may take."""


def _parsed(parse: Callable[[str], int], least: int = 1) -> Callable[..., int | None]:
    def of(_: click.Context, __: click.Parameter, value: str | None) -> int | None:
        if value is None:
            return None
        try:
            number = parse(value)
        except ValueError as error:
            raise click.BadParameter(str(error)) from error
        if number < least:
            raise click.BadParameter(f"{value} is less than {least}")
        return number

    return of


def _tokens(text: str) -> int:
    try:
        return parse_count(text)
    except ValueError:
        raise ValueError(
            f"{text!r} is not a number of tokens, such as 32768, 128k (128,000) or 128Ki (131,072)"
        ) from None


def _retention(context: click.Context, parameter: click.Parameter, value: str) -> int | None:
    return None if value == "all" else _parsed(_tokens, 0)(context, parameter, value)


@click.command()
@click.argument("model", required=False, metavar="[MODEL]")
@click.option(
    "--context",
    default="32Ki",
    show_default=True,
    metavar="TOKENS",
    callback=_parsed(_tokens),
    help="Length of a session.",
)
@click.option(
    "--sessions", default=100, show_default=True, type=click.IntRange(1), metavar="COUNT", help="Sessions to keep."
)
@click.option(
    "--shared-prefix",
    default="0",
    metavar="TOKENS",
    callback=_parsed(_tokens, 0),
    help="Prefix that all sessions share.",
)
@click.option(
    "--gpus", default=None, type=click.IntRange(1), metavar="COUNT", help="GPUs of the node. [default: as --tp]"
)
@click.option(
    "--tp",
    default=1,
    show_default=True,
    type=click.IntRange(1),
    metavar="COUNT",
    help="Tensor-parallel ranks of an engine.",
)
@click.option(
    "--host-memory",
    metavar="SIZE",
    callback=_parsed(parse_size),
    help=f"Memory that the daemon may use, including the pool. [default: {HOST_SHARE} of this machine's]",
)
@click.option(
    "--disk", metavar="SIZE", callback=_parsed(parse_size), help="Free space on a local disk. [default: none]"
)
@click.option(
    "--kv-dtype", type=click.Choice(["auto", "fp8"]), default="auto", show_default=True, help="vLLM's --kv-cache-dtype."
)
@click.option("--block-size", type=click.IntRange(1), metavar="TOKENS", help="vLLM's --block-size. [default: vLLM's]")
@click.option(
    "--retention",
    default="0",
    show_default=True,
    metavar="TOKENS|all",
    callback=_retention,
    help="vLLM's --prefix-cache-retention-interval, for windows and states; all: before vLLM 0.32.",
)
@click.option("--small-pages", is_flag=True, help="The pool has no huge pages (--huge-pages none).")
@click.option(
    "--bench", metavar="FILE", type=click.Path(), help="Results of kvsidecar bench as JSON, for the pinning time."
)
@click.option("--trace", metavar="FILE", type=click.Path(), help="Requests to replay, to estimate their hit rate.")
@click.option("--running", is_flag=True, help="Take the model's figures from what an engine has stored in a daemon.")
@daemon_options
@click.option("--json", "as_json", is_flag=True, help="Print all figures, and the lines to paste, as one JSON object.")
def size(
    model: str | None,
    context: int,
    sessions: int,
    shared_prefix: int,
    gpus: int | None,
    tp: int,
    host_memory: int | None,
    disk: int | None,
    kv_dtype: str,
    block_size: int | None,
    retention: int | None,
    small_pages: bool,
    bench: str | None,
    trace: str | None,
    running: bool,
    as_json: bool,
    **where: str | None,
) -> None:
    """Recommend a pool, a disk and limits for a model and its users.

    MODEL is the path of a model's config.json or of its folder, or a known name such as Llama-3.3-70B. With --running
    it is the name of a namespace of the daemon, or may be left out. Prints the size of a token, a block and a session;
    the pool, disk, memory limit and huge pages; the time to pin; and the lines of the configuration, systemd and Helm.
    docs/sizing.md has examples.

    --trace takes a log of vLLM or of a gateway, a trace in Mooncake's format, or recorded sessions, of which --sessions
    run at once; it is replayed over the pool, half of it and twice as much.

    Exit codes: 0, 69 no daemon answers (with --running), 78 the model or an option cannot be used.
    """
    import json
    from pathlib import Path

    from rich.console import Console

    from kvsidecar.cli.size import plan as plans
    from kvsidecar.cli.size import view
    from kvsidecar.cli.size.json_lines import BadFile
    from kvsidecar.cli.size.kv import BadModel, kv_of
    from kvsidecar.cli.size.models import load

    gpus = gpus or tp
    if gpus % tp:
        raise click.UsageError(f"--gpus {gpus} is not a multiple of --tp {tp}")
    if shared_prefix > context:
        raise click.UsageError("--shared-prefix is longer than --context")
    assumed = []
    if host_memory is None:
        host_memory = _memory_of_this_machine()
        assumed.append(
            f"the daemon may take {format_size(host_memory)} (--host-memory), {HOST_SHARE} of this machine's memory"
        )
    try:
        if running:
            kv = _measured(model, where)
            assumed.append("every block is needed for a hit, as without windows and states")
        elif model is None:
            raise click.UsageError("name a MODEL, or use --running")
        else:
            kv = kv_of(load(model), tp=tp, fp8=kv_dtype == "fp8", block_tokens=block_size)
        machine = plans.Machine(gpus, host_memory, disk, not small_pages, _pin_rate(bench))
        demand = plans.Demand(context, sessions, shared_prefix, retention)
        found = plans.plan(kv, demand, machine)
        hits = _hits(Path(trace), kv, found, sessions) if trace else {}
    except (BadModel, BadFile, ValueError) as error:
        fail(str(error), EXIT_CONFIG)
    if as_json:
        click.echo(json.dumps(plans.as_json(kv, found) | ({"hits": hits} if trace else {}), indent=2))
    else:
        Console().print(view.render(kv, demand, machine, found, hits, assumed))


def _memory_of_this_machine() -> int:
    if sys.platform != "linux":
        raise click.UsageError("name the memory of the daemon's machine with --host-memory")
    from kvsidecar.support.memory_limits import resolve_size

    return resolve_size(Size.parse(HOST_SHARE))


def _measured(model: str | None, where: dict[str, str | None]) -> KV:
    """The KV as measured: the mean of the blocks that the namespace of this model, or the largest one, has stored."""
    from kvsidecar.cli.size.kv import KV, BadModel, KVGroup, KVKind

    with connected(where, "kvsidecar size") as client:
        reply = client.status(everything=True)
    there = [each for each in reply.namespaces if each.blocks and model in (None, each.namespace.model)]
    if not there:
        of = "" if model is None else f" of {model!r}"
        raise BadModel(
            f"the daemon has no blocks{of} yet: send an engine a prompt first, or name a model's config.json"
        )
    largest = max(there, key=lambda each: each.bytes)
    return KV((KVGroup(KVKind.FULL, 1, largest.bytes // largest.blocks, 1, largest.namespace.block_size),))


def _pin_rate(file: str | None) -> float | None:
    """The pin rate, in ms/GiB, from a result of ``kvsidecar bench``."""
    import json
    from pathlib import Path

    if file is None:
        return None
    try:
        result: Any = json.loads(Path(file).read_text(encoding="utf-8"))
        return next(float(row["ms_per_gib"]) for row in result["measurements"]["pin"]["rows"] if "ms_per_gib" in row)
    except OSError as error:
        raise ValueError(f"--bench {file} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, StopIteration):
        raise ValueError(f"--bench {file} has no pinning time: run kvsidecar bench --only pin --json FILE") from None


def _hits(path: Any, kv: KV, found: Any, sessions: int) -> dict[str, float]:
    """Hit rates with pools of several sizes under each eviction policy, with the disk, and with room for everything."""
    from kvsidecar.cli.size.hits import hit_rate, most_hits, read
    from kvsidecar.cli.size.progress import ReplayProgress
    from kvsidecar.types import Eviction

    progress = ReplayProgress()
    uses = read(path, sessions, progress)

    def rate(nbytes: float, eviction: Eviction = Eviction.LRU) -> float:
        return hit_rate(uses, int(nbytes / max(1.0, kv.token_bytes)), eviction, progress)

    pool, hits = found.pool_bytes, {}
    for times, words in ((0.5, "half the pool"), (1, f"the pool of {format_size(pool)}"), (2, "twice the pool")):
        hits[words] = rate(times * pool)
        hits[f"{words} and --eviction rhythm"] = rate(times * pool, Eviction.RHYTHM)
    if found.disk_bytes > pool:
        every = f"the disk of {format_size(found.disk_bytes)}, if it gets every block (disk_admission = all)"
        hits[every] = rate(found.disk_bytes)
    return {**hits, "room for everything": most_hits(uses)}
