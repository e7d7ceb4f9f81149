"""The lines of the pages that start SGLang are accepted by its own parser, and load the linker."""

from __future__ import annotations

import argparse
import importlib

import pytest
from sglang.srt.server_args import ServerArgs

from tests.docs.serve_lines import arguments


@pytest.mark.parametrize("page", ["README.md", "docs/sglang.md", "docs/recipes.md"])
def test_sglang_takes_the_lines_of_a_page_and_they_load_the_linker(page: str) -> None:
    lines = arguments(page, "python -m sglang.launch_server")
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    for line in lines:
        parsed = parser.parse_args(line)
        config = parsed.unified_cache_external_linker_config
        assert hasattr(importlib.import_module(config["linker_module_path"]), config["linker"])
        assert parsed.enable_unified_cache_external_linker
        assert (parsed.unified_cache_external_linker_backend, parsed.page_size) == ("dynamic", 64)
