"""The Helm chart: equal to the manifests of deploy/kubernetes, valid for Kubernetes, and true of the daemon."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from kvsidecar.cli.main import main
from kvsidecar.daemon.pool_geometry import pool_geometry
from kvsidecar.integrations.vllm.options import ConnectorOptions
from kvsidecar.support.memory_limits import HugePages, PageKind, Pages, bookkeeping_bytes, check_fits
from kvsidecar.support.units import MiB, parse_size
from tests.deploy import test_kubernetes as kubernetes
from tests.deploy.manifests import FIRST_VERSION, Manifest, bases, daemons, documents, latest, pods, settings, validate
from tests.deploy.server_rules import dangling
from tests.deploy.support import DEPLOY, ROOT
from tests.support.pods import in_pod

helm = pytest.importorskip("helm_python", reason="the group dev is not installed, or has no Helm for this processor")

CHART = DEPLOY / "helm" / "kvsidecar"
EXAMPLES = DEPLOY / "helm" / "examples"
ALL_MONITORING: Manifest = {
    "podMonitor": {"enabled": True}, "prometheusRule": {"enabled": True}, "dashboard": {"enabled": True}
}  # fmt: skip
CLAIM = {"size": "1TiB", "volume": {"persistentVolumeClaim": {"claimName": "disk"}}}
DISK = {"size": "1TiB", "volume": {"hostPath": {"path": "/var/cache/kvsidecar", "type": "DirectoryOrCreate"}}}
ROUTERS: list[Manifest] = [{"podSelector": {"matchLabels": {"app": "router"}}}]
EVERYTHING: dict[str, Manifest] = {
    "defaults": {},
    "engine": {"engine": {"enabled": True, "args": ["--max-model-len", "8192"]}},
    "sidecar": {"mode": "sidecar"},
    "baseline": {"mode": "sidecar", "podSecurity": "baseline"},
    "wait for pool": {"mode": "sidecar", "waitForPool": True},
    "huge pages": {"pool": {"hugePages": {"enabled": True}}},
    "huge pages, sidecar": {"mode": "sidecar", "pool": {"hugePages": {"enabled": True, "size": "48Gi"}}},
    "no volume": {"pool": {"warmRestart": False}},
    "cdi": {"runtimeClassName": "", "gpus": {"cdi": "nvidia.com/gpu=all"}},
    "dra": {"gpus": {"resourceClaims": [{"name": "gpus", "resourceClaimName": "all-gpus"}]}},
    "tiers": {
        "tiers": {
            "disk": DISK,
            "shared": {"size": "10TiB", "volume": {"nfs": {"server": "files", "path": "/kv"}}},
            "cluster": {"master": ""},
        }
    },
    "cluster": {"tiers": {"cluster": {"master": "kv-master:50051"}}},
    "policy": {"policy": '[{uids = [1001], namespaces = ["meta-llama/*"]}]', "settings": {"log_level": "debug"}},
    "shares": {"shares": '[{name = "chat", namespaces = ["chat/*"], guaranteed = "40%"}]'},
    "sidecar with a disk": {"mode": "sidecar", "podSecurity": "baseline", "tiers": {"disk": CLAIM}},
    "pods": {
        "imagePullSecrets": [{"name": "registry"}], "priorityClassName": "system-node-critical", "hostPID": True,
        "podLabels": {"team": "kv"}, "podAnnotations": {"a": "b"}, "image": {"tag": "1.2.3", "pullPolicy": "Always"},
        "extraEnv": [{"name": "KVSIDECAR_LOG_FORMAT", "value": "json"}], "affinity": {"nodeAffinity": {}},
    },
    "monitoring": ALL_MONITORING,
    "account": {"serviceAccount": {"create": True}, "fullnameOverride": "cache", "resources": {"requests": {"cpu": 1}}},
    "publisher": {"publisher": {"enabled": True}},
    "host pool": {"pool": {"hostPath": "/dev/shm/kvsidecar"}},
    "host pool in huge pages": {
        "pool": {"hostPath": "/mnt/huge", "tableHostPath": "/dev/shm/table", "hugePages": {"enabled": True}}
    },
    "models": {
        "engine": {
            "enabled": True, "modelCache": {"persistentVolumeClaim": {"claimName": "models"}},
            "huggingFaceToken": {"secret": "huggingface"}, "service": {"enabled": False},
        }
    },
    "network": {"networkPolicy": {"enabled": True, "routers": ROUTERS}, "publisher": {"enabled": True}},
    "network, cluster": {"networkPolicy": {"enabled": True}, "tiers": {"cluster": {"master": "kv-master:50051"}}},
    "network, sidecar": {"networkPolicy": {"enabled": True, "routers": ROUTERS}, "mode": "sidecar"},
    "large nodes": yaml.safe_load((EXAMPLES / "large-nodes.yaml").read_text()),
    "small nodes": yaml.safe_load((EXAMPLES / "small-nodes.yaml").read_text()),
}  # fmt: skip


def render(values: Manifest | None = None, release: str = "kvsidecar") -> list[Manifest]:
    with helm.Chart.load(str(CHART)) as chart:
        chart.validate_schema(values or {})
        files = chart.render(values or {}, name=release, namespace="kvsidecar")
    return [each for name, text in files.items() if name.endswith(".yaml") for each in documents(text)]


def of_kind(manifests: list[Manifest], kind: str) -> Manifest:
    (found,) = [each for each in manifests if each["kind"] == kind]
    return found


def plain(manifest: Manifest) -> Manifest:
    """Without what the chart has beside, and without the order of what has names."""
    made = copy.deepcopy(manifest)
    labels = made["metadata"]["labels"]
    made["metadata"]["labels"] = {"app.kubernetes.io/name": labels["app.kubernetes.io/name"]}
    made["metadata"]["name"] = labels["app.kubernetes.io/name"]
    for chosen in (made["spec"]["selector"]["matchLabels"], made["spec"]["template"]["metadata"]["labels"]):
        chosen.pop("app.kubernetes.io/instance", None)
    pod = made["spec"]["template"]["spec"]
    for container in [*pod.get("initContainers", ()), *pod["containers"]]:
        container["image"] = container["image"].rpartition(":")[0].rpartition("/")[2] or container["image"]
        container["env"] = sorted(container.get("env", ()), key=lambda each: str(each["name"]))
        container["volumeMounts"] = sorted(container["volumeMounts"], key=lambda each: str(each["mountPath"]))
        container["command"] = [re.sub(r"\s+", " ", word) for word in container.get("command", ())]
    pod["volumes"] = sorted(pod["volumes"], key=lambda each: str(each["name"]))
    return made


def base(path: str) -> Manifest:
    (manifest,) = documents((kubernetes.HERE / "base" / path).read_text())
    return manifest


@pytest.mark.parametrize(
    ("values", "kind", "path"),
    [
        ({}, "DaemonSet", "daemonset/daemonset.yaml"),
        ({"mode": "sidecar"}, "Deployment", "sidecar/deployment.yaml"),
        ({"engine": {"enabled": True}}, "Deployment", "engine/deployment.yaml"),
    ],
)
def test_the_chart_renders_what_kustomize_has(values: Manifest, kind: str, path: str) -> None:
    assert plain(of_kind(render(values), kind)) == plain(base(path))


def test_what_is_patched_by_the_component_that_waits_for_the_pool_is_rendered_too() -> None:
    (patch,) = yaml.safe_load((kubernetes.HERE / "components/wait-for-pool/kustomization.yaml").read_text())["patches"]
    (added,) = [each["value"] for each in yaml.safe_load(patch["patch"]) if each["op"] == "add"]
    ((_, template),) = pods(render(EVERYTHING["wait for pool"]))
    (daemon,) = daemons(template)
    assert daemon["readinessProbe"] == added
    assert render({"waitForPool": True}) == render(), "of the DaemonSet, whose updates wait for it anyway"


def test_what_is_patched_by_the_component_of_the_disk_is_rendered_too() -> None:
    (patch,) = documents((kubernetes.HERE / "components" / "disk-tier" / "daemonset.yaml").read_text())
    wanted = patch["spec"]["template"]["spec"]
    ((_, template),) = pods(render({"tiers": {"disk": DISK}}))
    (daemon,) = daemons(template)
    (patched,) = wanted["containers"]
    for key in ("env", "volumeMounts"):
        assert [each for each in patched[key] if each not in daemon[key]] == []
    assert [each for each in wanted["volumes"] if each not in template["spec"]["volumes"]] == []
    given = {each["name"]: each for each in template["spec"]["initContainers"]}
    for each in wanted["initContainers"]:
        assert given[each["name"]] == {**each, "image": given[each["name"]]["image"]}


def test_what_is_patched_by_the_component_of_the_publisher_is_rendered_too() -> None:
    (patch,) = documents((kubernetes.HERE / "components" / "publisher" / "daemonset.yaml").read_text())
    (wanted,) = patch["spec"]["template"]["spec"]["containers"]
    ((_, template),) = pods(render({"publisher": {"enabled": True}}))
    (rendered,) = [each for each in template["spec"]["containers"] if each["name"] == "publisher"]
    assert {**rendered, "image": "kvsidecar"} == wanted
    assert render({"publisher": {"enabled": True}, "mode": "sidecar"}) == render({"mode": "sidecar"})


def test_the_publishers_variables_are_those_of_its_command() -> None:
    ((_, template),) = pods(render({"publisher": {"enabled": True}}))
    (rendered,) = [each for each in template["spec"]["containers"] if each["name"] == "publisher"]
    assert {each["name"] for each in rendered["env"]} <= {each.envvar for each in main.commands["publish"].params}


def test_what_is_patched_by_the_component_of_huge_pages_is_rendered_too() -> None:
    (patch,) = documents((kubernetes.HERE / "components" / "huge-pages" / "daemonset.yaml").read_text())
    (wanted,) = patch["spec"]["template"]["spec"]["containers"]
    ((rendered,),) = [
        daemons(template) for _, template in pods(render({"pool": {"hugePages": {"enabled": True}}}))
    ]  # fmt: skip
    assert wanted["resources"]["limits"].items() <= rendered["resources"]["limits"].items()
    assert rendered["resources"]["limits"] == rendered["resources"]["requests"]
    given = {each["name"]: each["value"] for each in rendered["env"]}
    assert {each["name"]: each["value"] for each in wanted["env"]}.items() <= given.items()


@pytest.mark.parametrize("name", EVERYTHING)
def test_what_is_rendered_is_valid(name: str, tmp_path: Path) -> None:
    manifests = render(EVERYTHING[name])
    assert manifests
    assert dangling(manifests) == []
    for manifest in manifests:
        validate(manifest, FIRST_VERSION if "dra" not in name else latest())
        validate(manifest, latest())
    for number, (_, template) in enumerate(pods(manifests)):
        for daemon in daemons(template):
            _holds(daemon, template, tmp_path / str(number))


@pytest.mark.parametrize("name", ["tiers", "sidecar with a disk"])
def test_the_disk_belongs_to_the_daemons_user(name: str) -> None:
    """kubelet makes a directory of the host for root alone."""
    ((_, template),) = pods(render(EVERYTHING[name]))
    (daemon,) = daemons(template)
    inits = [each["name"] for each in template["spec"]["initContainers"]]
    (gives,) = [each for each in template["spec"]["initContainers"] if each["name"] == "disk-directory"]
    user = daemon["securityContext"]["runAsUser"]
    path = str(settings(daemon).disk_dir)
    assert gives["command"] == ["install", "--directory", f"--owner={user}", f"--group={user}", "--mode=0700", path]
    assert kubernetes.volumes(template, gives)[path] == kubernetes.volumes(template, daemon)[path]
    assert "kvsidecar" not in inits or inits.index("disk-directory") < inits.index("kvsidecar")


# -- what an operator says reaches every pod, once, and no other release ---------------------------------------------

WHERE = {
    "nodeSelector": {"pool": "h100"},
    "tolerations": [{"key": "team", "operator": "Equal", "value": "kv", "effect": "NoExecute"}],
    "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}}},
    "runtimeClassName": "nvidia-cdi",
    "imagePullSecrets": [{"name": "registry"}],
}
"""What says on which nodes pods run, and from where they get images."""


@pytest.mark.parametrize("values", [{}, {"engine": {"enabled": True}}, {"mode": "sidecar"}], ids=str)
def test_where_pods_run_is_said_once_for_all_of_them(values: Manifest) -> None:
    found = list(pods(render({**values, **WHERE})))
    assert len(found) == 1 + ("engine" in values)
    for name, template in found:
        given = {key: template["spec"].get(key) for key in WHERE}
        given["nodeSelector"].pop("nvidia.com/gpu.present")  # of values.yaml: Helm joins them
        assert given == WHERE, name


@pytest.mark.parametrize("values", [{}, {"engine": {"enabled": True}}, {"mode": "sidecar"}], ids=str)
def test_without_being_told_all_pods_run_on_nodes_with_gpus_and_tolerate_their_taint(values: Manifest) -> None:
    taint = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    for manifests in (render(values), bases()):
        for name, template in pods(manifests):
            assert template["spec"]["tolerations"] == [taint], name
            assert template["spec"]["nodeSelector"] == {"nvidia.com/gpu.present": "true"}, name


ANOTHER = {
    "pool_size": "1MiB", "socket_mode": "0600", "drain_timeout": "1.5", "huge_pages": "none", "disk_size": "5GiB",
    "shared_size": "6GiB", "cluster_master": "another:1", "policy": "[]", "share": "[]", "log_level": "error",
    "log_format": "text",
}  # fmt: skip
"""A value of each setting that the chart sets itself, and that it would not set."""


def variables(values: Manifest) -> list[tuple[str, str]]:
    ((_, template),) = pods(render(values))
    (daemon,) = daemons(template)
    return [(each["name"], each["value"]) for each in daemon["env"]]


@pytest.mark.parametrize(
    ("mode", "name"),
    [
        (mode, name)
        for mode in ("daemonset", "sidecar")
        for name in sorted(EVERYTHING)
        if mode == "daemonset" or "hostPath" not in EVERYTHING[name].get("pool", ())
    ],
)
def test_each_variable_is_there_once_and_the_nearest_word_wins(mode: str, name: str) -> None:
    values = {key: each for key, each in EVERYTHING[name].items() if key not in ("engine", "podSecurity")}
    usual = dict(variables({**values, "mode": mode}))
    options = [variable.removeprefix("KVSIDECAR_").lower() for variable in usual]
    own = {option: ANOTHER[option] for option in options if not option.endswith("_dir")}
    found = variables({**values, "mode": mode, "settings": own})
    assert len(found) == len(dict(found)) == len(usual)
    beyond = {each["name"]: each["value"] for each in values.get("extraEnv", ())}
    assert dict(found) == {**usual, **{f"KVSIDECAR_{option.upper()}": text for option, text in own.items()}, **beyond}
    extra = [{"name": variable, "value": "nearest"} for variable in usual]
    assert variables({**values, "mode": mode, "extraEnv": extra}) == [(variable, "nearest") for variable in usual]


def test_the_port_of_metrics_is_the_daemons() -> None:
    ((_, template),) = pods(render({"settings": {"http_port": "9999"}}))
    (daemon,) = daemons(template)
    assert [each["containerPort"] for each in daemon["ports"]] == [settings(daemon).http_port] == [9999]


def chosen_by(selector: Manifest, labels: Manifest) -> bool:
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        each["key"] in labels for each in selector.get("matchExpressions", ())
    )


BOTH: list[Manifest] = [{**ALL_MONITORING, "engine": {"enabled": True}}, {**ALL_MONITORING, "mode": "sidecar"}]


@pytest.mark.parametrize("one", BOTH, ids=["daemonset", "sidecar"])
@pytest.mark.parametrize("two", BOTH, ids=["daemonset", "sidecar"])
def test_two_releases_in_one_namespace_leave_each_other_alone(one: Manifest, two: Manifest) -> None:
    releases = {release: render(values, release) for release, values in (("a", one), ("a-b", two), ("vllm", two))}
    names = [(each["kind"], each["metadata"]["name"]) for made in releases.values() for each in made]
    assert len(set(names)) == len(names)
    labels = {release: [each["metadata"]["labels"] for _, each in pods(made)] for release, made in releases.items()}
    selecting = 0
    for release, made in releases.items():
        for each in made:
            if (selector := each["spec"].get("selector") if "spec" in each else None) is None:
                continue
            if each["kind"] == "Service":
                selector = {"matchLabels": selector}
            selecting += 1
            chosen = {of for of, pods_of in labels.items() if any(chosen_by(selector, each) for each in pods_of)}
            assert chosen == {release}, (each["kind"], each["metadata"]["name"])
            if "template" in each["spec"]:
                others = [each for each in labels[release] if chosen_by(selector, each)]
                assert others == [each["spec"]["template"]["metadata"]["labels"]]
    assert selecting >= 2 * len(releases)


@pytest.mark.parametrize("host_pid", [None, True, False])
def test_copiers_have_the_nodes_pids_and_a_sidecar_those_of_its_pod(host_pid: bool | None) -> None:
    """In PID namespaces of their own, a copier and an engine both have small PIDs, and a rank of the same value cannot
    attach. Kubernetes refuses a pod with both `hostPID` and `shareProcessNamespace`."""
    values: Manifest = {} if host_pid is None else {"hostPID": host_pid}
    found = dict(pods(render({**values, "engine": {"enabled": True}})))
    assert found["kvsidecar"]["spec"].get("hostPID", False) is (host_pid is not False)
    assert "hostPID" not in found["kvsidecar-vllm"]["spec"]
    (pod,) = [template["spec"] for _, template in pods(render({**values, "mode": "sidecar"}))]
    assert pod["shareProcessNamespace"] is True
    assert "hostPID" not in pod


def _holds(daemon: Manifest, template: Manifest, directory: Path) -> None:
    """The daemon takes these settings, and its own check finds room for the pool in the limit."""
    told = settings(daemon)
    limits = daemon["resources"]["limits"]
    root = in_pod(directory, parse_size(limits["memory"]))
    pool = pool_geometry(told, root).pool_bytes
    if told.huge_pages is HugePages.HUGETLB:
        assert parse_size(limits["hugepages-2Mi"]) == pool
        check_fits(bookkeeping_bytes(pool), pages=Pages(PageKind.SMALL, 4096), root=root)
    else:
        check_fits(pool, pages=Pages(PageKind.THP, 2 * MiB), bookkeeping=bookkeeping_bytes(pool), root=root)
    mounted = kubernetes.volumes(template, daemon)
    for directory_of in (told.pool_dir, told.table_dir, told.disk_dir, told.shared_dir):
        assert directory_of is None or str(directory_of) in mounted


ADMITTED = {
    "AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD", "NET_BIND_SERVICE", "SETFCAP",
    "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT",
}  # fmt: skip


def beyond_baseline(template: Manifest) -> Iterator[str]:
    """What the level "baseline" of Kubernetes' Pod Security Standards refuses of a pod."""
    spec = template["spec"]
    yield from (field for field in ("hostNetwork", "hostPID", "hostIPC") if spec.get(field))
    yield from ("hostPath" for volume in spec["volumes"] if "hostPath" in volume)
    contexts = [spec.get("securityContext", {})]
    for container in [*spec.get("initContainers", ()), *spec["containers"]]:
        context = container.get("securityContext", {})
        contexts.append(context)
        yield from set(context.get("capabilities", {}).get("add", ())) - ADMITTED
        yield from ("hostPort" for port in container.get("ports", ()) if port.get("hostPort"))
        yield from ("privileged" for _ in [0] if context.get("privileged"))
    for context in contexts:
        yield from ("seccomp" for _ in [0] if context.get("seccompProfile", {}).get("type") == "Unconfined")
        yield from (
            field for field in ("procMount", "sysctls", "seLinuxOptions", "appArmorProfile") if field in context
        )


def test_the_profile_baseline_asks_for_nothing_that_baseline_refuses() -> None:
    found = {name: list(beyond_baseline(template)) for name, template in pods(render(EVERYTHING["baseline"]))}
    assert found == {"kvsidecar-vllm": []}
    found = {
        name: list(beyond_baseline(template)) for name, template in pods(render(EVERYTHING["sidecar with a disk"]))
    }
    assert found == {"kvsidecar-vllm": []}
    ((_, usual),) = pods(render(EVERYTHING["sidecar"]))
    assert list(beyond_baseline(usual)) == ["SYS_NICE"]
    ((_, node),) = pods(render())
    assert sorted(beyond_baseline(node)) == ["SYS_NICE", "hostPID", "hostPath"]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"podSecurity": "baseline"}, "set mode=sidecar"),
        ({"tiers": {"disk": {"size": "1TiB"}}}, "tiers.disk.size needs tiers.disk.volume"),
        ({"mode": "deployment"}, "mode"),
        ({"pool": {"sizes": "80%"}}, "sizes"),
        ({"settings": {"log_levle": "debug"}}, "log_levle"),
        ({"settings": {"drain_timeout": "soon"}}, "drain_timeout"),
        ({"settings": {"drain_timeout": -1}}, "drain_timeout"),
        ({"settings": {"eviction": "lfu"}}, "'lru', 'rhythm'"),
        ({"settings": {"socket_mode": 432}}, "'0600', '0660'"),  # what YAML makes of 0660
        ({"settings": {"http_page": "sometimes"}}, "http_page"),
        ({"settings": {"disk_size": "64"}}, "disk_size"),
        ({"settings": {"slab_size": 64}}, "slab_size"),
        ({"settings": {"store_chunk": "4 megs"}}, "store_chunk"),
        ({"pool": {"size": "64"}}, "/pool/size"),
        ({"pool": {"size": 64}}, "/pool/size"),
        ({"pool": {"memory": "64GB"}}, "Ki|Mi|Gi|Ti|M|G|T"),
        ({"pool": {"memory": "64"}}, "/pool/memory"),
        ({"pool": {"hugePages": {"size": "64GiB"}}}, "/pool/hugePages/size"),
        ({"pool": {"cpu": "four"}}, "/pool/cpu"),
        ({"tiers": {"disk": {"size": "1 TB"}}}, "/tiers/disk/size"),
        ({"engine": {"memory": "64GB"}}, "/engine/memory"),
        ({"fullnameOverride": "KV"}, "fullnameOverride"),
        ({"resources": {"limits": {"memory": "64Gi"}}}, "resources.limits.memory: the pool is made to fit"),
        ({"resources": {"memory": "64Gi"}}, "/resources"),
        ({"settings": {"pool_dir": "/pool"}}, "settings.pool_dir: the chart mounts"),
        ({"pool": {"hostPath": "/dev/shm/kv"}, "mode": "sidecar"}, "pool.hostPath is for mode=daemonset"),
        ({"pool": {"hostPath": "/dev/shm/kv", "warmRestart": False}}, "pool.warmRestart=false does not"),
        ({"pool": {"hostPath": "/mnt/huge", "hugePages": {"enabled": True}}}, "needs pool.tableHostPath"),
    ],
)
def test_what_cannot_work_is_refused_in_words(values: Manifest, said: str) -> None:
    with pytest.raises(helm.HelmError, match=re.escape(said)):
        render(values)


@pytest.mark.parametrize(
    ("given", "variable", "value"),
    [
        ("settings.drain_timeout=30", "KVSIDECAR_DRAIN_TIMEOUT", "30"),
        ("settings.drain_timeout=2.5", "KVSIDECAR_DRAIN_TIMEOUT", "2.5"),
        ("settings.http_port=9999", "KVSIDECAR_HTTP_PORT", "9999"),
        ("settings.devices=0", "KVSIDECAR_DEVICES", "0"),
        ("settings.store_chunk=1048576", "KVSIDECAR_STORE_CHUNK", "1048576"),
        ("settings.store_chunk=off", "KVSIDECAR_STORE_CHUNK", "off"),
        ("settings.zero_freed=true", "KVSIDECAR_ZERO_FREED", "true"),
        ("settings.zero_freed=on", "KVSIDECAR_ZERO_FREED", "on"),
        ("settings.eviction=rhythm", "KVSIDECAR_EVICTION", "rhythm"),
        ("settings.socket_mode=0600", "KVSIDECAR_SOCKET_MODE", "0600"),
        ("pool.size=64GB", "KVSIDECAR_POOL_SIZE", "64GB"),
        ("pool.size=75.5%", "KVSIDECAR_POOL_SIZE", "75.5%"),
    ],
)
def test_what_set_sends_and_the_daemon_takes_reaches_it(given: str, variable: str, value: str) -> None:
    values = helm.parse_set_string(given)
    ((_, template),) = pods(render(values))
    (daemon,) = daemons(template)
    settings(daemon)
    assert (variable, value) in variables(values)


def test_numbers_of_a_file_are_written_as_they_are_read() -> None:
    values = yaml.safe_load("settings: {store_chunk: 4194304, stuck_after: 1000000, light_sleep: 0.002}")
    found = dict(variables(values))
    assert [found[f"KVSIDECAR_{name.upper()}"] for name in values["settings"]] == ["4194304", "1000000", "0.002"]
    ((_, template),) = pods(render({"image": {"tag": 20261129}}))
    assert daemons(template)[0]["image"].endswith(":20261129")


@pytest.mark.parametrize("cpu", ["2", "500m", 2, 0.5])
def test_requests_and_limits_are_those_that_are_given(cpu: Any) -> None:
    engine = {"enabled": True, "cpu": cpu, "gpus": 2, "resources": {"limits": {"ephemeral-storage": "1Gi"}}}
    values = {
        "pool": {"cpu": cpu}, "engine": engine, "resources": {"requests": {"cpu": "100m"}},
        "publisher": {"enabled": True, "cpu": cpu, "resources": {"limits": {"memory": "2Gi"}}},
    }  # fmt: skip
    made = render(values)
    for manifest in made:
        validate(manifest, latest())
    found = {each["name"]: each["resources"] for _, template in pods(made) for each in template["spec"]["containers"]}
    of_engine = {"cpu": str(cpu), "memory": "64Gi", "nvidia.com/gpu": "2"}
    assert found == {
        "kvsidecar": {
            "requests": {"cpu": "100m", "memory": "256Gi"}, "limits": {"cpu": str(cpu), "memory": "256Gi"},
        },
        "publisher": {"requests": {"cpu": str(cpu), "memory": "1Gi"}, "limits": {"cpu": str(cpu), "memory": "2Gi"}},
        "vllm": {"requests": of_engine, "limits": {**of_engine, "ephemeral-storage": "1Gi"}},
    }  # fmt: skip


@pytest.mark.parametrize("mode", ["daemonset", "sidecar"])
def test_a_name_and_an_account_of_ones_own(mode: str) -> None:
    values = {"mode": mode, "fullnameOverride": "cache", "engine": {"enabled": True}, **ALL_MONITORING}
    made = render({**values, "serviceAccount": {"create": True, "annotations": {"a": "b"}}}, release="other")
    assert {each["metadata"]["name"] for each in made} == {"cache", "cache-vllm", "cache-dashboard"}
    account = of_kind(made, "ServiceAccount")
    assert account["metadata"]["name"] == "cache"
    assert account["metadata"]["annotations"] == {"a": "b"}
    for create, name, wanted in ((True, "mine", "mine"), (False, "mine", "mine"), (False, "", None)):
        made = render({**values, "serviceAccount": {"create": create, "name": name}})
        assert [each["metadata"]["name"] for each in made if each["kind"] == "ServiceAccount"] == ["mine"] * create
        for _, template in pods(made):
            account_of = wanted if daemons(template) else None
            assert template["spec"].get("serviceAccountName") == account_of
            assert template["spec"]["automountServiceAccountToken"] is False


def test_the_chart_is_well_formed() -> None:
    report = helm.lint(str(CHART), strict=True)
    assert report["errors"] == []
    assert [each for each in report["messages"] if each["severity"] >= 2] == []


def test_monitoring_is_asked_for_and_then_what_the_repository_has() -> None:
    assert {each["kind"] for each in render()} == {"DaemonSet"}
    made = render(ALL_MONITORING)
    assert of_kind(made, "PrometheusRule")["spec"] == yaml.safe_load((DEPLOY / "prometheus/alerts.yaml").read_text())
    shown = json.loads(of_kind(made, "ConfigMap")["data"]["kvsidecar.json"])
    assert shown == json.loads((DEPLOY / "grafana/kvsidecar.json").read_text())
    (monitor,) = documents((kubernetes.HERE / "components/pod-monitor/podmonitor.yaml").read_text())
    monitor["spec"]["selector"]["matchLabels"] = {"app.kubernetes.io/instance": "kvsidecar"}
    assert of_kind(made, "PodMonitor")["spec"] == monitor["spec"]


def test_monitoring_finds_the_engines_and_the_port_of_their_metrics() -> None:
    for values in BOTH:
        made = render(values)
        (monitor,) = [
            each for each in made if each["kind"] == "PodMonitor" and each["metadata"]["name"].endswith("vllm")
        ]
        (wanted,) = documents((kubernetes.HERE / "components/engine-monitor/podmonitor.yaml").read_text())
        assert monitor["spec"]["podMetricsEndpoints"] == wanted["spec"]["podMetricsEndpoints"]
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        found = [each for _, each in pods(made) if chosen_by(monitor["spec"]["selector"], each["metadata"]["labels"])]
        ((engine,),) = [[each for each in pod["spec"]["containers"] if each["name"] == "vllm"] for pod in found]
        assert endpoint["port"] in {each["name"] for each in engine["ports"]}
        without = render({**values, "podMonitor": {"enabled": True, "engine": False}})
        assert of_kind(without, "PodMonitor")["metadata"]["name"] == "kvsidecar"


# -- networks, models, and a pool that an update keeps ---------------------------------------------------------------


def admitted(manifests: list[Manifest]) -> list[tuple[list[Manifest] | None, set[str]]]:
    """(from whom, to which ports) of each rule; None is anyone."""
    rules = of_kind(manifests, "NetworkPolicy")["spec"]["ingress"]
    return [(each.get("from"), {port["port"] for port in each.get("ports", ())}) for each in rules]


PROMETHEUS = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]


def test_a_network_policy_admits_prometheus_and_routers_to_the_daemon_and_anyone_to_its_engine() -> None:
    node, sidecar = render(EVERYTHING["network"]), render(EVERYTHING["network, sidecar"])
    assert admitted(node) == [(PROMETHEUS, {"kvsidecar-http", "kv-metrics"}), (ROUTERS, {"kv-events", "kv-replay"})]
    assert admitted(sidecar) == [(None, {"http"}), (PROMETHEUS, {"kvsidecar-http"})]
    (component,) = documents((kubernetes.HERE / "components/network-policy/networkpolicy.yaml").read_text())
    assert admitted([component]) == admitted(render({"networkPolicy": {"enabled": True}}))
    in_cluster = render({"networkPolicy": {"enabled": True}, **EVERYTHING["cluster"]})
    (peers, ports), _ = admitted(in_cluster)
    assert peers is not None
    assert chosen_by(peers[0]["podSelector"], next(pods(in_cluster))[1]["metadata"]["labels"])
    assert ports == set(), "any"
    nobody = render({"networkPolicy": {"enabled": True, "monitoring": []}})
    assert not of_kind(nobody, "NetworkPolicy")["spec"]["ingress"], "none, which is not the same as any"
    for made in (node, sidecar):
        policy = of_kind(made, "NetworkPolicy")["spec"]
        assert policy["policyTypes"] == ["Ingress"]
        (chosen,) = [each for _, each in pods(made) if chosen_by(policy["podSelector"], each["metadata"]["labels"])]
        assert daemons(chosen)
        ports = {port["name"] for each in [*chosen["spec"]["initContainers"], *chosen["spec"]["containers"]]
                 for port in each.get("ports", ())}  # fmt: skip
        assert set().union(*(named for _, named in admitted(made))) == ports
    with_engine = render({"networkPolicy": {"enabled": True}, "engine": {"enabled": True}})
    chosen_names = {
        name for name, each in pods(with_engine)
        if chosen_by(of_kind(with_engine, "NetworkPolicy")["spec"]["podSelector"], each["metadata"]["labels"])
    }  # fmt: skip
    assert chosen_names == {"kvsidecar"}


def test_an_engine_gets_its_models_volume_its_token_and_a_service() -> None:
    made = render(EVERYTHING["models"])
    template = dict(pods(made))["kvsidecar-vllm"]
    (engine,) = template["spec"]["containers"]
    assert kubernetes.volumes(template, engine)["/var/cache/vllm"]["persistentVolumeClaim"] == {"claimName": "models"}
    (token,) = [each for each in engine["env"] if each["name"] == "HF_TOKEN"]
    assert token["valueFrom"] == {"secretKeyRef": {"name": "huggingface", "key": "token"}}
    assert "Service" not in {each["kind"] for each in made}
    made = render(EVERYTHING["engine"])
    service = of_kind(made, "Service")["spec"]
    template = dict(pods(made))["kvsidecar-vllm"]
    assert service["selector"].items() <= template["metadata"]["labels"].items()
    (engine,) = template["spec"]["containers"]
    assert [each["targetPort"] for each in service["ports"]] == [each["name"] for each in engine["ports"]]
    assert "HF_TOKEN" not in {each["name"] for each in engine["env"]}


@pytest.mark.parametrize("name", ["host pool", "host pool in huge pages"])
def test_a_pool_that_an_update_keeps_lies_on_the_node_and_belongs_to_the_daemons_user(name: str) -> None:
    """The daemon keeps what it finds in these directories; tests/daemon holds that."""
    ((_, template),) = pods(render(EVERYTHING[name]))
    (daemon,) = daemons(template)
    told, user = settings(daemon), daemon["securityContext"]["runAsUser"]
    wanted = EVERYTHING[name]["pool"]
    mounted = kubernetes.volumes(template, daemon)
    for path, host in ((told.pool_dir, wanted["hostPath"]), (told.table_dir, wanted.get("tableHostPath"))):
        if host is None:
            assert path is None
            continue
        assert mounted[str(path)]["hostPath"]["path"] == host
        (gives,) = [each for each in template["spec"]["initContainers"] if str(path) in each["command"]]
        assert gives["command"] == [
            "install",
            "--directory",
            f"--owner={user}",
            f"--group={user}",
            "--mode=0700",
            str(path),
        ]
        assert kubernetes.volumes(template, gives)[str(path)] == mounted[str(path)]


def test_what_is_patched_by_the_component_of_the_host_pool_is_rendered_too() -> None:
    (patch,) = documents((kubernetes.HERE / "components" / "host-pool" / "daemonset.yaml").read_text())
    wanted = patch["spec"]["template"]["spec"]
    ((_, template),) = pods(render(EVERYTHING["host pool"]))
    (volume,) = wanted["volumes"]
    del volume["emptyDir"]  # null: the patch takes it away
    assert volume in template["spec"]["volumes"]
    given = {each["name"]: each for each in template["spec"]["initContainers"]}
    (gives,) = wanted["initContainers"]
    assert given[gives["name"]] == {**gives, "image": given[gives["name"]]["image"]}


def test_two_types_of_nodes_have_pools_of_their_own_and_no_node_in_common() -> None:
    made = {name: render(EVERYTHING[name], release=name.replace(" ", "-")) for name in ("large nodes", "small nodes")}
    specs = [template["spec"] for each in made.values() for _, template in pods(each)]
    products = [each["nodeSelector"]["nvidia.com/gpu.product"] for each in specs]
    assert len(set(products)) == 2
    limits = [parse_size(daemons({"spec": each})[0]["resources"]["limits"]["memory"]) for each in specs]
    assert limits[0] > limits[1]


def test_the_chart_has_the_version_of_the_newest_release() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    released = re.findall(r"^## (\d+\.\d+\.\d+) - ", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert chart["version"] == chart["appVersion"] == released[0]
    overlay = yaml.safe_load((kubernetes.HERE / "overlays/daemonset/kustomization.yaml").read_text())
    assert overlay["images"][0]["newTag"] == released[0]


def test_an_archive_of_the_chart_renders_the_same(tmp_path: Path) -> None:
    with helm.Chart.load(str(CHART)) as chart:
        path = chart.save(str(tmp_path))
        values: Any = ALL_MONITORING
        with helm.Chart.load(path) as packed:
            rendered = [each.render(values, name="kvsidecar", namespace="kvsidecar") for each in (chart, packed)]
    assert rendered[0] == rendered[1]


def test_the_commands_of_the_page_find_what_is_rendered_valid() -> None:
    """By Helm and kubeconform themselves where they are installed, else by their equals from PyPI."""
    page = (ROOT / "docs" / "helm.md").read_text()
    (block,) = [each for each in re.findall(r"^```sh\n(.*?)^```", page, re.MULTILINE | re.DOTALL) if "template" in each]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}:{Path(__file__).with_name('equals')}"
    command = ["bash", "-euo", "pipefail", "-c", block]
    ran = subprocess.run(command, cwd=ROOT, env={**os.environ, "PATH": path}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert len(re.findall(r"Valid: [1-9].*Invalid: 0", ran.stdout)) == 2
    wrong = block.replace("kubeconform", "sed 's/containerPort/containerPrt/' | kubeconform")
    command[-1] = wrong
    ran = subprocess.run(command, cwd=ROOT, env={**os.environ, "PATH": path}, capture_output=True, text=True)
    assert ran.returncode != 0


# -- examples ------------------------------------------------------------------------------------------------------


def connector(words: list[str]) -> Manifest:
    text = " ".join(words)
    found: Manifest = json.loads(re.findall(r"--kv-transfer-config '?(\{.*?\})'?(?:\s|$)", text, re.DOTALL)[0])
    return found


def test_engines_of_the_production_stack_find_the_daemon() -> None:
    spec = yaml.safe_load((EXAMPLES / "production-stack.yaml").read_text())["servingEngineSpec"]
    (model,) = spec["modelSpec"]
    given = connector(model["vllmConfig"]["extraArgs"])
    assert model["vllmConfig"]["enablePrefixCaching"] is True
    assert "PYTHONHASHSEED" not in {each["name"] for each in model["env"]}, "that chart has it: two are refused"
    _an_engine(given, {each["name"]: each["value"] for each in model["env"]}, model["extraVolumes"], spec)


def test_the_leader_of_a_set_serves_for_all_ranks(tmp_path: Path) -> None:
    """By the command itself: told its start rank, vLLM takes the leader's for the only one that it serves."""
    (lws,) = documents((EXAMPLES / "leader-worker-set.yaml").read_text())
    (engine,) = lws["spec"]["leaderWorkerTemplate"]["leaderTemplate"]["spec"]["containers"]
    printer = tmp_path / "vllm"
    printer.write_text('#!/bin/sh\nprintf "%s\\0" "$@"\n')
    printer.chmod(0o755)
    said = []
    for rank in ("0", "1"):
        group = {"LWS_WORKER_INDEX": rank, "LWS_GROUP_SIZE": "2", "LWS_LEADER_ADDRESS": "leader"}
        env = {**os.environ, **group, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        ran = subprocess.run([*engine["command"], *engine["args"]], env=env, capture_output=True, text=True, check=True)
        said.append(ran.stdout.split("\0"))
    leader, worker = said
    assert not {"--headless", "--data-parallel-start-rank"} & set(leader)
    (start,) = [place for place, word in enumerate(worker) if word == "--data-parallel-start-rank"]
    assert worker[start + 1] == "1"
    assert "--headless" in worker
    assert json.loads(leader[leader.index("--kv-transfer-config") + 1]) == connector(engine["args"])


def test_pods_of_a_leader_worker_set_find_the_daemon() -> None:
    (lws,) = documents((EXAMPLES / "leader-worker-set.yaml").read_text())
    template = lws["spec"]["leaderWorkerTemplate"]
    for name in ("leaderTemplate", "workerTemplate"):
        pod = template[name]["spec"]
        validate({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "vllm"}, "spec": pod}, latest())
        (engine,) = pod["containers"]
        (command,) = engine["args"]
        assert f"--tensor-parallel-size {engine['resources']['limits']['nvidia.com/gpu']} " in command, "it spans nodes"
        seeds = [each["value"] for each in engine["env"] if each["name"] == "PYTHONHASHSEED"]
        assert seeds == ["0"]
        _an_engine(connector([command]), {each["name"]: each["value"] for each in engine["env"]}, pod["volumes"], pod)


def _an_engine(given: Manifest, env: dict[str, str], volumes: list[Manifest], pod: Manifest) -> None:
    assert given["kv_connector_module_path"] == "kvsidecar.integrations.vllm"
    assert given["kv_load_failure_policy"] == "recompute"
    ConnectorOptions.parse(given.get("kv_connector_extra_config", {}))
    assert env["KVSIDECAR_SOCKET"] == "/run/kvsidecar/kvsidecar.sock"
    ((_, node),) = pods(render())
    (of_node,) = [each["hostPath"] for each in node["spec"]["volumes"] if "hostPath" in each]
    assert [each["hostPath"] for each in volumes if "hostPath" in each] == [of_node]
    assert pod["securityContext"]["supplementalGroups"] == [10001]


def test_the_values_that_kvsidecar_size_prints_make_a_daemon_that_fits(tmp_path: Path) -> None:
    machine = ["--tp", "8", "--host-memory", "256GiB", "--disk", "2TiB"]
    printed = CliRunner().invoke(main, ["size", "Llama-3.3-70B", "--sessions", "99", *machine, "--json"])
    body = json.loads(printed.stdout)
    ((_, template),) = pods(render(yaml.safe_load(body["paste"]["helm"])))
    (daemon,) = daemons(template)
    _holds(daemon, template, tmp_path)
    told = settings(daemon)
    assert (told.pool_size.nbytes, told.disk_size) == (body["pool_bytes"], body["disk_bytes"])
    assert daemon["resources"]["limits"]["memory"] == f"{body['memory_limit_bytes'] >> 30}Gi"
