from __future__ import annotations

import subprocess
import sys

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


def test_protobuf_gives_back_no_memory_while_its_messages_come_and_go() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.split() == ["True", "True", "True"]
