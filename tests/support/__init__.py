"""What the equivalence tests share: training a model plainly and accumulated, and comparing."""

import contextlib
import importlib.util
import random
import shlex
import unittest.mock
from typing import NamedTuple

import keras
import numpy as np
import pytest

import macrobatch
from macrobatch import cli

BACKEND = keras.backend.backend()
if BACKEND == "tensorflow":
    import tensorflow as tf

# How many examples there are in each run of the trial whether examples meet, if a batch has eight:
# in the four of the formula, and then half of them.
TRIAL = [8, 8, 8, 8, 4]

# How each backend can run steps. The first is what it does unless told otherwise.
MODES = {
    "tensorflow": {
        "graph": {},
        "eager": {"run_eagerly": True},
        "compiled": {"jit_compile": True},
    },
    "jax": {"compiled": {}, "eager": {"run_eagerly": True}, "not-compiled": {"jit_compile": False}},
    "torch": {"eager": {}, "compiled": {"jit_compile": True}},
}[BACKEND]

# Beside a case or a parameter: `make test` deselects it, `make test-all` runs it.
thorough = pytest.mark.thorough
needs_hub = pytest.mark.skipif(
    importlib.util.find_spec("keras_hub") is None, reason="needs keras-hub: make test-hub"
)
# The same for those of its parameters that have one of these words in their ids.
thorough_for = pytest.mark.thorough_for


def slow_on(*backends):
    """A mark: `thorough` on these backends, where others like it run and most of it compiles."""
    return thorough if BACKEND in backends else thorough_for()


def only_on(*backends):
    """A mark for what other backends do not have."""
    return pytest.mark.skipif(BACKEND not in backends, reason=f"of {' and '.join(backends)}")


def modes(quick):
    """The modes of this backend, as parameters: `make test` runs the quick ones on TensorFlow.

    On other backends, what they do unless told otherwise.
    """
    chosen = quick.split() if BACKEND == "tensorflow" else [next(iter(MODES))]
    return [pytest.param(mode, marks=() if mode in chosen else thorough) for mode in MODES]


class DensePlain(keras.Model):
    """Plain Keras with its gradient made dense: the reference where rows of a table repeat.

    Keras hands repeated rows to the optimizer one by one, which for most optimizers is not the
    update of the gradient.
    """

    def train_step(self, data):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x, y, y_pred, sample_weight)
        self._loss_tracker.update_state(loss, sample_weight=tf.shape(tf.nest.flatten(x)[0])[0])
        gradients = tape.gradient(loss, self.trainable_weights)
        gradients = [g if g is None else tf.convert_to_tensor(g) for g in gradients]
        self.optimizer.apply(gradients, self.trainable_weights)
        return self.compute_metrics(x, y, y_pred, sample_weight)


class OneDevice:
    """What a strategy of TensorFlow is elsewhere: nothing."""

    def scope(self):
        return contextlib.nullcontext()

    def experimental_local_results(self, value):
        return (value,)


# In whose scope the accumulated model is made; the plain one is always on one device.
if BACKEND == "tensorflow":
    strategy = tf.distribute.get_strategy()
else:
    strategy, DensePlain = OneDevice(), keras.Model  # Keras sums repeated rows there.


def array(value):
    """A copy of a value, or of what a variable holds, as an array of NumPy."""
    return np.array(keras.ops.convert_to_numpy(value))


def code_of(line):
    """The exit code of a command line of `macrobatch`."""
    try:
        return cli.main(shlex.split(line))
    except SystemExit as end:
        return end.code


def build_pair(build):
    """Two models with the same weights."""
    models = []
    for scope in (contextlib.nullcontext(), strategy.scope()):
        keras.utils.set_random_seed(7)
        with scope:
            models.append(build())
    return models


def variables(model):
    return [*model.variables, *model.optimizer.variables]


class Reference(NamedTuple):
    """Where training ended in plain Keras."""

    paths: list
    values: list
    history: dict


def ended(model, history=None):
    """The `Reference` that a model is, after training."""
    found = variables(model)
    return Reference([v.path for v in found], [array(v) for v in found], history)


def assert_same(left, right, tolerance=1e-10):
    """Asserts that two models have the same variables, those of their optimizers included."""
    assert_ended(ended(left), right, tolerance)


def assert_ended(reference, model, tolerance=1e-10):
    """Asserts that a model has the variables of the reference, on each of its replicas."""
    found = variables(model)
    assert len(reference.values) == len(found)
    for path, value, variable in zip(reference.paths, reference.values, found):
        scale = max(1.0, np.abs(value).max(initial=0.0))
        for copy in strategy.experimental_local_results(variable.value):
            difference = np.abs(value - array(copy)).max(initial=0.0) / scale
            assert difference <= tolerance, f"{path} differs by {difference}"


def assert_same_history(left, right, tolerance=1e-10):
    assert left.keys() == right.keys()
    for name, values in left.items():
        np.testing.assert_allclose(values, right[name], rtol=tolerance, err_msg=name)


def made(value):
    """What a lambda makes, and anything else as it is."""
    return value() if getattr(value, "__name__", "") == "<lambda>" else value


def train(
    build,
    x,
    y=None,
    *,
    cut=None,
    batch_size=8,
    epochs=1,
    optimizer=lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    fit=None,
    before=None,
    moved=True,
    scope=None,
    **compiled,
):
    """Trains a model, accumulated if it is told how to cut batches. Returns it and its history.

    A lambda is called for each model: metrics keep state, and generators run out.
    """
    keras.utils.set_random_seed(7)
    with scope or contextlib.nullcontext():
        model = build()
        arguments = {k: made(v) for k, v in {"loss": "mse", **compiled}.items()}
        model.compile(optimizer=optimizer(), **arguments)
    if before:
        before(model)
    if cut:
        macrobatch.accumulate(model, **cut)
    start = [array(w) for w in model.trainable_weights]
    x = made(x)
    arguments = dict(fit or {})
    if isinstance(x, (np.ndarray, list, dict)):
        arguments.setdefault("batch_size", batch_size)
    keras.utils.set_random_seed(3)
    history = model.fit(x, y, epochs=epochs, shuffle=False, verbose=0, **arguments).history
    if moved and start:
        ends = [array(w) for w in model.trainable_weights]
        assert any(np.abs(a - b).max() > 1e-4 for a, b in zip(start, ends)), "did not train"
    return model, history


# The minor version of Keras 3.
KERAS = int(keras.__version__.split(".")[1])

# How plain Keras trains, unless told otherwise: a few steps take less time than a trace. With
# several outputs it needs `plain={}`: Keras weighs their losses in another way in eager mode.
# Eagerly, JAX would compile each operation by itself.
PLAIN = {} if BACKEND == "jax" else {"run_eagerly": True, "jit_compile": False}


def check(
    build,
    x,
    y=None,
    *,
    micro_batch_size=3,
    micro_batch_weight=None,
    cut=None,
    plain=PLAIN,
    **options,
):
    """Trains two equal models, plainly on whole batches and accumulated; they end the same."""
    cut = cut or {"micro_batch_size": micro_batch_size}
    plain, history = train(build, x, y, **{**options, **plain})
    cut = {"micro_batch_weight": micro_batch_weight, **cut}
    accumulated, other = train(build, x, y, cut=cut, scope=strategy.scope(), **options)
    assert_same(plain, accumulated)
    assert_same_history(history, other)
    return plain, accumulated


# Nothing changes


def everything(model):
    """All that must be as before: of the model, and what is global."""
    optimizer = model.optimizer
    variables = [*model.variables, *model.metrics_variables, *optimizer.variables]
    attributes = {name: id(value) for name, value in vars(model).items()}
    layers_before = {
        layer.name: sorted(vars(layer)) for layer in model._flatten_layers(include_self=False)
    }
    settings = keras.config.floatx(), keras.config.dtype_policy().name
    return (
        [(id(v), v.path, array(v.value).tolist()) for v in variables],
        attributes,
        layers_before,
        sorted(vars(optimizer)),
        settings,
    )


def draws():
    """What is drawn, and named, next."""
    return (
        random.random(),
        np.random.rand(),  # noqa: NPY002
        array(keras.random.uniform([2])).tolist(),
        tf.random.uniform([2]).numpy().tolist() if BACKEND == "tensorflow" else [],
        keras.layers.Dense(1).name,
        array(keras.initializers.GlorotUniform()([2, 2])).tolist(),
    )


@contextlib.contextmanager
def several_devices():
    """Two replicas of TensorFlow, or two devices of JAX. Gives the scope in which to build."""
    if BACKEND == "tensorflow":
        with unittest.mock.patch.dict(globals(), strategy=mirrored(2)):
            yield strategy.scope()
    else:
        keras.distribution.set_distribution(keras.distribution.DataParallel())
        try:
            yield contextlib.nullcontext()
        finally:
            keras.distribution.set_distribution(None)


def mirrored(count=2):
    """A strategy with this number of replicas on this machine, on TensorFlow."""
    from test_accumulator_everywhere import mirrored

    return mirrored(count)
