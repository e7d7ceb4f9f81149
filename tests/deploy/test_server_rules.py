"""What `server_rules` refuses, each planted in a workload that is fine."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import yaml

from tests.deploy.server_rules import Manifest, dangling, refusals

GOOD = """
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: kv, labels: {app: kv}}
spec:
  selector: {matchLabels: {app: kv}}
  template:
    metadata: {labels: {app: kv, tier: cache}}
    spec:
      serviceAccountName: kv
      volumes: [{name: run, hostPath: {path: /run/kv}}, {name: settings, configMap: {name: kv}}]
      initContainers:
        - {name: directory, image: a, volumeMounts: [{name: run, mountPath: /run/kv}]}
      containers:
        - name: kv
          image: a
          env: [{name: A, value: b}]
          ports: [{name: http, containerPort: 9464}]
          livenessProbe: {httpGet: {path: /, port: http}}
          resources: {requests: {cpu: 500m, memory: 1Gi}, limits: {cpu: "1", memory: 1Gi, nvidia.com/gpu: 1}}
          volumeMounts: [{name: run, mountPath: /run/kv}, {name: settings, mountPath: /etc/kv}]
"""
SERVICE = """
apiVersion: v1
kind: Service
metadata: {name: kv}
spec: {selector: {app: kv}, ports: [{name: http, port: 80, targetPort: http}, {name: grpc, port: 90}]}
"""
POD = ("spec", "template", "spec")
DAEMON = (*POD, "containers", 0)
INIT = (*POD, "initContainers", 0)


def changed(text: str, path: tuple[str | int, ...], value: Any) -> Manifest:
    manifest = copy.deepcopy(yaml.safe_load(text))
    at = manifest
    for each in path[:-1]:
        at = at[each]
    at[path[-1]] = value
    return manifest


@pytest.mark.parametrize(
    ("path", "value", "why"),
    [
        (("metadata", "name"), "Kv", "Kv is no name"),
        (("metadata", "labels"), {"app": "a b"}, "'a b' is no value of a label"),
        (("metadata", "annotations"), {"a/b/c": "x"}, "'a/b/c' is no key of annotations"),
        (("metadata", "annotations"), {"a": 1}, "a of annotations is no text"),
        (("spec", "selector", "matchLabels"), {"app": "other"}, "the selector does not select the template"),
        (("spec", "updateStrategy"), {"rollingUpdate": {"maxUnavailable": 0}}, "an update may neither stop nor add"),
        ((*POD, "restartPolicy"), "Never", "always restarted"),
        ((*POD, "volumes", 0, "emptyDir"), {}, "the volume run has 2 sources"),
        ((*POD, "volumes", 0, "hostPath", "path"), "run/kv", "the path of run is not absolute"),
        ((*POD, "volumes", 1, "name"), "run", "a volume is there 2 times: run"),
        ((*POD, "volumes", 1, "name"), "other", "there is no volume settings"),
        ((*DAEMON, "volumeMounts"), [], "nothing mounts the volume settings"),
        ((*DAEMON, "volumeMounts", 1, "mountPath"), "/run/kv", "a mount is there 2 times: /run/kv"),
        ((*INIT, "name"), "kv", "a container is there 2 times: kv"),
        ((*INIT, "name"), "k_v", "'k_v' is no name"),
        ((*INIT, "readinessProbe"), {"exec": {}}, "directory: an init container that ends has no readinessProbe"),
        ((*INIT, "lifecycle"), {"preStop": {}}, "directory: an init container that ends has no lifecycle"),
        ((*DAEMON, "restartPolicy"), "Always", "kv: only an init container has a restart policy"),
        ((*DAEMON, "ports", 0, "name"), "kvsidecar-metrics", "at most 15 characters"),
        ((*DAEMON, "livenessProbe", "httpGet", "port"), "web", "livenessProbe asks a port that has no such name: web"),
        ((*DAEMON, "livenessProbe", "exec"), {}, "livenessProbe asks in one way"),
        ((*DAEMON, "livenessProbe", "successThreshold"), 2, "livenessProbe succeeds at once"),
        ((*DAEMON, "env", 0, "name"), "1A", "'1A' is no name of a variable"),
        ((*DAEMON, "env", 0, "valueFrom"), {}, "A has a value and a source of one"),
        ((*DAEMON, "resources", "requests", "memory"), "1025Mi", "more memory is requested than allowed"),
        ((*DAEMON, "resources", "requests", "nvidia.com/gpu"), 2, "request and limit of nvidia.com/gpu differ"),
        ((*DAEMON, "resources"), {"limits": {"hugepages-2Mi": "1Gi"}}, "huge pages go with cpu or memory"),
        ((*DAEMON, "resources", "claims"), [{"name": "gpus"}], "the pod has no claim gpus"),
        ((*DAEMON, "securityContext"), {"runAsNonRoot": True, "runAsUser": 0}, "root is not to run"),
        (
            (*DAEMON, "securityContext"),
            {"privileged": True, "allowPrivilegeEscalation": False},
            "what is privileged may escalate",
        ),
    ],
)
def test_what_a_server_refuses_is_seen(path: tuple[str | int, ...], value: Any, why: str) -> None:
    assert refusals(yaml.safe_load(GOOD)) == []
    assert any(why in each for each in refusals(changed(GOOD, path, value)))


def test_a_pod_has_the_hosts_pids_or_its_own() -> None:
    one = yaml.safe_dump(changed(GOOD, (*POD, "hostPID"), True))
    both = changed(one, (*POD, "shareProcessNamespace"), True)
    assert refusals(both) == ["a pod has the host's PIDs or its own"]


@pytest.mark.parametrize(
    ("path", "value", "why"),
    [
        (("metadata", "name"), "1kv", "begins with a letter"),
        (("spec", "ports", 1, "name"), "http", "a Service's port is there 2 times: http"),
        (("spec", "ports", 1, "port"), 80, "a Service's port is there 2 times: (80, 'TCP')"),
    ],
)
def test_what_is_wrong_with_a_service_is_seen(path: tuple[str | int, ...], value: Any, why: str) -> None:
    assert refusals(yaml.safe_load(SERVICE)) == []
    assert any(why in each for each in refusals(changed(SERVICE, path, value)))


def test_a_key_that_no_file_can_have_is_seen() -> None:
    wrong = {"kind": "ConfigMap", "metadata": {"name": "kv"}, "data": {"a/b": ""}}
    assert refusals(wrong) == ["'a/b' is no key of a ConfigMap"]


def test_what_a_pod_or_a_service_names_must_be_there() -> None:
    workload, service = yaml.safe_load(GOOD), yaml.safe_load(SERVICE)
    account, settings = ({"kind": kind, "metadata": {"name": "kv"}} for kind in ("ServiceAccount", "ConfigMap"))
    assert dangling([workload, service, account, settings]) == []
    assert dangling([workload, service]) == ["kv needs the ServiceAccount kv", "kv needs the ConfigMap kv"]
    assert dangling([service]) == ["the Service kv selects no pod"]
    other = changed(SERVICE, ("spec", "ports", 0, "targetPort"), "web")
    assert dangling([workload, other, account, settings]) == ["no port of the Service's pods is named web"]
