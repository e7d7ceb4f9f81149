"""Messages as JSON for people and jq: every field, under its own name, and numbers as numbers.

(protobuf's own JSON form writes 64-bit integers as strings.)
"""

from __future__ import annotations

from typing import Any

from google.protobuf.message import Message


def message_json(message: Message) -> dict[str, Any]:
    return {field.name: field_json(message, field) for field in message.DESCRIPTOR.fields}


def field_json(message: Message, field: Any) -> Any:
    value = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return dict(value)
    if field.is_repeated:
        return [message_json(each) if field.message_type else each for each in value]
    if field.has_presence and not message.HasField(field.name):
        return None
    if field.message_type is not None:
        return message_json(value)
    if field.enum_type is not None:
        # STATE_READY -> "ready", as /ready says it
        return field.enum_type.values_by_number[value].name.partition("_")[2].lower()
    return value
