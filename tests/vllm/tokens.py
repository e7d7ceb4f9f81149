"""Answers under preemption with the connector against those without it, with and without asynchronous scheduling.

TEST_DEVICE=cuda python -m tests.vllm.tokens            # one GPU, about three minutes
python -m tests.vllm.tokens --tiny                      # on the CPU, where vLLM has no asynchronous scheduling

The same prompts are asked, all at once and greedily, of an engine with memory for all of them and no connector; of one
without a connector that has too few GPU blocks, so that it preempts; and of one as small with the connector: once to
store, then again and again behind a reset of the GPU's own cache, so that every prompt is a hit, and preempted requests
are stored and loaded in between.

Kernels round differently in batches of another size, which may change a token once in a while. The second engine says
how often; with the connector it may not be more than twice that. KV that was copied before a kernel had written it
changes most of the answers that hit it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.harness import DEVICE, DaemonProcess
from tests.vllm import models
from tests.vllm.engine import Answer, Engine, EngineProcess, Prompt, blocks, join, kvsidecar, prompt, serve


@dataclass(frozen=True)
class Shape:
    """What is asked of whom."""

    model: str
    prompts: int
    shortest: int
    longest: int
    """Tokens of a prompt."""
    tokens: int
    """Of an answer."""
    rounds: int
    memory: int
    """Bytes of KV cache that are enough for all of them."""
    gpu_blocks: int
    """Of 32 tokens: not enough."""
    max_len: int
    batch: int
    """Tokens of one step."""
    pool: str


FULL = Shape("wide", 60, 500, 3000, 64, 5, 4 << 30, 420, 4096, 2048, "6GiB")
TINY = Shape("full", 10, 60, 200, 40, 3, 16 << 20, 24, 512, 256, "6MiB")
RETRIES = 20


class Asked(Engine):
    """In a process of its own."""

    def facts(self) -> dict[str, Any]:
        config = self.engine.vllm_config
        return {"async_scheduling": bool(getattr(config.scheduler_config, "async_scheduling", False))}


class AskedProcess(EngineProcess):
    module = "tests.vllm.tokens"

    def facts(self) -> dict[str, Any]:
        return dict(self._call("facts"))


@dataclass
class Run:
    """What one engine has answered."""

    name: str
    answers: list[list[Answer]]
    counters: dict[str, float]
    facts: dict[str, Any]
    seconds: float

    def wrong(self, right: Sequence[Answer]) -> int:
        return sum(
            each.tokens != expected.tokens
            for answers in self.answers
            for each, expected in zip(answers, right, strict=True)
        )

    @property
    def count(self) -> int:
        return sum(map(len, self.answers))

    @property
    def hits(self) -> int:
        return sum(each.cached > 0 for answers in self.answers for each in answers)

    def line(self, right: Sequence[Answer]) -> str:
        preemptions = self.counters.get("vllm:num_preemptions", 0)
        kept = "on" if self.facts["async_scheduling"] else "off"
        return (
            f"{self.name:<28} async scheduling {kept:<3}  {self.count:4} answers, {self.wrong(right):4} differ, "
            f"{self.hits:4} hits, {preemptions:5.0f} preemptions, {self.seconds:6.1f} s"
        )


def ask(
    name: str, model: str, shape: Shape, prompts: Sequence[Prompt], daemon: DaemonProcess | None = None, **options: Any
) -> Run:
    transfer = None if daemon is None else kvsidecar(daemon.socket)
    given = {
        "max_model_len": shape.max_len,
        "max_num_batched_tokens": shape.batch,
        "kv_cache_memory_bytes": shape.memory,
        **options,
    }
    engine = AskedProcess(model, transfer, **given)
    with engine:
        engine.wait_started()
        began = time.monotonic()
        answers = []
        if daemon is not None:
            join(engine, daemon)
        for number in range(shape.rounds if daemon is not None else 1):
            if number:
                _reset(engine)
            answers.append(engine.generate(*prompts, tokens=shape.tokens))
            engine.drain()
        return Run(name, answers, engine.counters(), engine.facts(), time.monotonic() - began)


def _reset(engine: EngineProcess) -> None:
    """Stores hold blocks until they are over."""
    for _ in range(RETRIES):
        if engine.reset():
            return
        engine.drain()
        time.sleep(0.1)
    raise SystemExit("the engine's own cache could not be reset: it still holds blocks")


def compare(shape: Shape, directory: Path) -> bool:
    """Prints what was found. False: the connector changes answers, or nothing was shown."""
    model = models.save(shape.model, directory)
    step = (shape.longest - shape.shortest) / max(1, shape.prompts - 1)
    prompts = [prompt(("tokens", i), int(shape.shortest + i * step)) for i in range(shape.prompts)]
    reference = ask("no connector, all memory", model, shape, prompts, enable_prefix_caching=False)
    (right,) = reference.answers
    print(reference.line(right), flush=True)
    good = True
    for scheduling in (False, True) if DEVICE == "cuda" else (False,):
        small: dict[str, Any] = {"num_gpu_blocks_override": shape.gpu_blocks, "async_scheduling": scheduling}
        control = ask("no connector, few blocks", model, shape, prompts, **small)
        print(control.line(right), flush=True)
        with DaemonProcess(directory, "--pool-size", shape.pool) as daemon:
            daemon.wait_ready()
            run = ask("kvsidecar, few blocks", model, shape, prompts, daemon, **small)
            print(run.line(right), f"  {blocks(daemon)} blocks stored", flush=True)
        noise = control.wrong(right) / control.count
        wrong = run.wrong(right) / run.count
        for shown, what in (
            (run.facts["async_scheduling"] is scheduling, "the engine schedules otherwise than it was told to"),
            (run.hits >= (shape.rounds - 1) * shape.prompts * 0.9, "few prompts were hits"),
            (run.counters.get("vllm:num_preemptions", 0) > 0, "nothing was preempted"),
            (wrong <= 2 * noise + 0.01, f"{wrong:.1%} of the answers differ, without the connector {noise:.1%}"),
        ):
            if not shown:
                print(f"FAILED: {what}", flush=True)
                good = False
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small enough for the CPU")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvs-") as directory:
        good = compare(TINY if options.tiny else FULL, Path(directory))
    print("the same with the connector as without" if good else "not the same", flush=True)
    sys.exit(not good)


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1].startswith("["):
        serve(Asked)
    else:
        main()
