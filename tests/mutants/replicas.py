"""Mutants of replicas and workers: one reduction, whole numbers on each, files and meetings."""

from mutant import Mutant, waiting

UPDATE, REPLICAS = "_tensorflow/update.py", "_tensorflow/replicas.py"
CALLBACKS, WAIT = "_workers/callbacks.py", "_workers/wait.py"
ON_REPLICAS = "fit/test_keras_on_replicas.py::"
EVERYWHERE = "loops/test_accumulator_everywhere.py::"
ACCUMULATOR = "loops/test_accumulator.py::"
LOOPS = "loops/test_replicas.py::"
LOSSES, MODELS = (f"equivalence/test_equivalence.py::test_{kind}" for kind in ("losses", "models"))
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
        "sums.merge_rows(next(sums))",
        "next(sums)",
        (
            ACCUMULATOR + "test_replicas_clip_the_reduced_gradient_and_sum_rows_over_replicas",
            MODELS + "[repeated-rows-global_clipnorm-replicas]",
        ),
    ),
    Mutant(
        "replicas: clipping before the reduction",
        UPDATE,
        "arguments = _no_reduction_of_its_own(optimizer) if replicas.in_several() else None",
        "arguments = None",
        (MODELS + "[optimizer-global_clipnorm-replicas]", MODELS + "[optimizer-clipnorm-replicas]"),
    ),
    Mutant(
        "replicas: None not agreed upon in eager mode",
        UPDATE,
        "gradients = _agreed(gradients, variables)",
        "gradients = list(gradients)",
        (MODELS + "[variables-without-gradient-in-some-micro-batches-replicas]",),
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
        "masked = [tf.where(is_first, value, tf.zeros_like(value)) for value in values]",
        "masked = [value * tf.cast(is_first, value.dtype) for value in values]",
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
        ("processes/test_workers.py::test_backups_of_one_worker", "processes/test_faults.py"),
    ),
    Mutant(
        "workers: an epoch lost",
        CALLBACKS,
        "self.model._initial_epoch = epoch",
        "self.model._initial_epoch = epoch + 1",
        ("processes/test_workers.py::test_backups_of_one_worker", "processes/test_faults.py"),
    ),
    Mutant(
        "workers: anybody at the port taken for a worker",
        WAIT,
        '            connection.sendall(own.encode() + b"\\n")\n',
        '            connection.sendall(own.encode() + b"\\n")\n            return True\n',
        ("processes/test_wait.py::test_a_worker_that_comes_after_somebody_else_at_its_address",),
    ),
    waiting("replicas: a regulariser once per replica", LOSSES + "[regularizers-replicas]"),
    waiting(
        "replicas: means divided by the number of replicas",
        ON_REPLICAS + "test_losses_inside_of_layers_and_metrics",
        ON_REPLICAS + "test_an_overridden_loss",
    ),
    waiting(
        "replicas: examples of one replica as denominator",
        LOSSES + "[reduction-sum_over_batch_size-weights-replicas]",
    ),
    waiting(
        "replicas: tokens of one replica as denominator",
        LOSSES + "[mask-sum_over_batch_size-replicas]",
    ),
    waiting(
        "replicas: the loss of one replica in the logs", ON_REPLICAS + "test_logs_of_each_batch"
    ),
    waiting(
        "replicas: metrics of one replica in the logs", ON_REPLICAS + "test_logs_of_each_batch"
    ),
    waiting(
        "replicas: the loss of one replica from value_and_gradients",
        LOOPS + "test_the_loss_is_whole_and_gradients_sum_to_the_whole",
    ),
    waiting(
        "replicas: a part by the scale of another",
        LOOPS + "test_the_loss_is_whole_and_gradients_sum_to_the_whole",
    ),
    waiting(
        "replicas: moving statistics of each replica",
        LOOPS + "test_moving_statistics_are_those_of_the_whole_batch",
    ),
    waiting(
        "replicas: variance between replicas left out",
        LOOPS + "test_moving_statistics_are_those_of_the_whole_batch",
    ),
    waiting(
        "replicas: seeds of each replica drift apart",
        LOOPS + "test_moving_statistics_are_those_of_the_whole_batch",
    ),
    waiting(
        "replicas: seeds of the first replica, which may have no examples",
        LOOPS + "test_moving_statistics_are_those_of_the_whole_batch",
    ),
    waiting(
        "replicas: batches of no fixed size with synchronized layers",
        ON_REPLICAS + "test_synchronized_layers_need_batches_of_a_fixed_size",
    ),
    waiting(
        "replicas: a warning by the size of one replica's batch",
        ON_REPLICAS + "test_batches_that_are_single_micro_batches",
    ),
    waiting(
        "replicas: metrics made outside of the scope",
        ON_REPLICAS + "test_parts_made_outside_of_the_scope",
    ),
    waiting(
        "replicas: they meet inside of the loop",
        ON_REPLICAS + "test_gradients_are_reduced_once",
    ),
    waiting(
        "replicas: collectives of each layer by itself",
        ON_REPLICAS + "test_moments_of_all_layers_are_reduced_at_once",
    ),
]
