"""Finds the blocks an operator means: the namespace and hashes in the arguments of `kvsidecar clear` and `pin`."""

from __future__ import annotations

from typing import TextIO

from kvsidecar.cli.status_figures import namespace_names
from kvsidecar.client import Namespace
from kvsidecar.protocol.wire import namespace_from_wire
from kvsidecar.support.units import count, format_size
from kvsidecar.v1 import sidecar_pb2 as pb

LISTED = 20
"""Maximum number of namespaces in an error message."""


def find_namespace(wanted: str, reply: pb.StatusReply) -> Namespace | str:
    """The namespace that the operator means, or an error message if there is not exactly one.

    Args:
        wanted: the model as `kvsidecar status` shows it, the name of its weights, or the full text if several
            namespaces have that model.
    """
    names = namespace_names(reply.namespaces)
    known = [namespace_from_wire(each.namespace) for each in reply.namespaces]
    found = [each for each in known if str(each) == wanted] or [
        each
        for each, name, status in zip(known, names, reply.namespaces, strict=True)
        if wanted in (each.model, name, status.served_name)
    ]
    if len(found) == 1:
        return found[0]
    if found:
        listed = _some([f"  --namespace {str(each)!r}" for each in found], "\n")
        return f"several namespaces have the model {wanted!r}; choose one:\n{listed}"
    models = _some([repr(name) for name in dict.fromkeys(names)], ", ")
    return f"no namespace has the model {wanted!r}; " + (
        f"known models: {models}" if models else "there are no namespaces"
    )


def _some(texts: list[str], separator: str) -> str:
    more = [f"and {len(texts) - LISTED} more: kvsidecar status --json lists all"] if len(texts) > LISTED else []
    return separator.join(texts[:LISTED] + more)


def clear_question(reply: pb.StatusReply) -> str:
    totals = reply.totals
    return (
        f"Clear all {count(totals.blocks, 'block')} ({format_size(totals.bytes)}) in "
        f"{count(totals.namespaces, 'namespace')}? Engines will recompute them."
    )


def read_hashes(file: TextIO) -> list[bytes] | str:
    """The block hashes in a file, one a line in hexadecimal; or an error message."""
    hashes = []
    for number, line in enumerate(file, 1):
        try:
            hashes += [bytes.fromhex(line)] if line.strip() else []
        except ValueError:
            return f"line {number} is not a hash in hexadecimal"
    if len({len(each) for each in hashes}) > 1:
        return "the hashes have different lengths"
    return hashes or "there are no hashes"
