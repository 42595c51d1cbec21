"""GradientNoiseScale: against gradients of micro-batches by hand, and against a closed form."""

import contextlib
import glob
import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from support import KERAS, MODES, thorough, thorough_for
from test_accumulator_everywhere import mirrored

import macrobatch
from macrobatch._fit.noise import Turns
from macrobatch._noise.checks import sentence

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=[10, 4]), RNG.normal(size=[10, 1])
WORDS = RNG.integers(1, 9, [10, 5]) * (np.arange(5) < RNG.integers(1, 6, [10, 1]))
TAGS = WORDS[..., None] / 4.0


def regularised():
    dense = layers.Dense(3, "tanh", kernel_regularizer=keras.regularizers.L2(0.3))
    return keras.Sequential([keras.Input([4]), dense, layers.Dense(1)])


def tagger():
    """Rows of a table, tokens that do not count, and a regulariser."""
    table = layers.Embedding(9, 3, mask_zero=True)
    dense = layers.Dense(1, kernel_regularizer=keras.regularizers.L2(0.3))
    return keras.Sequential([keras.Input([5]), table, dense])


def scaled():
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=2.0**10)


def compiled(build, optimizer=keras.optimizers.SGD, strategy=None, **options):
    keras.utils.set_random_seed(1)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = build()
        model.compile(optimizer(), "mse", **options)
    return model


def expected(model, cuts):
    """Norm of the gradient, noise and signal: noise as the variance between micro-batches."""

    def gradient(loss):
        with tf.GradientTape() as tape:
            value = loss()
        weights = [v.value for v in model.trainable_weights]
        found = tape.gradient(value, weights, unconnected_gradients="zero")
        return np.concatenate([np.ravel(tf.convert_to_tensor(each)) for each in found])

    # Keras 3.12 adds epsilon to the size of a mask.
    tokens = (WORDS > 0).sum() + (keras.config.epsilon() if KERAS == 12 else 0)

    def loss_of(start, end):
        errors = tf.reduce_mean((model(WORDS[start:end]) - TAGS[start:end]) ** 2, -1)
        return tf.reduce_sum(errors * (WORDS[start:end] > 0)) / tokens

    parts = np.stack([gradient(lambda p=pair: loss_of(*p)) for pair in zip(cuts, cuts[1:])])
    whole, sizes = parts.sum(0), np.diff(cuts)
    means = parts * (sizes.sum() / sizes)[:, None]
    noise = sizes @ ((means - whole) ** 2).sum(1) / (len(sizes) - 1)
    whole = whole + gradient(lambda: sum(model.losses))
    return [math.sqrt(whole @ whole), noise, whole @ whole - noise / sizes.sum()]


@thorough_for("compiled")
@pytest.mark.parametrize(
    "mode", [*MODES, "replicas", pytest.param("eager replicas", marks=thorough)]
)
def test_as_written_out(mode):
    strategy = mirrored(2) if "replicas" in mode else None
    options = {"run_eagerly": True} if "eager" in mode else MODES.get(mode, {})
    model = compiled(tagger, scaled, strategy, **options)
    cuts = [0, 3, 5, 8, 10] if strategy else [0, 3, 6, 9, 10]
    norm, noise, signal = expected(model, cuts)
    macrobatch.accumulate(model, 3)
    measured = macrobatch.GradientNoiseScale(every=2, decay=0.5)
    logs = model.fit(
        WORDS, TAGS, batch_size=10, shuffle=False, verbose=0, callbacks=[measured]
    ).history
    state = measured.meter().state.numpy()
    np.testing.assert_allclose(state, [1, norm, 10, 0.5, noise / 2, signal / 2], rtol=1e-9)
    assert signal > 0
    found = logs["noise_scale"][0], logs["gradient_norm"][0]
    np.testing.assert_allclose(found, [noise / signal, norm], rtol=1e-9)


def test_a_noise_scale_that_is_known():
    """Linear regression with normal inputs, at weights that stay where they are.

    With errors of variance e and inputs of covariance C, the gradient of an example at a distance d
    from the best weights has mean 2 C d, and mean square 4 (d'Cd tr C + 2 d'CCd + e tr C).
    """
    covariance, distance, variance = np.array([0.5, 1.0, 2.0]), np.array([1.0, -0.5, 0.3]), 0.7
    best, count = np.array([0.2, 0.1, -0.4]), 1000
    rng = np.random.default_rng(1)
    x = rng.normal(size=[24 * count, 3]) * np.sqrt(covariance)
    y = x @ best + rng.normal(size=len(x)) * math.sqrt(variance)
    c = covariance
    signal = 4 * ((c * distance) ** 2).sum()
    square = distance**2 @ c * c.sum() + 2 * (distance**2 @ c**2) + variance * c.sum()
    noise = 4 * square - signal

    model = keras.Sequential([keras.Input([3]), layers.Dense(1, use_bias=False)])
    model.compile(keras.optimizers.SGD(0.0), "mse")
    model.layers[0].set_weights([(best + distance)[:, None]])
    macrobatch.accumulate(model, 5)  # 5, 5, 5, 5 and 4
    measured = macrobatch.GradientNoiseScale(every=1, decay=0.0)
    pairs = []
    collect = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: pairs.append(measured.meter().state.numpy()[4:])
    )
    data = tf.data.Dataset.from_tensor_slices((x.reshape(count, 24, 3), y.reshape(count, 24)))
    model.fit(data, shuffle=False, verbose=0, callbacks=[measured, collect])
    assert len(pairs) == count
    mean, error = np.mean(pairs, 0), np.std(pairs, 0) / math.sqrt(count)
    # Four standard errors: of right means, one seed in some 8000 is further away. What they are
    # sharp enough for: a noise that is off by an eighth (K in place of K - 1 is a fifth), and a
    # signal with noise / B left in it, are further away for any seed.
    assert 4 * error[0] < noise / 8
    assert 8 * error[1] < noise / 24
    assert (np.abs(mean - [noise, signal]) < 4 * error).all(), (mean, [noise, signal], error)

    smoothed = macrobatch.GradientNoiseScale(every=1, decay=0.9999)  # nearly the mean
    some = data.take(100)
    logs = model.fit(some, shuffle=False, verbose=0, callbacks=[smoothed]).history
    expected_ratio = np.divide(*np.mean(pairs[:100], 0))
    np.testing.assert_allclose(logs["noise_scale"], expected_ratio, rtol=0.02)


@thorough_for("graph")
@pytest.mark.parametrize(
    "mode", ["graph", *(pytest.param(mode, marks=thorough) for mode in ("compiled", "replicas"))]
)
def test_training_stays_as_it_was(mode):
    ends, histories, scales = [], [], []
    for callbacks in ([], [macrobatch.GradientNoiseScale(every=2)]):
        strategy = mirrored(2) if mode == "replicas" else None
        model = compiled(regularised, keras.optimizers.Adam, strategy, **MODES.get(mode, {}))
        macrobatch.accumulate(model, 2)
        history = model.fit(X, Y, batch_size=5, epochs=3, verbose=0, callbacks=callbacks)
        ends.append([np.array(v) for v in [*model.variables, *model.optimizer.variables]])
        scales.append([history.history.pop(n, None) for n in ("noise_scale", "gradient_norm")])
        histories.append(history.history)
    # XLA rounds each program in its own way, in the last digit.
    tolerance = 1e-13 if mode == "compiled" else 0
    for left, right in zip(*ends):
        np.testing.assert_allclose(left, right, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(histories[0]["loss"], histories[1]["loss"], rtol=tolerance)
    assert scales[0] == [None, None]
    assert np.isfinite(scales[1][1]).all()


@thorough
def test_steps_per_execution_and_tensorboard(tmp_path):
    found = []
    for steps in (1, 2):
        model = compiled(regularised, steps_per_execution=steps)
        macrobatch.accumulate(model, 3)
        board = keras.callbacks.TensorBoard(str(tmp_path / str(steps)))
        measured = macrobatch.GradientNoiseScale(every=2)
        fit = model.fit(X, Y, batch_size=5, epochs=2, verbose=0, callbacks=[board, measured])
        found.append(fit.history)
    for name, values in found[0].items():
        np.testing.assert_allclose(values, found[1][name])
    (file,) = glob.glob(str(tmp_path / "1" / "train" / "events*.v2"))
    events = tf.compat.v1.train.summary_iterator(file)
    tags = {value.tag for event in events for value in event.summary.value}
    assert {"epoch_noise_scale", "epoch_gradient_norm", "epoch_loss"} <= tags


@pytest.mark.parametrize("steps", [1, 2])
def test_updates_that_are_not_measured_run_a_function_of_their_own(steps, monkeypatch):
    """Two graphs, whatever comes: epochs end in the middle of an execution, too."""
    made = []
    of_step = Turns.of_step

    def watched(turns, examples, trained):
        made.append(turns.measures)
        return of_step(turns, examples, trained)

    monkeypatch.setattr(Turns, "of_step", watched)
    model = compiled(regularised, steps_per_execution=steps)
    macrobatch.accumulate(model, 1)
    noise = macrobatch.GradientNoiseScale(every=4)
    weights = []

    def look(batch, logs):
        state = noise.meter().state.numpy()
        weights.append((state[0], state[3]))

    collect = keras.callbacks.LambdaCallback(on_train_batch_end=look)
    model.fit(X[:9], Y[:9], batch_size=3, epochs=5, verbose=0, callbacks=[noise, collect])
    assert made == [True, False]
    # An average of 1 tells how often there was something: of updates 0, 4, 8 and 12.
    for updates, weight in weights:
        assert math.isclose(weight, 1 - 0.95 ** math.ceil(updates / 4))
    assert weights[-1][0] == 15


@pytest.mark.eager
def test_measures_only_in_its_own_fit():
    """Also if that is interrupted: the next one has the plain step, and its logs."""
    model = compiled(regularised)
    macrobatch.accumulate(model, 3)
    interrupt = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: 1 / 0)
    measured = macrobatch.GradientNoiseScale()
    with pytest.raises(ZeroDivisionError):
        model.fit(X, Y, batch_size=5, verbose=0, callbacks=[measured, interrupt])
    assert list(model.fit(X, Y, batch_size=5, verbose=0).history) == ["loss"]
    assert "noise_scale" in model.fit(X, Y, batch_size=5, verbose=0, callbacks=[measured]).history
    assert measured.meter().state.numpy()[0] == 2, "each fit starts anew"
    assert list(model.fit(X, Y, batch_size=5, verbose=0).history) == ["loss"]


@pytest.mark.eager
@pytest.mark.parametrize("verbose", [0, 2])
def test_the_advice_is_always_given(verbose, capsys, caplog):
    model = macrobatch.accumulate(compiled(regularised), 2)
    model.fit(X, Y, batch_size=10, verbose=verbose, callbacks=[macrobatch.GradientNoiseScale()])
    said = [caplog.text, capsys.readouterr().out]
    assert ["radient noise scale" in each for each in said] == [verbose == 0, verbose > 0]


@pytest.mark.eager
@pytest.mark.filterwarnings("ignore:Nothing is being accumulated")
def test_a_batch_that_is_not_cut_tells_nothing(capsys):
    model = compiled(regularised)
    macrobatch.accumulate(model, 10)
    measured = macrobatch.GradientNoiseScale()
    logs = model.fit(X, Y, batch_size=10, verbose=2, callbacks=[measured]).history
    assert math.isnan(logs["noise_scale"][0])
    assert logs["gradient_norm"][0] > 0
    assert "The gradient noise scale is not known" in capsys.readouterr().out


def own_step():
    class Own(keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"loss": loss}

    inputs = keras.Input([4])
    return Own(inputs, layers.Dense(1)(inputs))


def of_any_length():
    table = layers.Embedding(9, 3, mask_zero=True)
    return keras.Sequential([keras.Input([None]), table, layers.Dense(1)])


@pytest.mark.parametrize(
    ("build", "cut", "message"),
    [
        (regularised, None, "which is not accumulated"),
        (own_step, {}, "a train_step of its own"),
        (regularised, {"whole_batch_loss": True}, "whole_batch_loss=True"),
        (of_any_length, {"sequence_axis": 1}, "sequence_axis=1"),
    ],
)
def test_what_cannot_be_measured_is_refused(build, cut, message):
    model = compiled(build)
    if cut is not None:
        macrobatch.accumulate(model, 3, **cut)
    x, y = (WORDS, TAGS) if build is of_any_length else (X, Y)
    before = [np.array(v) for v in model.variables]
    with pytest.raises(ValueError, match=message):
        model.fit(x, y, verbose=0, callbacks=[macrobatch.GradientNoiseScale()])
    for left, right in zip(before, model.variables):
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize(
    "arguments", [{"every": 0}, {"every": 2.0}, {"every": True}, {"decay": 1}, {"decay": "0.9"}]
)
def test_bad_arguments(arguments):
    with pytest.raises(ValueError, match=f"Received: {next(iter(arguments))}="):
        macrobatch.GradientNoiseScale(**arguments)


@pytest.mark.parametrize(
    ("scale", "batch", "text"),
    [
        (343, 64, "Gradient noise scale 340: a batch of 64 is below it, so a larger batch, up to"),
        (
            30.4,
            256,
            "Gradient noise scale 30: a batch of 256 is above it, so a smaller batch, down",
        ),
        (300, 256, "Gradient noise scale 300: a batch of 256 is close to it"),
        (0.012, 256, "Gradient noise scale 0.012: a batch of 256 is above it"),
        (0.0, 256, "Gradient noise scale 0: a batch of 256 is above it"),
        (math.inf, 64, "far above a batch of 64"),
        (math.nan, 0, "is not known"),
    ],
)
def test_the_advice(scale, batch, text):
    assert text in sentence(scale, batch)


# Loops


def as_is(function):
    return function


@thorough_for("means-compiled")
@pytest.mark.parametrize(
    "function",
    [as_is, tf.function, pytest.param(lambda f: tf.function(f, jit_compile=True), id="compiled")],
)
@pytest.mark.parametrize("learned", [False, True], ids=["means", "learned weights"])
def test_in_a_loop(function, learned):
    model, power = compiled(regularised), tf.Variable(0.3, dtype=tf.float64)
    weights = [*(v.value for v in model.trainable_variables), power]

    def losses(micro_batch):
        x, y = micro_batch
        values = tf.reduce_mean((model(x) - y) ** 2, -1) + sum(model.losses)
        return (values, tf.exp(power * x[:, 0])) if learned else values

    def gradients(loss):
        with tf.GradientTape() as tape:
            value = loss()
        found = tape.gradient(value, weights, unconnected_gradients="zero")
        return np.concatenate([np.ravel(each) for each in found])

    def mean(start, end, loss=None):
        """A part of the batch; d(N / D) = d(N - loss D) / D, for all parts of it."""
        found = losses((X[start:end], Y[start:end]))
        values, own = found if learned else (found, tf.ones_like(found))
        total = tf.stop_gradient(tf.reduce_sum(losses((X, Y))[1])) if learned else 10.0
        above = tf.reduce_sum(values * own)
        return above / total if loss is None else (above - loss * tf.reduce_sum(own)) / total

    loss = mean(0, 10).numpy() if learned else 0.0
    cuts = [0, 4, 8, 10]
    parts = np.stack([gradients(lambda p=pair: mean(*p, loss)) for pair in zip(cuts, cuts[1:])])
    whole, sizes = parts.sum(0), np.diff(cuts)
    noise = sizes @ ((parts * (10 / sizes)[:, None] - whole) ** 2).sum(1) / 2
    signal = whole @ whole - noise / 10

    measured = macrobatch.GradientNoiseScale(every=1, decay=0.5)

    @function
    def step(x, y):
        return macrobatch.value_and_gradients(
            losses, weights, (x, y), micro_batch_size=4, noise_scale=measured
        )

    for count in (1, 2):
        step(tf.constant(X), tf.constant(Y))
        share = 1 - 0.5**count
        state = [count, math.sqrt(whole @ whole), 10, share, share * noise, share * signal]
        np.testing.assert_allclose(measured.meter().state, state, rtol=1e-9)
    assert measured.result()["gradient_norm"] == pytest.approx(math.sqrt(whole @ whole))
    assert "oise scale" in measured.advice()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"noise_scale": 3}, "Received: noise_scale=3"),
        ({"forward": lambda batch: batch}, "noise_scale= and forward="),
        ({"sequence_axis": 1}, "sequence_axis=1"),
    ],
)
def test_what_a_loop_cannot_measure_is_refused(arguments, message):
    arguments = {"noise_scale": macrobatch.GradientNoiseScale(), **arguments}
    two = "forward" in arguments
    loss_fn = (lambda outputs, batch: outputs) if two else (lambda batch: batch)
    with pytest.raises(ValueError, match=message):
        macrobatch.value_and_gradients(
            loss_fn, [tf.Variable(1.0)], tf.ones([4]), micro_batch_size=2, **arguments
        )
