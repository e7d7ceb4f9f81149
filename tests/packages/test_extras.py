"""What the daemon's extras install, the daemon imports: what only tests and routers need is elsewhere."""

from __future__ import annotations

import re
import tomllib

import pytest
from packaging.requirements import Requirement

from tests.packages.support import ROOT

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
IMPORTED = {
    module.split(".")[0]
    for path in (ROOT / "kvsidecar").rglob("*.py")
    for module in re.findall(r"^\s*(?:import|from) ([\w.]+)", path.read_text(), re.MULTILINE)
}
MODULES = {"pyzmq": "zmq", "mooncake-transfer-engine-non-cuda": "mooncake"}
"""Of packages whose module has another name."""


@pytest.mark.parametrize("extra", ["events", "mooncake"])
def test_all_that_an_extra_installs_is_imported(extra: str) -> None:
    names = [Requirement(each).name for each in EXTRAS[extra]]
    assert names
    assert [name for name in names if MODULES.get(name, name) not in IMPORTED] == []
