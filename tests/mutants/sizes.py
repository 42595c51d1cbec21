"""Mutants of sizes that are found: batches that are run again, the search, limits, files."""

from mutant import Mutant

HELD, COMPILED = "_fit/held.py", "fit/test_auto_compiled.py::test_"
FIT, LOOPS = "fit/test_auto.py::test_", "loops/test_auto_sizes.py::test_"
SEARCH_TESTS = "units/test_sizes.py::test_"
AUTO, STEPS, SEARCH = "_sizes/finder.py", "_fit/steps.py", "_sizes/search.py"
OWN_TESTS, EARLY, RUNS = (
    "fit/test_auto_own_steps.py::test_",
    "_own_steps/early.py",
    "_own_steps/runs.py",
)
GRAPHS, CACHE, CUT = "_gradients/auto.py", "_sizes/cache.py", "_batches/in_order.py"

MUTANTS = [
    Mutant(
        "sizes: a batch that has begun to write is run again",
        AUTO,
        "            if engine.has_begun():\n",
        "            if False:\n",
        (FIT + "an_optimizer_that_runs_out_is_not_called_again",),
    ),
    Mutant(
        "sizes: writes are not counted before they begin",
        STEPS,
        "[self.begun.assign_add(1)]",
        "[self.begun.assign_add(0)]",
        (FIT + "an_optimizer_that_runs_out_is_not_called_again",),
    ),
    Mutant(
        "sizes: a batch that runs out is skipped",
        AUTO,
        "            if found is not None:\n                break\n",
        "            if found is not None or len(tried) > 2:\n"
        "                found = found or {'loss': 0.0}\n                break\n",
        (FIT + "a_batch_that_runs_out_is_run_again",),
    ),
    Mutant(
        "sizes: the last micro-batch of a size in a variable is left out",
        CUT,
        "return [Run(0, size, (examples + size - 1) // size, static=False)]",
        "return [Run(0, size, examples // size, static=False)]",
        (FIT + "training_and_testing_in_turns",),
    ),
    Mutant(
        "sizes: looks for speed where the size shows",
        AUTO,
        "            search.only_fits()\n",
        "            pass\n",
        (FIT + "where_the_size_shows_it_is_only_shrunk",),
    ),
    Mutant(
        "sizes: a rehearsal writes",
        STEPS,
        "            return self._rehearsed((gradients, part))\n",
        "            pass\n",
        (FIT + "memory_is_watched_where_running_out_is_no_error[exact]",),
    ),
    Mutant(
        "sizes: sizes that do not fit are tried",
        SEARCH,
        "size <= most and self.fits(size)",
        "size <= most",
        (SEARCH_TESTS + "rehearses_no_more_than_the_line_says",),
    ),
    Mutant(
        "sizes: longer examples count as short ones",
        SEARCH,
        "found.append((max(1, int(size * shorter**self._power)), peak.bytes))",
        "found.append((size, peak.bytes))",
        (SEARCH_TESTS + "longer_examples_shrink_the_size",),
    ),
    Mutant(
        "sizes: the first update of a size is timed",
        SEARCH,
        "            if self.size not in self._warm:",
        "            if False:",
        (SEARCH_TESTS + "first_update_of_a_size_is_not_timed",),
    ),
    Mutant(
        "sizes: times of a size that ran out are kept",
        SEARCH,
        "for s, each in self._seconds.items() if s < self._failed}",
        "for s, each in self._seconds.items()}",
        (SEARCH_TESTS + "runs_out_while_it_looks",),
    ),
    Mutant(
        "sizes: a graph that failed has the same size again",
        GRAPHS,
        "        half = tf.maximum((size + 1) // 2, 1)\n",
        "        half = size\n",
        (LOOPS + "in_replicas",),
    ),
    Mutant(
        "sizes: the key of a file is not looked at",
        CACHE,
        ' or entry["key"] != key',
        "",
        (FIT + "a_damaged_file_is_ignored_with_a_warning",),
    ),
    Mutant(
        "sizes: draws of tf.random do not show the size",
        STEPS,
        "                self.shows_size = True\n",
        "                pass\n",
        (FIT + "draws_of_tf_random_show_the_size",),
    ),
    Mutant(
        "sizes: what a step of a model's own had written is not taken back",
        EARLY,
        "            variable.assign(value)\n",
        "            pass\n",
        (FIT + "a_batch_that_runs_out_is_run_again[own]",),
    ),
    Mutant(
        "sizes: slots of an optimizer that was called early are not kept",
        EARLY,
        "                found += optimizer.variables\n",
        "                pass\n",
        # In a graph, what runs out may do so before the early optimizer has written.
        (OWN_TESTS + "a_batch_that_runs_out_is_run_again[gan-eager]",),
    ),
    Mutant(
        "sizes: a step of a model's own does not count that its last gradient is there",
        RUNS,
        "            begun = self._begun.assign_add(1)\n",
        "            begun = self._begun.assign_add(0)\n",
        (FIT + "an_optimizer_that_runs_out_is_not_called_again[False-own]",),
    ),
    Mutant(
        "sizes: draws of a step of a model's own do not show the size",
        "_own_steps/plan.py",
        " or any(map(is_seed, self.variables))",
        "",
        (FIT + "where_the_size_shows_it_is_only_shrunk[own-dropout]",),
    ),
    Mutant(
        "sizes: sizes that grow are taken for the largest at once",
        AUTO,
        "        if engine.is_typical() and not grows:\n",
        "        if engine.is_typical():\n",
        (FIT + "sizes_grow_where_nothing_is_rehearsed[own]",),
    ),
    Mutant(
        "sizes: value_and_gradients looks for speed where the size shows",
        GRAPHS,
        "        self._search.only_fits()\n",
        "        pass\n",
        (LOOPS + "where_the_size_shows_it_is_the_largest",),
    ),
    Mutant(
        "sizes: times of value_and_gradients are not told",
        GRAPHS,
        "search.ran(whole, time.perf_counter() - start)",
        "search.ran(whole)",
        (LOOPS + "finds_the_fastest",),
    ),
    Mutant(
        "sizes: a search that is told to look only for what fits goes on timing",
        SEARCH,
        '            self._start("settled")\n            self.size = max(self._allowed())\n',
        "            pass\n",
        (SEARCH_TESTS + "stops_looking_in_the_middle",),
    ),
    Mutant(
        "sizes: what a compiled step that failed took with it is not put back",
        HELD,
        "                part.assign(value)\n",
        "                pass\n",
        (COMPILED + "a_batch_that_runs_out_is_run_again[Spoils]",),
    ),
    Mutant(
        "sizes: a counter that XLA took with it says whether a batch may be run again",
        "_fit/auto.py",
        "            return not self._held.is_on\n",
        "            pass\n",
        (COMPILED + "a_step_that_fitted_before_and_fails_is_not_run_again",),
    ),
    Mutant(
        "sizes: memory of variables is kept for each batch",
        HELD,
        "        self._fitted.add(kind)\n",
        "        pass\n",
        (COMPILED + "a_step_that_fitted_before_and_fails_is_not_run_again",),
    ),
    Mutant(
        "sizes: the key of a file has what others leave free",
        AUTO,
        "in_all = limits.in_all(self.memory_limit, on_gpu=on_gpu)",
        "in_all = None if watched is None else watched.limit.bytes",
        (FIT + "what_was_found_is_found_again_whatever_others_use",),
    ),
    Mutant(
        "sizes: what a size takes is forgotten when it is found again",
        AUTO,
        "        takes = self._takes\n",
        "        takes = 0\n",
        (FIT + "what_was_found_is_found_again_whatever_others_use",),
    ),
    Mutant(
        "sizes: after a batch of which nothing fits, no batch fits",
        SEARCH,
        "        self._failed, self._batch, self._most, self._extent = None, 0, 0, 0.0",
        "        pass",
        (SEARCH_TESTS + "after_a_batch_of_which_nothing_fits_it_starts_anew",),
    ),
    Mutant(
        "sizes: a compiled size is the whole batch, which is no power of two",
        SEARCH,
        "batch = power_above(batch) if self._is_compiled else batch",
        "pass",
        (SEARCH_TESTS + "sizes_that_are_compiled_are_powers_of_two",),
    ),
    Mutant(
        "sizes: all sizes are compiled that are not far slower",
        SEARCH,
        "        if not self._is_compiled:\n            return self._is_far",
        "        if True:\n            return self._is_far",
        (SEARCH_TESTS + "sizes_that_are_as_fast_need_not_be_compiled",),
    ),
    Mutant(
        "sizes: memory of compiled steps is not watched under a limit of the kernel",
        "_fit/auto.py",
        "        return not self._steps.model.jit_compile\n",
        "        return True\n",
        (COMPILED + "memory_is_watched",),
    ),
]
