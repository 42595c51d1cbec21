"""Mutants of the check whether examples interact: the formula, the groups, names, what stays."""

from mutant import Mutant

FIT = "fit/test_interaction.py::test_"
SAID = FIT + "what_is_said"
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
        (SAID + "[by-example]",),
    ),
    Mutant(
        "meet: sums are not tried",
        COMPARISON,
        "        size = max(map(abs, self.values))\n",
        "        return True\n",
        (SAID + "[added-square]",),
    ),
    Mutant(
        "meet: only the first rows are compared",
        COMPARISON,
        "        halves = _halves(calls.on_host(value), 0, self._start)\n",
        "        halves = _halves(calls.on_host(value), 0, self._start)[:1]\n",
        (SAID + "[whole-batch-later]",),
    ),
    Mutant(
        "meet: only the last rows are compared",
        COMPARISON,
        "BEFORE = [(None, None), (None, 0), (0, None), (1, 2)]",
        "BEFORE = [(None, None), (None, 0), (None, None), (None, 2)]",
        (SAID + "[whole-batch-earlier]",),
    ),
    Mutant(
        "meet: small batches have no other examples",
        MEETING,
        "else (examples - first, 0)",
        "else (0, first)",
        (FIT + "few_examples",),
    ),
    Mutant(
        "meet: one tolerance for all dtypes",
        COMPARISON,
        '        return DOUBLE if name == "float64" else SINGLE\n',
        "        return COARSE\n",
        (FIT + "rounding",),
    ),
    Mutant(
        "meet: float64 is taken for exact in sums",
        COMPARISON,
        "DOUBLE = Tolerance(rows=1e-9, spread=1e-5, size=1e-6)",
        "DOUBLE = Tolerance(rows=1e-9, spread=1e-12, size=1e-12)",
        (SAID + "[by-example]",),
    ),
    Mutant(
        "meet: draws are taken for other examples",
        MEETING,
        "            return Verdict(is_random=True)\n",
        "            pass\n",
        (SAID + "[drawing]",),
    ),
    Mutant(
        "meet: BatchNormalization takes the moments of each run",
        "_keras/batch_norm.py",
        "    if place == len(first.setdefault(layer, [])):\n",
        "    if True:\n        return plain(layer, inputs, mask)\n",
        (SAID + "[normalization]",),
    ),
    Mutant(
        "meet: a layer that is known hides what follows",
        CALLS,
        "        if start in instead:\n",
        "        if False:\n",
        (SAID + "[both]",),
    ),
    Mutant(
        "meet: a layer is named for what is in it",
        COMPARISON,
        "            if not inside and self._is_culprit(same)",
        "            if self._is_culprit(same)",
        (SAID + "[operation]",),
    ),
    Mutant(
        "meet: layers that inherit are named",
        COMPARISON,
        "        return all(self._along_any(values) is not False for values in inputs)\n",
        "        return True\n",
        (SAID + "[layer-mean]",),
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
        "meet: only the sums of losses are compared",
        TRIED,
        '                    found[f"{VALUES} {index}"] = term.values\n',
        "                    pass\n",
        (SAID + "[over_the_mean]",),
    ),
    Mutant(
        "meet: a mean that each example gets counts",
        TRIED,
        "        found = compared(lambda micro_batch: self._slopes(micro_batch, doubtful))\n",
        "        return names\n",
        (SAID + "[mean-for-each]",),
    ),
    Mutant(
        "meet: the sum of two pieces may be anything",
        PIECES,
        '        return not size < float("inf") or difference',
        "        return True or difference",
        (SAID + "[by_shape]",),
    ),
    Mutant(
        "meet: only the first piece is looked at",
        PIECES,
        "return all(self._has(whole, each, place) for each, place in known)",
        "return all(self._has(whole, each, place) for each, place in known[:1])",
        (LOSS_FN + "what_is_said[place-in-forward-eager]",),
    ),
    Mutant(
        "meet: a single example that differs in another size counts",
        PIECES,
        "        return found < size / 2\n",
        "        return not found\n",
        (FIT + "a_few_examples_that_rounding_turns",),
    ),
    Mutant(
        "meet: pieces of few bits are compared as those of many",
        PIECES,
        "        return OF_COARSE if is_coarse else TOLERANCE\n",
        "        return TOLERANCE\n",
        (FIT + "rounding",),
    ),
    Mutant(
        "meet: each piece divides by its own number of examples",
        TRIED,
        "Whole(made.sizes[0]))",
        "Whole(self._engine.examples(batch)))",
        (SAID + "[by_shape-of-two]",),
    ),
    Mutant(
        "meet: dropout drops other places of fewer examples",
        TRIED,
        "scope.dropping(False):",
        "scope.dropping(True):",
        (SAID + "[by-cumsum-behind-dropout]",),
    ),
    Mutant(
        "meet: draws of another size are compared",
        TRIED,
        "        return {} if ran.drew else _rows_of(ran.y_pred)\n",
        "        return _rows_of(ran.y_pred)\n",
        (SAID + "[by_shape]",),
    ),
    Mutant(
        "meet: draws of a loss are compared between sizes",
        TRIED,
        "{} if scope.drew else self._numerators",
        "self._numerators",
        (SAID + "[compute_loss-that-draws]",),
    ),
    Mutant(
        "meet: what the trial writes stays",
        TAP,
        "        variable.assign(value)\n",
        "        pass\n",
        (FIT + "the_check_writes_nothing",),
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
        (SAID + "[not-cut]", LOSS_FN + "what_is_said[not-cut-eager]"),
    ),
    Mutant(
        "meet: one example is taken for a group",
        TRIAL,
        "    return examples > 1 and (",
        "    return (",
        (FIT + "single_examples_come_first",),
    ),
    Mutant(
        "meet: a model is kept by the function that its examples go to",
        TAP,
        "reference = graph.specs_of(rows), weakref.ref(self)",
        "reference = graph.specs_of(rows), lambda: self",
        ("fit/test_fit.py::test_nothing_is_kept_of_models_that_are_gone",),
    ),
    Mutant(
        "meet: a loss_fn is tried again and again",
        TRIAL,
        "        _done.add(self._code, None, self._variables)\n",
        "",
        (LOSS_FN + "what_is_said[loss-eager]",),
    ),
    Mutant(
        "meet: losses that are not finite are taken for a verdict",
        MEETING,
        "            return sized._replace(unknown=unknown)\n",
        "            return sized\n",
        (SAID + "[infinite]",),
    ),
]
