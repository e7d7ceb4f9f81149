"""One engine with data parallel replicas, in a process of its own; each replica is an engine core of its own, too."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

from tests.vllm.engine import Answer, EngineProcess, Prompt, answer_of, defaults, input_of, sampling, serve


class ReplicasProcess(EngineProcess):
    """Takes ``data_parallel_size``, and ``generate`` takes ``replica``."""

    module = "tests.vllm.replicas"


class Replicas:
    """What of `tests.vllm.engine.Engine` is needed, with vLLM's asynchronous engine, which alone has replicas."""

    def __init__(self, model: str, transfer: dict[str, Any] | None = None, **options: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._names = itertools.count()
        self._engine = self._loop.run_until_complete(self._start(model, transfer, options))

    async def _start(self, model: str, transfer: dict[str, Any] | None, options: dict[str, Any]) -> Any:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = AsyncEngineArgs(model=model, kv_transfer_config=transfer, **{**defaults(), **options})
        return AsyncLLM.from_engine_args(arguments)

    def generate(self, *prompts: Prompt, tokens: int = 8, replica: int = 0) -> list[Answer]:
        """Run these prompts together on one of the replicas."""

        async def ask(prompt: Prompt) -> Answer:
            last = None
            name = f"r{next(self._names)}"
            async for output in self._engine.generate(
                input_of(prompt), sampling(tokens), request_id=name, data_parallel_rank=replica
            ):
                last = output
            return answer_of(last)

        async def all_of_them() -> list[Answer]:
            return await asyncio.gather(*map(ask, prompts))

        return self._loop.run_until_complete(all_of_them())


if __name__ == "__main__":
    serve(Replicas)
