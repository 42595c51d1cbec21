"""Mutants of accumulate: denominators, regularisers, tails, statistics, reports."""

from mutant import Mutant, waiting

LOSSES, MODELS = (f"equivalence/test_equivalence.py::test_{kind}" for kind in ("losses", "models"))
KERAS = "fit/test_keras.py::"
NORM = "fit/test_batch_norm.py::"

MUTANTS = [
    Mutant(
        "fit: repeated rows not merged",
        "_tensorflow/sums.py",
        "return merge_rows(tf.IndexedSlices(total.values.concat(), total.indices.concat(), table))",
        "return tf.IndexedSlices(total.values.concat(), total.indices.concat(), table)",
        (MODELS + "[repeated-rows-adam-graph]",),
    ),
    Mutant(
        "fit: sums in float16 and bfloat16",
        "_tensorflow/sums.py",
        "return tf.float32 if dtype in (tf.float16, tf.bfloat16) else dtype",
        "return dtype",
        ("rooms/test_sums.py::test_narrow_gradients_are_summed_in_float32",),
    ),
    waiting("fit: examples counted instead of tokens", LOSSES + "[mask-sum_over_batch_size-graph]"),
    waiting(
        "fit: weights left out of mean_with_sample_weight",
        LOSSES + "[reduction-mean_with_sample_weight-weights-graph]",
    ),
    waiting("fit: mean of means", LOSSES + "[reduction-sum_over_batch_size-graph]"),
    waiting("fit: regulariser counted per micro-batch", LOSSES + "[regularizers-graph]"),
    waiting("fit: regulariser missing in the reported loss", LOSSES + "[regularizers-graph]"),
    waiting("fit: activity regulariser summed", LOSSES + "[regularizers-graph]"),
    waiting("fit: vectors given to add_loss by share", LOSSES + "[add_loss-vectors-graph]"),
    waiting("fit: tail lost in a graph", MODELS + "[17-examples-seven-graph]"),
    waiting("fit: tail lost in XLA", MODELS + "[17-examples-seven-compiled]"),
    waiting(
        "fit: statistics of the last micro-batch only",
        NORM + "test_pooled_statistics_are_those_of_the_batch[graph]",
    ),
    waiting("fit: variance between micro-batches left out", NORM + "test_pooling_two_sets"),
    waiting(
        "fit: writes do not wait for the loop",
        KERAS + "test_a_failure_changes_nothing[backward-graph]",
    ),
    waiting(
        "fit: seeds not carried",
        KERAS + "test_each_micro_batch_draws_fresh_numbers_and_runs_can_be_repeated",
    ),
    waiting("fit: metrics not carried", LOSSES + "[metrics-graph]"),
    waiting("fit: loss tracker weighted by 1", LOSSES + "[reduction-sum_over_batch_size-graph]"),
    waiting("fit: tracker of an output told the last part only", LOSSES + "[outputs-dict-graph]"),
    waiting("fit: micro_batch_weight ignored", KERAS + "test_the_weight_of_a_micro_batch[graph]"),
    waiting(
        "fit: loss scale left out of the regulariser", LOSSES + "[regularizer-and-loss-scale-graph]"
    ),
    waiting("fit: reduction=None reported as a sum", LOSSES + "[no-reduction-graph]"),
    waiting(
        "fit: first gradient dropped in eager mode",
        LOSSES + "[reduction-sum_over_batch_size-weights-eager]",
    ),
    waiting("fit: a second trace for the loop", KERAS + "test_one_trace_per_signature"),
]
