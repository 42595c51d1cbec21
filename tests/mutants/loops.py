"""Mutants of value_and_gradients: quotients, scales, state and auxiliary values."""

from mutant import Mutant

TESTS = "loops/test_value_and_gradients.py::"
FORMS, LEARNED = (
    TESTS + f"test_{name}"
    for name in ("each_form_of_loss_and_each_size", "weights_that_are_learned")
)
LOSS_FN, ENTRY = "_tensorflow/loss_fn.py", "_value_and_gradients.py"

MUTANTS = [
    Mutant(
        "loop: mean of means",
        LOSS_FN,
        "return Mean(tf.reduce_sum(losses), elements, elements / count, may_be_empty=False)",
        "return Mean(tf.reduce_mean(losses), elements / elements, 1 / count, may_be_empty=False)",
        (FORMS + "[losses-3-graph]",),
    ),
    Mutant(
        "loop: mean of means of scalars",
        LOSS_FN,
        "return Mean(losses * count, count, 1.0, may_be_empty=False)",
        "return Mean(losses, count / count, 1 / count, may_be_empty=False)",
        (FORMS + "[scalar-3-graph]",),
    ),
    Mutant(
        "loop: weights left out of the denominator",
        LOSS_FN,
        "tf.reduce_sum(losses * weights), tf.reduce_sum(weights)",
        "tf.reduce_sum(losses * weights), elements",
        (FORMS + "[losses and weights-3-graph]",),
    ),
    Mutant(
        "loop: scalar weight ignored",
        LOSS_FN,
        "        weight = tf.cast(weights, losses.dtype)\n",
        "        weight = count\n",
        (FORMS + "[scalar and weight-3-graph]",),
    ),
    Mutant(
        "loop: no guard for gradients of 0 / 0",
        ENTRY,
        "        if mean.may_be_empty:\n",
        "        if False:\n",
        (TESTS + "test_a_micro_batch_without_any_weight_does_not_count",),
    ),
    Mutant(
        "loop: no guard for losses of 0 / 0",
        LOSS_FN,
        "numerator = tf.math.multiply_no_nan(losses, weight)",
        "numerator = losses * weight",
        (TESTS + "test_a_micro_batch_without_any_weight_does_not_count",),
    ),
    Mutant(
        "loop: no guard for a batch without any weight",
        ENTRY,
        "loss = tf.math.divide_no_nan(*whole)",
        "loss = whole[0] / whole[1]",
        (TESTS + "test_a_batch_without_any_weight_is_0",),
    ),
    Mutant(
        "loop: each micro-batch by its own scale",
        ENTRY,
        "scale = tf.where(scale > 0, scale, first_scale)",
        "scale = first_scale",
        (FORMS + "[scalar and weight-3-graph]",),
    ),
    Mutant(
        "loop: sums of float16 not scaled",
        ENTRY,
        "first_scale = tf.stop_gradient(mean.scale(examples))",
        "first_scale = tf.ones([])",
        (TESTS + "test_loss_scaling",),
    ),
    Mutant(
        "loop: losses summed narrow",
        LOSS_FN,
        "    losses = sums.widened(losses)\n",
        "",
        (TESTS + "test_gradients_have_the_dtype_of_their_variables",),
    ),
    Mutant(
        "loop: gradients not cast back",
        ENTRY,
        "found.append(sums.cast(gradient, weight.dtype))",
        "found.append(gradient)",
        (TESTS + "test_gradients_have_the_dtype_of_their_variables",),
    ),
    Mutant(
        "loop: state not written",
        ENTRY,
        "written.write(part.written[1:], part.moments)",
        "pass",
        (TESTS + "test_metrics_and_other_variables_are_written_once_per_micro_batch",),
    ),
    Mutant(
        "loop: variables made in the scope not noticed",
        "_keras/scope.py",
        "self.made_variables = bool(_internals.variables_without_value())",
        "self.made_variables = False",
        (TESTS + "test_layers_that_are_built_in_loss_fn",),
    ),
    Mutant(
        "loop: regularised weights missing in the scope",
        "_keras/scope.py",
        "return _internals.raw_value(variable) if value is None else value",
        "return value",
        (TESTS + "test_layers_that_are_built_in_loss_fn",),
    ),
    Mutant(
        "loop: loss_fn not converted",
        "_gradients/functions.py",
        "return _internals.autograph_converted(call, status)",
        "return call",
        (
            TESTS + "test_python_control_flow_on_tensors_in_a_graph",
            TESTS + "test_python_control_flow_in_what_a_function_made_in_a_graph_calls",
        ),
    ),
    Mutant(
        "loop: aux of the last run only",
        "_tensorflow/loop.py",
        "lambda *runs: tf.concat(runs, 0)",
        "lambda *runs: runs[-1]",
        (TESTS + "test_aux_of_all_runs",),
    ),
    Mutant(
        "loop: sparse aux without offsets",
        "_tensorflow/leaves.py",
        "indices[:, :1] + rows[:, None]",
        "indices[:, :1]",
        (TESTS + "test_any_micro_batches_make_up_the_batch",),
    ),
    Mutant(
        "loop: gradient of learned weights left out",
        ENTRY,
        "gradient = sums.add(of_numerator, sums.scaled(of_denominator, -loss))",
        "gradient = of_numerator",
        (LEARNED + "[losses and weights-graph]",),
    ),
    Mutant(
        "loop: rows twice where weights are learned from the table too",
        ENTRY,
        "gradient = sums.merge_rows(sums.scaled(gradient, factor))",
        "gradient = sums.scaled(gradient, factor)",
        (TESTS + "test_absent_gradients_and_rows_that_come_once",),
    ),
    Mutant(
        "loop: weights that are not finite accepted",
        LOSS_FN,
        "(tf.math.is_finite(denominator), FINITE_WEIGHTS)",
        "(tf.constant(True), FINITE_WEIGHTS)",
        (TESTS + "test_weights_that_cannot_be_are_refused",),
    ),
    Mutant(
        "loop: a Python weight rounded to float32",
        LOSS_FN,
        "losses.dtype if is_number else None",
        "None",
        (TESTS + "test_a_python_number_is_not_rounded_to_float32",),
    ),
    Mutant(
        "loop: scale under the tape",
        ENTRY,
        "first_scale = tf.stop_gradient(mean.scale(examples))",
        "first_scale = mean.scale(examples)",
        (LEARNED,),
    ),
]
