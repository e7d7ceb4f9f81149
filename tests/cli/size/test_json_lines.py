"""Lines of files, plain and compressed."""

from __future__ import annotations

import gzip
import lzma
from pathlib import Path

import pytest

from kvsidecar.cli.size.json_lines import BadFile, read_text

TEXT = b"first\n\nsecond\n"


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.log", TEXT), ("a.log.gz", gzip.compress(TEXT, mtime=0)), ("a.log.xz", lzma.compress(TEXT))],
)
def test_lines_are_read_from_whatever_holds_them(name: str, content: bytes, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    assert [(line.number, line.text) for line in read_text(file)] == [(1, "first"), (3, "second")]
    file.write_bytes(b"")
    with pytest.raises(BadFile):
        list(read_text(file))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("no.gz", TEXT),
        ("no.xz", TEXT),
        ("cut.gz", gzip.compress(TEXT * 999, mtime=0)[:-9]),
        ("damaged.gz", gzip.compress(TEXT, mtime=0)[:12] + b"\xff" * 20),
        ("bytes.log", b"\xff\xfe"),
    ],
)
def test_a_damaged_file_is_refused_by_its_name(name: str, content: bytes, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(BadFile) as refused:
        list(read_text(file))
    assert str(file) in str(refused.value)
