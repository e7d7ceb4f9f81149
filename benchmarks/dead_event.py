"""What becomes of a wait for the interprocess event of a process that dies? Needs a GPU, torch and cuda-python.

    python benchmarks/dead_event.py

A child runs a kernel of about four seconds, records an interprocess event behind it, and is killed after half a
second. This process has either asked the event (cuEventQuery) or put a wait for it into a stream (cuStreamWaitEvent).
It prints what the event or the stream says ten seconds later, and whether the child's memory can then be unmapped.
The result is why `kvsidecar.device.cuda.stream.CudaEvent` asks and never waits.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
import time
from typing import Any

from cuda.bindings import driver

NOT_READY = driver.CUresult.CUDA_ERROR_NOT_READY
KERNEL_SECONDS, KILL_AFTER, PATIENCE = 4, 0.5, 10.0


def child() -> None:
    import torch

    from kvsidecar.support.cuda_driver import address_range, ipc_handle

    memory = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
    event = torch.cuda.Event(interprocess=True, enable_timing=False)
    torch.cuda.synchronize()
    for _ in range(KERNEL_SECONDS):
        torch.cuda._sleep(1_900_000_000)
    event.record()
    print(ipc_handle(address_range(memory.data_ptr())[0]).hex(), event.ipc_handle().hex(), flush=True)
    sys.stdin.read()


def call(result: tuple[Any, ...]) -> Any:
    if result[0] != driver.CUresult.CUDA_SUCCESS:
        raise SystemExit(str(result[0]))
    return result[1] if len(result) > 1 else None


def opened(kind: Any, text: str) -> Any:
    handle = kind()
    ctypes.memmove(handle.getPtr(), bytes.fromhex(text), 64)
    return handle


def trial(context: Any, *, wait_in_stream: bool) -> None:
    exporter = subprocess.Popen(
        [sys.executable, __file__, "child"], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )
    assert exporter.stdout is not None
    memory_handle, event_handle = exporter.stdout.readline().split()
    memory = call(driver.cuIpcOpenMemHandle(opened(driver.CUipcMemHandle, memory_handle), 1))
    event = call(driver.cuIpcOpenEventHandle(opened(driver.CUipcEventHandle, event_handle)))
    stream = call(driver.cuStreamCreate(1))
    host = call(driver.cuMemAllocHost(1 << 20))
    if wait_in_stream:
        call(driver.cuStreamWaitEvent(stream, event, 0))
        call(driver.cuMemcpyDtoHAsync(int(host), int(memory), 1 << 20, stream))
    time.sleep(KILL_AFTER)
    exporter.kill()
    exporter.wait()
    ask = (lambda: driver.cuStreamQuery(stream)) if wait_in_stream else (lambda: driver.cuEventQuery(event))
    deadline = time.monotonic() + PATIENCE
    while (status := ask()[0]) == NOT_READY and time.monotonic() < deadline:
        time.sleep(0.001)

    def unmap() -> None:
        driver.cuCtxSetCurrent(context)
        driver.cuIpcCloseMemHandle(memory)

    closing = threading.Thread(target=unmap, daemon=True)
    started = time.monotonic()
    closing.start()
    closing.join(PATIENCE)
    hung = closing.is_alive()
    took = f"still hangs after {PATIENCE:g} s" if hung else f"returns after {(time.monotonic() - started) * 1e3:.1f} ms"
    how = "a wait in a stream" if wait_in_stream else "asking the event"
    print(f"{how}: {status.name} {PATIENCE:g} s after the death; cuIpcCloseMemHandle {took}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["child"]:
        child()
    else:
        call(driver.cuInit(0))
        context = call(driver.cuDevicePrimaryCtxRetain(call(driver.cuDeviceGet(0))))
        call(driver.cuCtxSetCurrent(context))
        trial(context, wait_in_stream=False)
        trial(context, wait_in_stream=True)
        sys.stdout.flush()
        # The hung call cannot be taken back: end without the interpreter's own clean-up.
        import os

        os._exit(0)
