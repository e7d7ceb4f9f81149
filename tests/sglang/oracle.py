"""Many answers of engines with a daemon, under faults at random, each compared with that of an engine without a cache.

python -m tests.sglang.oracle --answers 5000 --seed 7

Two engines of one model share a daemon that is killed, stopped and started again, and whose copies fail. Their own
caches are so small that pages are evicted and requests retracted. Prompts share prefixes; requests are aborted, caches
flushed, in the middle of requests too, and the weights of one engine updated in place. The other engine would hit what
the first one has stored under a wrong key, and both hit what they have stored themselves.

An episode is one seed: kind of engine, rounds of requests, and faults. The seed is printed, and repeats the episode,
except for the instants at which processes of a machine reach what they do.
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
from tests.sglang.engine import SGLangProcess, linker
from tests.vllm import models
from tests.vllm.engine import prompt

EPISODE = 100
"""Answers of one seed at most."""
ROOTS, CHILDREN = 10, 6
CALM_ROUNDS = 5
TOKENS = 40
"""Of an answer at most."""
LEAST_MARGIN = 0.01 if DEVICE == "host" else 0.2
"""An answer is compared up to the first token that is ahead of the next best by less: what else is in a batch changes
the last digits of float32, and more of them on a GPU, which multiplies with fewer."""
TOLERANCE = 0.002 if DEVICE == "host" else 0.05
"""Of a token's log probability. KV that is wrong in one place may not change the token."""


@dataclass(frozen=True)
class Kind:
    """Of model."""

    weights: tuple[str, ...]
    """Those of the engines, and others of the same shape that one of them may get."""
    pool: str
    """Of the daemon: some of the pages of all prompts."""


KINDS = {"full": Kind(("full", "other"), "6MiB"), "wide": Kind(("wide",), "64MiB")}
"""The latter keeps a GPU behind its engine for a while."""


@dataclass(frozen=True)
class Expected:
    """What an engine without a cache says to a prompt."""

    ids: tuple[int, ...]
    tokens: list[int]
    chosen: list[float]
    """Log probabilities of the tokens."""


@dataclass
class Table:
    """What is expected, by prompt and name of the weights: computed once."""

    prompts: list[tuple[int, ...]]
    answers: dict[str, list[Expected]]
    kind: Kind = KINDS["full"]


def _prompts() -> list[tuple[int, ...]]:
    """A forest: prefixes end within pages, at their ends, and one token off."""
    numbers = random.Random("prompts of the oracle")
    found = []
    for root in range(ROOTS):
        whole = prompt(("root", root), numbers.choice([70, 130, 256, 400])).ids
        found.append(whole)
        for child in range(CHILDREN):
            cut = numbers.randrange(16, len(whole))
            cut = min(len(whole), cut // 16 * 16 + numbers.choice([-1, 0, 1, cut % 16]))
            found.append(whole[:cut] + prompt(("child", root, child), numbers.choice([1, 15, 17, 90, 200])).ids)
    return found


def expected(name: str, directory: Path) -> Table:
    """The table for this kind of model; from the directory, if an earlier run has left it there."""
    table, kept = Table(_prompts(), {}, KINDS[name]), directory / f"expected-{name}.json"
    if kept.exists():
        found = json.loads(kept.read_text())
        table.answers = {name: [Expected(**each) for each in answers] for name, answers in found.items()}
        return table
    paths = [models.save(weights, directory) for weights in table.kind.weights]
    log = directory / f"expected-{name}.log"
    with SGLangProcess(paths[0], None, log, disable_radix_cache=True).wait_started() as engine:
        assert isinstance(engine, SGLangProcess)
        for weights, path in zip(table.kind.weights, paths, strict=True):
            if path != paths[0]:
                engine.update(path)
            engine.send_play([{"ids": ids, "tokens": TOKENS} for ids in table.prompts])
            answers = table.answers[weights] = []
            for ids, (said,) in zip(table.prompts, engine.played()["answers"], strict=True):
                assert said["finish"] == "length", said
                sure = next((at for at, margin in enumerate(said["margins"]) if margin < LEAST_MARGIN), TOKENS)
                answers.append(Expected(ids, said["tokens"][:sure], said["chosen"][:sure]))
    kept.write_text(json.dumps({name: [asdict(each) for each in found] for name, found in table.answers.items()}))
    return table


@dataclass
class _Engine:
    process: SGLangProcess
    weights: str
    mixed: bool = False
    """Whether its own cache may have KV of other weights, as SGLang lets it."""


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
        self._hot = 0
        """The first of the prompts that most requests are for, which share a prefix."""
        self._may_fail = False
        """Whether a load of the running round may fail, and cost an answer."""
        self._versions = 0
        self._calm = 0
        """In so many rounds to come the same prompts are asked, and flushed, because a cache was flushed that had KV of
        several weights: the third of equal prompts would hit what was stored of it."""

    def _happens(self, probability: float) -> bool:
        return self._random.random() < probability

    def options(self) -> dict[str, Any]:
        """Of both engines."""
        chosen: dict[str, Any] = {
            "page_size": self._random.choice([1, 8, 16, 16, 32]),
            "max_total_tokens": self._random.choice([960, 1280, 2048]),
            "chunked_prefill_size": self._random.choice([64, 128, 256]),
            "disable_overlap_schedule": self._happens(0.4),
            "schedule_policy": self._random.choice(["fcfs", "lpm"]),
            "schedule_conservativeness": 0.05,  # so that requests are retracted
            "sleep_on_idle": self._happens(0.8),  # else it takes a core from the other engine
        }
        if self._happens(0.4):
            chosen |= {
                "schedule_policy": "fcfs",
                "enable_priority_scheduling": True,
                "priority_scheduling_preemption_threshold": 0,
            }
        if self._happens(0.3):
            chosen["enable_mixed_chunk"] = True
        return chosen

    def run(self, answers: int) -> None:
        """Raises AssertionError if one is wrong."""
        options, kind = self.options(), self.table.kind
        with_updates = self._happens(0.4) and len(kind.weights) > 1
        print(f"seed {self.seed}: {options}{', updates' if with_updates else ''}", flush=True)
        home = Path(tempfile.mkdtemp(prefix="kvs-"))
        with ExitStack() as stack:
            stack.callback(shutil.rmtree, home)
            stack.callback(self._end_daemon)
            model = models.save(kind.weights[0], self.directory)
            transfer = linker(str(home / "kvs.sock"))
            processes = [
                stack.enter_context(
                    SGLangProcess(model, transfer, self.directory / f"{self.seed}-{name}.log", **options)
                )
                for name in "ab"
            ]
            engines = [_Engine(process, kind.weights[0]) for process in processes]
            self._start_daemon(home)
            for each in processes:
                each.wait_started()
            daemon = self._daemon
            assert daemon is not None
            eventually(lambda: len(daemon.get("/status")[1]["ranks"]) >= 2, "both engines attach")
            while self.counts["answers"] < answers:
                self._change(home)
                engine = engines[self._happens(0.3)]
                priorities = "enable_priority_scheduling" in options
                self._round(engine, priorities, with_updates and engine is engines[0])
            for name, total in zip("ab", [each.process.counters() for each in engines], strict=True):
                self.counts[f"hits of {name}"] = int(total["loads"])

    def _note(self, what: str) -> None:
        self.counts[what.split(":", maxsplit=1)[0]] += 1
        self.history.append(what)

    # -- the daemon

    def _start_daemon(self, home: Path) -> None:
        number, rules = self._random.randrange(3, 60), []
        if fails := self._happens(0.3):
            failures = ["in_flight@{}=kill", "before_copy@{}=raise(planned)"]
            rules.append(self._random.choice(["load.", "store."]) + self._random.choice(failures).format(number))
        if self._happens(0.5):
            # Pages stand in copies while their requests end, caches are flushed and weights change.
            rules.append(f"copy.device_lost=delay({self._random.choice([0.02, 0.2])})")
        self._note(f"daemon started: {rules}")
        variables = {"KVSIDECAR_FAILPOINTS": ";".join(rules)} if rules else {}
        self._daemon = DaemonProcess(
            home, "--pool-size", self.table.kind.pool, "--slab-size", "256KiB", **variables
        ).wait_ready()
        self._failing = fails

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

    def _round(self, engine: _Engine, priorities: bool, updates: bool) -> None:
        chosen = self._requests(priorities)
        acts = self._acts(updates, engine.mixed)
        weights, judged = engine.weights, not engine.mixed
        engine.process.send_play([request for _, request in chosen], acts)
        self._may_fail = self._failing
        if self._daemon is not None and self._happens(0.03):
            self._end_daemon()
            self._note("daemon killed in a round")
            self._may_fail = True
        played = engine.process.played()
        for act, forgot in zip(acts, played["acted"], strict=True):
            self._note(f"act: {act} {forgot}")
            if "model" in act:
                judged = False  # tokens of both
                engine.weights, engine.mixed = Path(act["model"]).name, True
                self.counts["updates"] += 1
            if forgot:
                self._calm = CALM_ROUNDS if engine.mixed else self._calm
                engine.mixed = False
                self.counts["flushes"] += 1
        for (number, request), said in zip(chosen, played["answers"], strict=True):
            for each in said:
                self.compare(self.table.answers[weights][number], request, each, judged)

    def _requests(self, priorities: bool) -> list[tuple[int, dict[str, Any]]]:
        chosen = []
        if self._happens(0.3) and not self._calm:
            self._hot = self._random.randrange(ROOTS) * (1 + CHILDREN)
        for _ in range(self._random.randrange(1, 9)):
            number = self._hot + self._random.randrange(1 + CHILDREN)
            if self._happens(0.3) and not self._calm:
                number = self._random.randrange(len(self.table.prompts))
            request: dict[str, Any] = {
                "ids": self.table.prompts[number],
                "tokens": self._random.choice([1, 5, 20, TOKENS]),
                "salt": self._random.choice([None] * 5 + ["salt"]),
            }
            if priorities:
                request["priority"] = self._random.randrange(4)
            if self._happens(0.15):
                request["abort_after"] = self._random.choice([0, 0, 1, 3, 10])
            elif self._happens(0.1):
                request["answers"] = 2
            chosen.append((number, request))
        return chosen

    def _acts(self, updates: bool, mixed: bool) -> list[dict[str, Any]]:
        after = self._random.choice([0, 2, 20, 10**6])
        if self._calm:
            self._calm -= 1
            return [{"after": 10**6, "flush": True}]
        if updates and self._happens(0.12):
            self._versions += 1
            act = {
                "pause": self._random.choice([None, "retract", "in_place", "in_place"]),
                "flush": self._happens(0.7),
                "model": models.save(self._random.choice(self.table.kind.weights), self.directory),
                "version": self._random.choice([None, f"{self.seed} {self._versions}"]),
            }
            # Without a flush, further prompts begin with KV of the weights before.
            return [{"after": after, **act}, {"after": 10**6, "flush": self._happens(0.3)}]
        if self._happens(0.1):
            return [{"after": after, "pause": "retract", "flush": True}]
        return [{"after": 10**6, "flush": True}] if self._happens(0.3 if mixed else 0.6) else []

    def compare(self, right: Expected, request: dict[str, Any], said: dict[str, Any], judged: bool) -> None:
        self.counts["retractions"] += said["retractions"]
        if said["status"] != 200:
            expected_status = 503 if self._may_fail else 200
            assert said["status"] == expected_status, self._failure("a request has failed", right, request, said)
            self.counts["failed loads"] += 1
            return
        aborted = said["finish"] == "abort"
        if aborted:
            self.counts["aborted"] += 1
        if not judged:
            self.counts["not judged"] += 1
            return
        if not aborted:
            assert len(said["tokens"]) == request["tokens"], self._failure("tokens are missing", right, request, said)
        count = min(len(said["tokens"]), len(right.tokens))
        assert said["tokens"][:count] == right.tokens[:count], self._failure("wrong tokens", right, request, said)
        off = max((abs(a - b) for a, b in zip(said["chosen"][:count], right.chosen, strict=False)), default=0.0)
        self.counts["largest error in millionths"] = max(self.counts["largest error in millionths"], int(off * 1e6))
        assert off < TOLERANCE, self._failure(f"log probabilities are off by {off}", right, request, said)
        self.counts["answers"] += 1
        self.counts["tokens from the daemon"] += said["host"]
        self.counts["tokens from a cache"] += said["cached"]

    def _failure(self, what: str, right: Expected, request: dict[str, Any], said: dict[str, Any]) -> str:
        asked = {**request, "ids": f"{len(right.ids)} tokens"}
        lines = [
            f"after {self.counts['answers']} answers: {what}",
            f"asked {asked}",
            f"right {right.tokens} {right.chosen}",
            f"said {said}",
            *self.history[-12:],
            f"python -m tests.sglang.oracle --seed {self.seed} --answers {EPISODE}",
        ]
        return "\n".join(lines)


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
