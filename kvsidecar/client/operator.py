"""The operator calls: status, clear, pin, drain."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Self

import grpc

from kvsidecar.errors import ClientError, DaemonUnreachable, RequestDenied
from kvsidecar.protocol.wire import namespace_to_wire, pack_hashes
from kvsidecar.types import Namespace
from kvsidecar.v1 import sidecar_pb2 as pb


class OperatorCalls(ABC):
    """The operator calls of every client, and its closing.

    Each call raises DaemonUnreachable if no daemon answers, and RequestDenied if this user may not make it: only admins
    may, or the namespace is another user's.
    """

    def status(self, *, everything: bool = False) -> pb.StatusReply:
        """The state of the daemon. A user who is not an admin sees only their own part (``partial``).

        Args:
            everything: list all namespaces and ranks, with as many requests as needed. By default the reply lists as
                many as fit into one message; its `totals` count all.
        """
        request = pb.StatusRequest(page=pb.StatusPage()) if everything else pb.StatusRequest()
        reply: pb.StatusReply = self._call("Status", request)
        page = reply
        while page.more:
            if page.namespaces:
                request.page.after_namespace.CopyFrom(page.namespaces[-1].namespace)
            if page.ranks:
                request.page.after_session = page.ranks[-1].session
            page = self._call("Status", request)
            reply.namespaces.extend(page.namespaces)
            reply.ranks.extend(page.ranks)
        reply.more = False
        return reply

    def clear(
        self,
        namespace: Namespace | None = None,
        *,
        share: str | None = None,
        groups: Mapping[int, bytes | Sequence[bytes]] | None = None,
        unused_seconds: int = 0,
    ) -> int:
        """Discard the blocks of one namespace, of a share, or all. Returns how many were discarded.

        Args:
            groups: only blocks with these hashes, by group.
            unused_seconds: only blocks that nobody has used for this long, or since the daemon started; 0: all.
        """
        request = pb.ClearRequest(unused_seconds=unused_seconds, share=share or "")
        if namespace is not None:
            request.namespace.CopyFrom(namespace_to_wire(namespace))
        else:
            request.all = share is None
        _add_groups(request, groups or {})
        reply: pb.ClearReply = self._call("Clear", request)
        return reply.blocks

    def pin(
        self, name: str, namespace: Namespace, groups: Mapping[int, bytes | Sequence[bytes]], seconds: float
    ) -> tuple[int, int]:
        """Keep the readable ones of these blocks in the pool. Returns their number and their bytes.

        Args:
            groups: block hashes by group; joined in one `bytes`, or as a sequence.
        """
        request = pb.PinRequest(name=name, namespace=namespace_to_wire(namespace), seconds=math.ceil(seconds))
        _add_groups(request, groups)
        reply: pb.PinReply = self._call("Pin", request)
        return reply.blocks, reply.bytes

    def unpin(self, name: str) -> bool:
        """End a pin. False if there is none."""
        reply: pb.UnpinReply = self._call("Unpin", pb.UnpinRequest(name=name))
        return reply.unpinned

    def drain(self) -> None:
        """Tell the daemon to accept no new work."""
        self._call("Drain", pb.DrainRequest())

    def cancel_drain(self) -> bool:
        """Undo `drain`. False if the daemon was not draining, or is shutting down."""
        reply: pb.CancelDrainReply = self._call("CancelDrain", pb.CancelDrainRequest())
        return reply.cancelled

    @abstractmethod
    def _call(self, method: str, request: object) -> Any:
        """Make an RPC. Returns its reply."""

    @abstractmethod
    def close(self, timeout: float | None = None) -> bool:
        """Close the connections. Returns whether the daemon holds nothing of this client any more."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _add_groups(request: pb.ClearRequest | pb.PinRequest, groups: Mapping[int, bytes | Sequence[bytes]]) -> None:
    for group, hashes in groups.items():
        request.groups.add(group=group, hashes=pack_hashes(hashes))


def operator_error(error: grpc.RpcError, where: str) -> ClientError:
    """The error to raise for a refused or unanswered call."""
    text = error.details() or error.code().name
    match error.code():
        case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.DEADLINE_EXCEEDED | grpc.StatusCode.CANCELLED:
            return DaemonUnreachable(f"no kvsidecar answers at {where}: {text}")
        case grpc.StatusCode.PERMISSION_DENIED | grpc.StatusCode.UNAUTHENTICATED:
            return RequestDenied(text)
        case grpc.StatusCode.UNIMPLEMENTED:
            return ClientError(
                f"the daemon at {where} runs a different release and lacks this call ({text}): upgrade it"
            )
        case _:
            return ClientError(text)
