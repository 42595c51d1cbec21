"""The tests of test_equivalence, with the accumulated model on two replicas."""

import pytest
import support
from test_accumulator_everywhere import mirrored
from test_equivalence import *  # noqa: F403


@pytest.fixture(autouse=True)
def two_replicas(monkeypatch):
    monkeypatch.setattr(support, "strategy", mirrored(2))
