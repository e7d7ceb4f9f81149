"""Where the time to the first token goes if a prompt is a hit in the daemon, and what part of it is the link's.

python -m benchmarks.vllm.hit_parts --json parts.json      # on a GPU
python -m benchmarks.vllm.hit_parts --shape windows        # a model of `benchmarks.vllm.shapes`
python -m benchmarks.vllm.hit_parts --tiny                 # on the CPU: shows that everything works

One prompt at a time, one token each, in an engine with one rank: each is a hit in the daemon, and at once asked again,
a hit in the GPU's prefix cache. Cores may change their speed from one second to the next, so the target compares
neighbours: at most 1.05 times what a copy of the prompt's KV and the hit on the GPU take together.
"""

from __future__ import annotations

import functools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.peers.cuda import opened_gpu
from benchmarks.vllm import runs, shapes, throughput
from benchmarks.vllm.engine import (
    ADDITIONS,
    Engine,
    kv_bytes_per_token,
    loop_microseconds,
    model_config,
    transfer_config,
)
from benchmarks.vllm.runs import console
from kvsidecar.client import JobDone
from kvsidecar.integrations.vllm.step_loads import StepLoads
from kvsidecar.integrations.vllm.worker import Transfers

SHAPE = {"tokens": (8192, 512), "prompts": (20, 4)}
PARTS = {
    "arrival": "from the call to the scheduler's question",
    "lookup": "until the daemon has answered it",
    "plan": "until the load has been sent: blocks, the step's plan, a step without a forward",
    "queue": "of the load in the daemon, without the copy: decoding, planning, waiting",
    "copy": "while bytes move",
    "report": "until the engine's rank knows of its end",
    "layers": "of a load within a step: until the layers behind its last chunk and the sampling are enqueued",
    "forward": "until the token: for other loads, the scheduler hears of it, schedules, and computes",
}
MORE_PROMPTS = 4
"""For which there is room, on the GPU and in the pool: those that compile, and those that drain the engine."""


class Clock:
    """When what happened to the one prompt that is asked."""

    def __init__(self, scheduler_side: Any, worker_side: Any) -> None:
        self.marks: dict[str, float] = {}
        self.done: list[JobDone] = []
        self._wrap(scheduler_side, "get_num_new_matched_tokens", ("asked", "answered"))
        self._wrap(worker_side, "start_load_kv", ("", "sent"))
        add, wait_for_layer = Transfers.add, StepLoads.wait_for_layer

        def note(transfers: Transfers, done: JobDone) -> bool:
            self.done.append(done)
            self.marks["ended"] = time.perf_counter()
            return add(transfers, done)

        def wait(loads: StepLoads, name: str) -> None:
            waits = any(load.jobs.num_running for load in loads.running)
            wait_for_layer(loads, name)
            if waits:
                self.marks["loaded"] = time.perf_counter()

        Transfers.add = note  # type: ignore[method-assign, assignment]
        StepLoads.wait_for_layer = wait  # type: ignore[method-assign, assignment]

    def _wrap(self, owner: Any, name: str, marks: tuple[str, str]) -> None:
        call: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(call)
        def marked(*arguments: Any, **options: Any) -> Any:
            self.marks.setdefault(marks[0], time.perf_counter())
            result = call(*arguments, **options)
            self.marks.setdefault(marks[1], time.perf_counter())
            return result

        setattr(owner, name, marked)

    def parts(self, began: float, ended: float) -> dict[str, float]:
        """Milliseconds of each of `PARTS`; the load may have been several jobs, one after the other."""
        copy = sum(job.copy_seconds for job in self.done)
        queue = max(job.queue_seconds + job.copy_seconds for job in self.done) - copy
        at = self.marks
        known = at.get("loaded", at["ended"])
        seconds = (
            at["asked"] - began,
            at["answered"] - at["asked"],
            at["sent"] - at["answered"],
            queue,
            copy,
            known - at["sent"] - queue - copy,
            at["ended"] - known,
            ended - at["ended"],
        )
        return {name: each * 1e3 for name, each in zip(PARTS, seconds, strict=True)}


def measure(engine: Engine, options: Any) -> dict[str, Any]:
    """Milliseconds of each prompt: hits on the GPU, hits in the daemon, and the parts of these."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    engine.phase(options.prompts, 2, options.tokens)  # they compile
    engine.phase(0, options.prompts, options.tokens)
    clock = Clock(engine.scheduler_connector, get_kv_transfer_group())
    hits, parts, on_gpu, loop_us = [], [], [], []
    for name in range(options.prompts):
        if not engine.reset()["reset"]:
            raise SystemExit("the engine's prefix cache could not be reset: it still holds blocks")
        loop_us.append(loop_microseconds())
        clock.marks.clear()
        clock.done.clear()
        (milliseconds,) = engine.phase(name, 1, options.tokens)["ms"]  # without what makes the prompt
        ended = time.perf_counter()
        if not clock.done:
            raise SystemExit("a prompt was no hit in the daemon: has its pool (--pool-size) room for all prompts?")
        hits.append(milliseconds)
        parts.append(clock.parts(ended - milliseconds / 1e3, ended))
        on_gpu += engine.phase(name, 1, options.tokens)["ms"]
    found = {"gpu_hit_ms": on_gpu, "daemon_hit_ms": hits, "parts_ms": parts, "loop_us": loop_us}
    return {"facts": engine.facts(), **found}


def show(found: dict[str, Any]) -> None:
    medians = {name: statistics.median(each[name] for each in found["parts_ms"]) for name in PARTS}
    runs.table(
        "A hit in the daemon", ["part", "ms", ""], [[name, f"{medians[name]:.2f}", PARTS[name]] for name in PARTS]
    )
    hits, on_gpu = found["daemon_hit_ms"], found["gpu_hit_ms"]
    hit, local = statistics.median(hits), statistics.median(on_gpu)
    console.print(f"{ADDITIONS:,} additions before a hit: {statistics.median(found['loop_us']):.0f} us (median)")
    console.print(f"first token: {hit:.1f} ms from the daemon, {local:.1f} ms from the GPU's cache (medians)")
    if link := found["link_ms"]:
        times = statistics.median(hit / (link + local) for hit, local in zip(hits, on_gpu, strict=True))
        console.print(f"link {link:.1f} ms: the hit takes {times:.3f} times as long as both together (median)")


def main() -> None:
    parser = runs.arguments(__doc__, ["kvsidecar"])
    parser.add_argument("--memory", type=float, default=0.7, help="share of the GPU's memory for the engine")
    parser.add_argument("--shape", default="", help=f"another model than a dense one: {', '.join(shapes.SHAPES)}")
    options = runs.parsed(parser, SHAPE)
    options.gpu_tokens = (options.prompts + MORE_PROMPTS) * options.tokens
    options.max_tokens = 2 * options.tokens
    options.config, default = model_config(options.tiny), options.gpu_tokens * kv_bytes_per_token(options.tiny)
    if options.shape:
        options.graphs, options.fits, options.resident_times = False, True, 4
        shapes.set_shape(options, options.shape)
        default = 2 * options.resident_bytes  # states take more in the pool than attention that the GPU has room for
    pool = runs.pool_bytes(options, default)
    with runs.folder(options) as directory, runs.daemon(options, directory, pool) as server:
        model = runs.model_folder(directory, options.config)
        transfer = transfer_config("kvsidecar", pool, server.socket, json.loads(options.extra))
        llm = {**runs.llm_options(options, max_model_len=options.max_tokens), **json.loads(options.llm)}
        engine = Engine(str(model), transfer, llm, time_hooks=False)
        with throughput.loads(server) as loaded:
            found = measure(engine, options)
        engine.end()
    found["link_ms"] = None
    if not options.tiny:
        with opened_gpu() as gpu:
            found["link_ms"] = loaded["bytes"] / options.prompts / gpu.bulk_gbps("load") / 1e6
    runs.save(options, found)
    show(found)


if __name__ == "__main__":
    main()
