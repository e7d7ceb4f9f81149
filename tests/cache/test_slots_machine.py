"""Random lives of slots in a pool of a few pages, against a map of who owns each page."""

from __future__ import annotations

import pytest
from hypothesis import settings

from tests.cache.slots_machine import SlotsMachine

pytestmark = pytest.mark.timeout(600)  # a pass takes seconds, but to make a failure short takes minutes


SlotsMachine.TestCase.settings = settings(max_examples=400, stateful_step_count=40, deadline=None)
TestSlots = pytest.mark.no_cover(SlotsMachine.TestCase)  # slow when every line is counted
