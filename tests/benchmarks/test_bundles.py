"""What a bundle keeps of an extension: the code of one GPU architecture, where the extension looks for it."""

from __future__ import annotations

import struct

import pytest

from benchmarks.bundles import fatbins
from benchmarks.bundles.fatbins import Entry

CODE, PTX = 2, 1


def entry(kind: int, architecture: int, payload: bytes) -> bytes:
    header = struct.pack("<HHIQIIIIIIQQQ", kind, 0x101, 64, len(payload), 0, 0, 0, architecture, 0, 0, 0, 0, 0)
    return header.ljust(64, b"\0") + payload


def container(*entries: bytes) -> bytes:
    whole = b"".join(entries)
    return struct.pack("<IHHQ", fatbins.MAGIC, 1, 16, len(whole)) + whole


def library(*containers: bytes) -> bytearray:
    """An ELF file with the containers in `.nv_fatbin`, and something behind them."""
    names = b"\0.nv_fatbin\0.names\0"
    kernels = b"".join(containers)
    at = 64
    behind = at + len(kernels) + len(b"behind")
    start = behind + len(names)
    sections = [(1, at, len(kernels)), (12, behind, len(names))]
    table = b"".join(
        struct.pack("<IIQQQQ", name, 1, 0, 0, begin, size).ljust(64, b"\0") for name, begin, size in sections
    )
    header = struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\x02", 3, 62, 1, 0, 0, start, 0, 64, 0, 0, 64, len(sections), 1)
    return bytearray(header + kernels + b"behind" + names + table)


def kept(found: bytes | bytearray) -> list[list[tuple[bool, int]]]:
    return [[(each.ptx, each.architecture) for each in entries] for _, _, entries in fatbins.containers(found)]


def test_the_code_of_one_architecture_stays_or_else_the_newest_ptx_that_it_can_compile() -> None:
    one = container(entry(CODE, 80, b"a" * 104), entry(CODE, 90, b"b" * 40), entry(PTX, 90, b"c" * 80))
    two = container(
        entry(CODE, 80, b"d" * 104), entry(PTX, 75, b"e" * 8), entry(PTX, 80, b"f" * 8), entry(PTX, 100, b"g" * 8)
    )
    three = container(entry(CODE, 100, b"h" * 16))
    made = library(one, bytes(8), two, three)
    before = [begin for begin, _, _ in fatbins.containers(made)]
    blanked = fatbins.slim(made, fatbins.for_architecture(90))
    assert kept(made) == [[(False, 90)], [(True, 80)], []]
    assert [begin for begin, _, _ in fatbins.containers(made)] == before  # the code points there
    assert blanked == len(one + two + three) - 3 * 16 - (64 + 40) - (64 + 8)
    assert b"b" * 40 in made
    assert b"behind" in made
    assert not any(letter * 8 in made for letter in (b"a", b"c", b"d", b"e", b"h"))


def test_what_a_recipe_chooses_stays() -> None:
    made = library(container(entry(CODE, 90, b"half_t"), entry(CODE, 90, b"bfloat16")))
    fatbins.slim(made, lambda entries: [each for each in entries if b"half_t" not in each.data])
    ((_, _, entries),) = fatbins.containers(made)
    assert entries == [Entry(False, 90, entry(CODE, 90, b"bfloat16"))]


def test_an_extension_without_kernels_stays_as_it_is() -> None:
    made = library()
    names = made.index(b".nv_fatbin")
    made[names : names + 10] = b".something"
    before = bytes(made)
    assert fatbins.slim(made, fatbins.for_architecture(90)) == 0
    assert made == before


def test_what_is_no_library_is_refused() -> None:
    with pytest.raises(ValueError, match="not a 64-bit ELF"):
        fatbins.slim(bytearray(b"no library" * 10), fatbins.for_architecture(90))


def test_a_container_with_bytes_that_are_no_entry_is_refused() -> None:
    with pytest.raises(ValueError, match="an entry without a header"):
        fatbins.containers(library(container(entry(CODE, 90, b"a" * 8), bytes(64))))
