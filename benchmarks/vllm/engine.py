"""One vLLM engine in a process of its own, mostly with random weights; the parent asks by JSON lines (`serve`, below).

The engine core runs in this same process, so that a request's time holds no hop between processes of vLLM's own.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.bundles.check_vllm import LLAMA, OFFLINE
from benchmarks.vllm import cutedsl, peers
from benchmarks.vllm.conversations import Conversations
from benchmarks.vllm.hooks import Hooks
from benchmarks.vllm.sessions import Sessions
from kvsidecar.bench.processes import serve
from kvsidecar.integrations.vllm.counters import COUNTED

ENVIRONMENT = {
    **OFFLINE,
    "PYTHONHASHSEED": "0",  # old versions begin their hashes with a random seed otherwise, and engines share nothing
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_PLUGINS": "",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # the engine's process has asked torch for its GPU
}
CPU_ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}

LLAMA_8B: dict[str, Any] = {
    **LLAMA,
    "num_hidden_layers": 32,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.02,
}
TINY = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 512,
    "vocab_size": 1024,
}

ADDITIONS = 2000
DRAIN_SECONDS = 0.1
FILL_TOKENS = 64
IDLE_SECONDS = 10.0


def model_config(tiny: bool) -> dict[str, Any]:
    return {**LLAMA_8B, **(TINY if tiny else {})}


def kv_bytes_per_token(tiny: bool) -> int:
    model = model_config(tiny)
    return int(2 * model["num_hidden_layers"] * model["num_key_value_heads"] * model["head_dim"] * 2)


def transfer_config(mode: str, pool_bytes: int, socket: str | None, extra: dict[str, Any]) -> dict[str, Any] | None:
    """The KV transfer configuration of a mode, one of `benchmarks.vllm.runs.WORKLOADS`."""
    if mode in ("none", "resident"):
        return None
    if mode in peers.PEERS:
        assert socket is not None
        return peers.transfer_config(mode, socket, extra)
    if mode == "empty":
        module = {"kv_connector": "EmptyConnector", "kv_connector_module_path": "benchmarks.vllm.empty"}
        return {**module, "kv_role": "kv_both"}
    own = {"simple": "SimpleCPUOffloadConnector", "offload": "OffloadingConnector"}
    if mode in own:
        options = {"cpu_bytes_to_use": pool_bytes, **extra}
        return {"kv_connector": own[mode], "kv_role": "kv_both", "kv_connector_extra_config": options}
    return {
        "kv_connector": "KVSidecarConnector",
        "kv_connector_module_path": "kvsidecar.integrations.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"socket": socket, **extra},
    }


class Engine:
    """Builds ``vllm.LLM``.

    Args:
        model: its folder. Engines share KV only if they call the model by the same name.
        transfer: as `transfer_config` gives it.
        options: of ``vllm.LLM``.
        time_hooks: add up the time in the connector's hooks, which costs some microseconds a step.
    """

    def __init__(
        self,
        model: str,
        transfer: dict[str, Any] | None,
        options: dict[str, Any],
        *,
        time_hooks: bool = True,
    ) -> None:
        os.environ.update(ENVIRONMENT)
        import torch

        self._cuda = torch.cuda.is_available()
        if not self._cuda:
            os.environ.update(CPU_ENVIRONMENT)
        began = time.perf_counter()
        if self._cuda:
            cutedsl.stand_in_if_missing()
        import vllm

        self._import_seconds = time.perf_counter() - began
        self._torch, self._vllm = torch, vllm
        self.register_ms = 0.0
        self._hooks = Hooks()
        self._histories: list[list[int]] = []
        self._time_hooks = time_hooks
        self._watch_connectors()
        defaults: dict[str, Any] = {
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": "bfloat16",
            "enable_prefix_caching": True,
            "generation_config": "vllm",
            "disable_log_stats": True,
            "seed": 0,
        }
        began = time.perf_counter()
        if transfer is not None:
            options = {**options, "kv_transfer_config": transfer}
        self.llm = vllm.LLM(model=model, **{**defaults, **options})
        self._build_seconds = time.perf_counter() - began
        config = json.loads((Path(model) / "config.json").read_text())
        self._vocabulary = min((config.get("text_config") or config)["vocab_size"], 128000)
        at_random = options.get("load_format", "dummy") == "dummy"
        if self._cuda and at_random and options.get("tensor_parallel_size", 1) == 1:  # else other processes have them
            self._spread_weights(config)

    def _watch_connectors(self) -> None:
        """Add up what the workers' side of the connector takes to register the KV cache, and both sides' hooks."""
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        create: Callable[..., Any] = KVConnectorFactory.create_connector.__func__  # type: ignore[attr-defined]

        def timed(call: Callable[..., Any]) -> Callable[..., Any]:
            def measure(*arguments: Any, **options: Any) -> Any:
                began = time.perf_counter()
                result = call(*arguments, **options)
                self._synchronize()
                self.register_ms += (time.perf_counter() - began) * 1e3
                return result

            return measure

        def create_timed(cls: Any, *arguments: Any, **options: Any) -> Any:
            connector = create(cls, *arguments, **options)
            if self._time_hooks:
                self._hooks.watch(connector)
            for name in ("register_kv_caches", "register_cross_layers_kv_cache"):
                if hasattr(connector, name):
                    setattr(connector, name, timed(getattr(connector, name)))
            return connector

        KVConnectorFactory.create_connector = classmethod(create_timed)  # type: ignore[method-assign, assignment]

    def _spread_weights(self, model: dict[str, Any]) -> None:
        """Dummy weights are noise of 1e-3, in which attention vanishes: give them a scale at which wrong KV changes
        the log-probabilities, with peaked attention."""
        runner = self._core.model_executor.driver_worker
        runner = getattr(runner, "worker", runner).model_runner
        loaded = runner.get_model() if hasattr(runner, "get_model") else runner.model
        generator = self._torch.Generator(device="cuda")
        generator.manual_seed(1)
        # Latent attention has no matrix of queries and keys alone.
        queries_and_keys = (model["num_attention_heads"] + model["num_key_value_heads"]) * model.get("head_dim", 0)
        with self._torch.no_grad():
            for name, weight in loaded.named_parameters():
                if weight.ndim < 2:
                    weight.fill_(1.0 if "norm" in name else 0.0)
                    continue
                weight.normal_(0.0, 1.0 if "embed" in name else weight.shape[-1] ** -0.5, generator=generator)
                if "qkv_proj" in name:
                    weight[:queries_and_keys].mul_(1.7)

    @property
    def _core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def scheduler_connector(self) -> Any:
        """The scheduler's side of the connector."""
        return self._core.scheduler.connector

    def end(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()

    def _synchronize(self) -> None:
        if self._cuda:
            self._torch.cuda.synchronize()

    def facts(self) -> dict[str, Any]:
        config = self.llm.llm_engine.vllm_config
        return {
            "vllm": self._vllm.__version__,
            "torch": self._torch.__version__,
            "device": self._torch.cuda.get_device_name(0) if self._cuda else "cpu",
            "register_ms": self.register_ms,
            "import_seconds": self._import_seconds,
            "build_seconds": self._build_seconds,
            "gpu_blocks": config.cache_config.num_gpu_blocks,
            "block_size": config.cache_config.block_size,
            "gpu_tokens": config.cache_config.num_gpu_blocks * config.cache_config.block_size,
            **peers.versions(),
            "async_scheduling": bool(getattr(config.scheduler_config, "async_scheduling", False)),
        }

    # -- one prompt at a time

    def phase(self, first: int, count: int, length: int) -> dict[str, Any]:
        """Run these prompts one after the other, one token each: its time is the time to the first token."""
        times, cached, tokens = [], [], []
        self._hooks.take()
        for name in range(first, first + count):
            elapsed, output = self._one(name, length, 1)
            times.append(elapsed * 1e3)
            cached.append(output.num_cached_tokens or 0)
            tokens.append(output.outputs[0].token_ids[0])
        return {"ms": times, "cached": cached, "tokens": tokens, **self._hooks.take()}

    def check(self, first: int, count: int, length: int) -> dict[str, Any]:
        """Tokens and the first token's log-probability of these prompts."""
        found: dict[str, list[Any]] = {"tokens": [], "logprob": [], "cached": []}
        for name in range(first, first + count):
            _, output = self._one(name, length, 8, logprobs=1)
            (answer,) = output.outputs
            found["tokens"].append(list(answer.token_ids))
            found["logprob"].append(answer.logprobs[0][answer.token_ids[0]].logprob)
            found["cached"].append(output.num_cached_tokens or 0)
        return found

    def _one(self, name: int, length: int, tokens: int, **sampling: Any) -> tuple[float, Any]:
        return self._answer(random_tokens(name, length, self._vocabulary), tokens, **sampling)

    def _answer(self, prompt: list[int], tokens: int, *, salt: str = "", **sampling: Any) -> tuple[float, Any]:
        """Seconds until the last token, and vLLM's output."""
        request = self._prompt(prompt, salt)
        parameters = self._sampling(tokens, **sampling)
        self._synchronize()
        began = time.perf_counter()
        (output,) = self.llm.generate([request], parameters, use_tqdm=False)
        return time.perf_counter() - began, output

    def drain(self, rounds: int = 3) -> dict[str, Any]:
        """Step the engine now and then, so that finished stores reach the scheduler."""
        for _ in range(rounds):
            time.sleep(DRAIN_SECONDS)
            self._one(time.monotonic_ns(), FILL_TOKENS, 4)
        deadline = time.monotonic() + IDLE_SECONDS
        while self._core.scheduler.has_requests() and time.monotonic() < deadline:
            self.llm.llm_engine.step()
        return {}

    def reset(self, connector: bool = False) -> dict[str, Any]:
        """Forget the GPU's prefix cache (and the connector's)."""
        for attempt in range(20):
            self.drain(3 if attempt == 0 else 1)
            if self.llm.reset_prefix_cache(reset_connector=connector):
                return {"reset": True}
        return {"reset": False}

    # -- many at once

    def converse(self, **options: Any) -> dict[str, Any]:
        """Run `Conversations` to their end."""
        talks = Conversations(**options, vocabulary=self._vocabulary)
        engine = self.llm.llm_engine
        clock = time.perf_counter
        parameters = self._sampling(talks.output_tokens)
        before_us = loop_microseconds()
        self._hooks.take()
        began = clock()
        while not talks.over:
            for name, tokens in talks.next_requests():
                talks.sent(name, clock())
                engine.add_request(name, self._prompt(tokens), parameters)
            for output in engine.step():
                (answer,) = output.outputs
                talks.answered(
                    output.request_id, list(answer.token_ids), clock(), output.finished, output.num_cached_tokens or 0
                )
        self._histories = talks.histories
        found = {"seconds": clock() - began, **talks.result(), **self._hooks.take(), "counters": self._counters()}
        return {**found, "loop_us": [before_us, loop_microseconds()]}

    def ask_again(self, computed: int = 0) -> dict[str, Any]:
        """What the last conversations would be asked next, one at a time; and the first so many ``computed``: under a
        salt of their own, which nothing hits."""
        found: dict[str, list[float]] = {"ttft_ms": [], "prompt_tokens": [], "cached_tokens": [], "tokens": []}
        for tokens in self._histories:
            elapsed, output = self._answer(tokens, 1)
            values = (elapsed * 1e3, len(tokens), output.num_cached_tokens or 0, output.outputs[0].token_ids[0])
            for name, value in zip(found, values, strict=True):
                found[name].append(value)
        salted = [self._answer(tokens, 1, salt="nobody's")[1] for tokens in self._histories[:computed]]
        return {**found, "computed": [output.outputs[0].token_ids[0] for output in salted]}

    def replay(self, **options: Any) -> dict[str, Any]:
        """Run `Sessions` to their end."""
        sessions = Sessions(**options, vocabulary=self._vocabulary)
        engine, began = self.llm.llm_engine, time.perf_counter()
        self._hooks.take()
        while not sessions.over(now := time.perf_counter() - began):
            for name, tokens, output_tokens in sessions.due(now):
                engine.add_request(name, self._prompt(tokens), self._sampling(output_tokens))
            if not self._core.scheduler.has_requests():
                time.sleep(max(0.0, (sessions.next_due() or 0.0) - now))
                continue
            outputs = engine.step()
            now = time.perf_counter() - began
            for output in outputs:
                (answer,) = output.outputs
                tokens_so_far, cached = len(answer.token_ids), output.num_cached_tokens or 0
                sessions.answered(output.request_id, tokens_so_far, now, output.finished, cached)
        return {**sessions.result(), **self._hooks.take(), "counters": self._counters()}

    def _counters(self) -> dict[str, int]:
        """Of this project's connector, since the engine's start; empty for another one."""
        side = getattr(getattr(self._core.scheduler, "connector", None), "_scheduler", None)
        counters = getattr(side, "counters", None)
        return {} if counters is None else {name: getattr(counters, name) for name in COUNTED}

    def _prompt(self, tokens: list[int], salt: str = "") -> Any:
        from vllm.inputs import TokensPrompt

        return TokensPrompt(prompt_token_ids=tokens, **({"cache_salt": salt} if salt else {}))

    def _sampling(self, tokens: int, **options: Any) -> Any:
        return self._vllm.SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, **options
        )


def add_up() -> int:
    """A loop of fixed length in Python, which takes as long as the core that runs it is slow."""
    total = 0
    for number in range(ADDITIONS):
        total += number
    return total


def loop_microseconds() -> float:
    """How fast a core is now: what `add_up` takes, the best of ten times."""
    return 1e6 * min(timeit.repeat(add_up, number=1, repeat=10))


def random_tokens(name: object, length: int, vocabulary: int) -> list[int]:
    numbers = random.Random(repr(name))
    return [numbers.randrange(10, vocabulary - 10) for _ in range(length)]


def main() -> None:
    config = json.loads(sys.argv[1])
    # Only replies may go to the parent: whatever the engine prints goes to the log.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    engine = Engine(config["model"], config["transfer"], config["options"], time_hooks=config["time_hooks"])
    sys.stdout = replies
    handlers = ("facts", "phase", "check", "drain", "reset", "converse", "ask_again", "replay")
    serve({name: getattr(engine, name) for name in handlers})
    sys.stdout = sys.stderr
    engine.end()


if __name__ == "__main__":
    main()
