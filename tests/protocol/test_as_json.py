"""Messages as JSON for people: every field, and numbers as numbers."""

from __future__ import annotations

from kvsidecar.protocol.as_json import field_json, message_json
from kvsidecar.v1 import sidecar_pb2 as pb


def test_every_field_is_there_and_numbers_are_numbers() -> None:
    readiness = pb.Readiness(state=pb.Readiness.STATE_PINNING, pool_bytes=1 << 40, pinned_bytes=3)
    found = message_json(readiness)
    assert found.keys() == {field.name for field in pb.Readiness.DESCRIPTOR.fields}
    assert (found["state"], found["pool_bytes"], found["reason"]) == ("pinning", 1 << 40, "")


def test_a_field_that_is_not_set_is_null_where_that_means_something() -> None:
    assert message_json(pb.Readiness())["eta_seconds"] is None
    assert message_json(pb.Readiness(eta_seconds=0.0))["eta_seconds"] == 0.0


def test_maps_lists_and_messages_are_what_they_are() -> None:
    reply = pb.StatusReply(refusals={"pool_full": 2}, readiness=pb.Readiness(pool_bytes=1))
    reply.ranks.add(instance="vllm")
    fields = pb.StatusReply.DESCRIPTOR.fields_by_name
    assert field_json(reply, fields["refusals"]) == {"pool_full": 2}
    assert field_json(reply, fields["readiness"])["pool_bytes"] == 1
    assert [each["instance"] for each in field_json(reply, fields["ranks"])] == ["vllm"]
