from __future__ import annotations

import pytest

from kvsidecar.core.quota import Quota
from kvsidecar.errors import LimitExceeded


def test_a_holder_may_have_as_many_as_the_limit_and_no_more() -> None:
    quota = Quota(2, "things")
    quota.take("a")
    with pytest.raises(LimitExceeded, match="one user may have 2 things"):
        quota.take("a", 2)
    quota.take("a")
    with pytest.raises(LimitExceeded):
        quota.take("a")
    quota.take("b", 2)
    quota.give_back("a")
    quota.take("a")
    assert quota.held == 4, "what was refused counts"


def test_the_peak_is_that_of_all_since_it_was_asked_for() -> None:
    quota = Quota(4, "things", 6)
    quota.take("a", 4)
    quota.take("b", 2)
    with pytest.raises(LimitExceeded):
        quota.take("b")
    quota.give_back("a", 4)
    assert quota.peak() == 6
    assert quota.peak() == quota.held == 2
    quota.give_back("b", 2)
    assert quota.peak() == 2
    assert quota.peak() == 0
