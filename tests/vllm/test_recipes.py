"""The lines of the pages that start vLLM are accepted by its own parser, and load the connector."""

from __future__ import annotations

import importlib

import pytest
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.docs.serve_lines import arguments


@pytest.mark.parametrize("page", ["README.md", "docs/vllm.md", "docs/recipes.md"])
def test_vllm_takes_the_lines_of_a_page_and_they_load_the_connector(page: str) -> None:
    lines = arguments(page, "vllm serve")
    common = pytest.importorskip("vllm.entrypoints.common.cli_args", reason="this vLLM has its parser elsewhere")
    parser = common.make_arg_parser(FlexibleArgumentParser())
    for line in lines:
        parsed = parser.parse_args(line)
        common.validate_parsed_serve_args(parsed)
        config = parsed.kv_transfer_config
        assert hasattr(importlib.import_module(config.kv_connector_module_path), config.kv_connector)
        assert (config.kv_role, config.kv_load_failure_policy) == ("kv_both", "recompute")
