"""The steps that dominate small jobs: compiled, or operations on arrays where this installation has no compiled ones.

An array operation costs as much for one value as for a hundred, and a lookup or a job of a few blocks takes dozens of
them. `kvsidecar.cache.array_kernels` documents the functions; both forms do the same (tests/cache/test_kernels.py).
"""

from __future__ import annotations

from kvsidecar.cache import array_kernels

try:
    from kvsidecar.cache import _kernels
except ImportError:  # there is no wheel for this platform, and there was no compiler
    COMPILED = False
else:
    COMPILED = True

tag_hashes = _kernels.tag_hashes if COMPILED else array_kernels.tag_hashes
find_rows = _kernels.find_rows if COMPILED else array_kernels.find_rows
place_rows = _kernels.place_rows if COMPILED else array_kernels.place_rows
unplace_rows = _kernels.unplace_rows if COMPILED else array_kernels.unplace_rows
enter_log = _kernels.enter_log if COMPILED else array_kernels.enter_log
leave_log = _kernels.leave_log if COMPILED else array_kernels.leave_log
readable_rows = _kernels.readable_rows if COMPILED else array_kernels.readable_rows
add_refs = _kernels.add_refs if COMPILED else array_kernels.add_refs
drop_refs = _kernels.drop_refs if COMPILED else array_kernels.drop_refs
sealed_slots = _kernels.sealed_slots if COMPILED else array_kernels.sealed_slots
move_slots = _kernels.move_slots if COMPILED else array_kernels.move_slots
free_slots = _kernels.free_slots if COMPILED else array_kernels.free_slots
reserve_free = _kernels.reserve_free if COMPILED else array_kernels.reserve_free
