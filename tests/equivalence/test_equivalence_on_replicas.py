"""The tests of test_equivalence, with the accumulated model on two replicas."""

import pytest
import support
from test_accumulator_everywhere import mirrored
from test_equivalence import *  # noqa: F403

pytestmark = pytest.mark.filterwarnings("ignore:Nothing is being accumulated")

# What several replicas cannot do is in test_keras_on_replicas.
CANNOT = ("test_masks_compiled", "test_several_steps_per_execution", "test_a_batch_of_one")
# Unless all are asked for, what replicas are most likely to get wrong.
CHOSEN = {
    "test_reductions": {"weighted": [True]},
    "test_masks": {
        "weights": [None],
        "reduction": ["sum_over_batch_size", "mean_with_sample_weight"],
    },
    "test_a_micro_batch_without_unmasked_elements": {},
    "test_each_output_with_its_own_weights": {},
    "test_regularizers_count_once": {},
    "test_vectors_given_to_add_loss": {},
    "test_sizes": {"micro_batch_size": [1]},
    "test_optimizers": {"name": ["lamb", "clipnorm", "global_clipnorm", "loss_scale"]},
    "test_variables_without_gradient": {},
    "test_variables_without_gradient_in_some_micro_batches": {},
    "test_repeated_embedding_rows": {"name": ["global_clipnorm"]},
    "test_mixed_precision_is_as_close_as_its_rounding": {"policy": ["mixed_float16"]},
    "test_ragged_inputs": {},
    "test_kinds_of_data": {"kind": ["generator", "Dataset"]},
    "test_metrics_are_those_of_the_whole_batch": {},
    "test_two_outputs_without_reduction": {},
    "test_weights_that_cancel_in_a_micro_batch": {},
}


def selected(name, parameters, thorough):
    if name in CANNOT or parameters.get("mode", "graph") != "graph":
        return False
    if name == "test_optimizers" and parameters["name"] == "ema":
        return False
    chosen = CHOSEN.get(name)
    return thorough or (
        chosen is not None and all(parameters[key] in values for key, values in chosen.items())
    )


@pytest.fixture(autouse=True)
def two_replicas(monkeypatch):
    monkeypatch.setattr(support, "strategy", mirrored(2))
