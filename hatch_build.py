"""Build hooks: what the metadata of the daemon's distribution takes from elsewhere, and its compiled kernels."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

REPOSITORY = "https://github.com/kvsidecar/kvsidecar"
KERNELS = "kvsidecar/cache/_kernels"
FLAGS = (
    "-std=c11",
    "-O3",
    "-g0",
    "-s",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Wno-unused-parameter",
)


class FromElsewhere(MetadataHookInterface):
    """Dependencies, with the other half of the package in this version; a README with whole links."""

    def update(self, metadata: dict[str, Any]) -> None:
        metadata["dependencies"] = [f"kvsidecar-client=={metadata['version']}", *self.config["dependencies"]]
        text = (Path(self.root) / "README.md").read_text()
        text = re.sub(r"\]\((?!https?:|#)", f"]({REPOSITORY}/blob/main/", text)
        text = re.sub(rf"(!\[[^\]]*\]\({REPOSITORY})/blob/", r"\1/raw/", text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def compile_kernels(root: Path, to: Path) -> None:
    """Compile the kernels of a checkout. Raises OSError or CalledProcessError where that cannot be done."""
    compiler = shlex.split(os.environ.get("KVSIDECAR_CC") or os.environ.get("CC") or "cc")
    if os.sep in compiler[0]:
        compiler[0] = os.path.abspath(compiler[0])
    headers = Path(sysconfig.get_path("include"))
    # Debian's pyconfig.h includes that of the processor, from a folder that only the system's own compiler looks into.
    own = headers.parent / str(sysconfig.get_config_var("MULTIARCH")) / headers.name / "pyconfig.h"
    with tempfile.TemporaryDirectory() as folder:
        if own.is_file():
            headers = Path(shutil.copytree(headers, Path(folder, "include")))
            shutil.copy(own, headers)
        command = [*compiler, *FLAGS, f"-I{headers}", "-o", str(to), str(root / f"{KERNELS}.c")]
        subprocess.run(command, check=True, capture_output=True, text=True)


class CompiledKernels(BuildHookInterface[Any]):
    """Compiles the kernels into the wheel, or beside their source for an editable installation.

    Without a C compiler or Python's headers the wheel has none, and the daemon uses numpy instead. Two variables of the
    environment serve `make package`: ``KVSIDECAR_CC``, the compiler's command, and ``KVSIDECAR_PLATFORM``, the platform
    in the wheel's name; where either is set, a wheel without the kernels is an error. ``KVSIDECAR_CC`` that is empty
    leaves them out.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        self._made: str | None = None
        if sys.platform != "linux" or os.environ.get("KVSIDECAR_CC") == "":
            return
        if version == "editable":
            self._compile(Path(self.root, f"{KERNELS}.abi3.so"))
            return
        self._made = tempfile.mkdtemp()
        made = Path(self._made, "_kernels.abi3.so")
        if self._compile(made):
            machine = os.environ.get("KVSIDECAR_PLATFORM") or re.sub("[-.]", "_", sysconfig.get_platform())
            build_data["pure_python"] = False
            build_data["tag"] = f"cp311-abi3-{machine}"
            build_data["force_include"][str(made)] = f"{KERNELS}.abi3.so"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self._made is not None:
            shutil.rmtree(self._made, ignore_errors=True)

    def _compile(self, to: Path) -> bool:
        """Whether there is a compiler that can."""
        asked = "KVSIDECAR_CC" in os.environ or "KVSIDECAR_PLATFORM" in os.environ
        try:
            compile_kernels(Path(self.root), to)
        except (OSError, subprocess.CalledProcessError) as error:
            said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
            if asked:
                self.app.display_error("\n".join(said))
                raise
            self.app.display_warning(f"The kernels were not compiled; the daemon will use numpy instead: {said[:1]}")
            return False
        return True
