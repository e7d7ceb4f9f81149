"""Fills the publisher's memory in every way that is open to a tenant and a router: long notes, frames without end,
subscriptions, replays that are not read.

Takes the directory of the daemon's ``kvs.sock``, and of the publisher's ``kv.events`` and ``kv.replay``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import socket
import sys
import threading
import time
from collections import Counter

from kvsidecar.client import Blocks, Client
from kvsidecar.core.watches import MAX_NOTE_BYTES
from kvsidecar.integrations.residency.note_format import CHECK_BYTES, TOKEN_BYTES, NoteFormat
from kvsidecar.publisher import zmtp
from tests.harness import NAMESPACE, NUM_BLOCKS, Rank

TOKENS = (MAX_NOTE_BYTES - 1 - CHECK_BYTES - NAMESPACE.hash_bytes) // TOKEN_BYTES
FRAME_BYTES = 200 << 20
SUBSCRIPTIONS = 200_000
UNREAD = 6


class Attack:
    def __init__(self, directory: str, seconds: float) -> None:
        self.directory, self.end = directory, time.monotonic() + seconds
        self.did: Counter[str] = Counter()

    def over(self) -> bool:
        return time.monotonic() > self.end

    def router(self, name: str, kind: bytes) -> socket.socket:
        """Connected, after its side of the handshake."""
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(1.0)
        sock.connect(f"{self.directory}/{name}")
        sock.sendall(zmtp.GREETING + zmtp.ready(kind))
        return sock

    def notes(self) -> None:
        """On more blocks than the pool holds, in a namespace of its own."""
        namespace = dataclasses.replace(NAMESPACE, block_size=NAMESPACE.block_size * 2)
        client = Client(f"{self.directory}/kvs.sock", name="attacker")
        rank = Rank(None, client=client, namespace=namespace, instance="notes")
        form = NoteFormat(namespace.hash_bytes, TOKENS, chained=True)
        for number in itertools.count():
            hashes = [hashlib.sha256(b"%d %d" % (number, i)).digest() for i in range(NUM_BLOCKS)]
            notes = b"".join(form.pack(each, None, hashlib.sha256(each).digest()[:4] * TOKENS) for each in hashes)
            rank.finish(rank.client.store([Blocks(0, hashes, list(range(NUM_BLOCKS)), notes=notes)]))
            self.did["noted_blocks"] += NUM_BLOCKS
            if self.over():
                break
        rank.close()

    def frames(self) -> None:
        """One that is long, and a message of parts that never ends."""
        long = b"\x02" + FRAME_BYTES.to_bytes(8, "big")
        while not self.over():
            for name, kind in (("kv.replay", b"DEALER"), ("kv.events", b"SUB")):
                for head, piece in ((long, bytes(1 << 16)), (b"", (b"\x01\xff" + bytes(255)) * 256)):
                    with contextlib.suppress(OSError), self.router(name, kind) as sock:
                        sock.sendall(head)
                        for _ in range(FRAME_BYTES >> 16):
                            sock.sendall(piece)
                            self.did["frame_bytes"] += len(piece)
                            if self.over():
                                break

    def subscriptions(self) -> None:
        while not self.over():
            with contextlib.suppress(OSError), self.router("kv.events", b"SUB") as sock:
                for number in range(SUBSCRIPTIONS):
                    sock.sendall(zmtp.command(b"SUBSCRIBE", b"kv@%064d" % number))
                    self.did["subscriptions"] += 1
                    if self.over():
                        break

    def unread(self) -> None:
        """Routers that ask for all there is, and read nothing of it."""
        while not self.over():
            with contextlib.ExitStack() as stack:
                for _ in range(UNREAD):
                    with contextlib.suppress(OSError):
                        sock = stack.enter_context(self.router("kv.replay", b"DEALER"))
                        for _ in range(3):
                            sock.sendall(b"".join(zmtp.message([b"", bytes(8)])))
                        self.did["unread_replays"] += 1
                time.sleep(max(0.0, min(5.0, self.end - time.monotonic())))


def main(directory: str, seconds: float, *kinds: str) -> dict[str, int]:
    """
    Args:
        kinds: methods of `Attack`; none: all of them at once.
    """
    attack = Attack(directory, seconds)
    names = kinds or ("notes", "frames", "subscriptions", "unread")
    threads = [threading.Thread(target=getattr(attack, name)) for name in names]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return dict(attack.did)


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], float(sys.argv[2]), *sys.argv[3:])))
