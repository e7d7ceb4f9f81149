"""One vLLM engine, in this process (`Engine`) or in one of its own that a test can kill (`EngineProcess`)."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, ClassVar, Self
from unittest import mock

import pytest

from kvsidecar.support import child_process
from tests.harness import DEVICE, SECONDS, DaemonProcess, environment, eventually

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",  # two threads spin for each other on a busy machine: seconds instead of a tenth
    "TORCHDYNAMO_DISABLE": "1",  # else a helper is compiled at the first forward: up to half a minute
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "PYTHONHASHSEED": "0",  # old versions begin their hashes with a random seed otherwise, and engines share nothing
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "NCCL_SOCKET_IFNAME": "lo",
}
"""What an engine needs offline, on two cores. It must be set before torch is imported."""

START = 900.0
"""Seconds within which an engine process has started, or answered: ranks that share two cores with other work spin for
each other, and a step may take seconds."""

LOG_CHARACTERS = 4000
"""Of the end of an engine's log, in the text of a failure."""

MODULE = "kvsidecar.integrations.vllm"


@dataclass(frozen=True)
class Prompt:
    """Token ids, and a salt that keeps its KV cache apart from other requests'."""

    ids: tuple[int, ...]
    salt: str | None = None

    def __add__(self, other: Sequence[int]) -> Prompt:
        return Prompt((*self.ids, *other), self.salt)


@dataclass(frozen=True)
class Answer:
    """What the engine said to one prompt."""

    tokens: tuple[int, ...]
    cached: int
    """Tokens of the prompt that were not computed, from the engine's own cache or the daemon's."""
    finish: str | None


@dataclass(frozen=True)
class Adapter:
    """What a request with an adapter names."""

    path: str
    name: str = "tuned"
    number: int = 1
    """vLLM's id."""
    inplace: bool = False
    """Whether vLLM reads it again where it has one of this id."""


def prompt(name: object, length: int, salt: str | None = None) -> Prompt:
    """Random token ids, the same for the same name."""
    numbers = random.Random(repr(name))
    return Prompt(tuple(numbers.randrange(2, 1000) for _ in range(length)), salt)


LONG = prompt("long", 700)
WHOLE = 672
"""Tokens in the full blocks of `LONG`."""


def kvsidecar(socket: str, policy: str = "recompute", **extra: Any) -> dict[str, Any]:
    """The engine's KV transfer configuration with this project's connector."""
    # A busy test machine must not turn a lookup into a miss; tests of the budget give their own.
    # Blocks are stored in every step, so that these short answers show the stores of requests that run.
    defaults = {"socket": socket, "lookup_budget": SECONDS, "store_interval": 1e-6}
    return {
        "kv_connector": "KVSidecarConnector",
        "kv_connector_module_path": MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {**defaults, **extra},
    }


def needs_gpus(count: int) -> None:
    """Skip the test where its ranks would be on GPUs, and there are fewer."""
    if DEVICE == "cuda":
        import torch

        if torch.cuda.device_count() < count:
            pytest.skip(f"fewer than {count} GPUs")


def defaults() -> dict[str, Any]:
    """Options of an engine that is small, and deterministic."""
    chosen: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 1024,
        "max_num_seqs": 16,
        "block_size": 32,
        "kv_cache_memory_bytes": 16 << 20,
        "seed": 0,
    }
    if DEVICE == "cuda":  # the attention that takes float32, so that tokens do not depend on what is batched
        chosen |= {"attention_backend": "TRITON_ATTN", "gpu_memory_utilization": 0.5}
    return chosen


def _kept_frozen() -> Any:
    """vLLM collects garbage eight times for each engine, and thaws what is frozen when one ends: each time all that was
    ever imported is gone through, which takes longer than the rest of the engine's start."""
    return mock.patch.multiple(gc, freeze=lambda: None, unfreeze=lambda: None)


class Engine:
    """In this process: only one at a time, since the workers' side of a connector is one per process.

    Args:
        model: path of the model.
        transfer: the KV transfer configuration; None for no connector.
        options: of ``vllm.LLM``.
    """

    def __init__(self, model: str, transfer: dict[str, Any] | None = None, **options: Any) -> None:
        from vllm import LLM

        gc.freeze()
        chosen = {**defaults(), **options}
        if isinstance(events := chosen.get("kv_events_config"), dict):
            from vllm.config import KVEventsConfig

            chosen["kv_events_config"] = KVEventsConfig(**events)
        with _kept_frozen():
            self.llm = LLM(model=model, kv_transfer_config=transfer, disable_log_stats=False, **chosen)
        self.engine = self.llm.llm_engine
        self._names = iter(range(1 << 30))

    # -- in this process only

    @property
    def scheduler(self) -> Any:
        return self.engine.engine_core.engine_core.scheduler

    @property
    def connector(self) -> Any:
        """The scheduler's side."""
        return self.scheduler.connector

    @property
    def runner(self) -> Any:
        """The worker's model runner; it has the KV cache of each layer in ``kv_caches``."""
        return self.engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner

    @property
    def free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def add(self, prompt: Prompt, tokens: int = 8, adapter: Adapter | None = None, priority: int = 0) -> str:
        """Add a request without running it. Returns its name, behind which vLLM has put a suffix."""
        name, what = f"r{next(self._names)}", {"lora_request": lora_of(adapter), "priority": priority}
        return str(self.engine.add_request(name, input_of(prompt), sampling(tokens), **what))

    def step(self) -> list[Any]:
        return list(self.engine.step())

    def step_until(self, condition: Callable[[], object], what: str | Callable[[], object]) -> None:
        eventually(lambda: condition() or (self.step() and False), what, pause=0.0)

    def run(self) -> dict[str, Answer]:
        """Step until every added request has ended."""
        answers: dict[str, Answer] = {}

        def all_ended() -> bool:
            if not self.engine.has_unfinished_requests():
                return True
            answers.update((output.request_id, answer_of(output)) for output in self.step() if output.finished)
            return False

        eventually(all_ended, "every request has ended", pause=0.0)
        return answers

    # -- the same in both

    def play(self, requests: Sequence[dict[str, Any]], acts: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        """Run requests that arrive while others run, and change something meanwhile.

        Args:
            requests: each with ``ids``, ``tokens``, ``arrives`` (the step) and, if wanted, ``salt``, ``priority``,
                ``adapter`` (fields of an `Adapter`), ``answers`` and ``abort_after`` (steps).
            acts: each with ``step``, when it is done, at the latest after all requests, and one of ``reset`` (the
                arguments of vLLM's reset), ``model`` (weights to load in place, before that reset), ``lose`` (a step,
                of which the worker has ``got`` or ``not got`` the plan) and ``sleep`` (its level).

        Returns:
            ``answers``: of each request a list, with ``tokens``, ``chosen`` (their log probabilities), ``margins`` (by
            which each is ahead of the next best), ``cached`` and ``finish``; ``acted``: of each act, whether the
            engine's own cache is empty of other weights now, or a step was lost.
        """
        names: dict[str, int] = {}
        outputs: dict[int, dict[str, Any]] = {}
        acted: list[bool] = []
        waiting = sorted(range(len(requests)), key=lambda each: int(requests[each]["arrives"]))
        aborts: list[tuple[int, str]] = []
        left = sorted(acts, key=lambda each: int(each["step"]))
        deadline, step = time.monotonic() + START, 0
        while waiting or self.engine.has_unfinished_requests() or left:
            assert time.monotonic() < deadline, f"requests have not ended: {self.scheduler.get_request_counts()}"
            idle = not (waiting or self.engine.has_unfinished_requests())
            while waiting and requests[waiting[0]]["arrives"] <= step:
                number = waiting.pop(0)
                names[name := self._add_played(requests[number])] = number
                if (after := requests[number].get("abort_after")) is not None:
                    aborts.append((step + after, name))
            for due in [each for each in aborts if each[0] <= step]:
                aborts.remove(due)
                self.engine.abort_request([due[1]])
            while left and (idle or left[0]["step"] <= step):
                acted.append(self._act(left.pop(0)))
            for output in self.engine.step() if self.engine.has_unfinished_requests() else ():
                outputs[names[output.request_id]] = {
                    "answers": [_said(each) for each in output.outputs],
                    "cached": output.num_cached_tokens or 0,
                }
            step += 1
        self.drain()
        return {"answers": [outputs.get(number) for number in range(len(requests))], "acted": acted}

    def _add_played(self, request: dict[str, Any]) -> str:
        from vllm import SamplingParams

        answers = request.get("answers", 1)
        # vLLM gives several answers only where it samples. Of one candidate, that is the same.
        how = {"temperature": 0.0} if answers == 1 else {"n": answers, "temperature": 1.0, "top_k": 1}
        chosen = SamplingParams(max_tokens=request["tokens"], ignore_eos=True, detokenize=False, logprobs=2, **how)
        name, what = f"p{next(self._names)}", Prompt(tuple(request["ids"]), request.get("salt"))
        others = {"priority": request.get("priority", 0), "lora_request": lora_of(request.get("adapter"))}
        self.engine.add_request(name, input_of(what), chosen, **others)
        return name

    def _act(self, act: dict[str, Any]) -> bool:
        if (got := act.get("lose")) is not None:
            return self.lose_step(got == "got")
        if (level := act.get("sleep")) is not None:
            return self._nap(level)
        if (model := act.get("model")) is not None:
            self.update(model)
        try:
            return bool(self.scheduler.reset_prefix_cache(**act["reset"]))
        except RuntimeError:
            return False

    def _nap(self, level: int) -> bool:
        """Sleep and wake. Returns whether vLLM did: it refuses while a load writes to what an aborted request had."""
        import torch

        # vLLM compares the free memory of the whole GPU, on which other engines start.
        with mock.patch.object(torch.accelerator, "get_memory_info", return_value=(0, 0)):
            try:
                self.sleep(level)
                slept = True
            except RuntimeError:
                slept = False
        self.wake()
        return slept

    def lose_step(self, got: bool) -> bool:
        """Let the next step fail in a rank, and go on as vLLM's fault tolerance does: all requests are aborted.

        Args:
            got: whether the rank computes the step before it fails.

        Returns:
            Whether there was a step to lose.
        """
        from vllm.v1.request import RequestStatus

        class _Lost(Exception):
            pass

        core = self.engine.engine_core.engine_core
        execute = core.model_executor.execute_model

        def fail(*args: Any, **named: Any) -> Any:
            if got:
                execute(*args, **named)
            raise _Lost

        lost = False
        with mock.patch.object(core.model_executor, "execute_model", fail):
            try:
                if self.engine.has_unfinished_requests():
                    self.engine.step()
            except _Lost:
                lost = True
        if lost:
            self.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
            self.runner.execute_model_state = None
            unfinished = list(self.engine.output_processor.request_states)
            self.engine.output_processor.abort_requests(unfinished, internal=True)
        return lost

    def generate(
        self, *prompts: Prompt, tokens: int = 8, adapter: Adapter | dict[str, Any] | None = None
    ) -> list[Answer]:
        """Run these prompts together."""
        inputs, lora = [input_of(each) for each in prompts], lora_of(adapter)
        return [
            answer_of(output)
            for output in self.llm.generate(inputs, sampling(tokens), use_tqdm=False, lora_request=lora)
        ]

    def load(self, adapter: Adapter | dict[str, Any]) -> bool:
        """As vLLM's server does before it takes requests with the adapter."""
        self.engine.add_lora(lora_of(adapter))
        return True

    def drain(self) -> None:
        """Step until the engine has nothing to do any more: all it stores is stored, all it holds given back."""
        if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0":
            self.step_until(lambda: not self.scheduler.has_requests(), lambda: f"an idle engine: {self._busy_with()}")

    def _busy_with(self) -> str:
        """Why vLLM steps on."""
        scheduler, found = self.scheduler, dict[str, Any]()
        found["requests"] = [(each.request_id, each.status.name) for each in scheduler.requests.values()]
        found["ended"] = sorted(scheduler.finished_req_ids)
        if (side := getattr(self.connector, "_scheduler", None)) is not None:
            stores, loads = side._stores, side._loads
            found["stores"] = [(each.begun, each.unreported, each.failed, each.retry) for each in stores.running]
            found["planned"], found["backlog"] = stores._num_planned, stores._backlog.count
            found["retry in"] = stores.backlog_waits(side._clock())
            found["loads"], found["planned loads"] = list(loads.running), len(loads.planned)
            found["unwritten"] = sorted(side._written.unwritten)
        return repr(found)

    def reset(self, connector: bool = False) -> bool:
        """Forget the engine's own cache (and the daemon's)."""
        return bool(self.llm.reset_prefix_cache(reset_connector=connector))

    def update(self, model: str) -> None:
        """Load the weights of another model of the same shape in place."""
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": model})

    def sleep(self, level: int) -> None:
        self.llm.sleep(level)

    def wake(self, *tags: str) -> None:
        """Wake up what has these tags; everything without one."""
        self.llm.wake_up(list(tags) or None)

    def counters(self) -> dict[str, float]:
        """vLLM's own metrics, by name, summed over labels; by name and position those that count by position."""
        found: dict[str, float] = {}
        for metric in self.llm.get_metrics():
            found.update((f"{metric.name}[{i}]", each) for i, each in enumerate(getattr(metric, "values", ())))
            value = getattr(metric, "value", getattr(metric, "sum", None))
            if value is not None:
                found[metric.name] = found.get(metric.name, 0.0) + value
        return found

    def begin(self, ids: Sequence[int], tokens: int) -> None:
        """Run a request, and return with its first token; it goes on where the engine's core has a process of its
        own."""
        self.add(Prompt(tuple(ids)), tokens)
        eventually(self.step, "a token", pause=0.0, seconds=START)

    def end(self) -> None:
        """As an operator does who lets the engine end what it has begun."""
        self.engine.engine_core.shutdown(timeout=START)

    def shutdown(self) -> None:
        with _kept_frozen():
            self.engine.engine_core.shutdown()
        del self.llm, self.engine
        gc.collect()


def join(engine: Engine | EngineProcess, daemon: DaemonProcess) -> Prompt:
    """Wait until the engine stores into this daemon. Returns the throw-away prompt that was stored in the end."""

    def stored() -> Prompt | None:
        before = blocks(daemon)
        thrown_away = prompt(time.monotonic_ns(), 33)
        engine.generate(thrown_away, tokens=1)
        engine.drain()
        return thrown_away if blocks(daemon) > before else None

    return eventually(stored, lambda: f"the engine does not use the daemon: {daemon.get('/status')[1]}")


def rejoin(engine: Engine | EngineProcess, daemon: DaemonProcess) -> None:
    """`join`, and wait until it also hits: the scheduler's client finds a new daemon on its own."""
    stored = join(engine, daemon)

    def hits() -> bool:
        if not engine.reset():  # refused while a store still reads a block
            return False
        (answer,) = engine.generate(stored, tokens=1)
        engine.drain()
        return bool(answer.cached)

    eventually(hits, lambda: f"the engine hits nothing: {daemon.get('/status')[1]}")


def blocks(daemon: DaemonProcess) -> int:
    """Blocks that can be looked up."""
    return int(daemon.get("/status")[1]["pool"]["blocks"])


def lora_of(adapter: Adapter | dict[str, Any] | None) -> Any:
    from vllm.lora.request import LoRARequest

    if adapter is None:
        return None
    if isinstance(adapter, dict):  # from another process
        adapter = Adapter(**adapter)
    return LoRARequest(adapter.name, adapter.number, adapter.path, load_inplace=adapter.inplace)


def input_of(prompt: Prompt) -> Any:
    from vllm.inputs import TokensPrompt

    salted = {"cache_salt": prompt.salt} if prompt.salt is not None else {}
    return TokensPrompt(prompt_token_ids=list(prompt.ids), **salted)


def sampling(tokens: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)


def answer_of(output: Any) -> Answer:
    (only,) = output.outputs
    return Answer(tuple(only.token_ids), output.num_cached_tokens or 0, only.finish_reason)


def _step_aside() -> None:
    """Let other sessions run before this one, of several processes. Ranks that spin for each other on two cores keep
    every other process of the machine waiting for up to 90 s (measured with a process that only sleeps), also the
    daemon, until its jobs' deadlines are over. The scheduler of Linux weighs sessions first, so nice(2) does not help.
    An engine of one process spins for nobody, and one that starts has nobody to spin for yet: on a busy machine it
    would get next to nothing."""
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text("10")


def _said(completion: Any) -> dict[str, Any]:
    """One answer, as `Engine.play` returns it."""
    chosen, margins = [], []
    for token, best in zip(completion.token_ids, completion.logprobs or (), strict=False):
        ranked = sorted((each.logprob for each in best.values()), reverse=True)
        chosen.append(best[token].logprob)
        margins.append(ranked[0] - ranked[1])
    return {
        "tokens": list(completion.token_ids),
        "chosen": chosen,
        "margins": margins,
        "finish": completion.finish_reason,
    }


class EngineProcess:
    """`Engine` in a process group of its own, with the same methods; a test may kill it at any instant.

    Args:
        variables: environment variables, such as ``VLLM_ENABLE_V1_MULTIPROCESSING``.
        stderr: a file for what it logs.
        others: as for `Engine`.
    """

    module = "tests.vllm.engine"
    environment: ClassVar[dict[str, str]] = ENVIRONMENT
    python: ClassVar[str] = sys.executable

    def __init__(
        self,
        model: str,
        transfer: dict[str, Any] | None = None,
        variables: dict[str, str] | None = None,
        stderr: Any = None,
        **options: Any,
    ) -> None:
        command = [self.python, "-m", self.module, json.dumps([model, transfer, options])]
        self.process = child_process.start(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=environment(**{**self.environment, **(variables or {})}),
            start_new_session=True,
        )
        self._stderr = stderr
        self._replies: SimpleQueue[str | None] = SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._started = False

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(_REPLY):  # engines print, too
                self._replies.put(line.removeprefix(_REPLY))
        self._replies.put(None)

    def _reply(self, timeout: float) -> Any:
        """The next reply.

        Raises:
            AssertionError: the process has ended, or says nothing for ``timeout`` seconds. The text says which, with
                the exit code and the end of the log.
        """
        deadline = time.monotonic() + timeout
        while True:
            try:
                # A process that the engine has started may keep stdout open beyond its end.
                ended = self.process.poll() is not None
                reply = self._replies.get(timeout=0.0 if time.monotonic() > deadline else 1.0)
            except Empty:
                assert not ended, self._fate()
                assert time.monotonic() < deadline, f"the engine has not answered within {timeout} s: {self._log_end()}"
                continue
            assert reply is not None, self._fate()
            return json.loads(reply)

    def _fate(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(SECONDS)
        return f"the engine process has ended with exit code {self.process.poll()}: {self._log_end()}"

    def _log_end(self) -> str:
        return self.text()[-LOG_CHARACTERS:] or "its log is not in a file"

    def text(self) -> str:
        """What it has logged, if that goes to a file of a known name."""
        name = getattr(self._stderr, "name", None)
        return Path(name).read_text(errors="replace") if isinstance(name, str) else ""

    def wait_started(self) -> EngineProcess:
        """Constructing does not wait, so that several start at the same time."""
        if not self._started:
            assert self._reply(START) == "started"
            self._started = True
        return self

    def _call(self, method: str, *arguments: Any, timeout: float = START, **options: Any) -> Any:
        self._send(method, arguments, options)
        return self._reply(timeout)

    def _send(self, method: str, arguments: Sequence[Any], options: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps([method, arguments, options]) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise AssertionError(self._fate()) from None

    def generate(self, *prompts: Prompt, tokens: int = 8, **options: Any) -> list[Answer]:
        self.send_generate(*prompts, tokens=tokens, **options)
        return self.answers()

    def answers(self) -> list[Answer]:
        """To what was sent."""
        return [Answer(tuple(each["tokens"]), each["cached"], each["finish"]) for each in self._reply(START)]

    def send_generate(self, *prompts: Prompt, **options: Any) -> None:
        """Ask and do not wait, because something will be killed while it runs."""
        if isinstance(options.get("adapter"), Adapter):
            options["adapter"] = asdict(options["adapter"])
        self._send("generate", [asdict(each) for each in prompts], options)

    def send_play(self, requests: Sequence[dict[str, Any]], acts: Sequence[dict[str, Any]] = ()) -> None:
        self._send("play", (requests, acts), {})

    def played(self) -> dict[str, Any]:
        """What `Engine.play` returns for what was sent."""
        return dict(self._reply(START))

    def load(self, adapter: Adapter) -> None:
        self._call("load", asdict(adapter))

    def drain(self) -> None:
        self._call("drain")

    def reset(self, connector: bool = False) -> bool:
        return bool(self._call("reset", connector=connector))

    def update(self, model: str) -> None:
        self._call("update", model)

    def sleep(self, level: int) -> None:
        self._call("sleep", level)

    def wake(self, *tags: str) -> None:
        self._call("wake", *tags)

    def counters(self) -> dict[str, float]:
        return dict(self._call("counters"))

    def begin(self, prompt: Prompt, tokens: int) -> None:
        self._call("begin", prompt.ids, tokens)

    def end(self) -> None:
        self._call("end")

    def kill(self) -> None:
        """SIGKILL to the engine and to all processes it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self._reader.join(SECONDS)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):  # what was written and never read
                stream.close()


_REPLY = "tests.vllm.engine: "


@contextlib.contextmanager
def running(model: str, transfer: dict[str, Any] | None = None, **options: Any) -> Iterator[Engine]:
    """An `Engine` that is shut down, also when the test fails."""
    engine = Engine(model, transfer, **options)
    try:
        yield engine
    finally:
        engine.shutdown()


@contextlib.contextmanager
def joined(
    daemon: DaemonProcess, model: str, transfer: dict[str, Any] | None = None, **options: Any
) -> Iterator[Engine]:
    """An engine that is `running`, and stores into this daemon."""
    with running(model, transfer or kvsidecar(daemon.socket), **options) as engine:
        join(engine, daemon)
        yield engine


def forget(engine: Engine | EngineProcess) -> None:
    """Let it store all that it has, and forget its own cache: the next request must load."""
    engine.drain()
    assert engine.reset()


def ask_again(engine: Engine) -> None:
    """Store the long prompt and forget it."""
    engine.generate(LONG)
    forget(engine)


def hits(engine: Engine, truth: Callable[..., list[tuple[int, ...]]], what: Prompt = LONG, cached: int = WHOLE) -> None:
    """So many tokens of a prompt come from a cache, and what follows them is right."""
    (answer,) = engine.generate(what)
    assert (answer.cached, [answer.tokens]) == (cached, truth(what))


def serve(new: Callable[..., Any]) -> None:
    """Commands to what ``new`` makes on stdin, one JSON line each; replies on stdout."""

    def reply(value: Any) -> None:
        # In one write: vLLM's threads log to stdout, too, and print() would let them in before the end of the line.
        sys.stdout.write(_REPLY + json.dumps(value) + "\n")
        sys.stdout.flush()

    model, transfer, options = json.loads(sys.argv[1])
    engine = new(model, transfer, **options)
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "1" or options.get("tensor_parallel_size", 1) > 1:
        _step_aside()
    reply("started")
    for line in sys.stdin:
        method, arguments, options = json.loads(line)
        if method == "generate":
            prompts = [Prompt(tuple(each["ids"]), each["salt"]) for each in arguments]
            reply([asdict(answer) for answer in engine.generate(*prompts, **options)])
        else:
            reply(getattr(engine, method)(*arguments, **options))


if __name__ == "__main__":
    serve(Engine)
