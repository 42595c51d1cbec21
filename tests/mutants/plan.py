"""Mutants of sizes: limits, peaks, the line through them, and the plan that rests on them."""

from mutant import Mutant

LIMIT, PEAKS = "_sizes/limit.py", "_sizes/peaks.py"
SEARCH, TRIAL, UNCHANGED = "_plan/search.py", "_plan/trial.py", "_no_trace/unchanged.py"
OF_LIMIT, OF_PEAKS = "units/test_limits.py::test_", "units/test_sizes.py::test_"
OF_PLAN, OF_COMMAND = "fit/test_plan.py::test_", "processes/test_commands.py::test_"

MUTANTS = [
    Mutant(
        "limit: what this process has counts as that of others",
        LIMIT,
        "rest = allowed - max(used - private, 0)",
        "rest = allowed - used",
        (OF_LIMIT + "a_container",),
    ),
    Mutant(
        "limit: pages of files cannot be given back",
        LIMIT,
        "sum(int(fields.get(name, 0)) for name in names)",
        "0",
        (OF_LIMIT + "a_container",),
    ),
    Mutant(
        "limit: groups around the own one do not count",
        LIMIT,
        "for count in range(len(parts), -1, -1)]",
        "for count in [len(parts)]]",
        (OF_LIMIT + "a_container", OF_LIMIT + "a_container_of_the_first_kind"),
    ),
    Mutant(
        "limit: a fraction over 1",
        LIMIT,
        "if not 0 < size <= 1:",
        "if not 0 < size <= 2:",
        (OF_LIMIT + "bad_limits",),
    ),
    Mutant(
        "limit: addresses that are taken count as free",
        LIMIT,
        'rest = space - own["VmSize"] + own["VmRSS"]',
        "rest = space",
        (OF_LIMIT + "a_limit_of_addresses",),
    ),
    Mutant(
        "peaks: the mark of earlier work stays",
        PEAKS,
        '                file.write("5")\n',
        "                pass\n",
        (OF_PLAN + "what_was_taken_before_does_not_count",),
    ),
    Mutant(
        "peaks: a slope below zero",
        PEAKS,
        "slopes, bases = [0.0], ",
        "slopes, bases = [-1e9], ",
        (OF_PEAKS + "the_line_through_peaks",),
    ),
    Mutant(
        "peaks: the last part of the line does not count",
        PEAKS,
        "slopes += [_least_squares(sizes, peaks), last]",
        "slopes += [_least_squares(sizes, peaks)]",
        (OF_PEAKS + "the_line_through_peaks",),
    ),
    Mutant(
        "peaks: the line starts at what was there before",
        PEAKS,
        "base = max(bases)",
        "base = bases[0]",
        (OF_PEAKS + "the_line_through_peaks",),
    ),
    Mutant(
        "peaks: growth is taken as it is",
        PEAKS,
        "CAUTION = 1.5",
        "CAUTION = 1.0",
        (OF_PEAKS + "growth_beyond_what_was_measured_counts_more",),
    ),
    Mutant(
        "plan: sizes are tried whatever the line says",
        SEARCH,
        "return not most or not self._peaks or line.fits(size, min(most))",
        "return True",
        (OF_PLAN + "no_size_is_tried_that_the_line_does_not_allow",),
    ),
    Mutant(
        "plan: what is kept counts as memory of the training",
        SEARCH,
        "self._peaks[size] = found.bytes - self._extra - self._left",
        "self._peaks[size] = found.bytes - self._left",
        (OF_PLAN + "what_is_kept_to_be_put_back_needs_room_too",),
    ),
    Mutant(
        "plan: what is kept needs no room",
        SEARCH,
        "[room - self._extra - self._left]",
        "[room]",
        (OF_PLAN + "what_is_kept_to_be_put_back_needs_room_too",),
    ),
    Mutant(
        "plan: what earlier sizes have left counts",
        SEARCH,
        "self._left = found.before - (self._settled or found.before)",
        "self._left = 0",
        (OF_PLAN + "what_earlier_sizes_have_left_does_not_count",),
    ),
    Mutant(
        "plan: peaks over the limit fit",
        SEARCH,
        "return limit is None or self._peaks[size] <= limit.bytes * (1 - MARGIN)",
        "return True",
        (OF_PLAN + "a_measured_peak_over_the_limit_does_not_fit",),
    ),
    Mutant(
        "plan: running out of memory ends the search",
        SEARCH,
        "except tf.errors.ResourceExhaustedError:",
        "except tf.errors.DataLossError:",
        (OF_PLAN + "where_running_out_is_an_error",),
    ),
    Mutant(
        "plan: trials are plain",
        TRIAL,
        "if size is not None:",
        "if size is None:",
        (OF_PLAN + "everything_fits",),
    ),
    Mutant(
        "plan: the model itself is tried",
        TRIAL,
        "self._model, _ = twin(model, as_it_trains=True)",
        "self._model = model",
        (OF_PLAN + "everything_fits",),
    ),
    Mutant(
        "plan: trained values are not put back",
        UNCHANGED,
        "            kept.put_back()\n",
        "            pass\n",
        (OF_PLAN + "a_failure_changes_nothing",),
    ),
    Mutant(
        "plan: what an own compile has yet to build is built",
        "_no_trace/compiled.py",
        "    _internals.set_compiled_apart(other)\n",
        "",
        (OF_PLAN + "what_was_never_trained_stays_so[with_own_compile]",),
    ),
    Mutant(
        "plan: frozen weights are copied",
        UNCHANGED,
        "lazily = {id(variable) for variable in rarely_written}",
        "lazily = set()",
        (OF_PLAN + "what_is_kept_to_be_put_back_needs_room_too[False]",),
    ),
    Mutant(
        "plan: nothing fits, and all is well",
        "_plan/command.py",
        "FOUND, NOTHING_FITS, COULD_NOT_TELL = 0, 1, 2",
        "FOUND, NOTHING_FITS, COULD_NOT_TELL = 0, 2, 2",
        (OF_COMMAND + "nothing_fits",),
    ),
]
