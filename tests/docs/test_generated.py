"""The pages that are made from the code are what the code makes."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("grpc_tools", reason="the group docs is not installed")

from docs.generate import DOCS, PAGES, configuration, messages
from docs.generate.markdown import attribute_docs, prose
from kvsidecar import errors
from kvsidecar.daemon.setting_sources import click_options, load_settings
from kvsidecar.daemon.settings import Settings
from kvsidecar.v1 import sidecar_pb2 as pb

TCP = {
    "tcp_listen": "[::]:1",
    "tls_certificate": "c",
    "tls_key": "k",
    "tls_client_ca": "a",
    "policy": "[{certificates = ['x'], admin = true}]",
}
"""None of these goes without the others."""
OPTIONS = {str(option.name): option for option in click_options() if option.name != "config"}


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_what_the_code_makes(name: str) -> None:
    assert (DOCS / name).read_text() == PAGES[name](), f"docs/{name} differs: run make docs"


def test_every_option_has_a_section() -> None:
    sections = re.findall(r"^### (\w+)$", configuration.page(), re.MULTILINE)
    assert sections == list(Settings.model_fields)


@pytest.mark.parametrize("name", OPTIONS)
def test_the_line_of_the_file_is_accepted_and_gives_the_default(name: str, tmp_path: Path) -> None:
    option = OPTIONS[name]
    line = configuration.file_line(name, str(option.metavar), configuration.default_of(option))
    file = tmp_path / "kvsidecar.toml"
    beside = {"socket_mode": "0660"} if name == "socket_group" else TCP if name == "tcp_listen" or "tls" in name else {}
    beside = {"pool_dir": "/dev/shm/kv"} if name == "table_dir" else beside
    disk = {"disk_dir": "/var/cache/kvsidecar", "disk_size": "1TiB"}
    beside = disk if name.startswith("disk_") else beside
    beside = {"cluster_master": "kv-master:50051"} if name.startswith("cluster_") else beside
    shared = {"shared_dir": "/mnt/kv/kvsidecar", "shared_size": "10TiB"}
    beside = shared if name.startswith("shared_") else beside
    others = "".join(f'{other} = "{value}"\n' for other, value in beside.items() if other != name)
    file.write_text(others + line + "\n")
    assert name in tomllib.loads(line)
    settings = load_settings({"config": str(file)}, environ={})
    if name not in configuration.EXAMPLES:
        assert getattr(settings, name) == getattr(load_settings({}, {}, tmp_path / "none"), name)


def test_every_message_of_the_protocol_has_a_section() -> None:
    sections = set(re.findall(r"^### (\w+)$", messages.page(), re.MULTILINE))
    assert sections == set(pb.DESCRIPTOR.message_types_by_name)


def test_every_rpc_is_described() -> None:
    (service,) = pb.DESCRIPTOR.services_by_name.values()
    described = (DOCS / "wire.md").read_text()
    for method in service.methods:
        assert re.search(rf"^### .*\b{method.name}\b", described, re.MULTILINE), method.name
    assert "." in re.findall(r"^- \*\*Renew\*\*: .+$", messages.page(), re.MULTILINE)[0]


def test_every_reason_of_a_refusal_has_a_text() -> None:
    assert set(attribute_docs(errors, "Refusal")) == {reason.name for reason in errors.Refusal}


def test_prose_makes_code_of_names_and_keeps_the_rest() -> None:
    assert prose("Size of ``a_b``\n    in bytes.") == "Size of `a_b` in bytes."
    assert prose("with --socket-mode 0660 or KVSIDECAR_X, r * row_stride") == (
        "with `--socket-mode` 0660 or `KVSIDECAR_X`, r \\* `row_stride`"
    )
