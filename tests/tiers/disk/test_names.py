"""What a disk's process knows of the namespaces of the shards that it finds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvsidecar.tiers.backend import namespace_digest
from kvsidecar.tiers.disk import backend as module
from kvsidecar.tiers.disk.backend import DiskBackend
from kvsidecar.tiers.disk.names import NAMES, KeptNames
from kvsidecar.types import Namespace
from tests.tiers.support import PAGE, read, space, there, write


def names(*models: str) -> list[Namespace]:
    return [space(model).namespace for model in models]


def digests(*models: str) -> set[str]:
    return {namespace_digest(each) for each in names(*models)}


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def kept(directory: int, path: Path, *asked: str, limit: int = 100) -> tuple[KeptNames, set[str]]:
    file = KeptNames(directory, path, limit)
    found = file.open(digests(*asked))
    assert all(namespace_digest(each) == digest for digest, each in found.items())
    return file, {each.model for each in found.values()}


def test_names_outlive_the_process_and_those_without_a_shard_go(directory: int, tmp_path: Path) -> None:
    file, found = kept(directory, tmp_path)
    assert not found
    for each in names("a", "b", "c", "a"):
        file.add(each, set)
    file.close()
    assert (tmp_path / NAMES).read_bytes().count(b"\n") == 3
    file, found = kept(directory, tmp_path, "a", "c", "unknown")
    assert found == {"a", "c"}
    assert (tmp_path / NAMES).read_bytes().count(b"\n") == 2
    file.close()
    assert os.listdir(tmp_path) == [NAMES]


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{",
        b"\0" * 5000,
        b"\xff\n[]\n5\n",
        b'{"model": 5}\n',
        b'{"model": ' + b"[" * 900 + b"]" * 900 + b"}",
        b"[" * 100_000 + b"\n",
    ],
)
def test_lines_that_are_damaged_are_skipped(directory: int, tmp_path: Path, damage: bytes) -> None:
    file, _ = kept(directory, tmp_path)
    file.add(names("a")[0], set)
    file.close()
    whole = (tmp_path / NAMES).read_bytes()
    (tmp_path / NAMES).write_bytes(damage + b"\n" + whole + damage)
    file, found = kept(directory, tmp_path, "a", "b")
    assert found == {"a"}
    file.close()


def test_a_file_that_another_user_could_have_written_is_not_read(directory: int, tmp_path: Path) -> None:
    file, _ = kept(directory, tmp_path)
    file.add(names("a")[0], set)
    file.close()
    (tmp_path / NAMES).chmod(0o644)
    file, found = kept(directory, tmp_path, "a")
    assert not found
    assert (tmp_path / NAMES).stat().st_mode & 0o777 == 0o600
    file.close()


def test_names_that_nobody_has_shards_of_do_not_pile_up(directory: int, tmp_path: Path) -> None:
    file, _ = kept(directory, tmp_path, limit=10)
    for number in range(100):
        file.add(names(f"m{number}")[0], lambda: digests("m0", "m1"))
        assert (tmp_path / NAMES).read_bytes().count(b"\n") <= 10
    file.close()
    assert kept(directory, tmp_path, "m0", "m1", "m99", "m50")[1] == {"m0", "m1", "m99"}


def test_a_directory_that_takes_no_file_costs_the_names_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvsidecar.tiers.disk.names.private_files.make_file", refused)
    gone = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    file = KeptNames(gone, tmp_path, 10)
    assert file.open(digests("a")) == {}
    file.add(names("a")[0], set)
    file.close()
    os.close(gone)


def test_reads_and_lookups_write_no_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SPACES", 4)
    backend = DiskBackend(tmp_path / "tier", 8 * PAGE, slab_bytes=4 * PAGE, lock_seconds=0)
    write(backend, space("a"), [1])
    for number in range(50):
        there(backend, space(f"m{number}"), [1])
        read(backend, space(f"m{number}"), [1])
    backend.close()
    assert (tmp_path / "tier" / NAMES).read_bytes().count(b"\n") == 1
