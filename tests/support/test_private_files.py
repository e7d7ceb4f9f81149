from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvsidecar.support.private_files import takes_none


def test_a_directory_that_takes_files_has_no_problem(tmp_path: Path) -> None:
    assert takes_none(tmp_path) == takes_none(Path("/dev/shm")) == ""
    assert list(tmp_path.iterdir()) == []


def test_why_a_directory_takes_none_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    assert takes_none(tmp_path / "file") == "is not a directory"
    assert takes_none(tmp_path / "none") == "does not exist"
    assert takes_none(Path("/proc")) == "is on a file system that holds no files", "also for root, who may write there"
    monkeypatch.setattr(os, "access", lambda path, mode, **_: not mode & os.W_OK)
    assert takes_none(tmp_path) == "may not be written to"


def test_a_file_system_that_is_mounted_read_only_takes_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = list(os.statvfs(tmp_path))
    found[8] |= os.ST_RDONLY  # f_flag
    monkeypatch.setattr(os, "fstatvfs", lambda fd: os.statvfs_result(found))
    assert takes_none(tmp_path) == "is on a file system that is mounted read-only"


def test_a_file_system_in_memory_without_a_limit_has_no_blocks_and_takes_files(monkeypatch: pytest.MonkeyPatch) -> None:
    found = list(os.statvfs("/dev/shm"))
    found[2] = 0  # f_blocks
    monkeypatch.setattr(os, "fstatvfs", lambda fd: os.statvfs_result(found))
    assert takes_none(Path("/dev/shm")) == ""
