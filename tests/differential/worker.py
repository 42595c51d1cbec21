"""Runs cases with the package that comes first on sys.path; says what came of each."""

import collections
import contextlib
import functools
import os
import re
import tempfile
import warnings

os.environ["MACROBATCH_CACHE"] = "0"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["JAX_ENABLE_X64"] = "1"
# Two devices, and quick compilation: models here are tiny.
os.environ["XLA_FLAGS"] = (
    "--xla_backend_optimization_level=0 --xla_force_host_platform_device_count=2"
)

import keras
import numpy as np
from keras import ops, tree
from keras.src.backend.common import dtypes

BACKEND = keras.backend.backend()
if BACKEND == "tensorflow":
    import tensorflow as tf
    from tensorflow.python.framework.func_graph import FuncGraph

    # Before the tests' own helpers ask for devices.
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
    )
    tf.config.threading.set_intra_op_parallelism_threads(1)  # sums have one order
    tf.config.threading.set_inter_op_parallelism_threads(16)  # replicas wait for each other
elif BACKEND == "jax":
    import jax
else:
    import torch

    torch.set_num_threads(1)
if BACKEND != "tensorflow":  # Keras computes float64 in float32 there
    for name in list(dtypes.BIT64_TO_BIT32_DTYPE):
        dtypes.BIT64_TO_BIT32_DTYPE[name] = name
keras.config.set_floatx("float64")
keras.config.set_dtype_policy("float64")
keras.utils.disable_interactive_logging()

import cases  # noqa: E402
import support  # noqa: E402

import macrobatch  # noqa: E402

COUNTS = collections.Counter()


def count(kind):
    """A decorator: counts calls of a method, by what `kind` says of its first argument."""

    def decorated(function):
        @functools.wraps(function)
        def counted(self, first, *args, **kwargs):
            COUNTS[kind(first)] += 1
            return function(self, first, *args, **kwargs)

        return counted

    return decorated


def kind_of_call(tensor):
    if BACKEND == "tensorflow":
        is_traced = tf.inside_function() and not isinstance(tensor, keras.KerasTensor)
    else:
        is_traced = BACKEND == "jax" and isinstance(tensor, jax.core.Tracer)
    return "traces" if is_traced else "calls"


def count_compilations(event, seconds, **more):
    COUNTS["compilations"] += event == "/jax/core/compile/backend_compile_duration"


keras.layers.Dense.call = count(kind_of_call)(keras.layers.Dense.call)
if BACKEND == "tensorflow":
    FuncGraph.__init__ = count(lambda name: "graphs")(FuncGraph.__init__)
elif BACKEND == "jax":
    jax.monitoring.register_event_duration_secs_listener(count_compilations)


OF_TRAIN = ("batch_size", "epochs", "optimizer", "fit", "before", "moved", "scope")


class Run:
    """A case while it runs, and what has come of it so far."""

    def __init__(self, case):
        self.case, self.logs, self.models = case, [], []
        self.base, self.fit_options = cases.BASES[case["base"]], {}
        if self.base is None:
            self.build, self.arrays = cases.STEPS[case["base"].removeprefix("step ")]
            return
        x, y = support.made(self.base.x), self.base.y
        self.fit_options = dict(self.base.options.get("fit") or {})
        weights = self.fit_options.pop("sample_weight", None)
        # What is no array has its labels with it, and stays as it is.
        self.data, self.arrays = x, None
        if all(isinstance(leaf, np.ndarray) for leaf in tree.flatten(x)):
            examples = len(tree.flatten(x)[0])
            if case["weights"] and weights is None and not self.fit_options:
                weights = np.random.default_rng(1).uniform(0, 2, examples)
            x = tree.map_structure(self.with_bad, x)
            self.arrays = tuple(each for each in (x, y, weights) if each is not None)

    def with_bad(self, values):
        """Inputs of which some examples are not a number."""
        values = np.array(values)
        if values.dtype.kind == "f":
            values[self.case["bad"]] = np.nan
        return values

    def cut(self):
        functions = {"lengths": lengths, "squares": squares}
        return {n: functions[v] if v in [*functions] else v for n, v in self.case["cut"].items()}

    def log(self, name, value):
        self.logs.append((name, tree.map_structure(np.array, value)))

    def model(self):
        """A compiled model, not accumulated."""
        keras.utils.set_random_seed(self.case["seed"])
        mode = {**support.MODES, "several": {"steps_per_execution": 2}}[self.case["mode"]]
        if self.base is None:
            model = self.build(mode)
        else:
            model = self.base.build()
            self.compile(model, mode)
            if "before" in self.base.options:
                self.base.options["before"](model)
        self.models.append(model)
        return model

    def compile(self, model, mode):
        options = {"loss": "mse", **self.base.options, **mode}
        optimizer = options.get("optimizer", cases.OPTIMIZERS["sgd"])
        if self.case["optimizer"]:
            optimizer = cases.OPTIMIZERS[self.case["optimizer"]]
        options = {k: support.made(v) for k, v in options.items() if k not in OF_TRAIN}
        if self.case["metrics"] and not {"metrics", "weighted_metrics"}.intersection(options):
            options.update(metrics=["mae"], weighted_metrics=["mse"])
        model.compile(optimizer(), **options)

    def batches(self):
        """The examples in batches, the last of which is smaller."""
        size, arrays = self.case["batch"], self.arrays or (cases.X, cases.Y)
        for start in range(0, len(tree.flatten(arrays)[0]), size):
            rows = slice(start, start + size)
            yield tree.map_structure(lambda a, r=rows: np.array(a[r]), arrays)

    def fit(self, model, **options):
        """Trains, on data in the form that the case says."""
        kind, epochs, options = (
            self.case["data"],
            self.case["epochs"],
            {**self.fit_options, **options},
        )
        if self.arrays is None:
            data = [self.data]
            epochs = 1
        elif kind == "dataset":
            pairs = tf.data.Dataset.from_tensor_slices(tree.lists_to_tuples(self.arrays))
            data = [pairs.batch(self.case["batch"])]
        elif kind == "generator":
            batches = list(self.batches())
            data = [each for _ in range(epochs) for each in batches]
            data, options["steps_per_epoch"] = [(each for each in data)], len(batches)
        elif kind == "loader" and len(tree.flatten(self.arrays)) == len(self.arrays):
            pairs = torch.utils.data.TensorDataset(*map(torch.as_tensor, self.arrays))
            data = [torch.utils.data.DataLoader(pairs, self.case["batch"])]
        else:
            data = self.arrays[:2]
            options.update(batch_size=self.case["batch"], shuffle=self.case["shuffle"])
            options.update(sample_weight=(*self.arrays, None, None)[2])
        by_batch = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: self.log("batch", dict(logs))
        )
        callbacks = [by_batch, *options.pop("callbacks", [])]
        keras.utils.set_random_seed(3)
        fitted = model.fit(*data, epochs=epochs, verbose=0, callbacks=callbacks, **options)
        self.log("history", fitted.history)


def lengths(x, y, sample_weight):
    there = ops.not_equal(x, 0)
    if len(x.shape) == 3:
        there = ops.any(there, axis=2)
    positions = ops.arange(1, ops.shape(there)[1] + 1, dtype="int32")
    return ops.max(ops.where(there, positions, 0), axis=1)


def squares(x, y, sample_weight):
    return ops.sum(ops.square(ops.cast(tree.flatten(y)[0], "float64"))) + 1.0


# The ways in


def fit(run):
    model, case, options = run.model(), run.case, {}
    macrobatch.accumulate(model, **run.cut())
    *_, batch = run.batches()
    if case["validation"] and "validation_data" not in run.fit_options:
        options = {"validation_data": batch, "validation_batch_size": 2}
    if case["callback"]:
        options["callbacks"] = [CALLBACKS[case["callback"]](model)]
    run.fit(model, **options)
    for name in case["afterwards"]:
        run.log(name, AFTERWARDS[name](run, model, batch))


def batches(run):
    model = run.model()
    macrobatch.accumulate(model, **run.cut())
    for batch in run.batches():
        run.log("train_on_batch", model.train_on_batch(*batch, return_dict=True))
    run.log("test_on_batch", model.test_on_batch(*batch, return_dict=True))
    run.log("predict_on_batch", model.predict_on_batch(batch[0]))


def verify(run, model=None, batch=None):
    cut = {k: v for k, v in run.cut().items() if k not in ("nonfinite", "memory_limit")}
    model, batch = model or run.model(), batch or next(run.batches())
    report = macrobatch.verify(model, *batch, **cut)
    causes = sorted(f"{each.kind} {sorted(each.names)} {each.affects}" for each in report.causes)
    run.log("report", [str(report.exact), report.dtype, causes, sorted(report.differences)])
    return []


def plan(run):
    model, batch = run.model(), next(run.batches())
    model(batch[0])
    names = ("sequence_axis", "lengths", "whole_batch_loss")
    cut = {k: v for k, v in run.cut().items() if k in names}
    found = macrobatch.find_micro_batch_size(model, *batch, objective="largest", **cut)
    run.log("plan", found.micro_batch_size)


def before_second_batch(function):
    return keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: function() if batch == 1 else None
    )


CALLBACKS = {
    "noise": lambda model: macrobatch.GradientNoiseScale(every=1),
    "schedule": lambda model: keras.callbacks.LearningRateScheduler(
        lambda epoch: 0.1 / (1 + epoch)
    ),
    "stopping": lambda model: keras.callbacks.EarlyStopping("loss", restore_best_weights=True),
    "backup": lambda model: keras.callbacks.BackupAndRestore(tempfile.mkdtemp()),
    "release": lambda model: before_second_batch(lambda: macrobatch.release(model)),
    "resize": lambda model: before_second_batch(lambda: macrobatch.accumulate(model, 2)),
}


def again(run, model, batch):
    macrobatch.accumulate(model, 2)
    run.fit(model)
    return []


def recompile(run, model, batch):
    if run.base is not None:
        run.compile(model, {"run_eagerly": True})
    run.fit(model)
    return []


def reload(run, model, batch):
    path = os.path.join(tempfile.mkdtemp(), "model.weights.h5")
    model.save_weights(path)
    model.load_weights(path)
    return []


AFTERWARDS = {
    "evaluate": lambda run, model, batch: model.evaluate(
        *batch[:2], batch_size=3, verbose=0, return_dict=True
    ),
    "predict": lambda run, model, batch: model.predict(batch[0], batch_size=3, verbose=0),
    "train_on_batch": lambda run, model, batch: model.train_on_batch(*batch, return_dict=True),
    "test_on_batch": lambda run, model, batch: model.test_on_batch(*batch, return_dict=True),
    "again": again,
    "recompile": recompile,
    "release": lambda run, model, batch: run.fit(macrobatch.release(model)) or [],
    "reload": reload,
    "verify": verify,
}
WAYS = {"fit": fit, "batches": batches, "verify": verify, "plan": plan}
if BACKEND == "tensorflow":
    import loops

    WAYS.update(loops.WAYS)


# What came of it


def words_of(text):
    """The first words of a message, without numbers: the same for all messages of a kind."""
    return " ".join(re.sub(r"0x[0-9a-f]+|\d+", "#", str(text)).split()[:9])


def kind_of(error):
    """The class that users can name: what the package derives from it is its own matter."""
    kinds = (c for c in type(error).__mro__ if not c.__module__.startswith("macrobatch."))
    return next(kinds).__name__


def run(seed):
    """What comes of a case: named values, of which those of two packages are compared."""
    case = cases.draw(seed)
    keras.utils.clear_session()
    keras.utils.set_random_seed(seed)
    if BACKEND == "tensorflow":
        off = {"disable_meta_optimizer": not case["grappler"]}
        tf.config.optimizer.set_experimental_options(off)
    running, error, message = Run(case), None, ""
    COUNTS.clear()
    devices = support.several_devices if case["devices"] > 1 else contextlib.nullcontext
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            with devices() as scope, scope or contextlib.nullcontext():
                WAYS[case["way"]](running)
        except Exception as raised:
            error, message = kind_of(raised), words_of(raised)
    variables = [v for m in running.models for v in support.variables(m)]
    return {
        "case": str(case),
        "by_time": case["by_time"],
        "kinds": [
            f"{name} {case[name]}" for name in ("way", "mode", "devices", "data", "callback")
        ],
        "package": macrobatch.__file__,
        "refusal": error,
        "message": message,
        "paths": [v.path for v in variables],
        "weights": [support.array(v) for v in variables],
        "updates": [int(support.array(m.optimizer.iterations)) for m in running.models],
        "logs": running.logs,
        "warnings": sorted(
            f"{each.category.__name__}: {words_of(each.message)}"
            for each in seen
            if issubclass(each.category, UserWarning)
        ),
        "counts": dict(COUNTS),
    }
