"""Mutants of micro-batches by length: what is cut, what is counted, and the trial of padding."""

from mutant import waiting

TESTS = "fit/test_lengths.py::"
WEIGHTS = TESTS + "test_weights_of_tokens[sum_over_batch_size-graph]"
ZERO_HEAD = TESTS + "test_a_layer_behind_which_all_is_0_at_first"

MUTANTS = [
    waiting("lengths: shares by all positions", WEIGHTS),
    waiting(
        "lengths: means of metrics over the cut", TESTS + "test_masked_tokens[attending-size-graph]"
    ),
    waiting("lengths: order not restored", TESTS + "test_value_and_gradients"),
    waiting("lengths: weights do not lengthen", TESTS + "test_a_weight_makes_an_example_longer"),
    waiting("lengths: labels not cut", TESTS + "test_masked_tokens[attending-size-graph]"),
    waiting("lengths: cut one too short", TESTS + "test_value_and_gradients"),
    waiting(
        "lengths: training and testing share a trial",
        TESTS + "test_testing_tells_nothing_about_training",
    ),
    waiting("lengths: a trial survives compile", TESTS + "test_another_loss_is_tried_again"),
    waiting("lengths: one trial for all variables", TESTS + "test_closures_over_several_models"),
    waiting(
        "lengths: a budget that ignores the longest",
        TESTS + "test_there_is_less_work[tokens-16]",
        TESTS + "test_a_budget_for_ragged_tokens",
    ),
    waiting("lengths: first micro-batch counted twice", TESTS + "test_value_and_gradients"),
    waiting(
        "lengths: tokens counted on cut micro-batches",
        TESTS + "test_an_output_with_a_mask_beside_one_with_weights",
    ),
    waiting("lengths: no rounding for XLA", TESTS + "test_compiled_shapes_are_few"),
    waiting("lengths: tails of any size for XLA", TESTS + "test_compiled_shapes_are_few"),
    waiting("lengths: dropout on in the trial", TESTS + "test_dropout_does_not_look_like_padding"),
    waiting(
        "lengths: inputs of a fixed size cut",
        TESTS + "test_an_input_that_is_as_large_as_sequences_but_fixed",
    ),
    waiting("lengths: aux not padded in other axes", TESTS + "test_value_and_gradients"),
    waiting("lengths: nothing is tried", TESTS + "test_a_loss_that_depends_on_padding"),
    waiting("lengths: ragged rows not in the size", TESTS + "test_ragged_and_sparse_parts"),
    waiting(
        "lengths: ragged rows not tried",
        TESTS + "test_a_layer_after_ragged_tokens_that_depends_on_padding",
    ),
    waiting(
        "lengths: examples that depend on each other compared",
        TESTS + "test_ragged_tokens_of_examples_that_depend_on_each_other",
    ),
    waiting(
        "lengths: ragged rows not in the length of a micro-batch",
        TESTS + "test_a_budget_for_ragged_tokens",
    ),
    waiting("lengths: counts doubled", TESTS + "test_masked_tokens[attending-size-graph]"),
    waiting(
        "lengths: counting makes predictions",
        "fit/test_keras.py::test_tokens_are_counted_without_predictions",
    ),
    waiting(
        "lengths: metrics of ragged tokens over the cut",
        TESTS + "test_ragged_tokens[tokens-graph]",
    ),
    waiting("lengths: neither gradients compared nor weights moved", ZERO_HEAD),
    waiting(
        "lengths: longer lengths not tried for XLA", TESTS + "test_labels_that_are_made_longer"
    ),
]
