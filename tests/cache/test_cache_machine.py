"""Random lives of a few blocks in a pool of a few pages, against a model that knows what each page should hold.

Each page of the pool has a token that says who wrote it last: block hash, shard, and the number of the store. What a
load is granted, and what a lease covers, must hold the tokens that were sealed under these hashes, until it ends.
"""

from __future__ import annotations

import pytest
from hypothesis import settings

from tests.cache.cache_machine import CacheMachine
from tests.marks import examples

pytestmark = pytest.mark.timeout(600)  # a pass takes seconds, but to make a failure short takes minutes

CacheMachine.TestCase.settings = settings(max_examples=examples(400), stateful_step_count=40, deadline=None)
TestCache = pytest.mark.no_cover(CacheMachine.TestCase)  # slow when every line is counted
