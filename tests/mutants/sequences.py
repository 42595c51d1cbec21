"""Mutants of micro-batches by length: what is cut, what is counted, and the trial of padding."""

from mutant import Mutant

TESTS = "fit/test_lengths.py::"
LOOPS = "loops/test_by_length.py::"
UPDATE = TESTS + "test_the_update_of_the_whole_batch"
REFUSED = TESTS + "test_what_depends_on_padding_is_refused"
WEIGHTS, MASKED = UPDATE + "[weights-sum_over_batch_size-graph]", UPDATE + "[attention-size-graph]"
MAXIMUM = tuple(f"{REFUSED}[maximum-{seed}-eager]" for seed in range(3))
GRADIENTS = LOOPS + "test_value_and_gradients"
CUT, BY_LENGTH, COMPARED = (f"_batches/{name}.py" for name in ("sequences", "by_length", "padding"))
LOSS, METRICS = "_keras/losses.py", "_keras/sequences.py"
LOOP, TRIAL, PADDING = "_tensorflow/loop.py", "_tensorflow/trial.py", "_fit/padding.py"

MUTANTS = [
    Mutant(
        "lengths: shares by all positions",
        LOSS,
        "share if isinstance(uncut, float) else share * ops.cast(uncut, dtype)",
        "share",
        (WEIGHTS,),
    ),
    Mutant(
        "lengths: means of metrics over the cut",
        METRICS,
        "return values * part, weights * part",
        "return values, weights",
        (MASKED,),
    ),
    Mutant(
        "lengths: order not restored",
        BY_LENGTH,
        "inverse = ops.argsort(self.order)",
        "inverse = self.order",
        (GRADIENTS,),
    ),
    Mutant(
        "lengths: weights do not lengthen",
        CUT,
        "telling = [*self._integers, *self._weights]",
        "telling = [*self._integers]",
        (UPDATE + "[weights-make-examples-longer-eager]",),
    ),
    Mutant(
        "lengths: labels not cut",
        CUT,
        "either(lasts, both(has, none_lasts)) if _is_among(leaf, likely) else lasts",
        "either(lasts, both(has, none_lasts)) if _is_among(leaf, likely) else False",
        (MASKED,),
    ),
    Mutant(
        "lengths: labels cut in the batch that happens to be as wide",
        "_tensorflow/memory.py",
        "variable.assign(tf.maximum(replicas.read(variable), now))",
        "variable.assign(now)",
        ("fit/test_tensorflow.py::test_labels_stay_whole_in_the_batch_that_happens_to_be_as_wide",),
    ),
    Mutant(
        "lengths: cut one too short",
        BY_LENGTH,
        "return self.taken(start, self.starts[index + 1], self.lengths[start])",
        "return self.taken(start, self.starts[index + 1], larger(self.lengths[start] - 1, 1))",
        (GRADIENTS,),
    ),
    Mutant(
        "lengths: training and testing share a trial",
        PADDING,
        "self.done[model.training],",
        "self.done[False],",
        (TESTS + "test_testing_tells_nothing_about_training",),
    ),
    Mutant(
        "lengths: a trial survives compile",
        "_fit/install.py",
        "            self.padding.done[True].assign(0)\n",
        "",
        (TESTS + "test_another_loss_is_tried_again",),
    ),
    Mutant(
        "lengths: one trial for all variables",
        TRIAL,
        "            known == key\n"
        "            and len(references) == len(variables)\n"
        "            and all(reference() is v for reference, v in zip(references, variables))\n",
        "            known == key\n",
        (LOOPS + "test_closures_over_several_models",),
    ),
    Mutant(
        "lengths: a budget that ignores the longest",
        BY_LENGTH,
        "self.examples_at(ops.take(self.lengths, start))",
        "self.examples_at(ops.take(self.lengths, total - 1))",
        (LOOPS + "test_a_budget_for_ragged_tokens[False-graph]",),
    ),
    Mutant(
        "lengths: first micro-batch counted twice",
        LOOP,
        "total = parts.added(total, part)",
        "total = parts.added(parts.added(None, part) if total is None else total, part)",
        (GRADIENTS + "[cut0-eager]",),
    ),
    Mutant(
        "lengths: tokens counted by the fraction that was not cut off",
        LOSS,
        "own = ops.sum(functools.reduce(_multiply, factors))",
        "own = ops.sum(functools.reduce(_multiply, factors)) * self._uncut_fraction(sample_weight)",
        (UPDATE + "[a-mask-beside-weights-graph]",),
    ),
    Mutant(
        "lengths: no rounding for XLA",
        BY_LENGTH,
        "                lengths = _rounded_up(lengths)\n",
        "                pass\n",
        (TESTS + "test_compiled_shapes_are_few[tokens]",),
    ),
    Mutant(
        "lengths: tails of any size for XLA",
        BY_LENGTH,
        "return ops.where(remaining >= size, size, _power_of_two(remaining))",
        "return ops.where(remaining >= size, size, remaining)",
        (TESTS + "test_compiled_shapes_are_few[tokens]",),
    ),
    Mutant(
        "lengths: dropout on in the trial",
        LOOP,
        "How(alone=True, drops=False)",
        "How(alone=True)",
        (TESTS + "test_dropout_does_not_look_like_padding",),
    ),
    Mutant(
        "lengths: dropout on in the trial of other weights",
        PADDING,
        "alone=True, drops=False, weights=weights",
        "alone=True, weights=weights",
        (TESTS + "test_dropout_does_not_look_like_padding",),
    ),
    Mutant(
        "lengths: inputs of a fixed size cut",
        PADDING,
        "fixed = fixed_parts(models.inputs_of(model), x, axis)",
        "fixed = []",
        (UPDATE + "[fixed-features-eager]",),
    ),
    Mutant(
        "lengths: aux not padded in other axes",
        BY_LENGTH,
        "for axis in range(1, len(leaves[0].shape)):",
        "for axis in range(1, min(2, len(leaves[0].shape))):",
        (GRADIENTS,),
    ),
    Mutant(
        "lengths: nothing is tried",
        TRIAL,
        "needed = tf.logical_and(comparison.is_padded, tf.equal(replicas.read(done), 0))",
        "needed = tf.constant(False)",
        (REFUSED + "[loss-graph]",),
    ),
    Mutant(
        "lengths: metrics not compared",
        PADDING,
        "found.setdefault(metric.name, []).extend(v for v in values if v is not None)",
        "pass",
        (REFUSED + "[own-metric-eager]",),
    ),
    Mutant(
        "lengths: ragged rows not in the size",
        CUT,
        "largest([self._dense_size, *(self.longest_row(leaf) for leaf in self.ragged)])",
        "self._dense_size",
        (LOOPS + "test_a_budget_for_ragged_tokens",),
    ),
    Mutant(
        "lengths: ragged rows not tried",
        COMPARED,
        "return Comparison(micro_batches, start, end, longer > 0)",
        "return Comparison(micro_batches, start, end, longer < 0)",
        (LOOPS + "test_a_layer_after_ragged_tokens_that_depends_on_padding[True]",),
    ),
    Mutant(
        "lengths: a trial with the padding that examples have",
        COMPARED,
        "examples = micro_batches.filled(start, end, longest)",
        "examples = micro_batches.uncut(start, end)",
        MAXIMUM,
    ),
    Mutant(
        "lengths: a trial with examples that have no padding",
        COMPARED,
        "start = larger(start, ops.where(as_long < examples, as_long, 0))",
        "pass",
        (REFUSED + "[last-micro-batch-eager]",),
    ),
    Mutant(
        "lengths: a trial without padding",
        BY_LENGTH,
        "again = ops.logical_and(is_sequence, positions < length)",
        "again = ops.logical_and(is_sequence, positions >= 0)",
        MAXIMUM,
    ),
    Mutant(
        "lengths: examples that depend on each other compared",
        COMPARED,
        "        if not is_additive():\n",
        "        if False:\n",
        (LOOPS + "test_ragged_tokens_of_examples_that_depend_on_each_other",),
    ),
    Mutant(
        "lengths: ragged rows not in the length of a micro-batch",
        BY_LENGTH,
        'rows = [leaf for leaf, _ in pairs if engine.kind_of(leaf) == "ragged"]',
        "rows = []",
        (LOOPS + "test_a_budget_for_ragged_tokens",),
    ),
    Mutant(
        "lengths: counts doubled",
        "_fit/steps.py",
        "loop.run(replicas.total_counts(counts), self._synchronized(model))",
        "loop.run([2 * n for n in replicas.total_counts(counts)], self._synchronized(model))",
        (MASKED,),
    ),
    Mutant(
        "lengths: counting makes predictions",
        LOOP,
        "        call = self._traced.only(counting)\n",
        "        call = lambda *arguments: counting(self._traced(*arguments))\n",
        ("fit/test_tensorflow.py::test_tokens_are_counted_without_predictions",),
    ),
    Mutant(
        "lengths: metrics of ragged tokens over the cut",
        BY_LENGTH,
        "if len(weights.shape) <= axis or length is None:",
        "if len(weights.shape) <= axis or length is None or self.sequences.ragged:",
        (LOOPS + "test_ragged_tokens[tokens-graph]",),
    ),
    Mutant(
        "lengths: neither gradients compared nor weights moved",
        PADDING,
        "        outcomes = [lambda micro_batch: self._outcome(loop, model, micro_batch)]\n"
        "        if model.trained:\n"
        "            outcomes.append(_of_moved_weights(loop, model, micro_batches))\n",
        "        def outcome(micro_batch: Batch) -> trial.Found:\n"
        '            found = self._outcome(loop, model, micro_batch)["loss"]\n'
        '            return {"loss": found[len(model.trained) :]}\n\n'
        "        outcomes = [outcome]\n",
        (REFUSED + "[zeros-graph]",),
    ),
    Mutant(
        "lengths: longer lengths not tried for XLA",
        BY_LENGTH,
        "return [_rounded_up(self.sequences.size)]",
        "return []",
        (LOOPS + "test_labels_that_are_made_longer",),
    ),
]
