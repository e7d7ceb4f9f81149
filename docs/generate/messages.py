"""docs/messages.md, from the comments of proto/ and from the limits that the daemon's code has."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from google.protobuf import descriptor_pb2
from grpc_tools import protoc

from docs.generate.markdown import code, prose, table
from kvsidecar import errors, types
from kvsidecar.core import layout_checks, lookups, registration
from kvsidecar.core import sessions as instances
from kvsidecar.protocol import framing
from kvsidecar.server import (
    arrivals,
    attach_protocol,
    attach_socket,
    attach_stream,
    attachment,
    local_protocol,
    partial_messages,
    service,
    status_codes,
)
from kvsidecar.server import convert as translate
from kvsidecar.support import peer

ROOT = Path(__file__).parents[2]
PROTO = "kvsidecar/v1/sidecar.proto"

HEAD = f"""\
<!-- Made by `make docs` from proto/{PROTO} and the limits in kvsidecar/: change those. -->
# Messages of the wire

Every RPC, message and field of [sidecar.proto](../proto/{PROTO}), the limits that the daemon enforces on clients, and
the status codes it returns. [wire.md](wire.md) shows how they are used.
"""

STATUS = """\
A refused request ends with one of these codes and a text that says what to change. The text never names another
client's instance, address or handle. Errors of the daemon's start and of the client library are not listed.
"""

LIMITS = (
    (framing, "MAX_MESSAGE_BYTES"),
    (types, "HASH_BYTES_MIN"),
    (types, "HASH_BYTES_MAX"),
    (types, "MAX_TEXT_BYTES"),
    (layout_checks, "MAX_BLOCKS"),
    (layout_checks, "MAX_REGIONS"),
    (layout_checks, "MAX_ROWS"),
    (registration, "MAX_GROUPS"),
    (registration, "MAX_ALLOCATIONS"),
    (registration, "MAX_SHARDS"),
    (registration, "MAX_EVENTS"),
    (instances, "MAX_RANKS"),
    (instances, "MAX_RANK_GROUPS"),
    (translate, "MAX_PARTS"),
    (attach_stream, "MAX_JOBS"),
    (attach_stream, "MAX_OUTSTANDING_BLOCKS"),
    (attach_stream, "MAX_JOBS_OF_USER"),
    (attach_stream, "MAX_BLOCKS_OF_USER"),
    (attach_stream, "MAX_FLUSHES"),
    (attach_stream, "MAX_WAITS_OF_USER"),
    (lookups, "MAX_LOOKUP_BLOCKS"),
    (lookups, "MAX_LEASES"),
    (lookups, "MAX_LEASED_BLOCKS"),
    (service, "FIRST_MESSAGE_SECONDS"),
    (service, "MAX_UNREAD"),
    (attachment, "MAX_UNREAD_BYTES"),
    (arrivals, "MAX_CONNECTIONS"),
    (arrivals, "MAX_SHARED_FDS"),
    (attach_socket, "MAX_HELLO_BYTES"),
    (types, "MAX_DESCRIPTORS"),
    (peer, "MAX_FDS"),
    (attach_socket, "HELLO_SECONDS"),
    (partial_messages, "MAX_PARTIAL_BYTES"),
    (partial_messages, "MESSAGE_SECONDS"),
    (attach_protocol, "MAX_EARLY_BYTES"),
    (local_protocol, "LINGER_SECONDS"),
)
"""Module and name of each."""

WHAT = {
    "MAX_MESSAGE_BYTES": "bytes of one message, over gRPC and over the local protocol",
    "HASH_BYTES_MIN": "bytes of a block hash, at least",
    "HASH_BYTES_MAX": "bytes of a block hash, at most",
    "MAX_TEXT_BYTES": "bytes of each text that the daemon keeps: fields of a namespace, instance, device",
    "MAX_BLOCKS": "blocks of a group",
    "MAX_REGIONS": "regions of all groups of a rank",
    "MAX_ROWS": "rows of all regions of a rank",
    "MAX_SHARDS": "shards of a block",
    "MAX_EVENTS": "events of a ring",
    "MAX_GROUPS": "groups of a rank, and of a lookup",
    "MAX_PARTS": "parts of a job; a job with more is declined as `invalid_request`",
    "MAX_ALLOCATIONS": "allocations of a rank",
    "MAX_RANKS": "ranks of one user",
    "MAX_RANK_GROUPS": "groups of all ranks of one user",
    "MAX_JOBS": "unfinished jobs of a rank; one more is declined as `limit`",
    "MAX_OUTSTANDING_BLOCKS": "blocks in the unfinished jobs of a rank; a job that exceeds it is declined as `limit`",
    "MAX_JOBS_OF_USER": "unfinished jobs of all ranks of one user; one more is declined as `limit`",
    "MAX_BLOCKS_OF_USER": "blocks in these; a job that exceeds it is declined as `limit`",
    "MAX_WAITS_OF_USER": "jobs that pending flushes of one user wait for, once for each flush; as above",
    "MAX_FLUSHES": "pending flushes of a rank; one more is answered at once, with the jobs still pending",
    "MAX_LOOKUP_BLOCKS": "hashes of a lookup or a touch, all groups together; those behind them are misses",
    "MAX_LEASES": "leases of one user; a lookup beyond that gets no lease",
    "MAX_LEASED_BLOCKS": "blocks in the leases of one user, 32 at least for each lookup; beyond that there is no lease",
    "FIRST_MESSAGE_SECONDS": "seconds that an Attach stream may take to send its Register (gRPC)",
    "MAX_CONNECTIONS": "connections of one user to the attach socket",
    "MAX_SHARED_FDS": "descriptors handed over by one user and still open, also with Hellos whose end has not arrived",
    "MAX_UNREAD": "replies queued for a client that does not read its Attach stream, before the stream is ended (gRPC)",
    "MAX_HELLO_BYTES": "bytes of a Hello",
    "MAX_DESCRIPTORS": "file descriptors with a Hello",
    "MAX_FDS": "of them with one of its bytes",
    "HELLO_SECONDS": "seconds that a new attach-socket connection has to send its Hello",
    "MAX_PARTIAL_BYTES": "bytes of one user's incomplete messages (local protocol)",
    "MESSAGE_SECONDS": "seconds from the first byte of a message to its last (local protocol)",
    "MAX_EARLY_BYTES": "bytes of messages queued behind an unanswered registration (local protocol)",
    "MAX_UNREAD_BYTES": "bytes of replies queued for a client that does not read them, before its stream is ended",
    "LINGER_SECONDS": "seconds that a refused client has to read the error (local protocol)",
}

_KINDS = {
    kind: descriptor_pb2.FieldDescriptorProto.Type.Name(kind).removeprefix("TYPE_").lower()
    for kind in descriptor_pb2.FieldDescriptorProto.Type.values()
}
_Path = tuple[int, ...]


class Source:
    """The proto file with the comments of its source."""

    def __init__(self) -> None:
        with tempfile.TemporaryDirectory() as directory:
            out = Path(directory, "set")
            arguments = [f"-I{ROOT / 'proto'}", "--include_source_info", f"--descriptor_set_out={out}", PROTO]
            if protoc.main(["protoc", *arguments]):
                raise RuntimeError(f"{PROTO} does not compile")
            (self.file,) = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file
        self._comments = {
            tuple(place.path): f"{place.leading_comments}\n{place.trailing_comments}".strip()
            for place in self.file.source_code_info.location
        }

    def comment(self, *path: int) -> str:
        return prose(self._comments.get(path, ""))


def page() -> str:
    source = Source()
    parts = [HEAD, "## RPCs\n", _rpcs(source), "\n## Messages\n"]
    for index, message in enumerate(source.file.message_type):
        parts += _message(source, message, (4, index))
    parts += ["## Limits\n", _limits(), "\n## Status codes\n", STATUS, _codes()]
    return "\n".join(parts) + "\n"


def _rpcs(source: Source) -> str:
    (described,) = source.file.service
    return "\n".join(
        f"- **{method.name}**: {_link(method.input_type, stream=method.client_streaming)} to "
        f"{_link(method.output_type, stream=method.server_streaming)}. {source.comment(6, 0, 2, index)}"
        for index, method in enumerate(described.method)
    )


def _message(source: Source, message: descriptor_pb2.DescriptorProto, path: _Path) -> Iterator[str]:
    yield f"### {message.name}\n"
    if text := source.comment(*path):
        yield text + "\n"
    rows = []
    for index, field in enumerate(message.field):
        kind = _link(field.type_name) if field.type_name else _KINDS[field.type]
        if field.type_name.endswith("Entry"):
            kind = "map: string to uint64"
        elif field.label == field.LABEL_REPEATED:
            kind = f"repeated {kind}"
        elif field.proto3_optional:
            kind = f"optional {kind}"
        elif field.HasField("oneof_index"):
            kind += f" (one of `{message.oneof_decl[field.oneof_index].name}`)"
        rows.append((str(field.number), code(field.name), kind, source.comment(*path, 2, index)))
    yield table(("No", "Field", "Type", "Meaning"), rows) + "\n" if rows else "No fields.\n"
    for number, enum in enumerate(message.enum_type):
        values = [
            (str(value.number), code(value.name), source.comment(*path, 4, number, 2, index))
            for index, value in enumerate(enum.value)
        ]
        yield f"Values of `{enum.name}`:\n"
        yield table(("No", "Value", "Meaning"), values) + "\n"


def _link(type_name: str, *, stream: bool = False) -> str:
    name = type_name.removeprefix(".kvsidecar.v1.")
    owner = name.partition(".")[0]
    return f"{'stream of ' if stream else ''}[{name}](#{owner.lower()})"


def _limits() -> str:
    def row(module: object, name: str) -> Sequence[str]:
        value = getattr(module, name)
        return f"{value:,g}" if isinstance(value, float) else f"{value:,}", WHAT[name]

    return table(("Limit", "Applies to"), [row(module, name) for module, name in LIMITS])


def _codes() -> str:
    rows = [
        (code(grpc_code.name), code(error.__name__), prose(error.__doc__ or "").partition("\n")[0])
        for error, grpc_code in status_codes.CODES.items()
        if _reaches_clients(error)
    ]
    rows.append((code(status_codes.CODES[errors.KVSidecarError].name), "any other", "Unexpected error; see the log."))
    return table(("Code", "Error", "When"), rows)


def _reaches_clients(error: type[errors.KVSidecarError]) -> bool:
    bases = (errors.KVSidecarError, errors.DeviceError)
    start = (errors.ConfigError, errors.SocketInUse, errors.PoolRefused, errors.PinFailed, errors.PinStopped)
    return error not in bases and not issubclass(error, (*start, errors.ClientError))
