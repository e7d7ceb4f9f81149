"""What to install for an extra of the distribution `kvsidecar`.

Errors name the packages themselves: ``kvsidecar[events]`` is found only where pip finds kvsidecar, which is not where a
checkout or a wheel was installed.
"""

from __future__ import annotations


def install(extra: str) -> str:
    """The command that brings what the extra needs, such as ``pip install 'msgspec>=0.19'``."""
    from importlib import metadata

    try:
        required = metadata.requires("kvsidecar") or []
    except metadata.PackageNotFoundError:  # run from the files of a checkout
        required = []
    wanted = []
    for line in required:
        package, _, marker = line.partition(";")
        if f"extra=='{extra}'" in marker.replace('"', "'").replace(" ", ""):
            wanted.append(f"'{package.strip()}'")
    return f"pip install {' '.join(wanted)}" if wanted else f"pip install ./client '.[{extra}]' in a checkout"
