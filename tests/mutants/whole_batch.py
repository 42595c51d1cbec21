"""Mutants of losses of the whole batch: two passes, random layers, replicas, what is refused."""

from mutant import Mutant

FIT, FORWARD = "fit/test_whole_batch.py::", "loops/test_forward.py::"
AS_PLAIN = FIT + "test_as_plain_keras_on_the_whole_batch"
PASSES, GATHER = "_tensorflow/two_passes.py", "_tensorflow/gather.py"
STEP, STAGES = "_keras/whole_batch.py", "_keras/two_stages.py"

MUTANTS = [
    Mutant(
        "whole: a gradient flows through what is assigned",
        "_engine.py",
        "        return ops.stop_gradient(value)\n",
        "        return value\n",
        ("fit/test_whole_batch.py::test_no_gradient_flows_through_what_the_loss_assigns",),
    ),
    Mutant(
        "whole batch: rows of another micro-batch",
        "_batches/in_order.py",
        "start = run.start + index * run.size",
        "start = run.start + (index * run.size if nest is self.batch else 0)",
        (AS_PLAIN + "[add_loss-graph]",),
    ),
    Mutant(
        "whole batch: rows in the order of the batch, not of lengths",
        "_batches/by_length.py",
        "self._engine.taken(leaf, self.order, *places)",
        "self._engine.taken(leaf, ops.arange(self.examples), *places)",
        (FORWARD + "test_sequences_by_length[graph]",),
    ),
    Mutant(
        "whole batch: seeds stay as they were in the second pass",
        PASSES,
        "return Part([*gradients, differ], written=found.written)",
        "return Part([*gradients, differ], written=[None] * len(found.written))",
        (FIT + "test_random_layers_draw_the_same_in_both_passes[graph]",),
    ),
    Mutant(
        "whole batch: the loss's own variables left out",
        PASSES,
        "return found, [sums.add(*pair) for pair in zip(gradients, own)]",
        "return found, gradients",
        (AS_PLAIN + "[compute_loss with a temperature-graph]",),
    ),
    Mutant(
        "whole batch: the loss's own variables count once per replica",
        PASSES,
        "own = [sums.scaled(gradient, 1 / replicas.count()) for gradient in own]",
        "pass",
        (AS_PLAIN + "[compute_loss with a temperature-replicas]",),
    ),
    Mutant(
        "whole batch: gradients of added losses left out",
        PASSES,
        "totals = [t for t, g in zip(found.totals, of_totals) if g is not None]\n"
        "                targets",
        "totals = [tf.stop_gradient(t) for t, g in zip(found.totals, of_totals) if g is not None]\n"
        "                targets",
        (AS_PLAIN + "[compute_loss with a temperature-graph]",),
    ),
    Mutant(
        "whole batch: a mean of means of what layers add",
        STEP,
        'value if kind == "sum" else value * _of_dtype(share, value.dtype)',
        "value / 3",
        (AS_PLAIN + "[compute_loss with a temperature-graph]",),
    ),
    Mutant(
        "whole batch: masks lost",
        STEP,
        "_internals.set_mask(leaf, mask)",
        "pass",
        (AS_PLAIN + "[mask-graph]",),
    ),
    Mutant(
        "whole batch: metrics count once per replica",
        STAGES,
        "self._engine.on_first_replica(value)",
        "value",
        (AS_PLAIN + "[compute_loss with a temperature-replicas]",),
    ),
    Mutant(
        "whole batch: replicas see only their own predictions",
        GATHER,
        "        flat = tf.nest.flatten(nest)\n",
        "        return nest\n        flat = tf.nest.flatten(nest)\n",
        (AS_PLAIN + "[compute_loss with a temperature-replicas]",),
    ),
    Mutant(
        "whole batch: all replicas take back the first rows",
        GATHER,
        "self._start = tf.reduce_sum(sizes[: _replica()])",
        "self._start = 0",
        (FORWARD + "test_replicas_see_the_outputs_of_all[sizes0-True]",),
    ),
    Mutant(
        "whole batch: an output that the loss does not use counts",
        PASSES,
        "of_outputs[i] = None if gradient is None else _like(flat[i], gradient)",
        "of_outputs[i] = tf.zeros_like(flat[i]) if gradient is None else _like(flat[i], gradient)",
        (FORWARD + "test_as_one_tape[graph]",),
    ),
    Mutant(
        "whole batch: both passes at once",
        PASSES,
        "with graph.refuse_unless(*_same_on_all_replicas(found.value)), after(of_outputs):",
        "with graph.refuse_unless(*_same_on_all_replicas(found.value)):",
        (FIT + "test_memory_is_that_of_micro_batches",),
    ),
    Mutant(
        "whole batch: random operations go unnoticed in a graph",
        PASSES,
        "            _loop_checks.draws_nothing_anew(self.loop.operations())\n",
        "            pass\n",
        (FORWARD + "test_random_numbers_must_be_drawn_from_seeds",),
    ),
    Mutant(
        "whole batch: passes are not compared",
        PASSES,
        "differ.append(error > tolerance * size)",
        "pass",
        (FIT + "test_what_draws_anew_is_refused_and_nothing_changes",),
    ),
    Mutant(
        "whole batch: replicas with different losses go unnoticed",
        PASSES,
        "good = tf.logical_not(error > 1e-3 * tf.abs(total))",
        "good = tf.constant(True)",
        (FORWARD + "test_replicas_that_come_to_different_losses_are_refused",),
    ),
    Mutant(
        "whole batch: the loss is not scaled",
        "_fit/whole_batch.py",
        "return Loss(found.loss * tf.cast(scale, found.loss.dtype), found)",
        "return Loss(found.loss, found)",
        (FIT + "test_gradients_of_a_tiny_loss_do_not_vanish_in_float16",),
    ),
    Mutant(
        "whole batch: what the forward passes wrote is lost",
        STAGES,
        "of_forward = [*written, *[None] * len(of_loss)]",
        "of_forward = [None] * len(of_loss)",
        (FIT + "test_random_layers_draw_the_same_in_both_passes[graph]",),
    ),
    Mutant(
        "whole batch: statistics of BatchNormalization are not moved",
        STAGES,
        "        self.forward.write([], moments)\n",
        "",
        (FIT + "test_moving_statistics_are_those_of_the_batch[graph]",),
    ),
]
