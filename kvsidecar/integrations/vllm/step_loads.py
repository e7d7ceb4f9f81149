"""Loads within a step: the forward pass begins with the layers that are loaded, and waits for the others.

Imports no vLLM. Worthwhile for a request that is alone on its engine: its first token is produced a forward pass
earlier. Any other request would wait with it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvsidecar.client import Blocks, Client, Completion, JobDone, Outcome
from kvsidecar.integrations.vllm.metadata import LoadJob
from kvsidecar.integrations.waited_jobs import WaitedJobs

_log = logging.getLogger("kvsidecar.vllm")

STEP_SECONDS = 5.0
"""Longest time that a step waits for its loads: all other requests that arrive wait with it."""
STOP_SECONDS = 2.0
"""How long a load that has missed its deadline may take to end, or to be cancelled. Then its daemon is given up."""


@dataclass(frozen=True, slots=True)
class LayerChunks:
    """The layers of the engine's only KV cache group, in parts that are loaded one after the other."""

    of: Mapping[str, int]
    """The chunk of each layer, by name. An earlier layer is in the same chunk, or in an earlier one."""
    count: int


@dataclass(slots=True)
class StepLoad:
    """One load, with a job for each chunk."""

    load: LoadJob
    deadline: float
    jobs: WaitedJobs
    numbers: list[int] = field(default_factory=list)
    """Numbers of the jobs, by chunk."""
    ended: list[JobDone] = field(default_factory=list)
    failed: bool = False

    def on_end(self, done: JobDone) -> None:
        self.ended.append(done)
        self.failed |= done.outcome is not Outcome.DONE


class StepLoads:
    """The loads within steps of one rank. Used by the engine's thread.

    Args:
        timeout: seconds that a step waits for a load.
    """

    def __init__(self, chunks: LayerChunks, timeout: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._chunks, self._timeout, self._clock = chunks, timeout, clock
        self.running: list[StepLoad] = []
        """The loads of this step. Callers check this before they call: nearly every step has none."""
        self._waited: set[str] = set()
        """Layers that have waited in this step."""
        self._layers_wait = True
        """Whether vLLM lets every layer of this model wait, as far as is known."""

    def begin(self, client: Client, load: LoadJob, blocks: Sequence[Blocks], after: Completion | None) -> None:
        """Begin to load, the first layers first."""
        count = self._chunks.count
        made = StepLoad(load, self._clock() + self._timeout, WaitedJobs(client))
        for chunk in range(count):
            parts = [replace(each, slice=chunk + 1 if count > 1 else 0) for each in blocks]
            job = client.load(parts, after=after, timeout=self._timeout, traceparent=load.traceparent)
            made.numbers.append(made.jobs.add(job, made.on_end))
        self.running.append(made)

    def wait_for_layer(self, name: str) -> None:
        """Return when this layer is loaded, or its load has failed. Never raises: the forward pass continues, and `end`
        reports the failure."""
        self._waited.add(name)
        last = self._chunks.of.get(name, self._chunks.count - 1)  # a layer of no group may use any other one's KV
        for each in self.running:
            if not each.failed:
                self._wait(each, each.numbers[: last + 1])

    def forward_begins(self, *, layers_wait: bool) -> None:
        """Prepare for the forward pass, which is about to begin.

        Args:
            layers_wait: whether vLLM calls `wait_for_layer` in it. It does not if one CUDA graph contains all layers.
        """
        if layers_wait and self._layers_wait:
            return
        self._waited.update(self._chunks.of)
        for each in self.running:
            self._wait(each, each.numbers)

    def _wait(self, load: StepLoad, numbers: Sequence[int]) -> None:
        if load.jobs.wait(numbers, load.deadline - self._clock()):
            load.failed = True

    def end(self) -> list[StepLoad]:
        """End the step, whose forward pass has been enqueued. Returns its loads, none of which writes to the GPU any
        more."""
        loads, self.running = self.running, []
        missing = self._chunks.of.keys() - self._waited
        self._waited.clear()
        if missing:
            if self._layers_wait:
                _log.error("kvsidecar: this model has layers that do not wait for their KV: loads end before its steps")
            self._layers_wait = False
            for each in loads:
                each.failed = True
        for each in loads:
            self._wait(each, each.numbers)
            reason = f"a load within a step has not ended {self._timeout + STOP_SECONDS:g} s after its start"
            each.jobs.end(each.numbers, STOP_SECONDS, reason)
        return loads
