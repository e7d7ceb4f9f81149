"""What an extension holds for other GPUs, blanked, so that it compresses to nothing.

The kernels of an extension lie in ELF section ``.nv_fatbin``, as containers of entries, one for each architecture:

    container: u32 magic, u16 version, u16 bytes of this header, u64 bytes of the entries
    entry:     u16 kind (1: PTX, 2: machine code), u16 version, u32 bytes of this header, u64 bytes of the payload,
               u32, u32, u32, u32 architecture (90: sm_90), ... the payload

A container stays where it is, because the code points to it, with the entries that are kept at its beginning.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

MAGIC = 0xBA55ED50
_CONTAINER = struct.Struct("<IHHQ")
_ENTRY = struct.Struct("<HHIQIII I")
_ELF = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQ")


@dataclass(frozen=True)
class Entry:
    """The kernels of one source file for one architecture."""

    ptx: bool
    architecture: int
    data: bytes
    """Header and payload."""


Choose = Callable[[list[Entry]], list[Entry]]


def for_architecture(architecture: int) -> Choose:
    """The machine code for this architecture; where there is none, the newest PTX that can be compiled for it."""

    def choose(entries: list[Entry]) -> list[Entry]:
        code = [each for each in entries if not each.ptx and each.architecture == architecture]
        if code:
            return code
        older = [each for each in entries if each.ptx and each.architecture <= architecture]
        return [max(older, key=lambda each: each.architecture)] if older else []

    return choose


def section(library: bytes | bytearray, name: bytes) -> tuple[int, int] | None:
    """Offset and bytes of a section in the file."""
    if library[:5] != b"\x7fELF\x02":
        raise ValueError("not a 64-bit ELF file")
    header = _ELF.unpack_from(library)
    start, size, count, names = header[6], header[11], header[12], header[13]
    sections = [_SECTION.unpack_from(library, start + index * size) for index in range(count)]
    of_names = sections[names][4]
    for each in sections:
        at = of_names + each[0]
        if library[at : library.index(0, at)] == name:
            return each[4], each[5]
    return None


def containers(library: bytes | bytearray) -> list[tuple[int, int, list[Entry]]]:
    """Offset of each container's entries in the file, their bytes, and they."""
    found = section(library, b".nv_fatbin")
    if found is None:
        return []
    at, end = found[0], sum(found)
    result = []
    while at < end:
        magic, _, header, size = _CONTAINER.unpack_from(library, at)
        if magic != MAGIC:  # padding
            at += 8
            continue
        entries, begin = [], at + header
        at = begin
        while at < begin + size:
            kind, _, header, payload, _, _, _, architecture = _ENTRY.unpack_from(library, at)
            if not header:
                raise ValueError(f"the container at byte {begin} has an entry without a header at byte {at}")
            entries.append(Entry(kind == 1, architecture, bytes(library[at : at + header + payload])))
            at += header + payload
        result.append((begin, size, entries))
    return result


def slim(library: bytearray, choose: Choose) -> int:
    """Keep in every container what `choose` chooses, and blank the rest. Returns the bytes that were blanked."""
    blanked = 0
    for begin, size, entries in containers(library):
        kept = b"".join(each.data for each in choose(entries))
        library[begin : begin + size] = kept + bytes(size - len(kept))
        struct.pack_into("<Q", library, begin - 8, len(kept))
        blanked += size - len(kept)
    return blanked
