"""Puts the newest vLLM into the environment whose Python runs this: its Python on the kernels of an older one for CPUs.

python newest.py WHEEL OLDER: `WHEEL` is vLLM's for GPUs, `OLDER` the folder that holds vLLM for CPUs.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
import zipfile
from pathlib import Path

WANTED = (".py", ".json", ".jinja", "/METADATA", "/entry_points.txt")
"""Ends of the names of the files that an engine on a CPU reads."""


def install(wheel: Path, older: Path, site: Path) -> None:
    version = wheel.name.split("-")[1]
    for each in site.glob("vllm-*.dist-info"):
        shutil.rmtree(each)
    shutil.rmtree(site / "vllm", ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site, [each for each in archive.namelist() if each.endswith(WANTED)])
    for kernels in (older / "vllm").glob("*.so"):
        os.link(kernels, site / "vllm" / kernels.name)
    # vLLM takes its platform from its version.
    found, named = site / f"vllm-{version}.dist-info", site / f"vllm-{version}+cpu.dist-info"
    found.rename(named)
    metadata = named / "METADATA"
    metadata.write_text(metadata.read_text().replace(f"\nVersion: {version}\n", f"\nVersion: {version}+cpu\n", 1))


if __name__ == "__main__":
    install(Path(sys.argv[1]), Path(sys.argv[2]), Path(sysconfig.get_path("purelib")))
