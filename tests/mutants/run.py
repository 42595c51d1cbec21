"""Mutants of `macrobatch run`, and of predict on accumulated models."""

from mutant import Mutant

RUN, PREDICT = "processes/test_run.py::", "fit/test_predict.py::"

MUTANTS = [
    Mutant(
        "run: what the script sets loses",
        "_run/fits.py",
        "is_own = accumulation_of(model) is not None",
        "is_own = False",
        (RUN + "test_what_the_script_sets_wins",),
    ),
    Mutant(
        "run: a refused model stays accumulated",
        "_run/fits.py",
        "            release(model)\n",
        "",
        (RUN + "test_a_model_that_cannot_be_accumulated_trains_as_before",),
    ),
    Mutant(
        "run: frames of the command in tracebacks",
        "_run/hook.py",
        "frames.clear()  # All frames so far have started the script.",
        "pass",
        (RUN + "test_a_script_ends_as_in_plain_python",),
    ),
    Mutant(
        "run: --verify goes on",
        "_run/fits.py",
        'if report.exact is False and self._verify == "stop":',
        "if False:",
        (RUN + "test_an_update_that_is_not_exact",),
    ),
    Mutant(
        "predict: batches stay whole",
        "_fit/predict.py",
        "micro_batches = in_order.InOrder(x, examples, size, ENGINE)",
        "micro_batches = in_order.InOrder(x, examples, 10**6, ENGINE)",
        (PREDICT + "test_same_results_in_the_same_order[4-eager]",),
    ),
    Mutant(
        "predict: release keeps it cut",
        "_keras/installed.py",
        "model.train_function = model.test_function = model.predict_function = None",
        "model.train_function = model.test_function = None",
        (PREDICT + "test_same_results_in_the_same_order[4-eager]",),
    ),
]
