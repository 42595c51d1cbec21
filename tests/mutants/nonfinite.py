"""Mutants of nonfinite=: what is written, which examples are found, what is left of the batch."""

from mutant import Mutant

FIT = "fit/test_not_finite.py::"
UPDATE = FIT + "test_the_update_of_the_other_examples[graph]"
GUARD, NUMBERS = "_fit/guard.py", "_keras/guard.py"
FINITE = "_keras/skipping.py"
INSTALL, EXAMPLES = "_fit/install.py", "_tensorflow/examples.py"

MUTANTS = [
    Mutant(
        "not finite: written all the same",
        GUARD,
        "tf.logical_and(tf.equal(bad, 0), tf.logical_not(looks))",
        "tf.logical_not(looks)",
        (UPDATE,),
    ),
    Mutant(
        "not finite: parts of a batch that are only looked at are written",
        GUARD,
        "tf.logical_and(tf.equal(bad, 0), tf.logical_not(looks))",
        "tf.equal(bad, 0)",
        (UPDATE,),
    ),
    Mutant(
        "not finite: gradients are not looked at",
        NUMBERS,
        "*([] if self._scales else gradients)",
        "*gradients[:0]",
        (FIT + "test_where_numbers_stop_being_finite",),
    ),
    Mutant(
        "not finite: losses are not looked at",
        NUMBERS,
        ", *losses]",
        ", *losses[:0]]",
        (FIT + "test_a_dynamic_loss_scale",),
    ),
    Mutant(
        "not finite: an overflow of the loss scale is an example's fault",
        NUMBERS,
        "[] if self._scales else gradients",
        "gradients",
        (FIT + "test_a_dynamic_loss_scale",),
    ),
    Mutant(
        "not finite: other examples are left out",
        FINITE,
        "remaining = [example for example in remaining if example not in gone]",
        "remaining = remaining[len(gone) :]",
        (UPDATE,),
    ),
    Mutant(
        "not finite: a guess is taken for what was seen",
        FINITE,
        "is_sure=not is_last)",
        "is_sure=True)",
        (FIT + "test_examples_that_are_bad_only_together",),
    ),
    Mutant(
        "not finite: the rest of a group is not looked at once one is found",
        FINITE,
        "if is_last or is_bad(part):",
        "if is_last or (not found and is_bad(part)):",
        (FIT + "test_bad_examples_are_found_one_by_one",),
    ),
    Mutant(
        "not finite: weights are not looked at",
        FINITE,
        "if names:",
        "if names and False:",
        (FIT + "test_examples_that_are_not_at_fault[skip]",),
    ),
    Mutant(
        "not finite: regularisers are not looked at",
        "_fit/finite.py",
        "sums.are_finite([penalty, *gradients])",
        "sums.are_finite([])",
        (FIT + "test_examples_that_are_not_at_fault[skip]",),
    ),
    Mutant(
        "not finite: examples are counted over epochs",
        INSTALL,
        "        self.finite.reset()",
        "        pass",
        (UPDATE,),
    ),
    Mutant(
        "not finite: logs of a batch without an update",
        FINITE,
        "self._counted(logs if remaining else self._unchanged(logs))",
        "self._counted(logs)",
        (FIT + "test_warnings",),
    ),
    Mutant(
        "not finite: a warning for each batch",
        FINITE,
        "self._warned.add(kind)",
        "pass",
        (FIT + "test_warnings",),
    ),
    Mutant(
        "not finite: a trial of padding that showed nothing counts",
        INSTALL,
        "        self.padding.done[True].assign(0)\n        if self.looks:",
        "        if self.looks:",
        (FIT + "test_a_trial_that_showed_nothing_is_made_again",),
    ),
    Mutant(
        "not finite: what is left of the first batch is taken for it",
        INSTALL,
        "if self.looks:  # at the batch as it came",
        "if False:",
        (FIT + "test_what_is_known_of_the_first_batch",),
    ),
    Mutant(
        "not finite: parts of batches of one size have that size",
        "_fit/attempts.py",
        "(usual if _fits(spec, batch) else other)(batch)",
        "usual(batch)",
        (FIT + "test_each_way_to_train[several steps at a time]",),
    ),
    Mutant(
        "not finite: an example of the next replica",
        EXAMPLES,
        "if start <= place < start + size",
        "if start <= place <= start + size",
        (FIT + "test_an_error_on_several_devices",),
    ),
    Mutant(
        "not finite: a sparse tensor keeps its rows where they were",
        "_tensorflow/leaves.py",
        "tf.concat([tf.cast(places, tf.int64)[:, None], some.indices[:, 1:]], 1)",
        "some.indices",
        (FIT + "test_other_kinds_of_tensors",),
    ),
    Mutant(
        "not finite: replicas write, each by what it has seen itself",
        "_tensorflow/replicas.py",
        "graph.when(agreed, lambda: strategy.run(keep(call), args=(functions,)))",
        "strategy.run(keep(call), args=(functions,))",
        (FIT + "test_an_error_on_several_devices",),
    ),
    Mutant(
        "not finite: statistics are never at fault",
        FINITE,
        "            if len(gone) == len(remaining):\n",
        "            if False:\n",
        (FIT + "test_statistics_that_are_not_finite_are_at_fault[skip]",),
    ),
    Mutant(
        "not finite: statistics are at fault for any example",
        FINITE,
        "            if len(gone) == len(remaining):\n",
        "            if True:\n",
        (FIT + "test_statistics_of_which_some_are_never_finite",),
    ),
]
