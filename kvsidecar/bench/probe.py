"""An engine's own GPU work, timed while the daemon copies or pins: ``python -m kvsidecar.bench.probe CONFIG``.

A process of its own: nothing else runs in it, so its times show the GPU and the driver alone.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol

from kvsidecar.bench.driver import Cuda
from kvsidecar.bench.limit import both_ways
from kvsidecar.bench.processes import serve
from kvsidecar.support.units import KiB, MiB

TOKEN_BYTES = 4 * KiB
PAUSE_SECONDS = 0.0005
"""Pause between token copies: an engine runs a step in between, and back-to-back copies would measure themselves."""
STEP_BYTES = 256 * MiB
STEP_COPIES = 8
"""Copies of STEP_BYTES from and to GPU memory in a step: about a millisecond on an H200."""
HOST_STEP_BYTES = 4 * MiB


class EngineStep(Protocol):
    """Runs one step of an engine, and returns when its work is over."""

    what: str

    def __call__(self) -> None: ...


class CudaCopyStep:
    what = "driver copies in GPU memory"

    def __init__(self, cuda: Cuda) -> None:
        self._stream = cuda.stream()
        self._from, self._to = cuda.alloc(STEP_BYTES), cuda.alloc(STEP_BYTES)

    def __call__(self) -> None:
        for _ in range(STEP_COPIES):
            self._stream.on_device(self._to, self._from, STEP_BYTES)
        self._stream.synchronize()


class HostStep:
    what = "copies in host memory"

    def __init__(self) -> None:
        self._from, self._to = (ctypes.create_string_buffer(HOST_STEP_BYTES) for _ in range(2))

    def __call__(self) -> None:
        ctypes.memmove(self._to, self._from, HOST_STEP_BYTES)


class TorchStep:
    what = "a CUDA graph of 64 GEMMs at batch 32"

    def __init__(self) -> None:
        from kvsidecar.bench.torch_work import DecodeGraph

        self._graph = DecodeGraph()

    def __call__(self) -> None:
        self._graph.step()


def why_no_torch() -> str:
    """Why torch cannot use the GPU; empty if it can."""
    try:
        import torch
    except ImportError as error:
        return f"needs torch: {error}"
    return "" if torch.cuda.is_available() else f"needs a torch that sees the GPU; torch {torch.__version__} does not"


class Probe:
    """Answers the parent's requests.

    Args:
        cuda: None on the host device, where the same loops run on host memory.
    """

    def __init__(self, cuda: Cuda | None) -> None:
        self._cuda = cuda
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._steps: list[tuple[float, float]] = []
        self._token = self._token_copy()

    def _token_copy(self) -> Callable[[], None]:
        if self._cuda is None:
            source, target = (ctypes.create_string_buffer(TOKEN_BYTES) for _ in range(2))

            def copy_on_host() -> None:
                ctypes.memmove(target, source, TOKEN_BYTES)

            return copy_on_host
        stream, device, host = self._cuda.stream(), self._cuda.alloc(TOKEN_BYTES), self._cuda.pinned(TOKEN_BYTES)

        def copy() -> None:
            stream.to_host(host.address, device, TOKEN_BYTES)
            stream.synchronize()

        return copy

    def token(self, samples: int) -> dict[str, Any]:
        """Time a small device-to-host copy, issue and synchronisation, ``samples`` times. Returns seconds for each."""
        copy, clock, took = self._token, time.perf_counter, []
        for _ in range(20):
            copy()
        for _ in range(samples):
            time.sleep(PAUSE_SECONDS)
            started = clock()
            copy()
            took.append(clock() - started)
        return {"seconds": took}

    def bulk(self, seconds: float, nbytes: int) -> dict[str, Any]:
        """Copy ``nbytes`` of pinned memory both ways, over and over: bytes a second of both together."""
        with ExitStack() as stack:
            copy = both_ways(self._cuda, nbytes, stack)
            copy()
            copied, started = 0, time.perf_counter()
            while (took := time.perf_counter() - started) < seconds:
                copy()
                copied += 2 * nbytes
        return {"bytes_per_second": copied / took}

    def steps(self) -> dict[str, Any]:
        """Run steps in a thread until `steps_over`: those of a decode graph if torch is installed."""
        step: EngineStep
        if self._cuda is None:
            step = HostStep()
        elif why_no_torch():
            step = CudaCopyStep(self._cuda)
        else:
            step = TorchStep()
        for _ in range(50):
            step()
        self._stop.clear()
        self._steps = []
        self._thread = threading.Thread(target=self._run_steps, args=(step,), name="bench-steps")
        self._thread.start()
        return {"what": step.what}

    def _run_steps(self, step: EngineStep) -> None:
        clock, steps = time.perf_counter, self._steps
        before = clock()
        while not self._stop.is_set():
            step()
            now = clock()
            steps.append((before, now - before))
            before = now

    def steps_over(self) -> dict[str, Any]:
        """Stop. Returns start and duration in seconds of every step; the clock is the same in all processes."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        return {"steps": self._steps}


def main() -> None:
    config = json.loads(sys.argv[1])
    probe = Probe(Cuda(config["ordinal"]) if config["cuda"] else None)
    gc.disable()
    serve({"token": probe.token, "bulk": probe.bulk, "steps": probe.steps, "steps_over": probe.steps_over})
    probe.steps_over()


if __name__ == "__main__":
    main()
