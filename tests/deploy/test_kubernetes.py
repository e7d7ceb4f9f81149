"""The manifests of deploy/kubernetes: valid for Kubernetes, and true of the daemon that they start."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvsidecar.client import State
from kvsidecar.daemon.pool_geometry import pool_geometry
from kvsidecar.integrations.vllm.options import ConnectorOptions
from kvsidecar.pool.record_table import RecordTable, TableFacts
from kvsidecar.support.memory_limits import HugePages, PageKind, Pages, bookkeeping_bytes, check_fits
from kvsidecar.support.units import GiB, MiB, parse_size
from tests.deploy.manifests import (
    FIRST_VERSION,
    HERE,
    PATCHES,
    Manifest,
    bases,
    daemons,
    documents,
    image_environment,
    latest,
    pods,
    settings,
    sources,
    validate,
)
from tests.deploy.server_rules import dangling
from tests.deploy.support import ROOT
from tests.harness import DaemonProcess, Gate, Rank, wait_until_ready
from tests.support.pods import in_pod

PROBES = ("startup", "readiness", "liveness")

KUSTOMIZE = ["kustomize", "build"] if shutil.which("kustomize") else ["kubectl", "kustomize"]
needs_kustomize = pytest.mark.skipif(
    shutil.which(KUSTOMIZE[0]) is None, reason="neither kustomize nor kubectl is installed: overlays are not built"
)


def overlays() -> list[Path]:
    return sorted(path.parent for path in HERE.glob("overlays/*/kustomization.yaml"))


def build(directory: Path) -> list[Manifest]:
    ran = subprocess.run([*KUSTOMIZE, str(directory)], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    return documents(ran.stdout)


def daemon_templates(manifests: list[Manifest]) -> list[Manifest]:
    return [template for _, template in pods(manifests) if daemons(template)]


# -- valid ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [FIRST_VERSION, "latest"])
@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(HERE)))
def test_every_manifest_is_valid(path: Path, version: str) -> None:
    for manifest in documents(path.read_text()):
        validate(manifest, latest() if version == "latest" else version)


@needs_kustomize
@pytest.mark.parametrize("overlay", overlays(), ids=lambda path: path.name)
def test_every_overlay_builds_into_valid_manifests(overlay: Path) -> None:
    manifests = build(overlay)
    assert manifests
    assert dangling(manifests) == []
    groups = {each["apiVersion"].partition("/")[0] for each in manifests}
    foreign = [each for each in groups if "." in each and not each.endswith(".k8s.io")]
    assert foreign == [], "a plain cluster does not know their kinds"
    for manifest in manifests:
        validate(manifest, FIRST_VERSION)
        validate(manifest, latest())


@needs_kustomize
@pytest.mark.parametrize("overlay", overlays(), ids=lambda path: path.name)
def test_an_overlay_names_the_registry_and_tag_of_every_image(overlay: Path) -> None:
    for name, template in pods(build(overlay)):
        for container in [*template["spec"].get("initContainers", ()), *template["spec"]["containers"]]:
            assert container["image"].startswith("registry.example.com/"), (name, container["name"])
            assert ":" in container["image"]


@needs_kustomize
def test_every_component_can_be_added(tmp_path: Path) -> None:
    """Also those that no overlay has."""
    shutil.copytree(HERE, tmp_path / "k")
    for component in sorted(path.name for path in (HERE / "components").iterdir()):
        base = "daemonset" if component in PATCHES else "sidecar"
        overlay = tmp_path / "k" / "overlays" / f"try-{component}"
        overlay.mkdir()
        text = {"resources": [f"../../base/{base}"], "components": [f"../../components/{component}"]}
        (overlay / "kustomization.yaml").write_text(yaml.safe_dump(text))
        manifests = build(overlay)
        for manifest in manifests:
            validate(manifest, latest())
        if component == "disk-tier":
            ((daemon,),) = [daemons(template) for _, template in pods(manifests)]
            assert settings(daemon).disk_size
        if component == "wait-for-pool":
            ((daemon,),) = [daemons(template) for _, template in pods(manifests)]
            (of_node,) = [daemons(template)[0] for name, template in pods(bases()) if name == "kvsidecar"]
            assert daemon["readinessProbe"] == of_node["readinessProbe"]


# -- true of the daemon ----------------------------------------------------------------------------------------------


def test_the_page_names_every_component() -> None:
    page = (HERE / "README.md").read_text()
    table = page.partition("| Component |")[2].partition("\n\n")[0]
    named = re.findall(r"`([a-z-]+)`", "".join(re.findall(r"^\|([^|]+)\|", table, re.MULTILINE)))
    assert sorted(named) == sorted(path.name for path in (HERE / "components").iterdir())


def test_the_settings_of_every_daemon_are_settings() -> None:
    found = [settings(daemon) for template in daemon_templates(bases()) for daemon in daemons(template)]
    assert len(found) == 2
    for each in found:
        assert each.socket == "/run/kvsidecar/kvsidecar.sock"
        assert each.socket_mode == "0660"
        assert each.http_host == "0.0.0.0"  # a probe comes from outside the container


def all_built() -> list[Manifest]:
    if shutil.which(KUSTOMIZE[0]) is None:
        return bases()
    return [manifest for overlay in overlays() for manifest in build(overlay)]


def test_the_memory_limit_counts_the_pool(tmp_path: Path) -> None:
    """By the daemon's own check, in a container with that limit: a pool that it would refuse is refused here."""
    templates = daemon_templates(all_built())
    assert templates
    for number, template in enumerate(templates):
        (daemon,) = daemons(template)
        limits = daemon["resources"]["limits"]
        assert daemon["resources"]["requests"] == limits, "not Guaranteed: the pool is the first to be killed"
        root = in_pod(tmp_path / str(number), parse_size(limits["memory"]))
        told = settings(daemon)
        pool = pool_geometry(told, root).pool_bytes
        assert pool >= 32 * GiB
        if told.huge_pages is HugePages.HUGETLB:
            assert parse_size(limits["hugepages-2Mi"]) == pool
            beside = bookkeeping_bytes(pool)
            check_fits(beside, pages=Pages(PageKind.SMALL, 4096), root=root)
        else:
            assert not any(name.startswith("hugepages") for name in limits)
            check_fits(pool, pages=Pages(PageKind.THP, 2 * MiB), bookkeeping=bookkeeping_bytes(pool), root=root)


def volumes(template: Manifest, container: Manifest) -> dict[str, Manifest]:
    """The volumes of a container by mount path."""
    sources = {each["name"]: each for each in template["spec"]["volumes"]}
    return {each["mountPath"]: sources[each["name"]] for each in container["volumeMounts"]}


def test_the_pool_lies_in_a_volume_in_memory_with_room_for_it_and_its_table(tmp_path: Path) -> None:
    for number, template in enumerate(daemon_templates(all_built())):
        (daemon,) = daemons(template)
        told = settings(daemon)
        limits = daemon["resources"]["limits"]
        root = in_pod(tmp_path / str(number), parse_size(limits["memory"]))
        geometry = pool_geometry(told, root)
        table = RecordTable.file_bytes(TableFacts(geometry.pool_bytes, geometry.slab_bytes, "", ""))
        mounted = volumes(template, daemon)
        pool = mounted[str(told.pool_dir)]["emptyDir"]
        if told.huge_pages is HugePages.HUGETLB:
            assert pool["medium"] == "HugePages"
            assert parse_size(mounted[str(told.table_dir)]["emptyDir"]["sizeLimit"]) >= table
        else:
            assert pool["medium"] == "Memory"
            assert told.table_dir is None
            assert geometry.pool_bytes + table <= parse_size(pool["sizeLimit"]) <= parse_size(limits["memory"])


def test_the_grace_period_has_room_for_the_drain_and_the_unpinning() -> None:
    for template in daemon_templates(bases()):
        (daemon,) = daemons(template)
        assert template["spec"]["terminationGracePeriodSeconds"] >= settings(daemon).drain_timeout + 30


def test_the_daemon_beside_an_engine_is_a_native_sidecar_that_starts_before_it() -> None:
    (spec,) = [template["spec"] for name, template in pods(bases()) if name == "vllm" and daemons(template)]
    (sidecar,) = spec["initContainers"]
    assert sidecar["restartPolicy"] == "Always"
    assert spec["shareProcessNamespace"] is True, "the driver refuses handles between two processes of one PID value"


def test_no_daemon_takes_a_gpu_from_the_engines_and_every_one_sees_them() -> None:
    assert image_environment()["NVIDIA_VISIBLE_DEVICES"] == "all"
    for template in daemon_templates(bases()):
        (daemon,) = daemons(template)
        assert not any("nvidia.com" in name for name in daemon["resources"]["limits"])
        assert template["spec"]["runtimeClassName"] == "nvidia"


def test_no_daemon_is_root_or_privileged() -> None:
    for template in daemon_templates(bases()):
        (daemon,) = daemons(template)
        context = daemon["securityContext"]
        assert context["runAsNonRoot"] is True
        assert context["readOnlyRootFilesystem"] is True
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"], "add": ["SYS_NICE"]}


def test_every_engine_finds_the_socket_of_its_daemon() -> None:
    seen = 0
    for name, template in pods(bases()):
        for container in template["spec"]["containers"]:
            if container["name"] != "vllm":
                continue
            seen += 1
            (socket,) = [each["value"] for each in container["env"] if each["name"] == "KVSIDECAR_SOCKET"]
            assert socket == image_environment()["KVSIDECAR_SOCKET"], name
            assert str(Path(socket).parent) in [each["mountPath"] for each in container["volumeMounts"]]
    assert seen == 2
    (engine,) = [template["spec"] for name, template in pods(bases()) if name == "vllm" and not daemons(template)]
    (node,) = [template["spec"] for name, template in pods(bases()) if name == "kvsidecar"]
    (of_engine,) = [each["hostPath"] for each in engine["volumes"] if "hostPath" in each]
    (of_node,) = [each["hostPath"] for each in node["volumes"] if "hostPath" in each]
    assert of_engine == of_node
    (daemon,) = node["containers"]
    assert daemon["securityContext"]["runAsGroup"] in engine["securityContext"]["supplementalGroups"]


def test_every_engine_gives_the_connector_options_that_it_has() -> None:
    for _, template in pods(bases()):
        for container in template["spec"]["containers"]:
            if container["name"] != "vllm":
                continue
            command = container["command"]
            config = json.loads(command[command.index("--kv-transfer-config") + 1])
            assert config["kv_connector"] == "KVSidecarConnector"
            assert config["kv_connector_module_path"] == "kvsidecar.integrations.vllm"
            assert config["kv_load_failure_policy"] == "recompute"
            ConnectorOptions.parse(config.get("kv_connector_extra_config", {}))


def test_all_engines_hash_alike() -> None:
    """vLLM 0.26, and a later one that is told to hash with xxhash, begin with a random seed: a restarted engine finds
    nothing."""
    seeds = [
        {each["name"]: each["value"] for each in container["env"]}.get("PYTHONHASHSEED")
        for _, template in pods(all_built())
        for container in template["spec"]["containers"]
        if container["name"] == "vllm"
    ]
    assert len(seeds) >= 2
    assert set(seeds) == {"0"}


def test_every_image_and_command_has_the_vllm_that_the_tests_have() -> None:
    """An earlier one refuses models with several KV cache groups. The version is that of tests/vllm/newest.txt."""
    (tested,) = re.findall(r"^vllm==(\S+)$", (ROOT / "tests/vllm/newest.txt").read_text(), re.MULTILINE)
    of_name = r"(?:vllm-kvsidecar|vllm-openai)(?::v?|\n *(?:newTag|tag): )(\d\S*)"
    files = [
        *(each for each in (ROOT / "deploy").rglob("*") if each.suffix in (".yaml", ".Dockerfile", ".md")),
        *(ROOT / "docs").glob("*.md"),
        ROOT / "README.md",
    ]
    found = {}
    for each in files:
        text = re.sub(r"^ *#(?! docker build).*\n", "", each.read_text(), flags=re.MULTILINE)
        found[str(each.relative_to(ROOT))] = set(re.findall(rf"{of_name}|\bvllm==(\S+)", text))
    named = {name: {said for pair in pairs for said in pair if said} for name, pairs in found.items() if pairs}
    assert {name: said for name, said in named.items() if said != {tested}} == {}
    overlays_named = {f"deploy/kubernetes/overlays/{each}/kustomization.yaml" for each in ("engine", "sidecar")}
    examples = {f"deploy/helm/examples/{each}.yaml" for each in ("leader-worker-set", "production-stack")}
    others = {"deploy/kubernetes/vllm.Dockerfile", "deploy/helm/kvsidecar/values.yaml", "deploy/kubernetes/README.md"}
    assert {*overlays_named, *examples, *others, "docs/tutorial.md"} <= named.keys()


def test_what_containers_share_is_said_in_one_place() -> None:
    """Two pages that both said it have contradicted each other."""
    place = "deploy/kubernetes/README.md#what-engine-and-daemon-must-share"
    for name in ("vllm.md", "sglang.md", "troubleshooting.md"):
        page = (ROOT / "docs" / name).read_text()
        assert place in page, name
        assert re.findall(r"IPC namespace|hostIPC|hostPID|--ipc|/dev/shm", page) == [], name
    text = (HERE / "README.md").read_text()
    said = text.partition("## What engine and daemon must share\n")[2].partition("\n## ")[0]
    assert all(word in said for word in ("hostPID: true", "hostIPC", "/dev/shm", "--pid host"))
    assert re.findall(r"hostIPC|hostPID", text.replace(said, "")) == []
    (node,) = [template["spec"] for name, template in pods(bases()) if name == "kvsidecar"]
    assert node["hostPID"] is True
    assert not any(template["spec"].get("hostIPC") for _, template in pods(bases()))
    compose = (ROOT / "examples" / "compose.yaml").read_text()
    assert re.findall(r"\bipc\b", compose) == []
    assert "pid: host" in compose


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda path: path.name
)
def test_all_commands_for_engines_do_too(page: Path) -> None:
    commands = [line for line in page.read_text().splitlines() if re.match(r"(\w+=\S+ )*vllm serve ", line.strip("$ "))]
    assert all("PYTHONHASHSEED=0 vllm serve" in line for line in commands)
    assert commands or page.name not in ("README.md", "vllm.md")


def test_the_pod_monitor_finds_the_daemons_and_the_port_of_their_metrics() -> None:
    monitor, *_ = [each for each in bases() if each["kind"] == "PodMonitor" and each["metadata"]["name"] == "kvsidecar"]
    (match,) = monitor["spec"]["selector"]["matchExpressions"]
    endpoint, of_publisher = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["path"] == of_publisher["path"] == "/metrics"
    patch = yaml.safe_load((HERE / "components" / "publisher" / "daemonset.yaml").read_text())
    (publisher,) = patch["spec"]["template"]["spec"]["containers"]
    ports = {each["name"]: each["containerPort"] for each in publisher["ports"]}
    (address,) = [each["value"] for each in publisher["env"] if each["name"] == "KVSIDECAR_PUBLISH_METRICS"]
    assert ports[of_publisher["port"]] == int(address.rpartition(":")[2])
    for name, template in pods(bases()):
        labels = template["metadata"]["labels"]
        assert (match["key"] in labels) == bool(daemons(template)), name
        for daemon in daemons(template):
            (port,) = daemon["ports"]
            assert port["name"] == endpoint["port"]
            assert len(port["name"]) <= 15, "Kubernetes refuses longer names of ports"
            assert port["containerPort"] == settings(daemon).http_port


def _only(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False}


TEXTS = {"type": "array", "items": {"type": "string"}}
POD_MONITOR = _only(
    apiVersion={"const": "monitoring.coreos.com/v1"},
    kind={"const": "PodMonitor"},
    metadata=_only(name={"type": "string"}),
    spec=_only(
        selector=_only(
            matchExpressions={
                "type": "array",
                "items": _only(
                    key={"type": "string"}, operator={"enum": ["In", "NotIn", "Exists", "DoesNotExist"]}, values=TEXTS
                ),
            }
        ),
        podMetricsEndpoints={
            "type": "array",
            "items": _only(
                port={"type": "string"},
                path={"type": "string"},
                interval={"type": "string", "pattern": "^([0-9]+(ms|[smhdwy]))+$"},
                relabelings={
                    "type": "array",
                    "items": _only(
                        sourceLabels=TEXTS, targetLabel={"type": "string", "pattern": "^[a-zA-Z_][a-zA-Z0-9_]*$"}
                    ),
                },
            ),
        },
    ),
)
"""What the manifest uses of the Prometheus operator's API (version 0.91), and nothing else: the API server drops a key
that it does not know without a word."""


def test_the_pod_monitor_says_only_what_the_operator_knows() -> None:
    validator = pytest.importorskip("jsonschema").Draft202012Validator(POD_MONITOR)
    monitor, *_ = [each for each in bases() if each["kind"] == "PodMonitor" and each["metadata"]["name"] == "kvsidecar"]
    assert [error.message for error in validator.iter_errors(monitor)] == []
    misspelt = json.loads(json.dumps(monitor).replace('"interval"', '"intervall"'))
    assert [error.message for error in validator.iter_errors(misspelt)] != []


def test_no_engine_waits_for_the_pool_and_an_update_of_the_daemons_does(short_dir: Path, gate: Gate) -> None:
    """Probes of a sidecar pass while it pins, and engines attach; of a pod of its own, the readiness probe waits."""
    probes = {}
    for name, template in pods(bases()):
        for daemon in daemons(template):
            asked = {kind: daemon[f"{kind}Probe"]["httpGet"] for kind in PROBES if f"{kind}Probe" in daemon}
            assert {each["port"] for each in asked.values()} == {daemon["ports"][0]["name"]}
            probes[name] = {kind: each["path"] for kind, each in asked.items()}
    flags = ("--pool-size", "1MiB", "--chunk-size", "128KiB", "--slab-size", "128KiB", "--huge-pages", "none")
    with DaemonProcess(short_dir, *flags, KVSIDECAR_FAILPOINTS=f"pool.pin_chunk={gate}") as process:
        gate.let_pass()
        process.wait_log("pinning")
        rank = Rank(process)
        answers = {name: {kind: process.get(path)[0] for kind, path in probes[name].items()} for name in probes}
        assert rank.client.readiness.state is State.PINNING
        gate.let_pass(7)
        wait_until_ready(rank.client)
        later = {name: {kind: process.get(path)[0] for kind, path in probes[name].items()} for name in probes}
        rank.close()
    assert answers == {
        "vllm": {"startup": 200, "liveness": 200},
        "kvsidecar": {"startup": 200, "readiness": 503, "liveness": 200},
    }
    assert later == {name: dict.fromkeys(probes[name], 200) for name in probes}
