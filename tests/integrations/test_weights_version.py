from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvsidecar.integrations import weights_version
from kvsidecar.integrations.weights_version import MAX_NAME_BYTES, WeightsVersion, read_name

HASHES = bytes(range(96))


def keys(name: str | None = None, *, start: str | None = None, width: int = 32) -> bytes:
    made = WeightsVersion(width, start)
    if name is not None:
        assert made.advance(name)
    return made.keys(HASHES)


def test_engines_as_they_were_started_have_their_hashes_for_keys() -> None:
    assert keys() == HASHES
    assert WeightsVersion(32).unmasked
    assert not WeightsVersion(32, "name").unmasked


@pytest.mark.parametrize("width", [16, 32, 48])
def test_keys_are_those_of_the_name_in_every_process_and_as_wide_as_hashes(width: int) -> None:
    named = keys("step 1", width=width)
    assert named == keys("step 1", width=width) == keys(start="step 1", width=width)
    assert len({named, keys("step 2", width=width), HASHES}) == 3
    found = [named[i : i + width] for i in range(0, 96, width)]
    assert len(set(found)) == 96 // width
    made = WeightsVersion(width, "step 1")
    assert [made.keys(HASHES[i : i + width]) for i in range(0, 96, width)] == found
    assert made.keys(named) == HASHES
    assert made.keys(b"") == b""


def test_keys_are_the_same_in_every_version() -> None:
    """Engines of two versions share a daemon during an update, and what they call equal must be."""
    assert keys("step 1")[:8].hex() == "76af418223c99ea8"


def test_without_a_name_every_reset_of_every_engine_is_another_generation() -> None:
    one, other = WeightsVersion(32), WeightsVersion(32)
    seen = {HASHES}
    for made in (one, other, one, other):
        assert not made.advance()
        seen.add(made.keys(HASHES))
    assert len(seen) == 5


def test_a_name_that_only_looks_like_a_random_one_is_another() -> None:
    made = WeightsVersion(32, token=lambda: "chosen")
    assert not made.advance()
    assert made.keys(HASHES) != keys("chosen")


@pytest.mark.parametrize("before", ["at the start", "given before", "step 1", "step 2"])
def test_a_name_that_the_engine_had_before_counts_as_none(before: str) -> None:
    made = WeightsVersion(32, "at the start", used=["given before"])
    assert made.advance("step 1")
    assert made.advance("step 2")
    was = made.keys(HASHES)
    assert not made.advance(before)
    assert made.keys(HASHES) not in (was, keys(before), keys("at the start"))
    assert not made.advance(before), "it does not become new by being refused"


def test_the_names_that_are_remembered_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_version, "REMEMBERED_NAMES", 3)
    made = WeightsVersion(32)
    for i in range(10):
        assert made.advance(f"step {i}")
    assert len(made._used) == 3
    assert not made.advance("step 9")


def test_a_name_is_read_without_the_white_space_around_it(tmp_path: Path) -> None:
    path = tmp_path / "name"
    assert read_name(None) is None
    assert read_name(str(path)) is None
    path.write_text(" \n")
    assert read_name(str(path)) is None
    os.mkfifo(tmp_path / "pipe")
    assert read_name(str(tmp_path / "pipe")) is None
    path.write_text("run 7/step 12\n")
    assert read_name(str(path)) == "run 7/step 12"


def test_a_file_that_has_no_name_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "name"
    path.write_bytes(b"x" * (MAX_NAME_BYTES + 1))
    assert read_name(str(path)) is None
    path.write_bytes(b"\xff")
    assert read_name(str(path)) is None
    assert read_name(str(tmp_path)) is None
    assert len(caplog.records) == 3
