"""What an API server refuses beyond the schemas of its types (pkg/apis/*/validation of Kubernetes), and what a kubelet
cannot start: `refusals` of a manifest, and `dangling` of all that is applied together.

For what this repository has. No API server can be installed from a package registry.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from decimal import Decimal
from typing import Any

Manifest = dict[str, Any]

_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN = rf"{_LABEL}(\.{_LABEL})*"
_NAME = r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?"
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?")
_UNITS = {"": Decimal(1), "m": Decimal("0.001")} | {
    f"{prefix}{end}": Decimal(base) ** (power + 1)
    for base, end, prefixes in ((1000, "", "kMGTP"), (1024, "i", "KMGTP"))
    for power, prefix in enumerate(prefixes)
}
_WORKLOADS = ("DaemonSet", "Deployment", "StatefulSet")
_HANDLERS = ("exec", "httpGet", "tcpSocket", "grpc")


def refusals(manifest: Manifest) -> list[str]:
    """Why a server refuses it; empty if it does not."""
    return [*_metadata(manifest), *_kind(manifest)]


def dangling(manifests: list[Manifest]) -> list[str]:
    """What pods and Services name that is not among the manifests."""
    there = {(each["kind"], each["metadata"]["name"]) for each in manifests}
    found = []
    for each in manifests:
        spec = _template(each).get("spec", {})
        wanted = [("ServiceAccount", spec["serviceAccountName"])] if "serviceAccountName" in spec else []
        for volume in spec.get("volumes", ()):
            for kind, field, key in (("ConfigMap", "configMap", "name"), ("Secret", "secret", "secretName")):
                if field in volume and not volume[field].get("optional"):
                    wanted.append((kind, volume[field][key]))
        found += [
            f"{each['metadata']['name']} needs the {kind} {name}" for kind, name in wanted if (kind, name) not in there
        ]
        if each["kind"] == "Service":
            found += _unserved(each, manifests)
    return found


def _unserved(service: Manifest, manifests: list[Manifest]) -> Iterator[str]:
    selector = service["spec"]["selector"].items()
    pods = [template for each in manifests if selector <= _labels(template := _template(each)).items()]
    if not pods:
        yield f"the Service {service['metadata']['name']} selects no pod"
    for pod in pods:
        named = {port.get("name") for each in _containers(pod["spec"]) for port in each.get("ports", ())}
        for port in service["spec"]["ports"]:
            if isinstance(port.get("targetPort"), str) and port["targetPort"] not in named:
                yield f"no port of the Service's pods is named {port['targetPort']}"


def _template(manifest: Manifest) -> Manifest:
    return manifest["spec"]["template"] if manifest["kind"] in _WORKLOADS else {}


def _labels(template: Manifest) -> dict[str, str]:
    return template.get("metadata", {}).get("labels", {})


def _containers(spec: Manifest) -> list[Manifest]:
    return [*spec.get("initContainers", ()), *spec["containers"]]


def _metadata(manifest: Manifest, where: str = "") -> Iterator[str]:
    metadata = manifest.get("metadata", {})
    if "name" in metadata and not (re.fullmatch(_SUBDOMAIN, metadata["name"]) and len(metadata["name"]) <= 253):
        yield f"{metadata['name']} is no name"
    for kind in ("labels", "annotations"):
        for key, value in (metadata.get(kind) or {}).items():
            prefix, _, name = key.rpartition("/")
            if not re.fullmatch(_NAME, name) or len(name) > 63 or (prefix and not re.fullmatch(_SUBDOMAIN, prefix)):
                yield f"{where}{key!r} is no key of {kind}"
            if not isinstance(value, str):
                yield f"{where}{key} of {kind} is no text"
            elif kind == "labels" and value and (not re.fullmatch(_NAME, value) or len(value) > 63):
                yield f"{where}{value!r} is no value of a label"


def _kind(manifest: Manifest) -> Iterator[str]:
    spec = manifest.get("spec", {})
    if manifest["kind"] in _WORKLOADS:
        template = spec["template"]
        selector = spec["selector"].get("matchLabels", {})
        if not selector or not selector.items() <= _labels(template).items():
            yield "the selector does not select the template"
        if template["spec"].get("restartPolicy", "Always") != "Always":
            yield "pods of a workload are always restarted"
        update = spec.get("updateStrategy", spec.get("strategy", {})).get("rollingUpdate", {})
        if update.get("maxUnavailable", 1) in (0, "0%") and update.get("maxSurge", 0) in (0, "0%"):
            yield "an update may neither stop nor add a pod"
        yield from _metadata(template, "template: ")
        yield from _pod(template["spec"])
    elif manifest["kind"] == "Service":
        if not re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", manifest["metadata"]["name"]):
            yield "a Service's name is a DNS label that begins with a letter"
        names = [port.get("name") for port in spec["ports"]]
        if len(names) > 1:
            yield from _unique("a Service's port", names)
        yield from _unique("a Service's port", [(port["port"], port.get("protocol", "TCP")) for port in spec["ports"]])
    elif manifest["kind"] in ("ConfigMap", "Secret"):
        for key in {**(manifest.get("data") or {}), **(manifest.get("stringData") or {})}:
            if not re.fullmatch(r"[-._a-zA-Z0-9]{1,253}", key):
                yield f"{key!r} is no key of a {manifest['kind']}"


def _unique(what: str, values: Iterable[Any]) -> Iterator[str]:
    yield from (f"{what} is there {times} times: {value}" for value, times in Counter(values).items() if times > 1)


def _pod(spec: Manifest) -> Iterator[str]:
    volumes = [each["name"] for each in spec.get("volumes", ())]
    containers = _containers(spec)
    names = [each["name"] for each in containers]
    yield from _unique("a volume", volumes)
    yield from _unique("a container", names)
    yield from (
        f"{each!r} is no name" for each in (*volumes, *names) if not re.fullmatch(_LABEL, each) or len(each) > 63
    )
    for volume in spec.get("volumes", ()):
        if len(sources := volume.keys() - {"name"}) != 1:
            yield f"the volume {volume['name']} has {len(sources)} sources"
        if not volume.get("hostPath", {}).get("path", "/").startswith("/") or ".." in str(volume.get("hostPath")):
            yield f"the path of {volume['name']} is not absolute"
    if spec.get("hostPID") and spec.get("shareProcessNamespace"):
        yield "a pod has the host's PIDs or its own"
    used = {each["name"] for container in containers for each in container.get("volumeMounts", ())}
    yield from (f"nothing mounts the volume {name}" for name in volumes if name not in used)
    claims = {each["name"] for each in spec.get("resourceClaims", ())}
    for number, container in enumerate(containers):
        initial = number < len(spec.get("initContainers", ()))
        runs_on = not initial or container.get("restartPolicy") == "Always"
        yield from (f"{container['name']}: {why}" for why in _container(container, set(volumes), claims, runs_on, spec))
        if not initial and "restartPolicy" in container:
            yield f"{container['name']}: only an init container has a restart policy of its own"


def _container(
    container: Manifest, volumes: set[str], claims: set[str], runs_on: bool, spec: Manifest
) -> Iterator[str]:
    mounts, ports = container.get("volumeMounts", ()), container.get("ports", ())
    yield from (f"there is no volume {each['name']}" for each in mounts if each["name"] not in volumes)
    yield from _unique("a mount", [each["mountPath"] for each in mounts])
    named = [port["name"] for port in ports if "name" in port]
    yield from _unique("a port", named)
    for name in named:
        if not re.fullmatch(r"(?!.*--)[a-z0-9]([-a-z0-9]{0,13}[a-z0-9])?", name) or name.isdecimal():
            yield f"{name!r} is no name of a port: at most 15 characters"
    for variable in container.get("env", ()):
        if not re.fullmatch(r"[-._a-zA-Z][-._a-zA-Z0-9]*", variable["name"]):
            yield f"{variable['name']!r} is no name of a variable"
        if variable.get("value") and "valueFrom" in variable:
            yield f"{variable['name']} has a value and a source of one"
    yield from _resources(container.get("resources", {}), claims)
    for kind in ("livenessProbe", "readinessProbe", "startupProbe"):
        if (probe := container.get(kind)) is None:
            continue
        if not runs_on:
            yield f"an init container that ends has no {kind}"
        if len([each for each in _HANDLERS if each in probe]) != 1:
            yield f"{kind} asks in one way"
        if kind != "readinessProbe" and probe.get("successThreshold", 1) != 1:
            yield f"{kind} succeeds at once"
        port = probe.get("httpGet", {}).get("port")
        if isinstance(port, str) and port not in named:
            yield f"{kind} asks a port that has no such name: {port}"
    if container.get("lifecycle") and not runs_on:
        yield "an init container that ends has no lifecycle"
    security = {**spec.get("securityContext", {}), **container.get("securityContext", {})}
    if security.get("runAsNonRoot") and security.get("runAsUser") == 0:
        yield "root is not to run"
    if security.get("privileged") and security.get("allowPrivilegeEscalation") is False:
        yield "what is privileged may escalate"


def _resources(resources: Manifest, claims: set[str]) -> Iterator[str]:
    limits, requests = resources.get("limits", {}), resources.get("requests", {})
    for name, wanted in {**limits, **requests}.items():
        if name not in ("cpu", "memory", "ephemeral-storage"):  # extended resources and huge pages
            if limits.get(name) is None or requests.get(name, limits[name]) != limits[name]:
                yield f"request and limit of {name} differ"
        elif name in limits and _number(requests.get(name, wanted)) > _number(limits[name]):
            yield f"more {name} is requested than allowed"
    if any(name.startswith("hugepages-") for name in limits) and not {"cpu", "memory"} & {*limits, *requests}:
        yield "huge pages go with cpu or memory"
    yield from (
        f"the pod has no claim {each['name']}" for each in resources.get("claims", ()) if each["name"] not in claims
    )


def _number(quantity: str | int) -> Decimal:
    found = _QUANTITY.fullmatch(str(quantity))
    assert found is not None, f"{quantity!r} is no quantity"
    return Decimal(found[1]) * _UNITS[found[2] or ""]
