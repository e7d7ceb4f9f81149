"""Makes a bundle of an engine for a GPU machine that has Python 3.12 and torch but no network.

    python -m benchmarks.bundles.make vllm --out .bundle-vllm

The folder then holds parts of an archive, their checksums, `join.sh`, and the scripts of the bundle. The wheels come
from pip's package index. Extensions keep the kernels of one GPU architecture (`fatbins`).
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import lzma
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.bundles import fatbins

HERE = Path(__file__).parent
PYTHON = "3.12"
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 24, 17, 12, 5)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]
ARCHITECTURE = 90
PART = 60 * 10**6
"""Bytes of a part of the archive."""
PRESET = 4
"""Of xz: 9 makes the archive of vLLM a tenth smaller, and takes several times as long."""


WHOLE = fatbins.for_architecture(ARCHITECTURE)


def no_ptx(entries: list[fatbins.Entry]) -> list[fatbins.Entry]:
    return [each for each in WHOLE(entries) if not each.ptx]


def bfloat16(entries: list[fatbins.Entry]) -> list[fatbins.Entry]:
    """Without the attention of other types, by the names of CUTLASS's types in its kernels'. What combines the parts of
    a split sequence has those of all types in one entry."""
    others = (b"float_e4m3", b"half_t")
    return [
        each
        for each in WHOLE(entries)
        if b"FlashAttnFwdCombine" in each.data or not any(other in each.data for other in others)
    ]


@dataclass(frozen=True)
class Wheel:
    """A package whose extensions are slimmed; those that are not listed are left out."""

    requirement: str
    libraries: dict[str, fatbins.Choose] = field(default_factory=dict)


@dataclass(frozen=True)
class Recipe:
    wheels: tuple[Wheel, ...]
    requirements: str
    """File beside this one: what is installed as it is."""
    script: str
    """File beside this one that checks the bundle, and travels with the archive."""
    stand_ins: Path | None = None
    """Folder of packages that replace what is too large and not needed."""


RECIPES = {
    # Without FlashAttention 2, FlashAttention 3 for other types than bfloat16, and the kernels of quantized experts,
    # which are compiled from PTX.
    "vllm": Recipe(
        wheels=(
            Wheel(
                "vllm==0.33.0",
                {
                    "vllm/_C_stable_libtorch.abi3.so": WHOLE,
                    "vllm/_moe_C_stable_libtorch.abi3.so": no_ptx,
                    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so": bfloat16,
                    "vllm/cumem_allocator.abi3.so": WHOLE,
                    "vllm/fs_io_C.abi3.so": WHOLE,
                    "vllm/spinloop.abi3.so": WHOLE,
                },
            ),
        ),
        requirements="vllm.txt",
        script="check_vllm.py",
    ),
    # Its extension, sglang-kernel 0.4.10, needs torch 2.14: 2.11 lacks, among others, the `torch::Library::_def` and
    # `c10::cuda::c10_cuda_check_implementation` that it calls. So SGLang computes with torch and Triton.
    "sglang": Recipe(
        wheels=(
            Wheel(
                "sglang==0.5.23",
                {
                    f"sglang/srt/{name}.cpython-312-x86_64-linux-gnu.so": WHOLE
                    for name in (
                        "rust_extensions/_grpc",
                        "rust_extensions/_multimodal",
                        "rust_extensions/_server",
                    )
                },
            ),
        ),
        requirements="sglang.txt",
        script="check_sglang.py",
        stand_ins=HERE / "stand_ins",
    ),
}

LEFT_OUT = [
    "*/__pycache__/*",
    "bin/*",
    "mistral_common/data/*",
    "pycountry/locales/*",
    "vllm/vllm-rs",  # a server
    "vllm/third_party/deep_gemm/include/*",
    "vllm/third_party/fmha_sm100/cutlass/*",
]


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments], check=True)


def for_target() -> list[str]:
    """Options of pip for the other machine's Python."""
    chosen = ["--no-deps", "--only-binary", ":all:", "--python-version", PYTHON, "--implementation", "cp"]
    for platform in PLATFORMS:
        chosen += ["--platform", platform]
    return chosen


def unpack(wheel: Wheel, site: Path, cache: Path) -> None:
    """The wheel's files into `site`, its extensions slimmed."""
    pip("download", *for_target(), "--dest", str(cache), wheel.requirement)
    name = wheel.requirement.partition("==")[0].replace("-", "_")
    (path,) = cache.glob(f"{name}-*.whl")
    missing = set(wheel.libraries)
    with zipfile.ZipFile(path) as archive:
        for member in archive.namelist():
            if ".so" not in Path(member).suffixes:
                archive.extract(member, site)
            elif member in wheel.libraries:
                library = bytearray(archive.read(member))
                blanked = fatbins.slim(library, wheel.libraries[member])
                target = site / member
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(library)
                missing.discard(member)
                print(f"{member}: {blanked / 1e6:.0f} of {len(library) / 1e6:.0f} MB blanked", flush=True)
    if missing:
        raise SystemExit(f"{path.name} has no {sorted(missing)}")


def pack(site: Path, out: Path) -> list[Path]:
    """The archive's parts."""
    files = [each for each in sorted(site.rglob("*")) if each.is_file()]
    kept = [
        each
        for each in files
        if not any(fnmatch.fnmatch(each.relative_to(site).as_posix(), pattern) for pattern in LEFT_OUT)
    ]
    whole = out / "bundle.tar.xz"
    with lzma.open(whole, "wb", preset=PRESET) as compressed, tarfile.open(fileobj=compressed, mode="w|") as archive:
        for each in kept:
            archive.add(each, f"site/{each.relative_to(site)}", filter=_of_nobody)
    parts = []
    with whole.open("rb") as source:
        while data := source.read(PART):
            part = out / f"bundle.tar.xz.{len(parts):02d}"
            part.write_bytes(data)
            parts.append(part)
    whole.unlink()
    return parts


def _of_nobody(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member


def make(recipe: Recipe, out: Path) -> None:
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        site, cache = Path(scratch, "site"), Path(scratch, "wheels")
        pip("install", *for_target(), "--no-compile", "--target", str(site), "-r", str(HERE / recipe.requirements))
        for wheel in recipe.wheels:
            unpack(wheel, site, cache)
        if recipe.stand_ins is not None:
            shutil.copytree(recipe.stand_ins, site, dirs_exist_ok=True)
        parts = pack(site, out)
    lines = [f"{hashlib.sha256(part.read_bytes()).hexdigest()}  {part.name}\n" for part in parts]
    (out / "SHA256SUMS").write_text("".join(lines))
    for script in ("join.sh", "steps.py", recipe.script):
        shutil.copy(HERE / script, out / script)
    size = sum(part.stat().st_size for part in parts)
    print(f"{out}: {size / 1e6:.1f} MB in {len(parts)} parts")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipe", choices=RECIPES)
    parser.add_argument("--out", type=Path, required=True, help="folder to make; what it holds is deleted")
    options = parser.parse_args()
    make(RECIPES[options.recipe], options.out)
