"""Mutants of the gradient noise scale."""

from mutant import Mutant

FIT = "fit/test_noise_scale.py::"
BY_HAND = FIT + "test_as_written_out"
ARITHMETIC, METER, STEPS = "_keras/noise.py", "_noise/meter.py", "_fit/noise.py"

MUTANTS = [
    Mutant(
        "noise scale: K in place of K - 1",
        ARITHMETIC,
        "found.examples / (found.micro_batches - 1)",
        "found.examples / found.micro_batches",
        (FIT + "test_a_noise_scale_that_is_known",),
    ),
    Mutant(
        "noise scale: the noise of the batch left in its signal",
        ARITHMETIC,
        "return noise, found.whole - noise / found.examples",
        "return noise, found.whole",
        (BY_HAND + "[eager]",),
    ),
    Mutant(
        "noise scale: what is not finite counts",
        ARITHMETIC,
        "counts = ops.logical_and(is_measured, ops.isfinite(signal))",
        "counts = is_measured",
        (FIT + "test_batches_that_tell_nothing",),
    ),
    Mutant(
        "noise scale: updates that are not measured count",
        ARITHMETIC,
        "counts = ops.logical_and(is_measured, ops.isfinite(signal))",
        "counts = ops.isfinite(signal)",
        (FIT + "test_updates_that_are_not_measured_run_a_function_of_their_own",),
    ),
    Mutant(
        "noise scale: micro-batches weigh the same",
        METER,
        "weight = tf.math.divide_no_nan(self._examples, size)",
        "weight = tf.constant(4.0, tf.float64)",
        (BY_HAND + "[graph]",),
    ),
    Mutant(
        "noise scale: rows of a table that come twice",
        "_tensorflow/sums.py",
        "rows = widened(merge_rows(left))",
        "rows = widened(left)",
        (BY_HAND + "[graph]",),
    ),
    Mutant(
        "noise scale: the regulariser counts as noise",
        METER,
        "if all(penalty is None for penalty in penalties):",
        "if True:",
        (BY_HAND + "[graph]",),
    ),
    Mutant(
        "noise scale: the regulariser of one replica",
        STEPS,
        "of_all = [sums.scaled(each, float(replicas.count())) for each in penalties]",
        "of_all = penalties",
        (BY_HAND + "[devices]",),
    ),
    Mutant(
        "noise scale: micro-batches of one replica",
        METER,
        "(sum_of_all,) = replicas.sum_over_replicas([tf.stack([apart, count])])",
        "sum_of_all = tf.stack([apart, count])",
        (BY_HAND + "[devices]",),
    ),
    Mutant(
        "noise scale: the loss scale stays in",
        METER,
        "square = tf.cast(scale, tf.float64) ** 2",
        "square = tf.cast(scale, tf.float64)",
        (BY_HAND + "[graph]",),
    ),
    Mutant(
        "noise scale: counts that were guessed stay so",
        STEPS,
        "self._update.finish(summed[place : place + 2], [1.0, *factors], scale)",
        "self._update.finish(summed[place : place + 2], [1.0] * (1 + len(factors)), scale)",
        (BY_HAND + "[eager]",),
    ),
    Mutant(
        "noise scale: weights that are learned have no gradient",
        "_value_and_gradients.py",
        "noise.finish(part.sums[-2:], [factor, -loss * factor])",
        "noise.finish(part.sums[-2:], [factor, 0.0])",
        (FIT + "test_in_a_loop",),
    ),
    Mutant(
        "noise scale: the function that measures comes too late",
        STEPS,
        "self.measures = always or self._left < steps",
        "self.measures = always or self._left < 1 - steps",
        (FIT + "test_updates_that_are_not_measured_run_a_function_of_their_own",),
    ),
    Mutant(
        "noise scale: all updates run the function that measures",
        STEPS,
        "self.measures = always or self._left < steps",
        "self.measures = True",
        (FIT + "test_updates_that_are_not_measured_run_a_function_of_their_own",),
    ),
    Mutant(
        "noise scale: updates that are not measured do not count",
        STEPS,
        "self._meter.count(self._examples)",
        "pass",
        (FIT + "test_updates_that_are_not_measured_run_a_function_of_their_own",),
    ),
    Mutant(
        "noise scale: an interrupted fit goes on being measured",
        "_fit/install.py",
        "            self._measure(None)\n",
        "            pass\n",
        (FIT + "test_measures_only_in_its_own_fit",),
    ),
]
