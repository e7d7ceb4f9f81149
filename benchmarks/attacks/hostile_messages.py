"""Hostile protobuf messages, built from their descriptors: every field of every request, with every bad value."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, cast

from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message

from kvsidecar.v1 import sidecar_pb2 as pb

METHODS: dict[str, MethodDescriptor] = dict(pb.DESCRIPTOR.services_by_name["Sidecar"].methods_by_name)

_RANGES = {
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (-(2**31), 2**31 - 1),
}
_NUMBERS = (0, 1, 2, 3, 7, 8, 255, 4095, 4096, 65536, 2**20, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**62,
            2**63 - 1, 2**63, 2**64 - 1, -1, -2, -(2**31), -(2**63))  # fmt: skip
_TEXTS = (
    "",
    "host",
    "x",
    "GPU-0",
    "\0",
    "a\nlevel=error",
    "../../etc/passwd",
    "%s%n{}",
    "\u202e\U0001f4a3",
    "é" * 500,
    "y" * 70_000,
)
_LENGTHS = (0, 1, 15, 16, 31, 32, 33, 63, 64, 65, 32 * 50, 100_000)

UNKNOWN_FIELD = b"\xfa\x3e\x03abc"
"""Field 1007, three bytes."""


def request_types() -> Iterator[Any]:
    """Every message type that a client may send, those inside others too."""
    return _with_inner(
        [method.input_type for method in METHODS.values()] + [pb.Hello.DESCRIPTOR, pb.LocalRequest.DESCRIPTOR]
    )


def reply_types() -> Iterator[Any]:
    """Every message type that the daemon may send, those inside others too."""
    return _with_inner(
        [method.output_type for method in METHODS.values()] + [pb.Welcome.DESCRIPTOR, pb.LocalReply.DESCRIPTOR]
    )


def _with_inner(todo: list[Any]) -> Iterator[Any]:
    seen: set[str] = set()
    while todo:
        descriptor = todo.pop()
        if descriptor.full_name not in seen:
            seen.add(descriptor.full_name)
            yield descriptor
            todo += [field.message_type for field in descriptor.fields if field.message_type is not None]


class Generator:
    """Makes messages bad.

    Args:
        touched: (message, field) names are put here when a field gets a hostile value.
        good_bytes: tokens and hashes that are right somewhere, to be used where they are wrong.
    """

    def __init__(
        self, rng: random.Random, touched: set[tuple[str, str]], good_bytes: Callable[[], list[bytes]]
    ) -> None:
        self.rng = rng
        self._touched = touched
        self._good_bytes = good_bytes

    def random(self, message: Message, depth: int = 0) -> None:
        """Set some fields of an empty message to anything."""
        for field in cast(Any, message.DESCRIPTOR.fields):
            if self.rng.random() < 0.6:
                self._set(message, field, depth)

    def spoil(self, message: Message) -> None:
        """Change one to three places of a message that is right."""
        for _ in range(self.rng.choice((1, 1, 1, 2, 3))):
            place = self.rng.choice(list(_messages(message)))
            if place.DESCRIPTOR.fields:
                self._set(place, self.rng.choice(cast(Any, place.DESCRIPTOR.fields)), 2)

    def mangle(self, data: bytes) -> bytes:
        """The bytes on the wire, mostly as they are."""
        choice = self.rng.random()
        if choice < 0.6 or not data:
            return data
        if choice < 0.7:
            return data + UNKNOWN_FIELD
        if choice < 0.8:
            return data[: self.rng.randrange(len(data))]
        place = self.rng.randrange(len(data))
        if choice < 0.9:
            return data[:place] + bytes([self.rng.randrange(256)]) + data[place + 1 :]
        # Bytes that are no UTF-8, also where a string should be.
        return data[:place] + b"\xff\xfe\xc0" + data[place + 3 :]

    def _set(self, message: Message, field: FieldDescriptor, depth: int) -> None:
        self._touched.add((message.DESCRIPTOR.name, field.name))
        if not field.is_repeated:
            if field.message_type is not None:
                inner = getattr(message, field.name)
                inner.SetInParent()
                self.random(inner, depth + 1)
            elif self.rng.random() < 0.1:
                message.ClearField(field.name)
            else:
                setattr(message, field.name, self._value(field))
            return
        values = getattr(message, field.name)
        if self.rng.random() < 0.5:
            del values[:]
        if field.message_type is None:
            value = self._value(field)
            values.extend([value] * self.rng.choice((1, 2, 3, 300, 20_000 if not isinstance(value, bytes) else 1)))
            return
        for _ in range(self.rng.choice((0, 1, 2, 3, 200 if depth < 2 else 4))):
            if len(values) and self.rng.random() < 0.5:
                values.add().CopyFrom(values[0])  # twice the same
            elif depth < 4:
                self.random(values.add(), depth + 1)

    def _value(self, field: FieldDescriptor) -> Any:
        match field.cpp_type:
            case FieldDescriptor.CPPTYPE_BOOL:
                return self.rng.random() < 0.5
            case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
                return self.rng.choice((0.0, -1.0, float("nan"), float("inf"), 1e308))
            case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_STRING:
                return self.rng.choice(_TEXTS)
            case FieldDescriptor.CPPTYPE_STRING:
                good = self._good_bytes()
                if good and self.rng.random() < 0.5:
                    return self.rng.choice(good) * self.rng.choice((1, 1, 2, 1000))
                return self.rng.randbytes(self.rng.choice(_LENGTHS))
            case cpp_type:
                low, high = _RANGES[cpp_type]
                numbers = [number for number in _NUMBERS if low <= number <= high]
                return self.rng.choice((*numbers, self.rng.randint(low, high)))


def extremes(good: Any) -> Iterator[Any]:
    """The message with one of its values changed, for every value in it and every extreme of that."""
    for index, place in enumerate(_messages(good)):
        for field in place.DESCRIPTOR.fields:
            for value in _extremes(field):
                bad = type(good)()
                bad.CopyFrom(good)
                inner: Any = list(_messages(bad))[index]
                if field.is_repeated:
                    getattr(inner, field.name).append(value)
                else:
                    setattr(inner, field.name, value)
                yield bad


def _extremes(field: Any) -> Iterator[Any]:
    if field.cpp_type in _RANGES:
        low, high = _RANGES[field.cpp_type]
        yield from (number for number in _NUMBERS if low <= number <= high)
    elif field.type == FieldDescriptor.TYPE_STRING:
        yield from _TEXTS
    elif field.type == FieldDescriptor.TYPE_BYTES:
        yield from (bytes(length) for length in _LENGTHS)


def _messages(message: Message) -> Iterator[Message]:
    """The message and all that are in it."""
    yield message
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        for inner in value if field.is_repeated else (value,):
            yield from _messages(inner)
