"""Options, variables, commands and metrics that a document names exist."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click
import pytest

from kvsidecar.cli.main import main
from kvsidecar.daemon.setting_sources import RESERVED, click_options, variable_of
from kvsidecar.daemon.settings import Settings
from kvsidecar.integrations.sglang.counters import HELP
from kvsidecar.integrations.vllm.counters import COUNTED
from tests.docs.pages import PAGES, commands, spans, text

metrics = pytest.importorskip("docs.generate.metrics", reason="the pages' generators need the group docs")

OF_OTHERS = {
    "--disable-radix-cache": "SGLang",
    "--enable-session-radix-cache": "SGLang",
    "--enable-return-indexer-topk": "SGLang",
    "--enable-return-routed-experts": "SGLang",
    "--kv-canary": "SGLang",
    "--enable-hierarchical-cache": "SGLang",
    "--enable-fault-tolerance": "vLLM",
    "--prefix-match-unit": "vLLM",
    "--scheduling-policy": "vLLM",
    "--served-model-name": "vLLM",
    "--enable-memory-saver": "SGLang",
    "--enable-metrics": "SGLang",
    "--lora-paths": "SGLang",
    "--unified-cache-external-linker-config": "SGLang",
    "--page-size": "SGLang",
    "--weight-version": "SGLang",
    "--at-once": "benchmarks.vllm.throughput",
    "--count": "benchmarks.vllm.throughput",
    "--gpu-tokens": "benchmarks.vllm.throughput",
    "--llm": "benchmarks.vllm.throughput",
    "--scattered": "benchmarks.sglang.load_layers",
    "--staging": "benchmarks.sglang.load_layers",
    "--against": "benchmarks.turns",
    "--agents": "benchmarks.fleet",
    "--blocks": "benchmarks.warm_restart",
    "--compare": "benchmarks.daemon.show",
    "--enable-log-requests": "vLLM",
    "--logging-config.formatter": "vLLM",
    "--max-log-len": "vLLM",
    "--disable-hybrid-kv-cache-manager": "vLLM",
    "--kv-events-config": "vLLM",
    "--kv-transfer-config": "vLLM",
    "--layouts": "benchmarks.peers",
    "--shares": "benchmarks.lookup_timing",
    "--extra": "benchmarks.vllm.runs",
    "--graphs": "benchmarks.vllm.shapes",
    "--half": "benchmarks.fleet",
    "--hours": "benchmarks.fleet",
    "--gpus": "docker",
    "--ipc": "docker",
    "--shm-size": "docker",
    "--ulimit": "docker",
    "--rate": "benchmarks.fleet",
    "--pre": "pip",
    "--limit": "benchmarks.warm_restart",
    "--tp": "benchmarks.vllm.throughput",
    "--resident-tokens": "benchmarks.vllm.throughput",
    "--logs": "benchmarks.peers",
    "--parts": "benchmarks.vllm.step_cost",
    "--plot": "benchmarks.daemon.show",
    "--shapes": "benchmarks.vllm.shapes",
    "--shutdown-timeout": "vLLM",
    "--targets": "benchmarks.daemon.show",
    "--tiny": "benchmarks.vllm",
    "--otlp-traces-endpoint": "vLLM",
    "--sglang": "examples.agent_loop",
}
"""Flags in the running text that belong to other programs -> whose they are."""
VARIABLES_OF_TESTS = {f"KVSIDECAR_{name}" for name in ("HOSTILE_SECONDS", "HOSTILE_SEED", "KILLS", "KILL_SEED")}
SERVE = {name for option in click_options() for name in option.opts}


def flags_of(command: click.Command) -> set[str]:
    return {"--help", "-h"} | {
        name for option in command.params if isinstance(option, click.Option) for name in option.opts
    }


ALL = set().union(SERVE, {"--version"}, *(flags_of(command) for command in main.commands.values()))


def unknown_in(line: str) -> Iterator[str]:
    """Commands and flags of a command line that kvsidecar does not have."""
    words = line.split()[1:]
    if not words or words[0].startswith("--"):
        yield from (word for word in words if word not in ("--version", "--help"))
        return
    if words[0] not in main.commands:
        # `kvsidecar COMMAND --help`, or prose such as "kvsidecar serves ..." in a shown output.
        if not words[0].isupper() and "--" in line:
            yield words[0]
        return
    known = flags_of(main.commands[words[0]])
    for word in words[1:]:
        if word == "--":
            known = SERVE
        elif word.startswith("--") and word.partition("=")[0] not in known:
            yield word


@pytest.mark.parametrize("page", PAGES)
def test_command_lines_are_those_of_kvsidecar(page: str) -> None:
    assert [(line, wrong) for line in commands(page) for wrong in unknown_in(line)] == []


@pytest.mark.parametrize("page", PAGES)
def test_flags_in_the_running_text_exist(page: str) -> None:
    named = {re.split(r"[ =]", span)[0] for span in spans(page) if span.startswith("--")}
    assert named - ALL - set(OF_OTHERS) == set()


@pytest.mark.parametrize("page", PAGES)
def test_variables_exist(page: str) -> None:
    named = set(re.findall(r"\bKVSIDECAR_[A-Z_]+\b", text(page)))
    assert named - set(map(variable_of, Settings.model_fields)) - RESERVED - VARIABLES_OF_TESTS == set()


@pytest.mark.parametrize("page", PAGES)
def test_metrics_exist(page: str) -> None:
    assert set(re.findall(r"\bvllm:kvsidecar_([a-z_]+)_total\b", text(page))) <= set(COUNTED)
    assert set(re.findall(r"\bsglang:kvsidecar_([a-z_]+)_total\b", text(page))) <= set(HELP)
    named = set(re.findall(r"(?<!vllm:)(?<!sglang:)\bkvsidecar_[a-z_]+\b", text(page)))
    families = [*metrics.families(), *metrics.publisher_families()]
    exported = {sample.name for family in families for sample in family.samples}
    histograms = {family.name for family in metrics.families() if family.type == "histogram"}
    assert named - exported - histograms == set()


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("kvsidecar serve --pool-sizes 1GiB", ["--pool-sizes"]),
        ("kvsidecar bench --quick -- --store-chunks off", ["--store-chunks"]),
        ("kvsidecar tops --once", ["tops"]),
        ("kvsidecar clear --all --yes", []),
        ("kvsidecar bench --only lookup -- --local-protocol off", []),
    ],
)
def test_a_wrong_name_is_found(line: str, wrong: list[str]) -> None:
    assert list(unknown_in(line)) == wrong


def test_the_exit_codes_of_the_table_are_those_of_the_help() -> None:
    rows = re.findall(r"^\| (\d+) \| (.+?) \|", text("docs/operating.md").partition("## Exit codes")[2], re.MULTILINE)
    shown = {(name, code) for code, names in rows for name in re.findall(r"`([a-z]+)", names)}
    helped = set()
    for name, command in main.commands.items():
        codes = (command.help or "").partition("Exit codes:")[2]
        helped |= {(name, code) for code in re.findall(r"(?:^|, |and |\n| )(\d+)\b", codes) if code != "0"}
    assert helped
    assert helped - shown == set()
