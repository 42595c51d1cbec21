"""Mutants of the trial whether examples meet: the formula, the groups, names, what stays."""

from mutant import Mutant

ROOM, FIT = "rooms/test_meeting.py::test_", "fit/test_examples_that_meet.py::test_"
LOSS_FN = "loops/test_loss_fn_that_compares.py::test_"
MEETING, CALLS, TRIED = "_keras/meeting.py", "_keras/calls.py", "_keras/tried.py"
COMPARISON, PIECES = "_keras/comparison.py", "_keras/pieces.py"
TAP, TRIAL = "_tensorflow/tap.py", "_meeting.py"

MUTANTS = [
    Mutant(
        "meet: a wrong sign in the formula",
        COMPARISON,
        "return abs(here - other_a - other_b + both)",
        "return abs(here - other_a + other_b - both)",
        (ROOM + "sums_and_rows_of_each_example_are_apart",),
    ),
    Mutant(
        "meet: sums are not tried",
        COMPARISON,
        "        size = max(map(abs, self.values))\n",
        "        return True\n",
        (ROOM + "what_meets_is_found",),
    ),
    Mutant(
        "meet: only the first rows are compared",
        COMPARISON,
        "        halves = _halves(calls.on_host(value), 0, self._start)\n",
        "        halves = _halves(calls.on_host(value), 0, self._start)[:1]\n",
        (ROOM + "what_meets_is_found",),
    ),
    Mutant(
        "meet: only the last rows are compared",
        COMPARISON,
        "BEFORE = [(None, None), (None, 0), (0, None), (1, 2)]",
        "BEFORE = [(None, None), (None, 0), (None, None), (None, 2)]",
        (ROOM + "what_meets_is_found",),
    ),
    Mutant(
        "meet: small batches have no other examples",
        MEETING,
        "else (examples - first, 0)",
        "else (0, first)",
        (ROOM + "groups_are_of_the_batch_and_differ",),
    ),
    Mutant(
        "meet: one tolerance for all dtypes",
        COMPARISON,
        '        return DOUBLE if name == "float64" else SINGLE\n',
        "        return COARSE\n",
        (ROOM + "tolerances",),
    ),
    Mutant(
        "meet: float64 is taken for exact in sums",
        COMPARISON,
        "DOUBLE = Tolerance(rows=1e-9, spread=1e-5, size=1e-6)",
        "DOUBLE = Tolerance(rows=1e-9, spread=1e-12, size=1e-12)",
        (ROOM + "a_sum_of_float32_inside_of_float64_is_no_meeting",),
    ),
    Mutant(
        "meet: draws are taken for other examples",
        MEETING,
        "            return Verdict(is_random=True)\n",
        "            pass\n",
        (ROOM + "draws_that_are_not_put_back_leave_no_verdict",),
    ),
    Mutant(
        "meet: BatchNormalization takes the moments of each run",
        "_keras/batch_norm.py",
        "    if place == len(first.setdefault(layer, [])):\n",
        "    if True:\n        return plain(layer, inputs, mask)\n",
        (ROOM + "batch_normalization_is_frozen",),
    ),
    Mutant(
        "meet: a layer that is known hides what follows",
        CALLS,
        "        if start in instead:\n",
        "        if False:\n",
        (ROOM + "what_meets_besides_is_named_too",),
    ),
    Mutant(
        "meet: a layer is named for what is in it",
        COMPARISON,
        "            if not inside and self._is_culprit(same)",
        "            if self._is_culprit(same)",
        (FIT + "an_operation_of_a_functional_model_is_named",),
    ),
    Mutant(
        "meet: layers that inherit are named",
        COMPARISON,
        "        return all(self._along_any(values) is not False for values in inputs)\n",
        "        return True\n",
        (ROOM + "layers_are_named_and_what_follows_is_not",),
    ),
    Mutant(
        "meet: the loss of a micro-batch, not its numerator",
        TRIED,
        'f"{LOSS} {index}": term.numerator\n',
        'f"{LOSS} {index}": term.numerator / (\n'
        "                1.0 if term.counted is None else self.counts[term.counted].own\n"
        "            )\n",
        (FIT + "masked_tokens_are_silent",),
    ),
    Mutant(
        "meet: the sum of two pieces may be anything",
        PIECES,
        '        return not size < float("inf") or difference',
        "        return True or difference",
        (ROOM + "what_depends_on_how_many_examples_there_are_is_found",),
    ),
    Mutant(
        "meet: only the first piece is looked at",
        PIECES,
        "self._has(whole, first, 1) and self._has(whole, last, 2)",
        "self._has(whole, first, 1)",
        (ROOM + "what_depends_on_how_many_examples_there_are_is_found",),
    ),
    Mutant(
        "meet: a single example that differs in another size counts",
        PIECES,
        ".mean() < 0.5)",
        ".mean() < 1e-9)",
        (ROOM + "a_few_examples_that_rounding_turns_are_no_dependence",),
    ),
    Mutant(
        "meet: pieces of few bits are compared as those of many",
        PIECES,
        "        return OF_COARSE if is_coarse else TOLERANCE\n",
        "        return TOLERANCE\n",
        (ROOM + "tolerances_of_sizes",),
    ),
    Mutant(
        "meet: each piece divides by its own number of examples",
        TRIED,
        "Whole(made.sizes[0]))",
        "Whole(self._engine.examples(batch)))",
        (FIT + "one_of_several_outputs_depends_on_how_many_examples_there_are",),
    ),
    Mutant(
        "meet: dropout drops other places of fewer examples",
        TRIED,
        "scope.dropping(False):",
        "scope.dropping(True):",
        (FIT + "layers_that_depend_on_how_many_examples_there_are",),
    ),
    Mutant(
        "meet: draws of another size are compared",
        TRIED,
        "        return {} if scope.drew else _rows_of(y_pred)\n",
        "        return _rows_of(y_pred)\n",
        (FIT + "losses_that_depend_on_how_many_examples_there_are",),
    ),
    Mutant(
        "meet: draws of a loss are compared between sizes",
        TRIED,
        "{} if scope.drew else self._numerators",
        "self._numerators",
        (FIT + "an_own_loss_that_depends_on_how_many_examples_there_are",),
    ),
    Mutant(
        "meet: what the trial writes stays",
        TAP,
        "        variable.assign(value)\n",
        "        pass\n",
        (FIT + "the_trial_writes_nothing",),
    ),
    Mutant(
        "meet: each batch is tried",
        "_fit/meeting.py",
        "        self._tap.close()\n",
        "",
        (FIT + "once_for_what_is_compiled",),
    ),
    Mutant(
        "meet: what is compiled again is not tried",
        "_fit/install.py",
        "            self.meeting.start()\n",
        "",
        (FIT + "once_for_what_is_compiled",),
    ),
    Mutant(
        "meet: batches that are not cut are tried",
        TRIAL,
        "    return examples > 1 and (several or cut.size is None or examples > cut.size)\n",
        "    return examples > 1\n",
        (FIT + "a_batch_that_is_not_cut_is_silent", LOSS_FN + "a_batch_that_is_not_cut_is_silent"),
    ),
    Mutant(
        "meet: one example is taken for a group",
        TRIAL,
        "    return examples > 1 and (",
        "    return (",
        (FIT + "one_example_is_not_cut",),
    ),
    Mutant(
        "meet: a model is kept by the function that its examples go to",
        TAP,
        "reference = graph.specs_of(rows), weakref.ref(self)",
        "reference = graph.specs_of(rows), lambda: self",
        ("fit/test_hard_cases.py::test_nothing_is_kept_of_models_that_are_gone",),
    ),
    Mutant(
        "meet: a loss_fn is tried again and again",
        TRIAL,
        "        _done.add(self._code, None, self._variables)\n",
        "",
        (LOSS_FN + "a_loss_in_which_examples_meet",),
    ),
    Mutant(
        "meet: losses that are not finite are taken for a verdict",
        MEETING,
        "            return sized._replace(unknown=unknown)\n",
        "            return sized\n",
        (FIT + "no_verdict_where_the_loss_is_not_finite",),
    ),
]
