"""What is packed on one side is unpacked on the other, and what does not fit is refused."""

from __future__ import annotations

import array

import numpy as np
import pytest

from kvsidecar.client.messages import LookupQuery
from kvsidecar.core.hashes import PackedHashes
from kvsidecar.errors import InvalidRequest
from kvsidecar.protocol.wire import pack_hashes, pack_ids
from kvsidecar.server.convert import bitmap_to, blocks_from, choice_from, ids_from
from kvsidecar.types import LookupMode
from kvsidecar.v1 import sidecar_pb2 as pb
from tests.harness import NAMESPACE, hashes


@pytest.mark.parametrize("count", [0, 1, 127, 128, 129, 1000])
@pytest.mark.parametrize("width", [16, 20, 32, 64])
def test_hashes_come_out_as_they_went_in(count: int, width: int) -> None:
    # Zeros at the end and at the start: numpy's own strings would cut them off.
    names = [i.to_bytes(4, "big") + bytes(width - 4) for i in range(count)]
    packed = PackedHashes(pack_hashes(names), width)
    assert len(packed) == count
    assert list(packed) == packed[:] == names
    assert all(type(each) is bytes for each in packed)
    assert [packed[i] for i in range(count)] == names


def test_hashes_that_are_packed_already_are_taken_as_they_are() -> None:
    packed = b"".join(hashes("a", "b"))
    assert pack_hashes(packed) is packed


def test_hashes_of_another_width_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="width 32"):
        PackedHashes(bytes(33), 32)


@pytest.mark.parametrize(
    "ids",
    [
        [],
        [0, 5, 2**40, -1],
        (7,),
        range(3),
        np.array([3, 1], np.int64),
        np.array([3, 1], np.int32),
        np.array([3, 1], np.uint8),
        np.arange(10)[::3],
        array.array("q", [9, 8]),
        array.array("i", [9, 8]),
    ],
    ids=str,
)
def test_ids_come_out_as_they_went_in(ids: object) -> None:
    packed = pack_ids(ids)  # type: ignore[arg-type]
    assert ids_from(packed).tolist() == [int(each) for each in ids]  # type: ignore[attr-defined]
    assert ids_from(packed).dtype == np.int64
    assert pack_ids(packed) is packed


@pytest.mark.parametrize("ids", [[2**63], [1.5], ["1"], np.array([1.5]), None, 5], ids=str)
def test_what_is_no_id_is_no_message(ids: object) -> None:
    with pytest.raises((TypeError, OverflowError)):
        pack_ids(ids)  # type: ignore[arg-type]


def test_ids_that_are_cut_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="9 bytes"):
        blocks_from([pb.Blocks(hashes=bytes(32), block_ids=bytes(9))], 32)


@pytest.mark.parametrize("count", [1, 7, 8, 9, 4096])
def test_a_bitmap_means_the_same_on_both_sides(count: int) -> None:
    found = [i % 3 == 0 for i in range(count)]
    reply = pb.LookupReply(groups=[pb.GroupHits(group=2, hits=sum(found), bitmap=bitmap_to(found))])
    query = LookupQuery(NAMESPACE, {2: bytes(32 * count)}, LookupMode.BITMAP)
    assert query.result(reply).groups[2].found == tuple(found)


def test_what_is_wanted_beyond_the_hashes_takes_no_memory() -> None:
    hashes, more = bytes(9 * 32), b"\xff" * (1 << 20)
    groups = [pb.LookupGroup(hashes=hashes, wanted=b"\x05\x01" + more), pb.LookupGroup(hashes=hashes), pb.LookupGroup()]
    choice = choice_from(pb.LookupRequest(groups=groups, fetch_tokens=7), 32)
    assert choice.wanted == [[1, 0, 1, 0, 0, 0, 0, 0, 1, *[0] * 7], [], []]
    assert choice.tokens == 7
