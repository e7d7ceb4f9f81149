"""Build hook: what the metadata of the daemon's distribution takes from elsewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

REPOSITORY = "https://github.com/kvsidecar/kvsidecar"


class FromElsewhere(MetadataHookInterface):
    """Dependencies, with the other half of the package in this version; a README with whole links."""

    def update(self, metadata: dict[str, Any]) -> None:
        metadata["dependencies"] = [f"kvsidecar-client=={metadata['version']}", *self.config["dependencies"]]
        text = (Path(self.root) / "README.md").read_text()
        text = re.sub(r"\]\((?!https?:|#)", f"]({REPOSITORY}/blob/main/", text)
        text = re.sub(rf"(!\[[^\]]*\]\({REPOSITORY})/blob/", r"\1/raw/", text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
