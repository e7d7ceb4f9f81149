"""What vLLM plans for the architectures of its registry is offloaded, or refused for a reason that is true."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.marks import long

REFUSED = {"WhisperForConditionalGeneration": "CrossAttentionSpec"}
"""By architecture: what the refusal names. An encoder's output is no KV of a prompt's tokens."""
PLANNED = 100
"""At least so many are planned without a GPU; the others want more of a configuration than transformers gives."""


@long
def test_every_architecture_that_vllm_plans_here_is_offloaded_or_refused_for_a_known_reason() -> None:
    # A process of its own: it stands in for modules that other tests may import.
    command = [sys.executable, "-m", "tests.vllm.planner"]
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    plans = {
        each["architecture"]: each for each in map(json.loads, filter(lambda line: line[0] == "{", said.splitlines()))
    }
    refused = {name: each["refused"] for name, each in plans.items() if "refused" in each}
    assert refused.keys() == REFUSED.keys()
    assert all(REFUSED[name] in why for name, why in refused.items())
    assert sum("offloaded" in each for each in plans.values()) >= PLANNED
    assert set(plans["Gemma3ForCausalLM"]["offloaded"]) == {"SLIDING_WINDOW", "FULL"}
    assert set(plans["Qwen3NextForCausalLM"]["offloaded"]) == {"STATE", "FULL"}
