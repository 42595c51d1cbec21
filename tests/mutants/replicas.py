"""Mutants of replicas and workers: one reduction, whole numbers on each, files and meetings."""

from mutant import Mutant

UPDATE, REPLICAS = "_tensorflow/update.py", "_tensorflow/replicas.py"
CALLBACKS, WAIT = "_workers/callbacks.py", "_workers/wait.py"
ON_REPLICAS = "fit/test_keras_on_replicas.py::"
EVERYWHERE = "loops/test_accumulator_everywhere.py::"
ACCUMULATOR = "loops/test_accumulator.py::"
LOOPS = "loops/test_replicas.py::"
CASE = "equivalence/test_equivalence.py::test_case"
WHOLE = LOOPS + "test_the_loss_is_whole_and_gradients_sum_to_the_whole"
STATISTICS = LOOPS + "test_moving_statistics_are_those_of_the_whole_batch"
STEPS, LOOP, REPORT = "_fit/steps.py", "_tensorflow/loop.py", "_keras/report.py"
NORM, ENTRY = "_keras/batch_norm.py", "_value_and_gradients.py"
WORKERS = "processes/test_workers.py::test_workers_end_where_one_device_ends"

MUTANTS = [
    Mutant(
        "replicas: reduced twice",
        UPDATE,
        "return list(pairs) if _reduced[id(self)] > 0 else reduce(self, pairs)",
        "return reduce(self, pairs)",
        (EVERYWHERE + "test_replicas",),
    ),
    Mutant(
        "replicas: inner optimizers reduce again",
        UPDATE,
        "summed = [id(each) for each in all_optimizers]",
        "summed = [id(optimizer)]",
        (ACCUMULATOR + "test_replicas_with_an_optimizer_in_an_optimizer",),
    ),
    Mutant(
        "replicas: rows of two replicas not merged",
        UPDATE,
        "sums.merge_rows(next(totals))",
        "next(totals)",
        (
            ACCUMULATOR + "test_replicas_clip_the_reduced_gradient_and_sum_rows_over_replicas",
            CASE + "[repeated-rows-global_clipnorm-replicas]",
        ),
    ),
    Mutant(
        "replicas: clipping before the reduction",
        UPDATE,
        "arguments = _no_reduction_of_its_own(optimizer) if replicas.in_several() else None",
        "arguments = None",
        (CASE + "[optimizer-global_clipnorm-replicas]", CASE + "[optimizer-clipnorm-replicas]"),
    ),
    Mutant(
        "replicas: None not agreed upon in eager mode",
        UPDATE,
        "gradients = _agreed(gradients, variables)",
        "gradients = list(gradients)",
        (CASE + "[variables-without-gradient-in-some-micro-batches-replicas]",),
    ),
    Mutant(
        "replicas: dtypes mixed in one collective",
        REPLICAS,
        "    for dtype in sorted({value.dtype.name for value in values}):\n"
        "        indices = [i for i, value in enumerate(values) if value.dtype.name == dtype]\n",
        "    if True:\n        indices = list(range(len(values)))\n",
        (ON_REPLICAS + "test_variables_of_different_dtypes",),
    ),
    Mutant(
        "replicas: cast before the sum",
        UPDATE,
        "there = [gradient for gradient in gradients if gradient is not None]",
        "there = [sums.cast(g, tf.as_dtype(v.dtype).base_dtype)"
        " for g, v in zip(gradients, variables) if g is not None]",
        (ON_REPLICAS + "test_sums_over_replicas_are_wide",),
    ),
    Mutant(
        "replicas: inf times 0",
        REPLICAS,
        "return tf.where(tf.equal(replica, 0), value, tf.zeros_like(value))",
        "return value * tf.cast(tf.equal(replica, 0), value.dtype)",
        (ON_REPLICAS + "test_variables_that_are_infinite",),
    ),
    Mutant(
        "replicas: dense or rows by a replica's own size",
        "_tensorflow/sums.py",
        "is_known = may_be_dense and isinstance(count, int) and rows is not None",
        "is_known = isinstance(count, int) and rows is not None",
        (LOOPS + "test_rows_of_replicas_with_different_numbers_of_examples",),
    ),
    Mutant(
        "replicas: train_on_batch whole on each replica",
        REPLICAS,
        "return leaf[start:end]",
        "return leaf",
        (ON_REPLICAS + "test_on_batch",),
    ),
    Mutant(
        "workers: no rows at all are exchanged",
        REPLICAS,
        "same = [_with_a_row(values[i]) for i in indices]",
        "same = [values[i] for i in indices]",
        (WORKERS,),
    ),
    Mutant(
        "workers: logs without their axis",
        REPLICAS,
        "return tf.nest.map_structure(lambda log: log[None], logs)",
        "return logs",
        (WORKERS,),
    ),
    Mutant(
        "workers: all of them write",
        CALLBACKS,
        "elif is_chief or type(callback) not in _WRITERS:",
        "else:",
        (WORKERS,),
    ),
    Mutant(
        "workers: seeds not backed up",
        CALLBACKS,
        "variables = [*self.model.variables, *self.model.optimizer.variables]",
        "variables = [*self.model.weights, *self.model.optimizer.variables]",
        ("processes/test_workers.py::test_a_backup_has_the_seeds_too",),
    ),
    Mutant(
        "workers: an epoch lost",
        CALLBACKS,
        "_internals.set_initial_epoch(self.model, epoch)",
        "_internals.set_initial_epoch(self.model, epoch + 1)",
        ("processes/test_workers.py::test_backups_of_one_worker",),
    ),
    Mutant(
        "workers: anybody at the port taken for a worker",
        WAIT,
        '            connection.sendall(own.encode() + b"\\n")\n',
        '            connection.sendall(own.encode() + b"\\n")\n            return True\n',
        ("processes/test_wait.py::test_a_worker_that_comes_after_somebody_else_at_its_address",),
    ),
    Mutant(
        "replicas: a regulariser once per replica",
        STEPS,
        "scaled_penalty = penalty * scale / replicas.count()",
        "scaled_penalty = penalty * scale",
        (CASE + "[regularizers-replicas]",),
    ),
    Mutant(
        "replicas: means divided by the number of replicas",
        "_internals/replaced.py",
        "lambda divide, entered, value: value,",
        "lambda divide, entered, value: divide(value),",
        (ON_REPLICAS + "test_losses_inside_of_layers_and_metrics",),
    ),
    Mutant(
        "replicas: examples of one replica as denominator",
        STEPS,
        "(examples_of_all,) = replicas.total_counts([examples])",
        "examples_of_all = examples",
        (CASE + "[reduction-sum_over_batch_size-weights-replicas]",),
    ),
    Mutant(
        "replicas: tokens of one replica as denominator",
        STEPS,
        "loop.run(replicas.total_counts(counts), self._synchronized(model))",
        "loop.run(counts, self._synchronized(model))",
        (CASE + "[mask-sum_over_batch_size-replicas]",),
    ),
    Mutant(
        "replicas: the loss of one replica in the logs",
        REPORT,
        "    sums = engine.sum_over_replicas(sums) if sums else []\n",
        "",
        (ON_REPLICAS + "test_logs_of_each_batch",),
    ),
    Mutant(
        "replicas: metrics of one replica in the logs",
        REPORT,
        "shared(metrics, own, engine, whole=True)",
        "shared(metrics, own, engine, whole=False)",
        (ON_REPLICAS + "test_logs_of_each_batch",),
    ),
    Mutant(
        "replicas: the loss of one replica from value_and_gradients",
        ENTRY,
        "whole = replicas.sum_over_replicas([numerator * scale, denominator * scale])",
        "whole = [numerator * scale, denominator * scale]",
        (WHOLE + "[losses-sizes0-True]",),
    ),
    Mutant(
        "replicas: a part by the scale of another",
        ENTRY,
        "factor = tf.math.divide_no_nan(scale, whole[1])",
        "factor = tf.math.divide_no_nan(replicas.from_first_replica([scale])[0], whole[1])",
        (WHOLE,),
    ),
    Mutant(
        "replicas: moving statistics of each replica",
        NORM,
        "if engine.replicas() == 1 or not moments:",
        "if True:",
        (STATISTICS,),
    ),
    Mutant(
        "replicas: variance between replicas left out",
        NORM,
        "_times_count(own.variance + ops.square(own.mean - mean), own.count)",
        "_times_count(own.variance, own.count)",
        (STATISTICS,),
    ),
    Mutant(
        "replicas: seeds of each replica drift apart",
        "_keras/scope.py",
        "    if engine.replicas() == 1:\n",
        "    if True:\n",
        (STATISTICS,),
    ),
    Mutant(
        "replicas: seeds of the first replica, which may have no examples",
        "_keras/scope.py",
        'return "first" if keras.backend.is_float_dtype(variable.dtype) else "largest"',
        'return "first"',
        (STATISTICS,),
    ),
    Mutant(
        "replicas: batches of no fixed size with synchronized layers",
        LOOP,
        "        checks.static_batch(examples, synchronized)\n",
        "",
        (ON_REPLICAS + "test_synchronized_layers_need_batches_of_a_fixed_size",),
    ),
    Mutant(
        "replicas: different numbers of examples with synchronized layers",
        LOOP,
        "replicas.compare(examples, lambda all: checks.even_replicas(all, synchronized))",
        "pass",
        (LOOPS + "test_synchronized_layers_on_replicas_with_different_numbers_of_examples",),
    ),
    Mutant(
        "replicas: a warning by the size of one replica's batch",
        STEPS,
        "self._remember(whole.examples)",
        "self._remember(micro_batches.examples)",
        (ON_REPLICAS + "test_logs_of_each_batch",),
    ),
    Mutant(
        "replicas: metrics made outside of the scope",
        "_keras/model.py",
        "return [*model.variables, *model.metrics_variables, *of_optimizer]",
        "return [*model.variables, *of_optimizer]",
        (ON_REPLICAS + "test_what_is_made_outside_of_the_scope[metrics]",),
    ),
    Mutant(
        "replicas: they meet inside of the loop",
        LOOP,
        "part = self._step(micro_batch, values, counts, How(alone=True))",
        "part = self._step(micro_batch, values, counts, How())",
        (LOOPS + "test_synchronized_layers[True]",),
    ),
    Mutant(
        "replicas: collectives of each layer by itself",
        NORM,
        "zip(engine.sum_over_replicas(squares), counts)",
        "zip([engine.sum_over_replicas([square])[0] for square in squares], counts)",
        (ON_REPLICAS + "test_moments_of_all_layers_are_reduced_at_once",),
    ),
    Mutant(
        "replicas: one without examples repeats the latest part",
        "_tensorflow/parts.py",
        "return None if value is None else tf.nest.map_structure(tf.zeros_like, value)",
        "return None if value is None else tf.nest.map_structure(tf.identity, value)",
        (ON_REPLICAS + "test_eagerly_with_a_replica_without_examples",),
    ),
]
