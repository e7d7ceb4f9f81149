"""The lines of the pages that start vLLM are accepted by its own parser, and load the connector."""

from __future__ import annotations

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.utils.argparse_utils import FlexibleArgumentParser

from kvsidecar.integrations.vllm import KVSidecarConnector
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
        children = config.kv_connector_extra_config.get("connectors", ())
        connectors = [KVTransferConfig(**child) for child in children] or [config]
        assert KVSidecarConnector in [KVConnectorFactory.get_connector_class(each) for each in connectors]
        for each in (config, connectors[-1]):
            assert (each.kv_role, each.kv_load_failure_policy) == ("kv_both", "recompute")
