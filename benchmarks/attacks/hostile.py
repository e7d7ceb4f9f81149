"""Requests of every kind that a client may send to a daemon, as they must not be. Sent one at a time, from a seed: the
same seed sends the same requests in the same order.
"""

from __future__ import annotations

import fcntl
import os
import random
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from queue import SimpleQueue
from typing import Any

import grpc
from google.protobuf.message import Message

from benchmarks.attacks.hostile_messages import METHODS, Generator, extremes
from kvsidecar.protocol.framing import HEADER_BYTES, frame
from kvsidecar.protocol.wire import layout_to_wire, namespace_to_wire, pack_ids
from kvsidecar.types import PROTOCOL, TOKEN_METADATA
from kvsidecar.v1 import sidecar_pb2 as pb
from tests.frames import frames
from tests.harness import NAMESPACE, SECONDS, DaemonProcess, hashes, layout

DOCUMENTED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNAVAILABLE,
}
ATTACKS = (*("unary",) * 3, *("attach",) * 3, *("local",) * 4, "hello", "garbage", "huge")
JOB_CALLS = ("Store", "Load")
LOCAL_CODES = DOCUMENTED | {grpc.StatusCode.UNIMPLEMENTED}
LAST_CALL = 4711
BUFFER_BYTES = 1 << 20


class Attacker:
    """Sends everything to one daemon, one request at a time."""

    def __init__(self, daemon: DaemonProcess, seed: int) -> None:
        self.daemon = daemon
        self.seed = seed
        self.number = 0
        self.codes: Counter[tuple[str, str]] = Counter()
        self.touched: set[tuple[str, str]] = set()
        self.tokens: list[bytes] = []
        self.leases: list[int] = []
        self.generator = Generator(
            random.Random(seed), self.touched, lambda: self.tokens[-3:] + hashes("a", "b") + [b"\0" * 64]
        )
        self._channel: Any = grpc.insecure_channel(f"unix:{daemon.socket}", [("grpc.max_send_message_length", -1)])

    def close(self) -> None:
        self._channel.close()

    @property
    def rng(self) -> random.Random:
        return self.generator.rng

    def attack(self) -> None:
        """One hostile request of a random kind."""
        self.number += 1
        kind = self.rng.choice(ATTACKS)
        getattr(self, f"_{kind}")()

    def sweep(self) -> None:
        """Every value of every request at its extremes, with all else right."""
        for method, good in (
            ("Attach", pb.AttachRequest(register=self._register(b"", 1))),
            *(("Attach", request) for request in self._jobs(1)[:3]),
            *((name, self._good(name)) for name in ("Lookup", "Release", "Renew", "Clear", "Pin", "Unpin")),
        ):
            for message in extremes(good):
                self.number += 1
                if isinstance(message, pb.AttachRequest):
                    self._attach_with(message)
                else:
                    self.call(method, [message.SerializeToString()])
        for name in JOB_CALLS:
            with self._attached() as (session, token):
                for message in extremes(self._job_call(name, session, job=1)):
                    self.number += 1
                    self.call(name, [message.SerializeToString()], token)

    def _attach_with(self, message: pb.AttachRequest) -> None:
        """A registration, or a job after a good one."""
        with self._shared("good") as (token, _):
            if message.HasField("register"):
                message.register.token = token
                self.call("Attach", [message.SerializeToString()])
            else:
                first = pb.AttachRequest(register=self._register(token, 1))
                self.call("Attach", [first.SerializeToString(), message.SerializeToString()])

    # -- gRPC ------------------------------------------------------------------------------------------------------

    def call(self, name: str, requests: list[bytes], token: bytes = b"") -> list[Any]:
        """Send bytes to a method; its replies. The status must be a documented one, and come in time."""
        metadata = ((TOKEN_METADATA, token),) if token else None
        method = METHODS[name]
        path = f"/{method.containing_service.full_name}/{name}"
        replies: list[Any] = []
        code, text = grpc.StatusCode.OK, ""
        try:
            if method.client_streaming:
                replies += self._channel.stream_stream(path)(iter(requests), timeout=SECONDS)
            else:
                replies.append(self._channel.unary_unary(path)(requests[0], timeout=SECONDS, metadata=metadata))
        except grpc.RpcError as error:
            code, text = error.code(), error.details() or ""
        self.codes[name, code.name] += 1
        sizes = [len(request) for request in requests]
        assert code in DOCUMENTED, f"{self} {name} of {sizes} bytes was answered {code.name}: {text[:500]}"
        assert code is grpc.StatusCode.OK or text, f"{self} {name}: {code.name} without a word"
        assert len(text) < 4096, f"{self} {name}: the text of {code.name} has {len(text)} characters"
        return replies

    def _unary(self) -> None:
        name = self.rng.choice(
            ("Lookup", "Release", "Renew", "Status", "Clear", "Pin", "Unpin", "CancelDrain", *JOB_CALLS)
        )
        if name not in JOB_CALLS:
            self.call(name, [self._bytes(self._good(name))])
            return
        with self._attached() as (session, token):
            for _ in range(self.rng.choice((1, 5))):
                self.call(name, [self._bytes(self._job_call(name, session))], token)

    def _huge(self) -> None:
        """Around the limit of a message, and far over it."""
        size = self.rng.choice(((4 << 20) - 300, 4 << 20, (4 << 20) + 1, 16 << 20))
        request = pb.LookupRequest(namespace=namespace_to_wire(NAMESPACE), mode=pb.LookupRequest.MODE_BITMAP)
        if self.rng.random() < 0.3:
            request.fetch_ms, request.choose = 1000, True
            request.groups.add(group=0, hashes=bytes(32), wanted=b"\xff" * size)
        else:
            request.groups.add(group=0, hashes=bytes(size // 32 * 32))
        self.call("Lookup", [request.SerializeToString()])

    def _attach(self) -> None:
        kinds = [self.rng.choice(KINDS) for _ in range(self.rng.choice((1, 1, 1, 2, 4)))]
        with self._shared(*kinds) as (token, connection):
            register = self._register(token, len(kinds))
            messages = [pb.AttachRequest(register=register)]
            messages += [self.rng.choice(self._jobs()) for _ in range(self.rng.choice((0, 1, 5, 20)))]
            good_start = self.rng.random() < 0.6
            requests = [messages[0].SerializeToString() if good_start else self._bytes(messages[0])]
            requests += [self._bytes(message) for message in messages[1:]]
            if self.rng.random() < 0.1:
                connection.close()  # the token ends before the stream begins
            self.call("Attach", requests)

    # -- the local protocol ----------------------------------------------------------------------------------------

    def _local(self) -> None:
        """Frames good and bad on one connection. What is answered has a documented code, and comes in time."""
        with self._shared("good") as (token, connection):
            good: list[pb.LocalRequest] = [pb.LocalRequest(attach=pb.AttachRequest(register=self._register(token, 1)))]
            for _ in range(self.rng.choice((0, 1, 5, 20))):
                kind = self.rng.choice(("attach", "attach", "Lookup", "Release", "Renew", "detach"))
                request = pb.LocalRequest(call=self.rng.choice((0, 1, 2**64 - 1)))
                match kind:
                    case "attach":
                        request.attach.CopyFrom(self.rng.choice(self._jobs()))
                    case "detach":
                        request.detach.SetInParent()
                    case _:
                        getattr(request, kind.lower()).CopyFrom(self._good(kind))
                good.append(request)
            if self.rng.random() < 0.3:
                self.rng.shuffle(good)
            payloads = [
                request.SerializeToString() if self.rng.random() < 0.7 else self._bytes(request) for request in good
            ]
            data = b"".join(map(frame, payloads))
            match self.rng.choice(("whole", "whole", "whole", "cut", "noise")):
                case "cut":
                    data = data[: self.rng.randrange(len(data))]
                case "noise":
                    data += self.rng.randbytes(self.rng.choice((1, 4, 9, 300)))
                case _:
                    data += frame(pb.LocalRequest(call=LAST_CALL, release=pb.ReleaseRequest()).SerializeToString())
                    self._exchange_frames(connection, data)
                    return
            with suppress(OSError):  # the daemon may have ended it by now
                connection.sendall(data)

    def _exchange_frames(self, connection: socket.socket, data: bytes) -> None:
        """Read what comes until the last call is answered, or the daemon ends the connection."""
        with suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(data)
            for payload in frames(connection):
                reply = pb.LocalReply.FromString(payload)
                error = reply.ended.error if reply.HasField("ended") else reply.error
                if error.code:
                    code = next(code for code in grpc.StatusCode if code.value[0] == error.code)
                    self.codes["local", code.name] += 1
                    assert code in LOCAL_CODES, f"{self} {code.name}: {error.text[:500]}"
                    assert 0 < len(error.text) < 4096, f"{self} {code.name} without a word, or with too many"
                if reply.call == LAST_CALL or (reply.HasField("error") and not reply.call):
                    return

    def _bytes(self, message: Message) -> bytes:
        choice = self.rng.random()
        if choice < 0.6:
            self.generator.spoil(message)
        elif choice < 0.9:
            message.Clear()
            self.generator.random(message)
        return self.generator.mangle(message.SerializeToString())

    # -- the attach socket and the raw one -------------------------------------------------------------------------

    def _hello(self) -> None:
        hello = pb.Hello(protocol=PROTOCOL, num_fds=1, client="x")
        with ExitStack() as stack:
            count = self.rng.choice((0, 1, 2, 40))
            fds = [stack.enter_context(shared_fd(self.rng.choice(KINDS))) for _ in range(count)]
            payload = self._bytes(hello)
            data = self.rng.choice(
                (frame(payload), frame(payload)[:-1], self.rng.choice((0, 4096, 4097, 2**32 - 1)).to_bytes(4, "little"),
                 self.rng.randbytes(self.rng.choice((1, 4, 5, 3000))))
            )  # fmt: skip
            exchange(stack.enter_context(self._connect()), data, fds)

    def _garbage(self) -> None:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(SECONDS)
            connection.connect(self.daemon.socket)
            preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
            with suppress(OSError):
                connection.sendall(
                    self.rng.choice((b"GET / HTTP/1.1\r\n\r\n", preface, b""))
                    + self.rng.randbytes(self.rng.choice((1, 9, 500)))
                )

    @contextmanager
    def _shared(self, *kinds: str) -> Iterator[tuple[bytes, socket.socket]]:
        """An attach connection with descriptors of these kinds, and its token."""
        with ExitStack() as stack:
            fds = [stack.enter_context(shared_fd(kind)) for kind in kinds]
            connection = stack.enter_context(self._connect())
            hello = pb.Hello(protocol=PROTOCOL, num_fds=len(fds), client="hostile")
            welcome = exchange(connection, frame(hello.SerializeToString()), fds)
            assert welcome is not None, f"{self} a good Hello was not answered"
            self.tokens.append(welcome.token)
            yield welcome.token, connection

    @contextmanager
    def _attached(self) -> Iterator[tuple[int, bytes]]:
        """The session of a rank whose stream is open, and its token."""
        with self._shared("good") as (token, _):
            messages: SimpleQueue[bytes | None] = SimpleQueue()
            messages.put(pb.AttachRequest(register=self._register(token, 1)).SerializeToString())
            attach = self._channel.stream_stream(f"/{METHODS['Attach'].containing_service.full_name}/Attach")
            replies = attach(iter(messages.get, None), timeout=SECONDS)
            yield pb.AttachReply.FromString(next(replies)).registered.session, token
            messages.put(None)
            for _ in replies:
                pass

    @contextmanager
    def _connect(self) -> Iterator[socket.socket]:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(SECONDS)
            connection.connect(self.daemon.socket + ".attach")
            yield connection

    # -- requests that would be right ------------------------------------------------------------------------------

    def _good(self, name: str) -> Message:
        lease = self.rng.choice((0, 1, 2**48 - 1, 2**64 - 1))
        match name:
            case "Lookup":
                choose = self.rng.random() < 0.5
                wanted = self.rng.randbytes(self.rng.choice((0, 1, 9)))
                groups = [pb.LookupGroup(group=0, hashes=b"".join(hashes("a", "b")), wanted=wanted)]
                return pb.LookupRequest(
                    namespace=namespace_to_wire(NAMESPACE),
                    mode=pb.LookupRequest.MODE_BITMAP if choose else pb.LookupRequest.MODE_PREFIX,
                    groups=groups,
                    fetch_ms=self.rng.choice((0, 100)),
                    choose=choose,
                    fetch_tokens=self.rng.choice((0, 32, 1 << 31)),
                    lease_ms=self.rng.choice((0, 100)),
                    token=self.rng.choice((b"", *self.tokens[-2:])),
                )
            case "Release":
                return pb.ReleaseRequest(lease=lease)
            case "Renew":
                return pb.RenewRequest(lease=lease, lease_ms=100)
            case "Clear":
                return pb.ClearRequest(namespace=namespace_to_wire(NAMESPACE))
            case "Pin":
                groups = [pb.LookupGroup(group=0, hashes=b"".join(hashes("a", "b")))]
                namespace = namespace_to_wire(NAMESPACE)
                return pb.PinRequest(name=self.rng.choice("ab"), namespace=namespace, groups=groups, seconds=1)
            case "Unpin":
                return pb.UnpinRequest(name="a")
            case "CancelDrain":
                return pb.CancelDrainRequest()
            case _:
                return pb.StatusRequest()

    def _register(self, token: bytes, num_fds: int) -> pb.Register:
        return pb.Register(
            protocol=PROTOCOL,
            token=token,
            instance="hostile",
            namespace=namespace_to_wire(NAMESPACE),
            world_size=1,
            device="host",
            allocations=[pb.Allocation(fd_index=index, size=BUFFER_BYTES) for index in range(num_fds)],
            groups=[layout_to_wire(layout())],
        )

    def _jobs(self, job: int | None = None) -> list[pb.AttachRequest]:
        """One of each kind that may follow a registration, and a second registration."""
        job = self.rng.choice((0, 1, 2, 3, 2**64 - 1)) if job is None else job
        blocks = [pb.Blocks(group=0, hashes=b"".join(hashes("a", "b")), block_ids=pack_ids([0, 1]))]
        return [
            pb.AttachRequest(store=pb.Store(job=job, blocks=blocks)),
            pb.AttachRequest(load=pb.Load(job=job, blocks=blocks)),
            pb.AttachRequest(flush=pb.Flush(flush=job, jobs=[1, 2], timeout_ms=10)),
            pb.AttachRequest(register=self._register(b"", 1)),
        ]

    def _job_call(self, name: str, session: int, job: int | None = None) -> Message:
        store, load, *_ = self._jobs(job)
        if name == "Store":
            return pb.StoreRequest(session=session, store=store.store)
        return pb.LoadRequest(session=session, load=load.load)

    def __str__(self) -> str:
        return f"KVSIDECAR_HOSTILE_SEED={self.seed}, request {self.number}:"


def exchange(connection: socket.socket, data: bytes, fds: list[int]) -> pb.Welcome | None:
    """Send one frame; the Welcome, or None if the daemon gave none. Ends our direction if the frame is not complete."""
    with suppress(OSError):
        socket.send_fds(connection, [data], fds)
        complete = data == frame(data[HEADER_BYTES:])
        if not complete:
            connection.shutdown(socket.SHUT_WR)
        for payload in frames(connection):
            return pb.Welcome.FromString(payload)
    return None


@contextmanager
def shared_fd(kind: str) -> Iterator[int]:
    """A descriptor as a client may share it: a sealed memfd, or something else."""
    if kind == "pipe":
        fd, other = os.pipe()
        os.close(other)
    elif kind == "directory":
        fd = os.open("/", os.O_RDONLY)
    else:
        fd = os.memfd_create("hostile", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        if kind in ("sparse", "empty"):
            os.ftruncate(fd, 1 << 40 if kind == "sparse" else 0)
        else:
            os.posix_fallocate(fd, 0, BUFFER_BYTES)
        seals = {"unsealed": 0, "read-only": fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE}.get(kind, fcntl.F_SEAL_SHRINK)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    try:
        yield fd
    finally:
        os.close(fd)


KINDS = ("good", "good", "good", "good", "sparse", "empty", "unsealed", "read-only", "pipe", "directory")
