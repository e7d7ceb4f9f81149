"""Many answers of engines with a daemon, under faults at random, each compared with that of an engine without a cache.

python -m tests.vllm.oracle --answers 5000 --seed 7

Two engines of one model share a daemon that is killed, stopped and started again, and whose copies are slow or fail.
Their own caches are so small that blocks are evicted and requests preempted, also in the step that would have written
their blocks. Prompts share prefixes; requests are aborted, the engines' caches reset in the middle of requests, and the
weights of one engine updated in place. With some seeds, requests name adapters, steps are lost as when a rank fails,
engines sleep (on a GPU), or another connector beside this one fails to load what it has promised. One engine would hit
what the other has stored under a wrong key, and both what they have stored themselves.

An episode is one seed: kind of engine, rounds of requests, and faults. The seed is printed, and repeats the episode,
except for the instants at which the daemon reaches what it does.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.harness import DEVICE, SECONDS, DaemonProcess, eventually
from tests.vllm import models
from tests.vllm.engine import EngineProcess, kvsidecar, prompt

EPISODE = 400
"""Answers of one seed at most."""
ROOTS, CHILDREN = 10, 6
TOKENS = 40
"""Of an answer at most."""
LONGEST = 640
"""Tokens of a prompt and its answer at most."""
SLOW_COPIES = (0.02, 0.2)
"""Seconds that a copy waits for, in some episodes."""


@dataclass(frozen=True)
class Kind:
    """A kind of model, and the room that it gets."""

    weights: tuple[str, ...]
    """Those of the engines, and others of the same shape that one of them may get."""
    pool: str
    """Size of the daemon's pool, which holds some of the blocks of all prompts."""
    blocks: tuple[int, int]
    """Fewest and most GPU blocks of an engine."""
    adapters: tuple[str, ...] = ()
    """For the first of the weights; some engines take requests with them."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of each engine."""
    least_margin: float = 0.01 if DEVICE == "host" else 0.2
    """An answer is compared up to the first token that is ahead of the next best by less: what else is in a batch
    changes the last digits of float32, and more of them on a GPU, which multiplies with fewer."""
    tolerance: float = 0.002 if DEVICE == "host" else 0.05
    """Of a token's log probability. KV that is wrong in one place may not change the token."""


KINDS = {
    # vLLM's kernels for adapters on a GPU take 16-bit numbers only.
    "full": Kind(("full", "other"), "6MiB", (26, 60), ("adapter-1", "adapter-2") if DEVICE == "host" else ()),
    "hybrid": Kind(("hybrid",), "12MiB", (70, 120)),
    # Has kernels on a GPU only.
    "mla": Kind(
        ("mla",), "6MiB", (26, 60), options={"dtype": "bfloat16", "attention_backend": "TRITON_MLA"},
        least_margin=0.5, tolerance=0.4,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Expected:
    """What an engine without a cache says to a prompt."""

    ids: tuple[int, ...]
    tokens: list[int]
    chosen: list[float]
    """Log probabilities of the tokens."""


@dataclass
class Table:
    """What is expected, by name of the weights or adapter and by prompt: computed once."""

    prompts: list[tuple[int, ...]]
    answers: dict[str, list[Expected]]
    name: str = "full"
    """Of the kind of model."""

    @property
    def kind(self) -> Kind:
        return KINDS[self.name]


def _prompts() -> list[tuple[int, ...]]:
    """A forest: prefixes end within blocks, at their ends, and one token off."""
    numbers = random.Random("prompts of the oracle")
    found = []
    for root in range(ROOTS):
        whole = prompt(("root", root), numbers.choice([70, 130, 256, 400])).ids
        found.append(whole)
        for child in range(CHILDREN):
            cut = numbers.randrange(16, len(whole))
            cut = min(len(whole), cut // models.BLOCK * models.BLOCK + numbers.choice([-1, 0, 1, cut % models.BLOCK]))
            rest = numbers.choice([1, 15, 33, 90, 190])
            found.append(whole[: max(1, cut)] + prompt(("child", root, child), rest).ids)
    return found


def expected(name: str, directory: Path) -> Table:
    """The table for this kind of model; from the directory, if an earlier run has left it there."""
    table, kept = Table(_prompts(), {}, name), directory / f"expected-{name}.json"
    if kept.exists():
        found = json.loads(kept.read_text())
        table.answers = {name: [Expected(**each) for each in answers] for name, answers in found.items()}
        return table
    for weights in table.kind.weights:
        named = {weights: None}
        if weights == table.kind.weights[0]:
            named |= adapters_of(table.kind, directory)
        options = {**table.kind.options, **(LORA if len(named) > 1 else {})}
        with EngineProcess(models.save(weights, directory), enable_prefix_caching=False, **options) as engine:
            engine.wait_started()
            for name, adapter in named.items():
                answers = table.answers[name] = []
                for ids in table.prompts:  # one at a time
                    engine.send_play([{"ids": ids, "tokens": TOKENS, "arrives": 0, "adapter": adapter}])
                    (said,) = engine.played()["answers"][0]["answers"]
                    margins = enumerate(said["margins"])
                    sure = next((at for at, margin in margins if margin < table.kind.least_margin), TOKENS)
                    answers.append(Expected(ids, said["tokens"][:sure], said["chosen"][:sure]))
    kept.write_text(json.dumps({name: [asdict(each) for each in found] for name, found in table.answers.items()}))
    return table


LORA = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
"""Options of an engine that takes requests with adapters."""


def adapters_of(kind: Kind, directory: Path) -> dict[str, dict[str, Any]]:
    """By name, what a request with it has as its adapter. Their weights are written into the directory."""
    return {
        name: {"path": models.save_adapter(directory / name, seed=number), "name": name, "number": number}
        for number, name in enumerate(kind.adapters, 1)
    }


@dataclass
class _Engine:
    name: str
    process: EngineProcess
    weights: str
    mixed: bool = False
    """Whether its own cache may have KV of other weights, because vLLM has refused a reset."""
    judged: bool = True
    """Whether its answers are compared."""


@dataclass
class Episode:
    """
    Args:
        table: of what is expected.
        directory: for models and logs.
    """

    table: Table
    directory: Path
    seed: int
    counts: Counter[str] = field(default_factory=Counter)
    history: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._daemon: DaemonProcess | None = None
        self._adapters: dict[str, dict[str, Any]] = {}
        self._with_losses = False
        self._with_sleep = False
        self._hot = 0
        """The first of the prompts that most requests are for, which share a prefix."""

    def _happens(self, probability: float) -> bool:
        return self._random.random() < probability

    def options(self) -> dict[str, Any]:
        """Options that both engines are started with."""
        chosen = self._random.choice
        return {
            "num_gpu_blocks_override": self._random.randrange(*self.table.kind.blocks),
            "max_model_len": LONGEST,
            "max_num_batched_tokens": chosen([96, 256, 512]),
            "long_prefill_token_threshold": chosen([0, 64, 128]),
            "scheduling_policy": chosen(["fcfs", "priority"]),
            "async_scheduling": self._happens(0.5),
            **self.table.kind.options,
        }

    def run(self, answers: int) -> None:
        """Raises AssertionError if one is wrong."""
        options, kind = self.options(), self.table.kind
        with_updates = self._happens(0.4) and len(kind.weights) > 1
        if self._happens(0.3) and kind.adapters and not with_updates:
            self._adapters = adapters_of(kind, self.directory)
            options |= LORA
        # With asynchronous scheduling, vLLM 0.33 itself never frees the blocks of a lost step.
        self._with_losses = self._happens(0.4) and not options["async_scheduling"]
        if DEVICE == "cuda" and self._happens(0.3):
            options["enable_sleep_mode"] = self._with_sleep = True
        extra: dict[str, Any] = {
            "store_mode": self._random.choice(["eager", "lazy"]),
            "store_interval": self._random.choice([1e-6, 0.05]),
            "load_chunks": self._random.choice([0, 4]),
        }
        # On a GPU, vLLM's second model runner goes on from any such KV itself, or reads memory that is not there.
        with_failing = self._happens(0.3) and kind.weights[0] == "full" and DEVICE == "host"
        faults = {"updates": with_updates, "failing loads": with_failing, "lost steps": self._with_losses}
        print(f"seed {self.seed}: {options} {extra} {faults}", flush=True)
        home = Path(tempfile.mkdtemp(prefix="kvs-"))
        with ExitStack() as stack:
            stack.callback(shutil.rmtree, home)
            stack.callback(self._end_daemon)
            model = models.save(kind.weights[0], self.directory)
            sidecar = kvsidecar(str(home / "kvs.sock"), **extra)
            engines = []
            for name in "ab":
                transfer = beside_failing(sidecar) if with_failing and name == "a" else sidecar
                log = stack.enter_context((self.directory / f"{self.seed}-{name}.log").open("w"))
                process = stack.enter_context(EngineProcess(model, transfer, stderr=log, **options))
                engines.append(_Engine(name, process, kind.weights[0]))
            # After a load within a step has failed, vLLM itself goes on from some wrong KV: see `WrittenBlocks`.
            engines[0].judged = not with_failing
            self._start_daemon(home)
            for each in engines:
                each.process.wait_started()
            daemon = self._daemon
            assert daemon is not None
            eventually(lambda: len(daemon.get("/status")[1]["ranks"]) >= 2, "both engines attach")
            while self.counts["answers"] < answers:
                self._change(home)
                playing = self._random.choice([engines[:1], engines[:1], engines[1:], engines])
                self._round(playing, options["scheduling_policy"] == "priority", with_updates)
            for each in engines:
                counters = each.process.counters()
                for what in ("vllm:num_preemptions", "vllm:kvsidecar_loads", "vllm:kvsidecar_step_loads"):
                    self.counts[f"{what} of {each.name}"] = int(counters.get(what, 0))

    def _note(self, what: str) -> None:
        self.counts[what.split(":", maxsplit=1)[0]] += 1
        self.history.append(what)

    # -- the daemon

    def _start_daemon(self, home: Path) -> None:
        number, rules = self._random.randrange(3, 60), []
        if self._happens(0.3):
            failures = ["in_flight@{}=kill", "before_copy@{}=raise(planned)"]
            rules.append(self._random.choice(["load.", "store."]) + self._random.choice(failures).format(number))
        if self._happens(0.5):
            # Blocks stand in copies while their requests end, caches are reset and weights change.
            rules.append(f"copy.device_lost=delay({self._random.choice(SLOW_COPIES)})")
        self._note(f"daemon started: {rules}")
        variables = {"KVSIDECAR_FAILPOINTS": ";".join(rules)} if rules else {}
        self._daemon = DaemonProcess(home, "--pool-size", self.table.kind.pool, **variables).wait_ready()

    def _end_daemon(self, kill: bool = True) -> None:
        if self._daemon is None:
            return
        with self._daemon as daemon:
            if kill:
                daemon.process.kill()
            else:
                daemon.process.terminate()
            daemon.process.wait(SECONDS)
        self._daemon = None

    def _change(self, home: Path) -> None:
        """Between two rounds."""
        if self._daemon is None:
            if self._happens(0.4):
                self._start_daemon(home)
        elif self._happens(0.04):
            kill = self._happens(0.5)
            self._end_daemon(kill)
            self._note("daemon killed" if kill else "daemon stopped")

    # -- requests

    def _round(self, engines: Sequence[_Engine], priorities: bool, updates: bool) -> None:
        """Each of the engines runs requests, at the same time."""
        playing = []
        for engine in engines:
            chosen, acts = self._requests(priorities), self._acts(updates and engine.name == "a")
            engine.process.send_play([request for _, request in chosen], acts)
            playing.append((engine, chosen, acts))
        if self._daemon is not None and self._happens(0.03):
            self._end_daemon()
            self._note("daemon killed in a round")
        for engine, chosen, acts in playing:
            self._judge(engine, chosen, acts, engine.process.played())

    def _judge(
        self,
        engine: _Engine,
        chosen: list[tuple[int, dict[str, Any]]],
        acts: list[dict[str, Any]],
        played: dict[str, Any],
    ) -> None:
        weights, judged = engine.weights, engine.judged and not engine.mixed
        lost = any("lose" in act for act in acts)
        for act, done in zip(acts, played["acted"], strict=True):
            self._note(f"act of {engine.name}: {act} {done}")
            if "lose" in act:
                self.counts["lost steps"] += done
            elif "sleep" in act:
                self.counts["slept" if done else "did not sleep"] += 1
            else:
                if "model" in act:
                    judged = False  # tokens of both
                    engine.weights, engine.mixed = Path(act["model"]).name, True
                    self.counts["updates"] += 1
                if done:
                    engine.mixed = False
                self.counts["resets" if done else "refused resets"] += 1
        for (number, request), said in zip(chosen, played["answers"], strict=True):
            cut = lost or "abort_after" in request
            if said is None:
                self.counts["aborted before a token"] += 1
                assert cut, f"no answer to {request}"
                continue
            named = request["adapter"]["name"] if request["adapter"] else weights
            for each in said["answers"]:
                said_now = {**each, "cached": said["cached"]}
                self.compare(self.table.answers[named][number], request, said_now, judged, cut)

    def _requests(self, priorities: bool) -> list[tuple[int, dict[str, Any]]]:
        chosen = []
        if self._happens(0.3):
            self._hot = self._random.randrange(ROOTS) * (1 + CHILDREN)
        urgency = self._happens(0.5)
        for each in range(self._random.randrange(1, 10)):
            number = self._hot + self._random.randrange(1 + CHILDREN)
            if self._happens(0.4):
                number = self._random.randrange(len(self.table.prompts))
            request: dict[str, Any] = {
                "ids": self.table.prompts[number],
                "tokens": self._random.choice([1, 5, 20, TOKENS]),
                "salt": self._random.choice([None] * 5 + ["salt"]),
                "arrives": self._random.choice([0, 0, each, 3 * each]),
                "adapter": self._random.choice([None, *self._adapters.values()]),
            }
            if priorities:
                request["priority"] = -each if urgency else self._random.randrange(4)
            if self._happens(0.1):
                request["abort_after"] = self._random.choice([0, 1, 3, 10])
            elif self._happens(0.1):
                request["answers"] = 2
            chosen.append((number, request))
        return chosen

    def _acts(self, updates: bool) -> list[dict[str, Any]]:
        step = self._random.choice([0, 2, 20, 10**6])
        if self._with_losses and self._happens(0.15):
            return [{"step": self._random.choice([0, 1, 2, 5, 20]), "lose": self._random.choice(["got", "not got"])}]
        if self._with_sleep and self._happens(0.15):
            return [{"step": 10**6, "sleep": 1}]
        running = {"reset_running_requests": True}
        if updates and self._happens(0.1):
            model = models.save(self._random.choice(self.table.kind.weights), self.directory)
            return [
                {"step": step, "model": model, "reset": {**running, "reset_connector": True}},
                {"step": 10**6, "reset": {**running, "reset_connector": True}},
            ]
        if self._happens(0.1):
            return [{"step": step, "reset": {**running, "reset_connector": self._happens(0.3)}}]
        return [{"step": 10**6, "reset": {}}] if self._happens(0.5) else []

    def compare(
        self, right: Expected, request: dict[str, Any], said: dict[str, Any], judged: bool, cut: bool = False
    ) -> None:
        """
        Args:
            judged: whether this answer can be wrong.
            cut: whether it may end early.
        """
        if cut:
            self.counts["aborted"] += 1
        if not judged:
            self.counts["not judged"] += 1
            return
        if not cut:
            assert len(said["tokens"]) == request["tokens"], self._failure("tokens are missing", right, request, said)
        count = min(len(said["tokens"]), len(right.tokens))
        assert said["tokens"][:count] == right.tokens[:count], self._failure("wrong tokens", right, request, said)
        off = max((abs(a - b) for a, b in zip(said["chosen"][:count], right.chosen, strict=False)), default=0.0)
        self.counts["largest error in millionths"] = max(self.counts["largest error in millionths"], int(off * 1e6))
        assert off < self.table.kind.tolerance, self._failure(
            f"log probabilities are off by {off}", right, request, said
        )
        self.counts["answers"] += 1
        self.counts["answers with an adapter"] += bool(request.get("adapter"))
        self.counts["tokens from a cache"] += said["cached"]

    def _failure(self, what: str, right: Expected, request: dict[str, Any], said: dict[str, Any]) -> str:
        asked = {**request, "ids": f"{len(right.ids)} tokens"}
        lines = [
            f"after {self.counts['answers']} answers: {what}",
            f"asked {asked}",
            f"right {right.tokens} {right.chosen}",
            f"said {said}",
            *self.history[-12:],
            f"python -m tests.vllm.oracle --seed {self.seed} --answers {EPISODE} --model {self.table.name}",
        ]
        return "\n".join(lines)


def beside_failing(sidecar: dict[str, Any]) -> dict[str, Any]:
    """Under a MultiConnector, behind a connector that fails to load what it has promised."""
    failing = {"kv_connector": "FailingConnector", "kv_connector_module_path": "tests.vllm.failing"}
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [{**failing, "kv_role": "kv_both"}, sidecar]},
    }


def run(answers: int, seed: int, directory: Path, model: str = "full") -> Counter[str]:
    """As many episodes as it takes. Raises AssertionError if an answer is wrong."""
    table, total = expected(model, directory), Counter[str]()
    while (left := answers - total["answers"]) > 0:
        episode = Episode(table, directory, seed)
        episode.run(min(EPISODE, left))
        print(f"seed {seed}: {dict(episode.counts)}", flush=True)
        total.update(episode.counts)
        seed += 1
    return total


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=1000, help="how many are compared")
    parser.add_argument("--seed", type=int, default=0, help="of the first episode; the next one has the next number")
    parser.add_argument("--model", choices=KINDS, default="full", help="kind of model")
    parser.add_argument("--directory", type=Path, help="keep the models, what is expected and the logs here")
    options = parser.parse_args(arguments)
    directory = options.directory or Path(tempfile.mkdtemp(prefix="oracle-"))
    directory.mkdir(exist_ok=True, parents=True)
    try:
        run(options.answers, options.seed, directory, options.model)
    except AssertionError as error:
        sys.exit(f"{error}\nlogs: {directory}")


if __name__ == "__main__":
    main()
