# Compiled from _kernels.c; documented in array_kernels.py.
from kvsidecar.cache.array_kernels import add_refs as add_refs
from kvsidecar.cache.array_kernels import drop_refs as drop_refs
from kvsidecar.cache.array_kernels import enter_log as enter_log
from kvsidecar.cache.array_kernels import find_rows as find_rows
from kvsidecar.cache.array_kernels import free_slots as free_slots
from kvsidecar.cache.array_kernels import leave_log as leave_log
from kvsidecar.cache.array_kernels import move_slots as move_slots
from kvsidecar.cache.array_kernels import place_rows as place_rows
from kvsidecar.cache.array_kernels import readable_rows as readable_rows
from kvsidecar.cache.array_kernels import reserve_free as reserve_free
from kvsidecar.cache.array_kernels import sealed_slots as sealed_slots
from kvsidecar.cache.array_kernels import tag_hashes as tag_hashes
from kvsidecar.cache.array_kernels import unplace_rows as unplace_rows
