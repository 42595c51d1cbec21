"""Mutants of value_and_gradients: quotients, scales, state and auxiliary values."""

from mutant import waiting

TESTS = "loops/test_value_and_gradients.py::"
FORMS = TESTS + "test_each_form_of_loss"

MUTANTS = [
    waiting("loop: mean of means", FORMS),
    waiting("loop: weights left out of the denominator", FORMS),
    waiting("loop: scalar weight ignored", FORMS),
    waiting("loop: no guard for 0 / 0", TESTS + "test_a_batch_without_any_weight_is_0", FORMS),
    waiting("loop: each micro-batch by its own scale", FORMS),
    waiting("loop: sums of float16 not scaled", TESTS + "test_loss_scaling"),
    waiting(
        "loop: losses summed narrow", TESTS + "test_gradients_have_the_dtype_of_their_variables"
    ),
    waiting(
        "loop: gradients not cast back", TESTS + "test_gradients_have_the_dtype_of_their_variables"
    ),
    waiting(
        "loop: state not written", TESTS + "test_metrics_of_keras_count_every_micro_batch_once"
    ),
    waiting(
        "loop: variables made in the scope not noticed",
        TESTS + "test_layers_that_are_built_in_loss_fn",
    ),
    waiting(
        "loop: regularised weights missing in the scope",
        TESTS + "test_a_regularised_layer_that_is_built_in_loss_fn",
    ),
    waiting(
        "loop: loss_fn not converted",
        TESTS + "test_python_control_flow_on_tensors_in_a_graph",
        TESTS + "test_python_control_flow_in_what_a_function_made_in_a_graph_calls",
    ),
    waiting("loop: aux of the last run only", TESTS + "test_nests_of_batches_variables_and_aux"),
    waiting(
        "loop: sparse aux without offsets",
        "rooms/test_loop.py::test_ragged_and_sparse_values_of_all_micro_batches",
    ),
    waiting("loop: gradient of learned weights left out", TESTS + "test_weights_that_are_learned"),
    waiting("loop: scale under the tape", TESTS + "test_weights_that_are_learned", FORMS),
]
