from __future__ import annotations

import subprocess
import sys

import pytest

from kvsidecar.support import free_memory
from kvsidecar.support.free_memory import QUIET_SECONDS, TRIM_BYTES, Peak
from tests.clock import Clock
from tests.marks import processes


@pytest.fixture
def given_back(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    calls: list[None] = []
    monkeypatch.setattr(free_memory, "give_back", lambda: calls.append(None))
    return calls


async def test_memory_is_given_back_once_when_much_less_is_in_use(given_back: list[None]) -> None:
    clock = Clock()
    peak = Peak(clock)
    await peak.used(2 * TRIM_BYTES)
    clock.now += QUIET_SECONDS
    await peak.used(TRIM_BYTES + 1)
    assert not given_back, "too little for it"
    for _ in range(3):
        clock.now += QUIET_SECONDS
        await peak.used(TRIM_BYTES)
    assert len(given_back) == 1


async def test_what_came_and_went_between_two_looks_is_given_back_too(given_back: list[None]) -> None:
    clock = Clock()
    peak = Peak(clock)
    await peak.used(0)
    await peak.used(0, most=TRIM_BYTES - 1)
    clock.now += QUIET_SECONDS
    await peak.used(0)
    assert not given_back
    await peak.used(0, most=TRIM_BYTES)
    clock.now += QUIET_SECONDS
    await peak.used(0)
    await peak.used(0)
    assert len(given_back) == 1


async def test_what_comes_and_goes_again_and_again_is_kept(given_back: list[None]) -> None:
    clock = Clock()
    peak = Peak(clock)
    for _ in range(10):
        await peak.used(2 * TRIM_BYTES)
        clock.now += 0.9 * QUIET_SECONDS
        await peak.used(0)
    assert not given_back
    clock.now += QUIET_SECONDS
    await peak.used(0)
    assert len(given_back) == 1


PROGRAM = """
import ctypes, resource
from kvsidecar.support.protobuf_trim import keep_from_trimming
from kvsidecar.v1 import sidecar_pb2 as pb

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

def lost():
    '''Pages that are free in the heap and were given back while 20,000 messages came and went.'''
    pieces = [libc.malloc(20_000) for _ in range(2000)]
    for each in pieces:
        ctypes.memset(each, 1, 20_000)
    for each in pieces[::2]:
        libc.free(each)
    before = resident()
    for _ in range(20_000):
        pb.LocalReply(call=1)
    found = before - resident()
    for each in pieces[1::2]:
        libc.free(each)
    return found

def resident():
    return int(open("/proc/self/statm").read().split()[1])

print(lost() > 2000, keep_from_trimming(), lost() < 100)
"""


@processes
def test_protobuf_gives_back_no_memory_while_its_messages_come_and_go() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.split() == ["True", "True", "True"]
