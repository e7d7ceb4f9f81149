"""Weights are known by what is in their files."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvsidecar.integrations import digest_cache, weights
from kvsidecar.integrations.digest_cache import DigestCache
from kvsidecar.integrations.weights import digest_of, hub_snapshot
from tests.marks import processes

NO_CACHE = DigestCache(None)
SHAPES = {"embed": 300_000, "layer.0.q": 80_000, "layer.0.norm": 64, "layer.1.q": 80_000, "layer.1.norm": 64}
"""Values of 2 bytes."""


def safetensors(tensors: dict[str, np.ndarray]) -> bytes:
    header, data = {}, b""
    for name, values in tensors.items():
        header[name] = {"dtype": "F16", "shape": [len(values)], "data_offsets": [len(data), len(data) + values.nbytes]}
        data += values.tobytes()
    packed = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    return len(packed).to_bytes(8, "little") + packed + data


def tensors() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {name: random.integers(0, 65536, count).astype("<u2") for name, count in SHAPES.items()}


def save(directory: Path, of: dict[str, np.ndarray] | None = None) -> Path:
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(safetensors(of or tensors()))
    (directory / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "rope_theta": 10000.0}')
    return directory


def of(model: Path) -> str | None:
    return digest_of(model, NO_CACHE)


def test_a_copy_with_other_times_and_another_path_is_the_same(tmp_path: Path) -> None:
    one = save(tmp_path / "one")
    shutil.copytree(one, tmp_path / "other", copy_function=shutil.copyfile)
    for each in (tmp_path / "other").iterdir():
        os.utime(each, ns=(1, 1))
    assert of(tmp_path / "other") == of(one) != None  # noqa: E711 - of one type


@pytest.mark.parametrize("many", [4096, 3], ids=["few tensors", "many tensors"])
@pytest.mark.parametrize("name", SHAPES)
def test_an_adapter_that_is_merged_into_one_tensor_is_seen(
    tmp_path: Path, name: str, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It changes the low bits of most values, and neither sizes nor the header."""
    monkeypatch.setattr(weights, "MANY_TENSORS", many)
    merged = tensors()
    merged[name] = merged[name] ^ np.random.default_rng(1).integers(0, 4, len(merged[name])).astype("<u2")
    assert of(save(tmp_path / "merged", merged)) != of(save(tmp_path / "base"))


def test_a_training_step_that_changes_one_value_in_a_hundred_is_seen(tmp_path: Path) -> None:
    """As a small learning rate does: most updates are below what the type can hold."""
    stepped, random = tensors(), np.random.default_rng(1)
    for name, values in stepped.items():
        stepped[name] = values ^ (random.random(len(values)) < 0.01).astype("<u2")
    assert of(save(tmp_path / "stepped", stepped)) != of(save(tmp_path / "base"))


@pytest.mark.parametrize(
    "name", ["config.json", "hf_quant_config.json", "modeling.py", "more.safetensors", "other.dat"]
)
def test_every_file_that_may_decide_what_kv_is_counts(tmp_path: Path, name: str) -> None:
    one, other = save(tmp_path / "one"), save(tmp_path / "other")
    for directory, content in ((one, b"{}"), (other, b"{ }")):
        (directory / name).write_bytes(content)
    assert of(one) != of(other)
    (other / name).write_bytes(b"{}")
    assert of(one) == of(other)


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
        "README.md",
        ".gitattributes",
        "vocab.json",
    ],
)
def test_what_makes_no_kv_does_not_count(tmp_path: Path, name: str) -> None:
    one, other = save(tmp_path / "one"), save(tmp_path / "other")
    (other / name).write_text("here only")
    assert of(one) == of(other)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.gguf", "broken.safetensors"])
def test_other_formats_are_read_in_places_over_the_whole_file(tmp_path: Path, name: str) -> None:
    content = np.random.default_rng(0).integers(0, 256, 5 << 20).astype(np.uint8)
    content[:8] = 255  # no length of a header
    found = set()
    for number, place in enumerate((None, 0, 3 << 20, len(content) - 1)):
        changed = content.copy()
        if place is not None:
            changed[place : place + 100] ^= 1
        directory = tmp_path / str(number)
        directory.mkdir()
        (directory / name).write_bytes(changed.tobytes())
        found.add(of(directory))
    assert len(found) == 4
    assert None not in found


@pytest.mark.parametrize(
    "header",
    [b"no json", b"[]", b'{"a": 1}', b'{"a": {"data_offsets": [0, 999999999]}}', b'{"a": {"data_offsets": [5]}}'],
)
def test_a_header_that_is_none_is_read_as_another_format(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "model.safetensors"
    found = set()
    for rest in (b"one", b"two"):
        path.write_bytes(len(header).to_bytes(8, "little") + header + rest)
        found.add(of(tmp_path))
    assert len(found) == 2


def test_a_single_file_is_what_is_in_it(tmp_path: Path) -> None:
    one, other = save(tmp_path / "one"), save(tmp_path / "other")
    (other / "model.safetensors").rename(other / "renamed.safetensors")
    assert of(one / "model.safetensors") == of(other / "renamed.safetensors") != None  # noqa: E711


def test_a_directory_without_weights_has_no_digest(tmp_path: Path) -> None:
    """The engine streams them from elsewhere, or makes them up."""
    save(tmp_path / "one")
    (tmp_path / "one" / "model.safetensors").unlink()
    (tmp_path / "one" / "spiece.model").write_bytes(b"tokens")
    assert of(tmp_path / "one") is None


def test_a_file_that_is_written_to_meanwhile_is_no_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = save(tmp_path / "one")
    hashed = weights._digest_of_spans

    def write_as_well(fd: int, size: int, spans: object) -> str:
        found = hashed(fd, size, spans)  # type: ignore[arg-type]
        os.utime(one / "model.safetensors", ns=(1, 1))
        return found

    monkeypatch.setattr(weights, "_digest_of_spans", write_as_well)
    with pytest.raises(OSError, match="was written to"):
        of(one)


def test_a_directory_of_the_hubs_cache_is_its_name_and_commit(tmp_path: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    root = tmp_path / "hub" / "models--org--model-name"
    files = save(tmp_path / "blobs")
    (root / "snapshots").mkdir(parents=True)
    snapshot = root / "snapshots" / commit
    snapshot.mkdir()
    for each in files.iterdir():
        (snapshot / each.name).symlink_to(each)
    assert hub_snapshot(snapshot) == ("org/model-name", commit)
    assert hub_snapshot(str(snapshot) + "/") == ("org/model-name", commit)
    assert hub_snapshot(root / "snapshots" / "main") is None
    assert hub_snapshot("org/model-name") is None
    # Somebody has saved other weights there: they are no longer those of the commit.
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").write_bytes(b"mine")
    assert hub_snapshot(snapshot) is None


# -- the cache -----------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def clocked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever filesystem the temporary directory of this machine is on, its times are of its clock."""
    monkeypatch.setattr(digest_cache, "CLOCKED", digest_cache.CLOCKED | {"overlay"})


def cached(path: Path) -> DigestCache:
    return DigestCache(path, settled_seconds=0.0)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Weights that were read, not found in a cache."""
    seen: list[Path] = []
    places = weights._samples

    def note(fd: int, size: int, path: Path) -> object:
        seen.append(path)
        return places(fd, size, path)

    monkeypatch.setattr(weights, "_samples", note)
    return seen


def test_files_that_were_read_before_are_not_read_again(tmp_path: Path, reads: list[Path]) -> None:
    model, path = save(tmp_path / "model"), tmp_path / "cache" / "kvsidecar" / "weights.json"
    first = digest_of(model, cached(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert digest_of(model, cached(path)) == first
    assert len(reads) == 1
    assert list(path.parent.iterdir()) == [path]

    # Other bytes of the same size, and the old times: the inode tells.
    weights_file = model / "model.safetensors"
    before = weights_file.stat()
    changed = tensors()
    changed["embed"] ^= 1
    while weights_file.stat().st_ctime_ns == before.st_ctime_ns:  # until the clock of the files has moved
        weights_file.write_bytes(safetensors(changed))
        os.utime(weights_file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert digest_of(model, cached(path)) != first
    assert len(reads) == 2


def test_a_file_that_was_just_written_is_not_remembered(tmp_path: Path) -> None:
    """It may be written to again within the same tick of the clock that times files."""
    path = tmp_path / "weights.json"
    digest_of(save(tmp_path / "model"), DigestCache(path, settled_seconds=3600.0))
    assert not path.exists()


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"version": 0, "digests": {}}',
        '{"version": 1}',
        '{"version": 1, "digests": 5}',
        "torn in the mid",
    ],
)
def test_a_cache_that_cannot_be_read_is_made_anew(tmp_path: Path, reads: list[Path], content: str) -> None:
    model, path = save(tmp_path / "model"), tmp_path / "weights.json"
    path.write_text(content)
    path.chmod(0o600)
    first = digest_of(model, cached(path))
    assert digest_of(model, cached(path)) == first
    assert len(reads) == 1


@pytest.mark.parametrize("mode", [0o644, 0o660, 0o602])
def test_a_cache_that_others_may_have_written_is_not_used(
    tmp_path: Path, reads: list[Path], caplog: pytest.LogCaptureFixture, mode: int
) -> None:
    model, path = save(tmp_path / "model"), tmp_path / "weights.json"
    digest_of(model, cached(path))
    forged = path.read_text().replace('": "', '": "f', 1)
    path.write_text(forged)
    path.chmod(mode)
    assert digest_of(model, cached(path)) == of(model)
    assert "accessible to other users" in caplog.text
    assert stat.S_IMODE(path.stat().st_mode) == 0o600, "it was replaced"
    assert digest_of(model, cached(path)) == of(model)


def test_a_cache_of_another_user_or_behind_a_link_is_not_used(
    tmp_path: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, path = save(tmp_path / "model"), tmp_path / "weights.json"
    digest_of(model, cached(path))
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: os.getuid() + 1)
        digest_of(model, cached(path))
    assert len(reads) == 2
    link = tmp_path / "link.json"
    link.symlink_to(path)
    digest_of(model, cached(link))
    assert len(reads) == 3
    os.mkfifo(tmp_path / "pipe.json", 0o600)
    digest_of(model, cached(tmp_path / "pipe.json"))
    assert len(reads) == 4


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save(tmp_path / "model")
    (tmp_path / "file").write_text("")
    assert digest_of(model, cached(tmp_path / "file" / "weights.json")) == of(model)
    (tmp_path / "weights.json").mkdir()
    assert digest_of(model, cached(tmp_path / "weights.json")) == of(model)
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith(".weights")] == []
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", lambda: exec("raise RuntimeError('no home')"))
    assert digest_cache.default_path() is None
    assert digest_of(model) == of(model)


def test_ranks_that_write_the_cache_at_once_leave_a_whole_one(tmp_path: Path) -> None:
    models, path = [save(tmp_path / str(i)) for i in range(4)], tmp_path / "weights.json"
    wanted = {each: of(each) for each in models}
    wrong = []

    def run(first: int) -> None:
        for i in range(25):
            model = models[(first + i) % 4]
            if digest_of(model, cached(path)) != wanted[model]:
                wrong.append(model)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert wrong == []
    for model in models:
        digest_of(model, cached(path))
    assert len(json.loads(path.read_text())["digests"]) == 4


def test_the_cache_does_not_grow_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest_cache, "MAX_ENTRIES", 3)
    path = tmp_path / "weights.json"
    for i in range(5):
        digest_of(save(tmp_path / str(i)), cached(path))
    assert len(json.loads(path.read_text())["digests"]) == 3


def squashfs(directory: Path, image: Path) -> None:
    tool = shutil.which("mksquashfs") or pytest.skip("mksquashfs is not installed")
    subprocess.run([tool, directory, image, "-quiet", "-no-progress", "-all-time", "0", "-mkfs-time", "0"], check=True)


def read_only_ext4(directory: Path, image: Path) -> None:
    make, edit = (shutil.which(each) or pytest.skip(f"{each} is not installed") for each in ("mkfs.ext4", "debugfs"))
    with image.open("wb") as file:
        file.truncate(8 << 20)
    subprocess.run([make, "-q", "-d", directory, image], check=True)
    for field in ("ctime", "ctime_extra", "mtime_extra"):
        command = f"set_inode_field /model.safetensors {field} {'@0' if field == 'ctime' else 0}"
        subprocess.run([edit, "-w", "-R", command, image], check=True, capture_output=True)


class FixedTimes:
    """Stands for `os` in a module: every file looks like one of an image with the same inode and the same times."""

    def __init__(self, nanoseconds: int) -> None:
        self.nanoseconds = nanoseconds

    def __getattr__(self, name: str) -> object:
        return getattr(os, name)

    def fstat(self, fd: int) -> os.stat_result:
        found, ns = os.fstat(fd), self.nanoseconds
        whole = ns // 1_000_000_000
        times = {f"st_{each}_ns": ns for each in ("atime", "mtime", "ctime")}
        times.update({f"st_{each}": ns / 1e9 for each in ("atime", "mtime", "ctime")})
        return os.stat_result((found.st_mode, 7, 5, 1, 0, 0, found.st_size, whole, whole, whole), times)


MOUNTS = {
    "an image": "27 1 7:0 / / rw - squashfs /dev/loop0 ro,errors=continue",
    "a read-only filesystem": "27 1 7:0 / / ro - ext4 /dev/loop0 ro",
    "a program's filesystem": "27 1 0:40 / / rw - fuse.squashfuse squashfuse rw",
    "layers of images": "27 1 0:40 / / rw - overlay overlay rw,lowerdir=/a",
    "none that is known": "",
    "a disk": "27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard",
    "a read-only mount of a disk": "27 1 254:0 / / ro,relatime - ext4 /dev/vda rw,discard",
}


@pytest.mark.parametrize(
    ("mount", "nanoseconds", "kept"),
    [
        ("a disk", 1_764_000_000_636_001_034, True),
        ("a read-only mount of a disk", 1_764_000_000_636_001_034, True),
        ("a disk", 0, False),
        ("a disk", -1, False),
        ("a disk", 1_764_000_000_000_000_000, False),
        ("an image", 1_764_000_000_636_001_034, False),
        ("a read-only filesystem", 1_764_000_000_636_001_034, False),
        ("a program's filesystem", 1_764_000_000_636_001_034, False),
        ("layers of images", 1_764_000_000_636_001_034, False),
        ("none that is known", 1_764_000_000_636_001_034, False),
    ],
)
def test_files_whose_times_say_nothing_are_read_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mount: str, nanoseconds: int, kept: bool
) -> None:
    """Two models that are mounted one after the other, with equal sizes, have equal device, inode and times too."""
    other = tensors()
    other["embed"] ^= 1
    one, second = save(tmp_path / "one"), save(tmp_path / "second", other)
    monkeypatch.undo()  # the list of filesystems as it is
    monkeypatch.setattr(weights, "os", FixedTimes(nanoseconds))
    monkeypatch.setattr(weights, "mount_of", lambda fd: MOUNTS[mount])
    path = tmp_path / "weights.json"
    digests = [digest_of(each, cached(path)) for each in (one, second)]
    assert (digests[0] == digests[1]) is kept
    assert path.exists() is kept


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
@pytest.mark.parametrize("make", [squashfs, read_only_ext4])
@processes
def test_images_that_are_mounted_one_after_the_other_are_told_apart(
    tmp_path: Path, make: Callable[[Path, Path], None]
) -> None:
    place, path, found = tmp_path / "models", tmp_path / "weights.json", []
    place.mkdir()
    for name, change in (("one", 0), ("other", 1)):
        changed = tensors()
        changed["embed"] ^= change
        model = save(tmp_path / name, changed)
        for each in model.iterdir():
            os.utime(each, ns=(0, 0))
        make(model, tmp_path / f"{name}.img")
        mounted = subprocess.run(["mount", "-o", "loop,ro", tmp_path / f"{name}.img", place], capture_output=True)
        if mounted.returncode:
            pytest.skip(f"images cannot be mounted here: {mounted.stderr.decode()}")
        try:
            found.append(((place / "model.safetensors").stat(), digest_of(place, cached(path))))
        finally:
            subprocess.run(["umount", place], check=True)
    (first, one_digest), (second, other_digest) = found
    assert digest_cache._key(first) == digest_cache._key(second), "nothing but the content differs"
    assert one_digest != other_digest
    assert one_digest == of(tmp_path / "one")
