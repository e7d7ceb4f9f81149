"""Time to first token of an 8k prompt: cold, in the GPU's prefix cache, and from the connector.

python -m benchmarks.vllm.hits --json hits.json            # on a GPU: no connector, vLLM's two, this project's
python -m benchmarks.vllm.hits --tiny                      # on the CPU: shows that everything works

One prompt at a time, one token each; a prompt more than are counted runs before each phase. Then the tokens and the
first log-probability of some prompts, cold, from the GPU's cache, and from the connector. With kvsidecar also an engine
restarted against the same daemon, and two engines at once that hit what the other one stored; with ``--pool-dir``
also an engine whose daemon is killed and started again meanwhile. With ``--tier``, flags of ``kvsidecar serve``, also
an engine whose daemon has nothing in its pool: it reads what the first daemon wrote to its disk, once that one has
ended, or what it put into the cluster, beside it. What is read slower than it is computed is a miss, unless
``--extra`` gives a low ``prefill_rate``.
"""

from __future__ import annotations

import argparse
import shutil
import time
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

from benchmarks.vllm import runs
from benchmarks.vllm.engine import kv_bytes_per_token
from benchmarks.vllm.runs import ask, console, p50
from benchmarks.warm_restart import kill
from kvsidecar.bench.processes import BenchChild, PrivateDaemon
from kvsidecar.client import Client
from kvsidecar.support.units import format_size

PROMPTS = {"tokens": (8192, 512), "prompts": (20, 4)}
"""Tokens of a prompt, and prompts that are counted."""
WARM, CHECKED, SHARED = 500_000, 700_000, 800_000
"""Names of prompts that are not counted, that are compared, and that two engines give each other."""
QUIET_SECONDS = 2.0
ATTACH_ATTEMPTS, ATTACH_SECONDS = 60, 0.5
"""An engine tries to attach again at growing distances, of seconds at most."""


def phase(child: BenchChild, first: int, options: argparse.Namespace) -> dict[str, Any]:
    ask(child, "phase", first=WARM, count=1, length=options.tokens)
    return ask(child, "phase", first=first, count=options.prompts, length=options.tokens)


def reset(child: BenchChild, connector: bool = False) -> None:
    if not ask(child, "reset", connector=connector)["reset"]:
        raise SystemExit("the engine's prefix cache could not be reset: it still holds blocks")


def measure(child: BenchChild, mode: str, options: argparse.Namespace) -> dict[str, Any]:
    """All phases of one engine."""
    found: dict[str, Any] = {"facts": ask(child, "facts")}
    ask(child, "phase", first=WARM, count=4, length=options.tokens)
    found["cold"] = phase(child, 0, options)
    found["gpu hit"] = phase(child, 0, options)
    checked = {"first": CHECKED, "count": options.checked, "length": options.tokens}
    if mode != "none":
        for name in ("external hit", "external hit, again"):
            reset(child)
            found[name] = phase(child, 0, options)
    found["check"] = {"cold": ask(child, "check", **checked), "gpu": ask(child, "check", **checked)}
    if mode != "none":
        reset(child)
        found["check"]["external"] = ask(child, "check", **checked)
        reset(child, connector=True)
        found["cold, after connector reset"] = phase(child, 0, options)
    return found


def restart(child: BenchChild, options: argparse.Namespace) -> dict[str, Any]:
    """An engine that begins: its very first requests find what an earlier one stored."""
    facts = ask(child, "facts")
    return {"facts": facts, "first": ask(child, "phase", first=0, count=options.prompts, length=options.tokens)}


def restart_daemon(child: BenchChild, daemon: PrivateDaemon, options: argparse.Namespace) -> dict[str, Any]:
    """The daemon is killed and started again while the engine keeps running. The engine's own cache is empty then, so
    that every hit is of what the daemon has kept."""
    ask(child, "drain")
    before = hit_check(child, options)
    ask(child, "drain")
    gone = kill(daemon)
    daemon.start()
    daemon.wait_ready()
    warm = daemon.said["warm start"]
    console.print(f"killed, gone after {gone:.2f} s; kept {warm['kept_blocks']} blocks", style="dim")
    for _ in range(ATTACH_ATTEMPTS):  # it attaches again by itself, within some seconds
        reset(child)
        if ask(child, "phase", first=CHECKED, count=1, length=options.tokens)["cached"][0]:
            break
        time.sleep(ATTACH_SECONDS)
    reset(child)
    after = ask(child, "check", first=CHECKED, count=options.checked, length=options.tokens)
    reset(child)
    return {
        "first": phase(child, 0, options), "kept_blocks": warm["kept_blocks"], "dropped": warm["dropped_blocks"],
        "ready_seconds": round(daemon.times["ready"] - daemon.started, 3), "gone_seconds": gone,
        "equal_tokens": _same(before, after), "cached": after["cached"],
    }  # fmt: skip


def hit_check(child: BenchChild, options: argparse.Namespace) -> dict[str, Any]:
    """What these prompts give that hit in the connector: what is recomputed differs by bf16's rounding."""
    checked = {"first": CHECKED, "count": options.checked, "length": options.tokens}
    ask(child, "check", **checked)
    reset(child)
    return ask(child, "check", **checked)


def wait_written(daemon: PrivateDaemon) -> dict[str, Any]:
    """Until the daemon's tier writes nothing more."""
    with Client(daemon.socket, name="hits") as client:
        before = -1
        while True:
            (tier,) = client.status().tiers
            if tier.written_bytes == before:
                return {"off": tier.off, "blocks": tier.blocks, "written_bytes": tier.written_bytes}
            before = tier.written_bytes
            time.sleep(QUIET_SECONDS)


def read_tier(
    child: BenchChild, daemon: PrivateDaemon, stored: dict[str, Any], options: argparse.Namespace
) -> dict[str, Any]:
    """An engine and a daemon that begin: what they hit was in the tier, the second time in the pool."""
    found = {"facts": ask(child, "facts")}
    ask(child, "phase", first=WARM + 100, count=2, length=options.tokens)
    for name in ("tier hit", "pool hit"):
        found[name] = phase(child, 0, options)
        reset(child)
    after = ask(child, "check", first=CHECKED, count=options.checked, length=options.tokens)
    with Client(daemon.socket, name="hits") as client:
        (tier,) = client.status().tiers
    read = {"read_bytes": tier.read_bytes, "failures": tier.failures, "off": tier.off}
    return {**found, **read, "equal_tokens": _same(stored, after), "cached": after["cached"]}


def share(one: BenchChild, other: BenchChild, options: argparse.Namespace) -> dict[str, Any]:
    """Each stores half of the prompts; each hits the other's."""
    half = max(1, options.prompts // 2)
    for index, child in enumerate((one, other)):
        ask(child, "facts")
        ask(child, "phase", first=WARM + 10 * index, count=2, length=options.tokens)
        ask(child, "phase", first=SHARED + index * half, count=half, length=options.tokens)
        ask(child, "drain")
    for index, child in enumerate((one, other)):
        child.ask("phase", first=SHARED + (1 - index) * half, count=half, length=options.tokens)
    return {"one": one.answer(runs.START_SECONDS), "other": other.answer(runs.START_SECONDS)}


def run(mode: str, options: argparse.Namespace, directory: Path, pool: int) -> dict[str, Any]:
    llm: dict[str, Any] = {
        "max_model_len": 2 * options.tokens,
        "max_num_batched_tokens": 2 * options.tokens,
        "max_num_seqs": 16,
        "block_size": 32 if options.tiny else 16,
        "enforce_eager": not options.graphs,
    }
    memory: dict[str, Any] = {"gpu_memory_utilization": options.memory}
    half: dict[str, Any] = {"gpu_memory_utilization": options.memory / 2}
    if options.tiny:
        memory = half = {"kv_cache_memory_bytes": 2 * kv_bytes_per_token(True) * options.tokens * (options.prompts + 4)}
    ours = mode == "kvsidecar"
    flags = ["--pool-dir", str(options.pool_dir)] if options.pool_dir is not None else []
    with runs.daemon(options, directory, pool, flags) if ours else nullcontext() as daemon:
        with runs.engine(options, directory, mode, pool, daemon, **llm, **memory) as child:
            found = measure(child, mode, options)
            if ours:  # the last phase forgot everything
                phase(child, 0, options)
                ask(child, "drain")
            if daemon is not None and flags:
                found["restart daemon"] = restart_daemon(child, daemon, options)
        if ours and not options.brief:
            with runs.engine(options, directory, mode, pool, daemon, **llm, **memory) as child:
                found["restart"] = restart(child, options)
            # One after the other: vLLM measures free GPU memory when it starts.
            with runs.engine(options, directory, mode, pool, daemon, **llm, **half) as one:
                ask(one, "facts")
                with runs.engine(options, directory, mode, pool, daemon, **llm, **half) as other:
                    found["share"] = share(one, other, options)
    if ours and options.tier:
        found["tier"] = behind(options, directory, pool, **llm, **memory)
    return found


def behind(options: argparse.Namespace, directory: Path, pool: int, **llm: Any) -> dict[str, Any]:
    flags = options.tier.split()
    filling = [*flags, *options.fill.split()]

    def fill(daemon: PrivateDaemon) -> dict[str, Any]:
        with runs.engine(options, directory, "kvsidecar", pool, daemon, **llm) as child:
            phase(child, 0, options)
            stored = hit_check(child, options)
            ask(child, "drain")
            return {"stored": stored, "written": wait_written(daemon)}

    def read(daemon: PrivateDaemon, filled: dict[str, Any]) -> dict[str, Any]:
        with runs.engine(options, directory, "kvsidecar", pool, daemon, **llm) as child:
            return {**read_tier(child, daemon, filled["stored"], options), "written": filled["written"]}

    if "--cluster-master" in flags:
        with (
            runs.daemon(options, directory, pool, filling) as one,
            runs.daemon(options, directory, pool, flags) as other,
        ):
            return read(other, fill(one))
    with runs.daemon(options, directory, pool, filling) as daemon:
        filled = fill(daemon)
    with runs.daemon(options, directory, pool, flags) as daemon:
        return read(daemon, filled)


PHASES = ("cold", "gpu hit", "external hit", "external hit, again", "cold, after connector reset")


def show(results: dict[str, dict[str, Any]], options: argparse.Namespace) -> None:
    rows: list[list[object]] = []
    for mode, found in results.items():
        timed = {name: found[name] for name in PHASES if name in found}
        if "restart daemon" in found:
            timed["restarted daemon"] = found["restart daemon"]["first"]
        if "restart" in found:
            timed["restarted engine"] = found["restart"]["first"]
            timed["two engines: one"] = found["share"]["one"]
            timed["two engines: the other"] = found["share"]["other"]
        if "tier" in found:
            timed |= {name: found["tier"][name] for name in ("tier hit", "pool hit")}
        for name, times in timed.items():
            ms = times["ms"]
            cached = f"{min(times['cached'])}..{max(times['cached'])}"
            rows.append([mode, name, len(ms), p50(ms), sum(ms) / len(ms), min(ms), max(ms), cached])
    columns = ["mode", "phase", "n", "p50 ms", "mean ms", "min ms", "max ms", "cached tokens"]
    runs.table(f"One token after a prompt of {options.tokens}", columns, rows)

    runs.hooks_table((mode, name, found[name]) for mode, found in results.items() for name in PHASES if name in found)
    rows = [
        [mode, found["facts"]["register_ms"], found["facts"]["build_seconds"], found["facts"]["gpu_blocks"]]
        for mode, found in results.items()
    ]
    runs.table("Start", ["mode", "register_kv_caches ms", "engine built s", "GPU blocks"], rows)

    for found in results.values():
        if (kept := found.get("restart daemon")) is not None:
            console.print(
                f"The daemon was killed: {kept['kept_blocks']} blocks kept, {sum(kept['dropped'].values())} dropped, "
                f"ready again after {kept['ready_seconds']:.2f} s; tokens equal to those before: {kept['equal_tokens']}"
            )
        if (tier := found.get("tier")) is not None:
            console.print(
                f"Behind the pool: {format_size(tier['written']['written_bytes'])} written, "
                f"{format_size(tier['read_bytes'])} read, {tier['failures']} failures; "
                f"tokens equal to those before: {tier['equal_tokens']}"
            )
    rows = []
    for mode, found in results.items():
        cold, gpu, external = (found["check"].get(name) for name in ("cold", "gpu", "external"))
        rows.append(
            [
                mode,
                _same(cold, gpu),
                _same(cold, external),
                _same(gpu, external),
                _apart(cold, gpu),
                _apart(gpu, external),
            ]
        )
    columns = ["mode", "GPU = cold", "external = cold", "external = GPU", "|Δ logprob| GPU, cold", "external, GPU"]
    runs.table(f"Of {options.checked} prompts: equal tokens, first token's log-probability", columns, rows)


def _same(one: dict[str, Any] | None, other: dict[str, Any] | None) -> str:
    if one is None or other is None:
        return "-"
    equal = sum(a == b for a, b in zip(one["tokens"], other["tokens"], strict=True))
    return f"{equal}/{len(one['tokens'])}"


def _apart(one: dict[str, Any] | None, other: dict[str, Any] | None) -> str:
    if one is None or other is None:
        return "-"
    return f"{max(abs(a - b) for a, b in zip(one['logprob'], other['logprob'], strict=True)):.6f}"


def main() -> None:
    parser = runs.arguments(__doc__)
    parser.add_argument("--checked", type=int, default=3, help="prompts whose tokens are compared")
    parser.add_argument(
        "--memory", type=float, default=0.7, help="share of the GPU's memory for an engine; half for each of two"
    )
    parser.add_argument(
        "--pool-dir", type=Path, help="a directory in memory, such as /dev/shm/NAME, that keeps the pool"
    )
    parser.add_argument("--brief", action="store_true", help="no engine that restarts, and no two at once")
    parser.add_argument("--tier", default="", help="flags of kvsidecar serve that add a disk or a cluster")
    parser.add_argument("--fill", default="", help="further flags of the daemon that fills it")
    parser.add_argument("--graphs", action="store_true", help="torch.compile and CUDA graphs instead of eager mode")
    options = runs.parsed(parser, PROMPTS)
    chosen = runs.modes(options, ("none", "kvsidecar") if options.tiny else runs.MODES)
    # Room for all that is ever stored: the prompts twice, and some.
    per_prompt = kv_bytes_per_token(options.tiny) * options.tokens
    pool = runs.pool_bytes(
        options, 2 * per_prompt * (2 * options.prompts + options.checked + 16) // (1 << 21) * (1 << 21)
    )
    results: dict[str, dict[str, Any]] = {}
    with ExitStack() as stack:
        if options.pool_dir is not None and not options.pool_dir.exists():
            stack.callback(shutil.rmtree, options.pool_dir, ignore_errors=True)  # it would hold the pool's memory
        directory = stack.enter_context(runs.folder(options))
        for mode in chosen:
            console.print(f"{mode} ...")
            results[mode] = run(mode, options, directory, pool)
            runs.save(options, {"modes": results})  # a run that is cut short has something to show
    show(results, options)


if __name__ == "__main__":
    main()
