"""Keeps protobuf from walking over the whole heap in the event loop.

protobuf calls glibc's `malloc_trim` each time it has freed 10,000 pieces of messages, in whichever call frees the last
one. That takes a millisecond, or ten after many clients have come and gone, about once a second of a busy daemon, and
no option turns it off. The daemon gives memory back itself when there is much (`kvsidecar.support.free_memory`). So the
entry in protobuf's library for this function is made to point at one that does nothing.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from typing import Final

_TRIM: Final = b"malloc_trim"
_RTLD_DI_LINKMAP: Final = 2
_DT_NULL, _DT_PLTRELSZ, _DT_STRTAB, _DT_SYMTAB, _DT_RELA, _DT_RELASZ, _DT_JMPREL = 0, 2, 5, 6, 7, 8, 23
_RELA: Final = struct.Struct("<QII8x")
"""A relocation: offset, kind, number of the symbol."""
_SYMBOL_BYTES: Final = 24


def keep_from_trimming() -> bool:
    """Call it before other threads use protobuf. Returns whether the entry was found and changed."""
    if sys.platform != "linux" or ctypes.sizeof(ctypes.c_void_p) != 8 or sys.byteorder != "little":
        return False
    try:
        from google._upb import _message  # the implementation that is used unless somebody asks for another one

        return _point_away(_message.__file__)
    except (ImportError, OSError, AttributeError):  # another implementation, or another C library: nothing to keep
        return False


def _point_away(path: str) -> bool:
    process = ctypes.CDLL(None)
    found = ctypes.POINTER(ctypes.c_uint64)()  # to l_addr, l_name, l_ld
    if process.dlinfo(ctypes.c_void_p(ctypes.CDLL(path)._handle), _RTLD_DI_LINKMAP, ctypes.byref(found)):
        return False
    nothing = ctypes.cast(process.abs, ctypes.c_void_p).value  # takes an int, returns it
    memory = os.open("/proc/self/mem", os.O_RDWR)  # an address that is not ours is an error here, and no crash
    try:
        base, dynamic, tags, changed = found[0], found[2], dict[int, int](), False
        while (tag := struct.unpack("<QQ", os.pread(memory, 16, dynamic)))[0] != _DT_NULL:
            tags[tag[0]] = tag[1]
            dynamic += 16
        for start, size in ((_DT_JMPREL, _DT_PLTRELSZ), (_DT_RELA, _DT_RELASZ)):
            table = os.pread(memory, tags.get(size, 0), tags.get(start, 0))
            for offset, _, symbol in _RELA.iter_unpack(table):
                (name,) = struct.unpack("<I", os.pread(memory, 4, tags[_DT_SYMTAB] + symbol * _SYMBOL_BYTES))
                if symbol and os.pread(memory, len(_TRIM) + 1, tags[_DT_STRTAB] + name) == _TRIM + b"\0":
                    os.pwrite(memory, struct.pack("<Q", nothing), base + offset)
                    changed = True
        return changed
    finally:
        os.close(memory)
