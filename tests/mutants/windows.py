"""Mutants of GradientAccumulator: windows, their sums, and what is saved of them."""

from mutant import Mutant

ACCUMULATOR, WINDOW = "_gradient_accumulator.py", "_tensorflow/window.py"
SUMS, REPLICAS = "_tensorflow/sums.py", "_tensorflow/replicas.py"
EVERYWHERE = "loops/test_accumulator_everywhere.py::"
TESTS = "loops/test_accumulator.py::"

MUTANTS = [
    Mutant(
        "window: weight not multiplied",
        WINDOW,
        "gradients = [sums.scaled(gradient, weight) for gradient in gradients]",
        "gradients = list(gradients)",
        (EVERYWHERE + "test_windows_equal_their_whole_batches",),
    ),
    Mutant(
        "window: divided by the number of micro-batches",
        ACCUMULATOR,
        "tf.math.divide_no_nan(one, total)",
        "one / tf.cast(replicas.read(self._window.pending), one.dtype)",
        (EVERYWHERE + "test_windows_equal_their_whole_batches",),
    ),
    Mutant(
        "window: not reset",
        ACCUMULATOR,
        "self._variables)\n            self._window.clear()",
        "self._variables)",
        (EVERYWHERE + "test_windows_equal_their_whole_batches",),
    ),
    Mutant(
        "window: rows replaced",
        WINDOW,
        "rows = sums.merge_rows(sums.add_rows(rows, gradient))",
        "rows = sums.merge_rows(gradient)",
        (EVERYWHERE + "test_windows_equal_their_whole_batches",),
    ),
    Mutant(
        "window: rows not merged",
        WINDOW,
        "rows = sums.merge_rows(sums.add_rows(rows, gradient))",
        "rows = sums.add_rows(rows, gradient)",
        (TESTS + "test_each_family_of_optimizers",),
    ),
    Mutant(
        "window: absent gradient as 0",
        WINDOW,
        "total: Gradient = None",
        "total: Gradient = tf.zeros(self._shapes[index], sums.wide(self._dtypes[index]))",
        (EVERYWHERE + "test_absent_gradients",),
    ),
    Mutant(
        "window: other gradients in a graph not noticed",
        ACCUMULATOR,
        "tf.reduce_all(tf.equal(replicas.read(self._window.arrivals) > 0, kinds))",
        "tf.constant(True)",
        (TESTS + "test_functions_with_other_gradients_share_a_window",),
    ),
    Mutant(
        "window: weight 0 times nan",
        SUMS,
        "return tf.math.multiply_no_nan(gradient, tf.cast(factor, gradient.dtype))",
        "return gradient * tf.cast(factor, gradient.dtype)",
        (EVERYWHERE + "test_a_micro_batch_of_weight_0_does_not_count",),
    ),
    Mutant(
        "window: weight checked too late",
        ACCUMULATOR,
        "with self._window.lock, allowed:",
        "with self._window.lock:",
        (EVERYWHERE + "test_what_is_wrong_when_the_graph_runs",),
    ),
    Mutant(
        "window: skipped counted as held",
        ACCUMULATOR,
        "graph.when(finite, hold, lambda: self._skipped.assign_add(1.0))",
        "self._window.pending.assign_add(1.0 - tf.cast(finite, tf.float32))\n"
        "                graph.when(finite, hold, lambda: self._skipped.assign_add(1.0))",
        (EVERYWHERE + "test_gradients_that_are_not_finite",),
    ),
    Mutant(
        "window: sums not made on restoring",
        WINDOW,
        "if of_sums and int(index) < len(self._shapes) and not self._making:",
        "if False:",
        (TESTS + "test_a_restored_window_can_be_flushed_at_once",),
    ),
    Mutant(
        "window: stale sums added to",
        WINDOW,
        "kept = sums.scaled(replicas.local(total), arrived[DENSE, index])",
        "kept = replicas.local(total)",
        (EVERYWHERE + "test_windows_equal_their_whole_batches",),
    ),
    Mutant(
        "window: stale sums counted",
        WINDOW,
        "                total = sums.scaled(total, arrived[DENSE, index])\n",
        "",
        ("loops/test_replicas.py::test_a_replica_that_adds_nothing_to_a_window",),
    ),
    Mutant(
        "window: stale sums saved",
        WINDOW,
        "                self._tidy_up()\n",
        "",
        ("loops/test_replicas.py::test_a_replica_that_adds_nothing_to_a_window",),
    ),
    Mutant(
        "window: rows not aligned before saving",
        WINDOW,
        "                self._align_rows()\n",
        "",
        (EVERYWHERE + "test_a_window_moves_to_another_number_of_replicas",),
    ),
    Mutant(
        "window: variables made inside the traced function",
        REPLICAS,
        "    with futures.ThreadPoolExecutor(1) as thread:\n"
        "        return thread.submit(function).result()",
        "    with tf.init_scope():\n        return function()",
        (
            TESTS + "test_a_sum_may_be_made_in_a_later_trace",
            EVERYWHERE + "test_windows_equal_their_whole_batches",
        ),
    ),
    Mutant(
        "window: narrow sums",
        SUMS,
        "return tf.float32 if dtype in (tf.float16, tf.bfloat16) else dtype",
        "return dtype",
        (TESTS + "test_narrow_gradients_are_summed_wide",),
    ),
    Mutant(
        "window: nothing written after leaving the graph",
        ACCUMULATOR,
        "part.assign_add(tf.zeros_like(part))",
        "pass",
        (
            TESTS + "test_steps_with_other_gradients_in_one_function",
            TESTS + "test_functions_with_other_gradients_share_a_window",
            TESTS + "test_a_flush_that_is_traced_before_the_first_gradient",
        ),
    ),
    Mutant(
        "window: rows after a compiled step",
        ACCUMULATOR,
        "                self._window.refuse_rows()\n",
        "",
        (TESTS + "test_rows_that_come_between_compiled_steps",),
    ),
    Mutant(
        "window: unknown shapes unchecked",
        ACCUMULATOR,
        "checks = window_checks.fit_when_run(gradients, self._variables)",
        "checks = []",
        (TESTS + "test_a_gradient_whose_shape_is_wrong_when_the_graph_runs",),
    ),
]
