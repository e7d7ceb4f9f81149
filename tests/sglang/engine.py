"""One SGLang engine in a process of its own, which a test can kill. SGLang starts its scheduler as a child of it.

TEST_DEVICE=cuda python -m pytest tests/sglang  # on a GPU, with the bundle of benchmarks/bundles
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import multiprocessing
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar
from unittest import mock

from benchmarks.bundles import check_sglang
from benchmarks.sglang.engine import ON_CPU
from tests.harness import DEVICE, SECONDS, DaemonProcess, eventually
from tests.vllm.engine import LOG_CHARACTERS, START, EngineProcess, Prompt, blocks, prompt, serve

ENVIRONMENT = ON_CPU if DEVICE == "host" else check_sglang.environment()
"""What an engine needs offline; on a GPU, with its bundle's stand-ins. It must be set before SGLang is imported."""

PAGE = 16
WHOLE = 688
"""Tokens in the full pages of `LONG`."""


@dataclass(frozen=True)
class Answer:
    """What the engine said to one prompt."""

    tokens: tuple[int, ...]
    cached: int
    """Tokens of the prompt that were not computed."""
    host: int
    """Of these, tokens that came from the daemon."""
    status: int
    """HTTP status: 200, or why there is no answer."""


def linker(socket: str, **extra: Any) -> dict[str, Any]:
    """The engine's arguments with this project's linker."""
    # A busy test machine must not turn a lookup into a miss; tests of the budget give their own.
    options = {"socket": socket, "lookup_budget": SECONDS, "lease_seconds": 2 * SECONDS, "load_timeout": SECONDS}
    config = {
        "linker": "KVSidecarLinker",
        "linker_module_path": "kvsidecar.integrations.sglang",
        "linker_extra_config": {**options, **extra},
    }
    return {
        "enable_unified_cache_external_linker": True,
        "unified_cache_external_linker_backend": "dynamic",
        "unified_cache_external_linker_config": config,
    }


DEFAULTS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "device": "cpu" if DEVICE == "host" else "cuda",
    "dtype": "float32",
    "attention_backend": "torch_native" if DEVICE == "host" else "triton",
    "sampling_backend": "pytorch",
    "disable_overlap_schedule": True,
    "disable_cuda_graph": True,
    "disable_custom_all_reduce": True,  # of kernels that the bundle for a GPU leaves out
    "page_size": PAGE,
    "max_total_tokens": 2048,
    "chunked_prefill_size": 256,
    "max_running_requests": 8,
    "enable_metrics": True,
    "random_seed": 0,
    "log_level": "info",
}
"""Of an engine that is small, and deterministic."""


def _sampling(tokens: int) -> dict[str, Any]:
    return {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}


def _pin_nothing() -> None:
    """SGLang pins memory for adapters and for what it keeps beside KV, which torch can do only where there is an
    accelerator."""
    import torch
    from sglang.srt.mem_cache.pool_host import common

    def unpinned(function: Any) -> Any:
        def call(*arguments: Any, pin_memory: bool = False, **others: Any) -> Any:
            return function(*arguments, **others)

        return call

    for name in ("tensor", "empty", "zeros", "ones", "full", "empty_like", "zeros_like"):
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign]
    common._cuda_host_register = lambda *_: None


class Engine:
    """In the process of an `EngineProcess`.

    Args:
        transfer: arguments of the linker; None for none.
        options: of ``sglang.Engine``.
    """

    def __init__(self, model: str, transfer: dict[str, Any] | None = None, **options: Any) -> None:
        import sglang

        if DEVICE == "host" and (options.get("lora_paths") or options.get("enable_return_routed_experts")):
            _pin_nothing()
        with contextlib.ExitStack() as stack:
            if DEVICE == "host":
                # SGLang starts its processes by spawn, and each would import for 10 s what this one has imported.
                multiprocessing.set_start_method("fork", force=True)
                stack.enter_context(mock.patch.object(multiprocessing, "set_start_method"))
            self.engine = sglang.Engine(model_path=model, **{**DEFAULTS, **(transfer or {}), **options})
        self._rids = itertools.count()

    def generate(
        self,
        *prompts: Prompt,
        tokens: int = 8,
        adapter: str | None = None,
        next_use: dict[str, Any] | None = None,
        session: str | None = None,
    ) -> list[Answer]:
        """Run these prompts together; one alone may fail.

        Args:
            adapter: name of the adapter for all of them.
            next_use: what each says of it to this project.
            session: that each belongs to, and starts over.
        """
        import fastapi

        salts: dict[str, Any] = (
            {"cache_salt": [each.salt or "" for each in prompts]} if any(each.salt for each in prompts) else {}
        )
        ids = [list(each.ids) for each in prompts]
        if adapter is not None:
            salts["lora_path"] = [adapter] * len(prompts)
        if session is not None:
            salts["session_params"] = {"id": session}
        sampling = _sampling(tokens)
        if next_use is not None:
            sampling["custom_params"] = {"kvsidecar": next_use}
        try:
            outputs = self.engine.generate(input_ids=ids, sampling_params=sampling, **salts)
        except fastapi.HTTPException as error:
            return [Answer((), 0, 0, error.status_code)]
        return [self._answer(output) for output in outputs]

    def experts(self, ids: Sequence[int]) -> str:
        """The experts of each token of a prompt but the last, in base64."""
        output = self.engine.generate(input_ids=list(ids), sampling_params=_sampling(1), return_routed_experts=True)
        return str(output["meta_info"]["routed_experts"])

    @staticmethod
    def _answer(output: dict[str, Any]) -> Answer:
        meta = output["meta_info"]
        status = meta["finish_reason"].get("status_code") or 200
        return Answer(
            tuple(output["output_ids"]),
            meta["cached_tokens"],
            (meta["cached_tokens_details"] or {}).get("host", 0),
            int(status),
        )

    def log_probabilities(self, ids: Sequence[int], first: int) -> tuple[list[float], int]:
        """Those of a prompt's tokens from the first one on, and how many of its tokens came from the daemon."""
        output = self.engine.generate(
            input_ids=list(ids), sampling_params=_sampling(1), return_logprob=True, logprob_start_len=first
        )
        found = [value for value, *_ in output["meta_info"]["input_token_logprobs"] if value is not None]
        return found, self._answer(output).host

    def play(self, requests: Sequence[dict[str, Any]], acts: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Run requests at the same time, and change something meanwhile.

        Args:
            requests: the arguments of `_play_one`.
            acts: the arguments of `_act`, each with ``after``: when so many outputs of any request have come, at the
                latest when all requests have ended.

        Returns:
            ``answers``: for each request, what was said to it, as often as it wants an answer; ``acted``: for each act,
            whether the engine has forgotten its cache.
        """
        return self.engine.loop.run_until_complete(self._play(requests, acts))  # type: ignore[no-any-return]

    async def _play(self, requests: Sequence[dict[str, Any]], acts: Sequence[dict[str, Any]]) -> dict[str, Any]:
        self._outputs, self._came = 0, asyncio.Event()
        tasks = [asyncio.ensure_future(self._play_one(**each)) for each in requests]
        ended = asyncio.gather(*tasks)
        ended.add_done_callback(lambda _: self._came.set())
        acted = []
        for act in acts:
            after = act.pop("after")
            while self._outputs < after and not ended.done():
                await self._came.wait()
                self._came.clear()
            acted.append(await self._act(**act))
        return {"answers": await ended, "acted": acted}

    async def _play_one(
        self,
        ids: Sequence[int],
        tokens: int,
        salt: str | None = None,
        answers: int = 1,
        priority: int | None = None,
        abort_after: int | None = None,
    ) -> list[dict[str, Any]]:
        """
        Args:
            abort_after: the request is aborted when so many outputs have come; after none, as soon as it is sent.
        """
        manager, name = self.engine.tokenizer_manager, f"play {next(self._rids)}"
        outputs = await self.engine.async_generate(
            input_ids=list(ids),
            sampling_params={**_sampling(tokens), "n": answers},
            cache_salt=salt,
            priority=priority,
            rid=name if answers == 1 else None,
            return_logprob=True,
            top_logprobs_num=2,
            stream=True,
        )
        last: dict[int, dict[str, Any]] = {}
        if abort_after == 0:
            coming = asyncio.ensure_future(anext(outputs))
            while name not in manager.rid_to_state and not coming.done():  # noqa: ASYNC110 - nothing announces it
                await asyncio.sleep(0)
            manager.abort_request(name)
            last[0] = await coming
        count = 0
        async for output in outputs:
            last[output.get("index") or 0] = output
            self._outputs, count = self._outputs + 1, count + 1
            self._came.set()
            if count == abort_after:
                manager.abort_request(name)
        return [self._said(last[index]) for index in sorted(last)]

    @staticmethod
    def _said(output: dict[str, Any]) -> dict[str, Any]:
        meta = output["meta_info"]
        finish = meta.get("finish_reason") or {}  # a request that was aborted in the queue has little of all this
        chosen = [value for value, *_ in meta.get("output_token_logprobs") or ()]
        best = [[value for value, *_ in two] for two in meta.get("output_top_logprobs") or ()]
        return {
            "tokens": list(output.get("output_ids") or ()),
            "chosen": chosen,
            "margins": [first - second for first, second in best],
            "cached": meta.get("cached_tokens", 0),
            "host": (meta.get("cached_tokens_details") or {}).get("host", 0),
            "finish": finish.get("type"),
            "status": int(finish.get("status_code") or 200),
            "retractions": meta.get("num_retractions", 0),
        }

    async def _act(
        self, pause: str | None = None, flush: bool = False, model: str | None = None, version: str | None = None
    ) -> bool:
        """
        Args:
            pause: SGLang's mode of a pause, in which all of the following is done.
            flush: its own cache is to be forgotten.
            model: whose weights are loaded in place, under the name ``version``.
        """
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

        manager = self.engine.tokenizer_manager
        if pause is not None:
            await manager.pause_generation(PauseGenerationReqInput(mode=pause))
        forgot = False
        if model is not None:
            problem = await self._updated(model, version, flush)
            assert not problem or "cache was not flushed" in problem, problem
            forgot = flush and not problem
        elif flush:
            forgot = bool((await manager.flush_cache()).success)
        if pause is not None:
            await manager.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))
        return forgot

    def open_session(self, name: str) -> bool:
        return bool(self.engine.open_session(1 << 20, name) == name)

    def close_session(self, name: str) -> bool:
        self.engine.close_session(name)
        return True

    def reset(self) -> bool:
        """Forget the engine's own cache. Refused while a request runs, or has just ended."""
        return bool(self.engine.flush_cache().success)

    def update(self, model: str, version: str | None = None, flush: bool = True) -> str:
        """Load the weights of another model of the same shape in place.

        Returns:
            Why SGLang says that this has failed, which may be that only the flush has; empty if it has not.
        """
        return self._run(self._updated(model, version, flush))

    async def _updated(self, model: str, version: str | None, flush: bool) -> str:
        from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

        request = UpdateWeightFromDiskReqInput(model_path=model, weight_version=version, flush_cache=flush)
        success, message, *_ = await self.engine.tokenizer_manager.update_weights_from_disk(request, None)
        return "" if success else str(message)

    def update_in_session(self, model: str) -> bool:
        """Load the weights of another model in several calls, none of which flushes."""
        from safetensors.torch import load_file

        tensors = [*load_file(Path(model) / "model.safetensors").items()]
        results = [
            self.engine.begin_weight_update(),
            self.engine.update_weights_from_tensor(tensors[::2], flush_cache=False),
            self.engine.update_weights_from_tensor(tensors[1::2], flush_cache=False),
            self.engine.end_weight_update(),
        ]
        assert all(success for success, _ in results), results
        return True

    def update_amid(self, ids: Sequence[int], tokens: int, model: str, version: str | None, flush: bool) -> str:
        """`update`, in the middle of a request that goes on with its KV and the new weights."""
        return self._run(self._updated_amid(list(ids), tokens, model, version, flush))

    async def _updated_amid(self, ids: list[int], tokens: int, model: str, version: str | None, flush: bool) -> str:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

        answer = await self.engine.async_generate(input_ids=ids, sampling_params=_sampling(tokens), stream=True)
        await anext(answer)
        await self.engine.tokenizer_manager.pause_generation(PauseGenerationReqInput(mode="in_place"))
        message = await self._updated(model, version, flush)
        await self.engine.tokenizer_manager.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))
        async for _ in answer:
            pass
        return message

    def _run(self, what: Coroutine[Any, Any, str]) -> str:
        return str(self.engine.loop.run_until_complete(what))

    def load(self, name: str, path: str) -> bool:
        """Load an adapter."""
        result = self.engine.load_lora_adapter(name, path)
        assert result.success, result.error_message
        return True

    def unload(self, name: str) -> bool:
        return bool(self.engine.unload_lora_adapter(name).success)

    def sleep_and_wake(self) -> bool:
        self.engine.release_memory_occupation()
        self.engine.resume_memory_occupation()
        return True

    def counters(self) -> dict[str, float]:
        """The linker's own metrics, as SGLang's server would export them."""
        from prometheus_client import CollectorRegistry, multiprocess

        registry = CollectorRegistry()
        multiprocess.MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return {
            sample.name.removeprefix("sglang:kvsidecar_").removesuffix("_total"): sample.value
            for metric in registry.collect()
            for sample in metric.samples
            if sample.name.startswith("sglang:kvsidecar_")
        }


class SGLangProcess(EngineProcess):
    """`Engine` in a process group of its own; a test may kill it at any instant.

    Args:
        log: a file for what the engine says.
    """

    module = "tests.sglang.engine"
    environment: ClassVar[dict[str, str]] = ENVIRONMENT

    def __init__(self, model: str, transfer: dict[str, Any] | None, log: Path, **options: Any) -> None:
        self._file: IO[bytes] = log.open("wb")
        super().__init__(model, transfer, stderr=self._file, **options)

    def answers(self) -> list[Any]:
        return [Answer(**{**each, "tokens": tuple(each["tokens"])}) for each in self._reply(START)]

    def ask(self, each: Prompt, tokens: int = 8, **options: Any) -> Answer:
        (answer,) = self.generate(each, tokens=tokens, **options)
        return answer  # type: ignore[return-value]

    def send_play(self, requests: Sequence[dict[str, Any]], acts: Sequence[dict[str, Any]] = ()) -> None:
        self._send("play", (requests, acts), {})

    def played(self) -> dict[str, Any]:
        """What `Engine.play` returns for what was sent."""
        return dict(self._reply(START))

    def experts(self, each: Prompt) -> str:
        return str(self._call("experts", each.ids))

    def log_probabilities(self, each: Prompt, first: int) -> tuple[list[float], int]:
        found, host = self._call("log_probabilities", each.ids, first)
        return found, host

    def open_session(self, name: str) -> None:
        assert self._call("open_session", name)

    def close_session(self, name: str) -> None:
        self._call("close_session", name)

    def touches(self) -> int:
        """Ends of requests and sessions that the daemon was told."""
        return int(self._call("counters").get("touches", 0))

    def forget(self) -> None:
        """Forget the engine's own cache, which is refused as long as the scheduler still ends a request."""
        eventually(lambda: self._call("reset"), "a flush of the engine's cache", pause=0.05)

    def update(self, model: str, version: str | None = None) -> None:
        """Load other weights into the idle engine, and forget its own cache. SGLang refuses the flush while the
        scheduler still ends a request."""
        self.forget()
        message = self._call("update", model, version)
        assert not message, message

    def update_in_session(self, model: str) -> None:
        """Forget the own cache, and load other weights in several calls without a further flush, as trainers do."""
        self.forget()
        self._call("update_in_session", model)

    def update_amid(
        self, what: Prompt, tokens: int, model: str, version: str | None = None, *, flush: bool = True
    ) -> str:
        """Load other weights in the middle of a request. Returns SGLang's error, empty if there is none."""
        return str(self._call("update_amid", what.ids, tokens, model, version, flush))

    def load_adapter(self, name: str, path: str) -> None:
        self._call("load", name, path)

    def unload_adapter(self, name: str) -> None:
        assert self._call("unload", name)

    def sleep_and_wake(self) -> None:
        self._call("sleep_and_wake")

    def kill(self) -> None:
        super().kill()
        self._file.close()


def stored(engine: SGLangProcess, daemon: DaemonProcess, what: Prompt, tokens: int = 8, **options: Any) -> Answer:
    """Ask, and wait until the daemon has every page of the prompt; then forget it. Returns the answer."""
    before = blocks(daemon)
    answer = engine.ask(what, tokens=tokens, **options)
    assert answer.status == 200, engine.text()[-LOG_CHARACTERS:]
    new = len(what.ids) // PAGE - answer.cached // PAGE
    eventually(lambda: blocks(daemon) >= before + new, lambda: f"{blocks(daemon)} blocks, not {before + new}")
    engine.forget()
    return answer


def forgotten(engine: SGLangProcess, daemon: DaemonProcess, what: Prompt) -> None:
    """Forget the engine's own cache when the daemon has every page of this prompt."""

    def found() -> bool:
        engine.forget()
        return engine.ask(what, tokens=1).host == (len(what.ids) - 1) // PAGE * PAGE

    eventually(found, "a prompt in the daemon")
    engine.forget()


def attach(engine: SGLangProcess, daemon: DaemonProcess) -> None:
    """Wait until the engine offloads to this daemon. Nothing is loaded, and no other prompt stored."""
    before, numbers = blocks(daemon), itertools.count()

    def stores() -> bool:
        one_page = prompt(("attach", daemon.process.pid, next(numbers)), PAGE + 1)
        engine.ask(one_page, tokens=1)
        engine.forget()
        return blocks(daemon) > before

    eventually(stores, lambda: f"the engine does not use the daemon: {engine.text()[-LOG_CHARACTERS:]}")


def warm(engine: SGLangProcess, daemon: DaemonProcess, what: Prompt) -> tuple[int, ...]:
    """Store all of this prompt, without a load before. Returns the tokens that follow."""
    attach(engine, daemon)  # else the engine may attach in the middle of it, and store only its end
    return stored(engine, daemon, what).tokens


def join(engine: SGLangProcess, daemon: DaemonProcess) -> None:
    """Wait until the engine offloads to this daemon, and hits there."""
    numbers = itertools.count()

    def hits() -> bool:
        thrown_away = prompt(("join", daemon.process.pid, next(numbers)), 2 * PAGE + 1)
        engine.ask(thrown_away, tokens=1)
        engine.forget()
        return engine.ask(thrown_away, tokens=1).host > 0

    eventually(hits, lambda: f"the engine does not use the daemon: {engine.text()[-LOG_CHARACTERS:]}")


if __name__ == "__main__":
    serve(Engine)
