"""What the manifests of Kubernetes are checked for."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvsidecar.daemon.setting_sources import load_settings
from kvsidecar.daemon.settings import Settings
from tests.deploy.server_rules import refusals
from tests.deploy.support import DEPLOY, ROOT

HERE = DEPLOY / "kubernetes"

PATCHES = ("disk-tier", "host-pool", "huge-pages", "publisher")
"""Components that patch the DaemonSet."""

FIRST_VERSION = "1.29"
"""The first Kubernetes that runs native sidecars without a feature gate."""

Manifest = dict[str, Any]


def documents(text: str) -> list[Manifest]:
    return [each for each in yaml.safe_load_all(text) if each]


def sources() -> list[Path]:
    """Every manifest that stands for itself: not a patch, and not a kustomization."""
    return sorted(
        path for path in HERE.rglob("*.yaml") if path.name != "kustomization.yaml" and path.parent.name not in PATCHES
    )


def validate(manifest: Manifest, version: str) -> None:
    """By the schema of this version of Kubernetes, and by what its API server refuses beyond that."""
    assert refusals(manifest) == [], manifest["metadata"]["name"]
    if manifest["apiVersion"].startswith("monitoring.coreos.com/"):
        return  # not of Kubernetes itself; test_the_pod_monitor_finds_the_daemons looks at what it says
    pytest.importorskip("kubernetes_validate").validate(manifest, version, strict=True)


def latest() -> str:
    return str(pytest.importorskip("kubernetes_validate").latest_version())


def pods(manifests: list[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """(name, pod template) of every workload."""
    for each in manifests:
        if each["kind"] in ("Deployment", "DaemonSet"):
            yield each["metadata"]["name"], each["spec"]["template"]


def daemons(template: Manifest) -> list[Manifest]:
    spec = template["spec"]
    return [each for each in [*spec.get("initContainers", ()), *spec["containers"]] if each["name"] == "kvsidecar"]


def image_environment() -> dict[str, str]:
    """The settings that the Dockerfile puts into the image."""
    text = (ROOT / "Dockerfile").read_text().rpartition("\nFROM ")[2].replace("\\\n", " ")
    (line,) = [line for line in text.splitlines() if line.startswith("ENV ")]
    return dict(word.split("=", 1) for word in shlex.split(line)[1:])


def settings(container: Manifest) -> Settings:
    given = {each["name"]: each["value"] for each in container["env"]}
    return load_settings({}, environ={**image_environment(), **given}, default_file=Path("/nonexistent"))


def bases() -> list[Manifest]:
    return [each for path in sources() for each in documents(path.read_text())]
