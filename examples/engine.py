"""The smallest engine: stores three blocks, finds them, and loads them into other blocks."""

import hashlib

from kvsidecar.client import Blocks, Client, ClientError, GroupLayout, HostBuffer, Namespace, Region

LAYERS, BLOCKS, ROW = 4, 64, 4096  # one layer's K and V of one block: 4096 bytes
kv = HostBuffer(LAYERS * BLOCKS * ROW)  # an engine on a GPU uses kvsidecar.client.torch instead
namespace = Namespace(  # what must be equal to share blocks
    model="my-model",
    dtype="bfloat16",
    kv_layout="LBNHC",
    block_size=16,
    tp_size=1,
    pp_size=1,
    hash_algorithm="sha256",
)
rows = Region(allocation=0, offset=0, row_stride=BLOCKS * ROW, block_stride=ROW, row_bytes=ROW, num_rows=LAYERS)

client = Client()
layout = GroupLayout(group=0, num_blocks=BLOCKS, shard=0, num_shards=1, regions=(rows,))
try:
    client.attach(instance="my-engine", namespace=namespace, buffers=kv.kv_buffers(), groups=[layout])
except ClientError as error:
    raise SystemExit(str(error)) from None  # no daemon runs, or it refuses: the text says what to do
daemon = client.wait_ready(timeout=60)
if not daemon.ready:
    raise SystemExit(daemon.reason)  # such as a pool that is larger than this user may lock
print(daemon)

hashes = [hashlib.sha256(b"block %d" % i).digest() for i in range(3)]
kv.memory[0:6] = b"hello!"  # layer 0 of block 0
job = client.store([Blocks(group=0, hashes=hashes, block_ids=[0, 1, 2])])  # returns at once
print(client.wait([job], timeout=10)[job])  # an engine calls client.poll() once a step instead

found = client.lookup(namespace, {0: hashes}, lease_seconds=10)
print(found.groups[0].hits, "blocks can be loaded")
job = client.load([Blocks(group=0, hashes=hashes, block_ids=[40, 41, 42])], lease=found.lease)
print(client.wait([job], timeout=10)[job].outcome)
client.release(found.lease)
assert kv.memory[40 * ROW : 40 * ROW + 6] == b"hello!"
client.close()
