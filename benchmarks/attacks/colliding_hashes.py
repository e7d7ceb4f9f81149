"""A tenant whose blocks collide in the bytes that name them to routers, and whose notes make them each other's parents.

Takes the directory of the daemon's ``kvs.sock`` and of the publisher's ``kv.events``.
"""

from __future__ import annotations

import itertools
import json
import sys
import time

import zmq

from kvsidecar.client import Blocks, Client, ClientError
from kvsidecar.integrations.residency.note_format import NoteFormat
from tests.harness import NAMESPACE, Rank

FORM = NoteFormat(NAMESPACE.hash_bytes, 4, chained=True)


def colliding(number: int, name: int) -> bytes:
    """A hash of its own, whose last 8 bytes are the name."""
    return number.to_bytes(24, "big") + name.to_bytes(8, "big")


def store(rank: Rank, block_hash: bytes, parent: bytes | None) -> None:
    blocks = Blocks(0, [block_hash], [0], notes=FORM.pack(block_hash, parent, bytes(16)))
    rank.finish(rank.client.store([blocks]))


def circle(rank: Rank, number: int) -> None:
    """Two names that are each other's parent, of blocks that are announced."""
    first, child, again = colliding(number, 1), colliding(number, 2), colliding(number + 1, 1)
    store(rank, first, None)
    store(rank, child, first)
    time.sleep(0.2)  # they are announced
    rank.client.clear(NAMESPACE, groups={0: [first]})
    store(rank, again, child)
    store(rank, colliding(number + 2, 1), again)  # its own parent


def subscribe(context: zmq.Context[zmq.Socket[bytes]], directory: str) -> None:
    """Everything is said again."""
    socket = context.socket(zmq.SUB)
    socket.connect(f"ipc://{directory}/kv.events")
    socket.subscribe("kv@")
    socket.poll(500)
    socket.close(0)


def main(directory: str, seconds: float) -> dict[str, int]:
    end = time.monotonic() + seconds
    rank = Rank(None, client=Client(f"{directory}/kvs.sock", name="attacker"), instance="colliding")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    done = refused = 0
    for number in itertools.count(1 << 40, 8):
        try:
            circle(rank, number)
            done += 1
        except ClientError:  # other attacks have used up what this user may have
            refused += 1
        subscribe(context, directory)
        if time.monotonic() > end:
            break
    rank.close()
    context.term()
    return {"circles": done, "refused": refused}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], float(sys.argv[2]))))
