"""Orders the copies of a CUDA rank behind its kernels. Not needed on the CPU, where kernels are synchronous. Imports
torch; engine-independent."""

from __future__ import annotations

import logging

import torch

from kvsidecar.client.torch import TorchEventRing

_log = logging.getLogger("kvsidecar")


class DeviceOrder:
    """The events that order a rank's copies.

    Args:
        device: the device of the KV cache.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.ring: TorchEventRing | None = None
        """None if the driver cannot share events: stores wait for `mark` on the host."""
        try:
            # Not in another thread: such calls would invalidate a CUDA graph that the engine captures.
            self.ring = TorchEventRing(device=device)
        except RuntimeError as error:
            _log.warning("kvsidecar: stores wait for the GPU on the host, not on the device: %s", error)

    def mark(self) -> torch.cuda.Event:
        """Record an event on the engine's current stream."""
        event = torch.cuda.Event(enable_timing=False)
        event.record(torch.cuda.current_stream(self._device))
        return event
