"""The tests of test_equivalence, with the accumulated model on two replicas."""

import pytest
import support
from test_accumulator_everywhere import mirrored
from test_equivalence import *  # noqa: F403

pytestmark = pytest.mark.filterwarnings("ignore:Nothing is being accumulated")

# What several replicas cannot do is in test_keras_on_replicas.
LEFT_OUT = ("test_masks_compiled", "test_several_steps_per_execution", "test_a_batch_of_one")
# Those that do more than one thing to each element of a gradient, or to each gradient.
OPTIMIZERS = ("adam", "lamb", "clipnorm", "global_clipnorm", "weight_decay", "loss_scale")


def selected(item):
    """Whether a test, with its parameters, is to be run here as well."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    return (
        item.originalname not in LEFT_OUT
        and params.get("mode", "graph") == "graph"
        and not (item.originalname == "test_optimizers" and params["name"] not in OPTIMIZERS)
        and not (item.originalname == "test_reductions" and not params["weighted"])
        and not (item.originalname == "test_masks" and params["weights"] is not None)
        and not (item.originalname == "test_sizes" and params["micro_batch_size"] > 1)
    )


@pytest.fixture(autouse=True)
def two_replicas(monkeypatch):
    monkeypatch.setattr(support, "strategy", mirrored(2))
