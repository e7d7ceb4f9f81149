"""The copy to a device and back before a copier takes the first one."""

from __future__ import annotations

import numpy as np
import pytest

from kvsidecar.copier.self_test import NBYTES, self_test
from kvsidecar.device.base import CopyMark, CopyStream, PreparedCall
from kvsidecar.device.host import HostCopyStream, HostDevice, HostPlatform
from kvsidecar.errors import DeviceError
from kvsidecar.support import host_memory
from kvsidecar.types import Direction


class FlippingStream(HostCopyStream):
    """Flips a bit of what it has copied to the device."""

    def __init__(self, device: FlippingDevice) -> None:
        super().__init__(Direction.LOAD, device._files)
        self._device = device

    def issue(self, prepared: PreparedCall, *, alone: bool = False, timed: bool = True) -> CopyMark:
        mark = super().issue(prepared, alone=alone, timed=timed)
        (mapping,) = self._device._mappings.values()
        host_memory.as_array(mapping.memory.address, NBYTES)[-1] ^= 1
        return mark


class FlippingDevice(HostDevice):
    def open_stream(self, direction: Direction) -> CopyStream:
        return FlippingStream(self) if direction is Direction.LOAD else super().open_stream(direction)


class Pins(HostPlatform):
    def __init__(self) -> None:
        super().__init__()
        self.pinned: dict[int, int] = {}

    def pin(self, address: int, nbytes: int) -> None:
        super().pin(address, nbytes)
        self.pinned[address] = nbytes

    def unpin(self, address: int, nbytes: int) -> None:
        super().unpin(address, nbytes)
        assert self.pinned.pop(address) == nbytes


def test_a_device_that_copies_right_passes_and_nothing_is_left() -> None:
    platform, device = Pins(), HostDevice()
    self_test(platform, device)
    assert (platform.pinned, device._mappings) == ({}, {})


def test_a_device_that_returns_other_bytes_is_refused() -> None:
    with pytest.raises(DeviceError, match="the self-test copy to host and back returned different bytes"):
        self_test(Pins(), FlippingDevice())


def test_the_pattern_is_another_one_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an earlier test left on the device must not look right."""
    seen = []
    equal = np.array_equal
    monkeypatch.setattr(np, "array_equal", lambda sent, back: seen.append(bytes(sent)) or equal(sent, back))
    for _ in range(2):
        self_test(Pins(), HostDevice())
    assert seen[0] != seen[1]
