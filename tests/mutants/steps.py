"""Mutants of models with their own train step: shares, replays, metrics, refusals."""

from mutant import Mutant

OWN = "fit/test_own_steps.py::"
CASE, REFUSED = OWN + "test_steps", OWN + "test_what_cannot_be_right_is_refused"
MODES, RUNS, STEP = "_own_steps/modes.py", "_own_steps/runs.py", "_own_steps/step.py"
FLOW, LOSSES, TRIAL = "_own_steps/flow.py", "_own_steps/losses.py", "_own_steps/trial.py"

MUTANTS = [
    Mutant(
        "own steps: losses summed without their shares",
        MODES,
        "started.append(start if is_sum else start * tf.cast(share, start.dtype))",
        "started.append(start)",
        (CASE + "[clipped-graph]",),
    ),
    Mutant(
        "own steps: values of examples weighted by share",
        MODES,
        "if output_gradients is None and all(per_example):",
        "per_example = [False] * len(targets)\n    if output_gradients is None and False:",
        (CASE + "[values-graph]",),
    ),
    Mutant(
        "own steps: a replay sees the weights as they are now",
        STEP,
        "return self._before[id(variable)] if self._changes_before(variable, group) else None",
        "return self._before[id(variable)] if is_seed(variable) else None",
        (CASE + "[sharpness-graph]",),
    ),
    Mutant(
        "own steps: a replay never sees an update",
        RUNS,
        "        for variable, value in snapshot or ():\n",
        "        for variable, value in ():\n",
        (CASE + "[gan-graph]",),
    ),
    Mutant(
        "own steps: gradients that depend on each other share a loop",
        FLOW,
        "        if _is_after(marks, group):\n            group = place\n",
        "",
        (CASE + "[sharpness-graph]",),
    ),
    Mutant(
        "own steps: means of metrics count micro-batches",
        RUNS,
        "sample_weight = tf.ones_like(values) * weight * share",
        "sample_weight = tf.ones_like(values) * weight",
        (CASE + "[gan-graph]",),
    ),
    Mutant(
        "own steps: metrics of the first micro-batch only",
        STEP,
        "                if value is not None:\n                    variable.assign(value)\n",
        "                pass\n",
        (CASE + "[statistics-graph]",),
    ),
    Mutant(
        "own steps: what is tracked once is tracked per micro-batch",
        RUNS,
        "sample_weight: Any) -> Any:\n        return None\n",
        "sample_weight: Any) -> Any:\n        return plain(metric, values, sample_weight)\n",
        (OWN + "test_a_metric_of_the_examples_and_of_the_gradient",),
    ),
    Mutant(
        "own steps: logs of the first micro-batch only",
        STEP,
        "            if is_mean:\n",
        "            if False:\n",
        (CASE + "[values-graph]",),
    ),
    Mutant(
        "own steps: all micro-batches draw the same",
        STEP,
        "    return seed + tf.concat",
        "    return seed + 0 * tf.concat",
        (OWN + "test_micro_batches_draw_different_numbers",),
    ),
    Mutant(
        "own steps: each gradient draws anew",
        STEP,
        "return [tf.constant(1, tf.int64), *(self._start",
        "return [tf.constant(1 + group, tf.int64), *(self._start",
        (OWN + "test_a_micro_batch_draws_the_same_for_all_gradients[graph]",),
    ),
    Mutant(
        "own steps: gradients of inputs as large as in a micro-batch",
        RUNS,
        "        asked = self.plan.inner[self._inner - 1]\n",
        "        asked = self.plan.inner[self._inner - 1]._replace(of_examples=False)\n",
        (CASE + "[adversarial-eager]",),
    ),
    Mutant(
        "own steps: masks and weights counted in each micro-batch",
        RUNS,
        "whole = part.counted.own if known is None else known[len(self.counts) - 1]",
        "whole = part.counted.own",
        (CASE + "[language-graph]",),
    ),
    Mutant(
        "own steps: a sum taken for a mean",
        LOSSES,
        'if by_examples and reduction != "sum" and not weighs and not is_masked:',
        "if by_examples and not weighs and not is_masked:",
        (OWN + "test_a_sum_of_the_compiled_loss",),
    ),
    Mutant(
        "own steps: moving statistics of the first micro-batch only",
        STEP,
        "            moments = calls[layer][0].moments.merged(others)\n",
        "            moments = calls[layer][0].moments\n",
        (CASE + "[statistics-graph]",),
    ),
    Mutant(
        "own steps: a micro-batch without weight brings 0 / 0",
        RUNS,
        "        if self.place.by_examples:\n            return found\n",
        "        return found\n",
        (OWN + "test_a_mean_over_something_else",),
    ),
    Mutant(
        "own steps: what depends on the last gradient is not late",
        FLOW,
        '(kind == "gradient" and where >= place)',
        '(kind == "gradient" and where > place)',
        (REFUSED + "[logs_gradients_of_examples-graph]",),
    ),
    Mutant(
        "own steps: what depends on updated weights is not late",
        FLOW,
        'or (kind == "applied" and where > place)',
        "",
        (REFUSED + "[logs_after_the_update-graph]",),
    ),
    Mutant(
        "own steps: a queue is written with a micro-batch",
        FLOW,
        "checks.written_once(write.variable.path, EXAMPLES in marks, is_late(marks))",
        "checks.written_once(write.variable.path, False, is_late(marks))",
        (REFUSED + "[writes_examples-graph]",),
    ),
    Mutant(
        "own steps: variables of TensorFlow are written K times",
        FLOW,
        "    checks.writes_no_variable_of_tensorflow(flow.writes_variables())\n",
        "",
        (REFUSED + "[writes_tensorflow-graph]",),
    ),
    Mutant(
        "own steps: results of metrics are read too early",
        FLOW,
        "return trains and any(mark[1] <= last for mark in metrics)",
        "return False",
        (REFUSED + "[result_too_early-graph]",),
    ),
    Mutant(
        "own steps: a metric counts micro-batches",
        FLOW,
        "checks.counts_examples(metric.name, all(EXAMPLES in marks for marks in direct))",
        "pass",
        (REFUSED + "[counts_batches-graph]",),
    ),
    Mutant(
        "own steps: a sum over the batch is not noticed",
        TRIAL,
        "if not self._is_sum(name) and not _same(value, both[name])",
        "if False",
        (OWN + "test_losses_that_are_no_means_over_examples_are_warned_of",),
    ),
    Mutant(
        "own steps: examples that meet in a vector are not noticed",
        TRIAL,
        "                found[name] = tf.reduce_sum(value)\n",
        "                found[name] = tf.zeros([])\n",
        (OWN + "test_losses_that_are_no_means_over_examples_are_warned_of",),
    ),
]
