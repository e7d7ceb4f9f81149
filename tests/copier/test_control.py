"""Requests between the daemon and a copier: whole, with their descriptors."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest

from kvsidecar.copier.control import layouts_of, pack_layouts, pack_source, source_of
from kvsidecar.device.base import CudaIpcSource, MemfdSource
from kvsidecar.errors import ImportRefused
from kvsidecar.support.child_side import Control
from kvsidecar.support.supervised_child import exchange
from kvsidecar.types import GroupLayout, Region


async def test_a_request_arrives_whole_and_with_its_descriptors() -> None:
    ours, far = socket.socketpair()
    ours.setblocking(False)
    theirs = Control(far)
    layouts = [GroupLayout(3, 64, 1, 2, (Region(0, 1, 2, 3, 4, 5), Region(1, 6, 7, 8, 9, 10)), (1, 1))]
    files = [os.memfd_create("each") for _ in range(2)]
    fds: list[int] = []
    sources = [
        pack_source(each, fds) for each in (MemfdSource(files[0]), CudaIpcSource(b"\x01\x02"), MemfdSource(files[1]))
    ]
    request = {"allocations": sources, "groups": pack_layouts(layouts)}
    asking = asyncio.create_task(exchange(ours, request, fds))
    received = await asyncio.to_thread(theirs.receive)
    assert received is not None
    message, arrived = received
    assert layouts_of(message["groups"]) == layouts
    first, second, third = (source_of(each, arrived) for each in message["allocations"])
    assert isinstance(first, MemfdSource)
    assert isinstance(third, MemfdSource)
    assert second == CudaIpcSource(b"\x01\x02")
    assert [os.fstat(each.fd).st_ino for each in (first, third)] == [os.fstat(each).st_ino for each in files]
    far.sendall(b'{"done": true}\n')
    assert await asking == {"done": True}
    ours.close()
    assert theirs.receive() is None
    far.close()
    for each in (*files, *arrived):
        os.close(each)


def test_a_descriptor_that_did_not_arrive_refuses_the_import() -> None:
    with pytest.raises(ImportRefused, match="no file descriptors left"):
        source_of({"fd": 1}, [5])
