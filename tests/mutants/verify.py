"""Mutants of verify: what is compared, what is found, what is put back."""

from mutant import Mutant

TESTS = "fit/test_verify.py::test_"
MODELS = TESTS + "models"
UNCHANGED, COMMAND = TESTS + "nothing_changes", "processes/test_commands.py::test_"
COMPARE, CAUSES, REPLAY = (f"_verify/{name}.py" for name in ("compare", "causes", "replay"))
SUBJECT, PUT_BACK = "_verify/subject.py", "_no_trace/unchanged.py"

MUTANTS = [
    Mutant(
        "verify: rows compared as plain Keras hands them over",
        "_fit/no_trace.py",
        "gradients if as_they_are else [sums.dense(gradient) for gradient in gradients]",
        "gradients",
        (TESTS + "repeated_rows_are_plain_keras_being_off",),
    ),
    Mutant(
        "verify: a tolerance for anything",
        COMPARE,
        'TOLERANCES = {"float64": 1e-9,',
        'TOLERANCES = {"float64": 1e-5,',
        (MODELS + "[wrong-gradient]",),
    ),
    Mutant(
        "verify: a gradient that is rounding only counts",
        COMPARE,
        "LEAST = 1e-6",
        "LEAST = 0.0",
        (MODELS + "[softmax-bias]",),
    ),
    Mutant(
        "verify: updates of elements without digits count",
        COMPARE,
        "left = np.where(known, left, right)",
        "pass",
        (MODELS + "[lion-and-rounding]",),
    ),
    Mutant(
        "verify: each generator goes on drawing",
        REPLAY,
        "        if id(seed) not in self._generators:\n",
        "        return seed\n        if id(seed) not in self._generators:\n",
        (MODELS + "[random-layers]",),
    ),
    Mutant(
        "verify: each example has draws of its own",
        REPLAY,
        "self._shared = {0, *",
        "self._shared = {*",
        (MODELS + "[random-layers]",),
    ),
    Mutant(
        "verify: BatchNormalization is not put aside",
        CAUSES,
        "return ops.zeros_like(mean), ops.ones_like(variance)",
        "return mean, variance",
        (MODELS + "[batch-norm]",),
    ),
    Mutant(
        "verify: random numbers go unnoticed",
        CAUSES,
        "return Found(None, self._tolerance, [messages.random()])",
        "pass",
        (MODELS + "[unseeded]",),
    ),
    Mutant(
        "verify: rounding is not measured",
        CAUSES,
        "ops.flip(leaf, 0)",
        "leaf",
        (MODELS + "[narrow-cast]",),
    ),
    Mutant(
        "verify: state does not count",
        COMPARE,
        "both = [*self.trained.values(), *self.state.values()]",
        "both = [*self.trained.values()]",
        (MODELS + "[state]",),
    ),
    Mutant(
        "verify: a layer that meets blames the loss behind it",
        CAUSES,
        "            wrong = [term for term in terms if term.name in known]\n",
        "            pass\n",
        (MODELS + "[two-causes]",),
    ),
    Mutant(
        "verify: draws by a number as seed are replayed",
        "_verify/replay.py",
        "    return seed is None or isinstance(seed, keras.random.SeedGenerator)\n",
        "    return True\n",
        (MODELS + "[seed-and-place]",),
    ),
    Mutant(
        "verify: what depends on sizes is no cause",
        CAUSES,
        "        if met.sized_layers:\n",
        "        if False:\n",
        (MODELS + "[layer-and-size]",),
    ),
    Mutant(
        "verify: a loss that depends on sizes is one in which examples meet",
        CAUSES,
        "        sized = [name for name in others if name in met.sized_losses]\n",
        "        sized = []\n",
        (MODELS + "[loss-and-size]",),
    ),
    Mutant(
        "verify: a weight is advised without a trial",
        CAUSES,
        "if self._is_right(context, weight) and self._helps(context, micro_batch_weight=weight):",
        "if True:",
        (MODELS + "[dice]",),
    ),
    Mutant(
        "verify: variables are not put back",
        PUT_BACK,
        "            variable.assign(value)\n",
        "            pass\n",
        (UNCHANGED + "[not_copied-settings1]",),
    ),
    Mutant(
        "verify: names are not put back",
        "_internals/copies.py",
        "            names.update(counted)\n",
        "            pass\n",
        (UNCHANGED + "[with_statistics-settings0]",),
    ),
    Mutant(
        "verify: Python's random numbers are not put back",
        PUT_BACK,
        "            random.setstate(numbers)\n",
        "",
        (UNCHANGED + "[with_statistics-settings0]",),
    ),
    Mutant(
        "verify: a copy without the weights of the optimizer",
        "_no_trace/compiled.py",
        "    if optimizer.built:\n",
        "    if False:\n",
        (TESTS + "the_optimizer_goes_on_from_where_it_is",),
    ),
    Mutant(
        "verify: any copy will do",
        SUBJECT,
        "        if one.shape != other.shape or",
        "        if False and",
        (TESTS + "a_copy_that_is_another_model_is_not_used",),
    ),
    Mutant(
        "verify: settings of the model are forgotten",
        "_accumulate.py",
        "whole_batch_loss=of_whole_batch",
        "whole_batch_loss=False",
        (TESTS + "whole_batch_loss_as_the_way_out",),
    ),
    Mutant(
        "verify: what is not finite has a verdict",
        "_verify/verify.py",
        "                raise _NotFinite(where, made)\n",
        "                pass\n",
        (TESTS + "a_batch_that_is_not_finite",),
    ),
    Mutant(
        "verify: the exit code tells nothing",
        "_verify/command.py",
        "CODES = {True: 0, False: 1, None: 2}",
        "CODES = {True: 0, False: 0, None: 2}",
        (COMMAND + "a_script_that_is_not_exact_as_json",),
    ),
    Mutant(
        "verify: fit stays as it was patched",
        "_no_trace/capture.py",
        "            model.fit = fit\n",
        "            pass\n",
        (COMMAND + "verify_runs_a_script_until_its_first_fit",),
    ),
]
