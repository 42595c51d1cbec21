"""GradientNoiseScale: against gradients of micro-batches by hand, and against a closed form."""

import contextlib
import math

import keras
import numpy as np
import pytest
from keras import layers
from support import (
    BACKEND,
    KERAS,
    MODES,
    array,
    only_on,
    several_devices,
    slow_on,
    thorough_for,
    variables,
)

import macrobatch

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=[10, 4]), RNG.normal(size=[10, 1])
WORDS = RNG.integers(1, 9, [30, 5]) * (np.arange(5) < RNG.integers(1, 6, [30, 1]))
TAGS = WORDS[..., None] / 4.0
ACTIVITY, PENALTY = 0.25, 0.5  # as they are in float32, too
on_tensorflow = only_on("tensorflow")


def regularised():
    dense = layers.Dense(3, "tanh", kernel_regularizer=keras.regularizers.L2(PENALTY))
    return keras.Sequential([keras.Input([4]), dense, layers.Dense(1)])


def tagger():
    """Rows of a table, a loss over the tokens that count, one over all, and a regulariser."""
    table = layers.Embedding(9, 3, mask_zero=True)
    l2 = keras.regularizers.L2
    dense = layers.Dense(1, kernel_regularizer=l2(PENALTY), activity_regularizer=l2(ACTIVITY))
    return keras.Sequential([keras.Input([5]), table, dense])


def still():
    """An optimizer that leaves weights where they are."""
    return keras.optimizers.SGD(0.0)


def scaled():
    return keras.optimizers.LossScaleOptimizer(still(), initial_scale=2.0**10)


def compiled(build=regularised, optimizer=still, cut=3, **options):
    """An accumulated model."""
    keras.utils.set_random_seed(1)
    model = build()
    model.compile(optimizer(), "mse", **options)
    cut = {"micro_batch_size": cut} if isinstance(cut, int) else cut
    return model if cut is None else macrobatch.accumulate(model, **cut)


def fitted(model, x=X, y=Y, callbacks=(), batch_size=10, **options):
    """The last numbers of the history of a fit."""
    options = {"shuffle": False, "verbose": 0, **options}
    history = model.fit(x, y, batch_size=batch_size, callbacks=[*callbacks], **options).history
    return {name: values[-1] for name, values in history.items()}


def by_hand(weights, words, tags, cuts):
    """Norm of the gradient, noise and signal: noise as the variance between micro-batches.

    Args:
        weights: the table, the kernel and the bias of the model.
        words: a batch.
        tags: its labels.
        cuts: where micro-batches begin, and where the last one ends.
    """
    table, kernel, bias = weights
    # Keras 3.12 adds epsilon to the size of a mask.
    tokens = (words > 0).sum() + (keras.config.epsilon() if KERAS == 12 else 0)

    def gradient(start, end):
        some = words[start:end]
        vectors = table[some]
        outputs = vectors @ kernel + bias
        of_errors = 2 * (outputs - tags[start:end]) * (some > 0)[..., None] / tokens
        of_outputs = of_errors + 2 * ACTIVITY * outputs / len(words)
        of_table = np.zeros_like(table)
        np.add.at(of_table, some, of_outputs * kernel[:, 0])
        of_kernel = (vectors * of_outputs).sum((0, 1))
        return np.concatenate([of_table.ravel(), of_kernel, [of_outputs.sum()]])

    parts = np.stack([gradient(*pair) for pair in zip(cuts, cuts[1:])])
    whole, sizes = parts.sum(0), np.diff(cuts)
    means = parts * (sizes.sum() / sizes)[:, None]
    noise = sizes @ ((means - whole) ** 2).sum(1) / (len(sizes) - 1)
    of_penalty = np.zeros_like(whole)
    of_penalty[table.size : -1] = 2 * PENALTY * kernel[:, 0]
    whole = whole + of_penalty
    return np.array([math.sqrt(whole @ whole), noise, whole @ whole - noise / sizes.sum()])


ELSEWHERE = {"tensorflow": ["devices", "eager devices"], "jax": ["devices"], "torch": []}[BACKEND]


@thorough_for("eager devices", *(["eager", "not"] if BACKEND == "jax" else ["compiled"]))
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:jit_compile=True has no effect")
@pytest.mark.parametrize("mode", [*MODES, *ELSEWHERE])
def test_as_written_out(mode):
    """Of three batches the first and the last are measured."""
    devices, options = "devices" in mode, MODES.get(mode.split()[0], {})
    with contextlib.ExitStack() as stack:
        if devices:
            stack.enter_context(stack.enter_context(several_devices()))
        model = compiled(tagger, scaled, **options)
        weights = [array(v) for v in model.trainable_weights]
        cuts = [0, 3, 5, 8, 10] if devices else [0, 3, 6, 9, 10]
        (_, *first), (norm, *last) = (
            by_hand(weights, WORDS[start : start + 10], TAGS[start : start + 10], cuts)
            for start in (0, 20)
        )
        measured = macrobatch.GradientNoiseScale(every=2, decay=0.5)
        logs = fitted(model, WORDS, TAGS, [measured])
    noise, signal = (0.5 * one + other for one, other in zip(first, last))
    assert signal > 0
    found = {"noise_scale": noise / signal, "gradient_norm": norm}
    assert {name: logs[name] for name in found} == pytest.approx(found, rel=1e-9)
    assert measured.result() == pytest.approx(found, rel=1e-9)


@slow_on("jax", "torch")
def test_a_noise_scale_that_is_known():
    """Linear regression with normal inputs, at weights that stay where they are.

    With errors of variance e and inputs of covariance C, the gradient of an example at a distance d
    from the best weights has mean 2 C d, and mean square 4 (d'Cd tr C + 2 d'CCd + e tr C).
    """
    c, distance, variance = np.array([0.5, 1.0, 2.0]), np.array([2.0, -1.0, 0.6]), 0.7
    best, count = np.array([0.2, 0.1, -0.4]), 1000
    rng = np.random.default_rng(1)
    x = rng.normal(size=[24 * count, 3]) * np.sqrt(c)
    y = x @ best + rng.normal(size=len(x)) * math.sqrt(variance)
    signal = 4 * ((c * distance) ** 2).sum()
    square = distance**2 @ c * c.sum() + 2 * (distance**2 @ c**2) + variance * c.sum()
    noise = 4 * square - signal

    def linear():
        return keras.Sequential([keras.Input([3]), layers.Dense(1, use_bias=False)])

    model = compiled(linear, cut=5)  # 5, 5, 5, 5 and 4
    model.set_weights([(best + distance)[:, None]])
    measured, seen = macrobatch.GradientNoiseScale(every=1, decay=0.0), []
    collect = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(dict(logs))
    )
    fitted(model, x, y[:, None], [measured, collect], 24)
    assert len(seen) == count
    # The square of the norm is the signal and the noise of 24 examples.
    scales, norms = (np.array([each[n] for each in seen]) for n in ("noise_scale", "gradient_norm"))
    signals = norms**2 / (1 + scales / 24)
    pairs = np.stack([scales * signals, signals])
    mean, error = pairs.mean(1), pairs.std(1) / math.sqrt(count)
    # Four standard errors: of right means, one seed in some 8000 is further away. What they are
    # sharp enough for: a noise that is off by an eighth (K in place of K - 1 is a fifth), and a
    # signal with noise / B left in it, are further away for any seed.
    assert 4 * error[0] < noise / 8
    assert 8 * error[1] < noise / 24
    assert (np.abs(mean - [noise, signal]) < 4 * error).all(), (mean, [noise, signal], error)


@slow_on("tensorflow", "jax")
@pytest.mark.parametrize("mode", list(MODES)[:1] + ELSEWHERE[:1])
def test_training_stays_as_it_was(mode):
    ends, logs = [], []
    for callbacks in ([], [macrobatch.GradientNoiseScale(every=2)]):
        with contextlib.ExitStack() as stack:
            if mode == "devices":
                stack.enter_context(stack.enter_context(several_devices()))
            model = compiled(optimizer=keras.optimizers.Adam, cut=2)
            logs.append(fitted(model, callbacks=callbacks, batch_size=5, epochs=3))
            ends.append([array(v) for v in variables(model)])
    # XLA rounds each program in its own way, in the last digit.
    for left, right in zip(*ends):
        np.testing.assert_allclose(left, right, rtol=1e-12)
    assert logs[1].pop("noise_scale") > 0
    assert logs[1].pop("gradient_norm") > 0
    assert logs[0] == pytest.approx(logs[1], rel=1e-12)


@on_tensorflow
def test_updates_that_are_not_measured_run_a_function_of_their_own():
    """Two graphs, whatever comes: epochs end in the middle of an execution, too."""
    traces, ends = [], []

    def traced(x):
        traces.append(None)
        return x

    def noted():
        return keras.Sequential([keras.Input([4]), layers.Lambda(traced), layers.Dense(1)])

    for steps in (1, 2):
        norms, counts = [], []

        def look(batch, logs, norms=norms, counts=counts):
            norms.append(logs["gradient_norm"])
            counts.append(len(traces))

        measured = macrobatch.GradientNoiseScale(every=4)
        callbacks = [measured, keras.callbacks.LambdaCallback(on_train_batch_end=look)]
        model = compiled(noted, keras.optimizers.SGD, 1, steps_per_execution=steps)
        fitted(model, X[:9], Y[:9], callbacks, 3, epochs=5)
        assert len(dict.fromkeys(counts)) == 2
        # Of 15 updates, those with the numbers 0, 4, 8 and 12 are measured.
        assert len(dict.fromkeys(norms)) == 4
        ends.append(measured.result())
        if steps == 1:
            assert [norms.index(norm) for norm in norms] == [i // 4 * 4 for i in range(15)]
    assert ends[0] == pytest.approx(ends[1], rel=1e-9)


@pytest.mark.eager
@pytest.mark.parametrize("verbose", [0, 2])
def test_measures_only_in_its_own_fit(verbose, capsys, caplog):
    """Also if that is interrupted: the next one has the plain step, and its logs."""
    model = compiled()
    interrupt = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: 1 / 0)
    measured, another = macrobatch.GradientNoiseScale(every=1), macrobatch.GradientNoiseScale()
    with pytest.raises(ZeroDivisionError):
        fitted(model, callbacks=[measured, interrupt])
    assert list(fitted(model)) == ["loss"]
    found = fitted(model, -X, Y, [measured], verbose=verbose)
    said = [caplog.text, capsys.readouterr().out]
    assert ["radient noise scale" in each for each in said] == [verbose == 0, verbose > 0]
    assert list(fitted(model)) == ["loss"]
    # Each fit starts anew.
    assert found == fitted(model, -X, Y, [another])


@pytest.mark.eager
@pytest.mark.filterwarnings("ignore:The loss or the gradient of")
@pytest.mark.filterwarnings("ignore:Nothing is being accumulated")
def test_batches_that_tell_nothing():
    """One that is not cut, and one that is left out as a whole, and is no update."""
    model = compiled(
        optimizer=keras.optimizers.SGD, cut={"micro_batch_size": 10, "nonfinite": "skip"}
    )
    norms, measured = [], macrobatch.GradientNoiseScale(every=2)
    collect = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: norms.append(logs["gradient_norm"])
    )
    logs = fitted(
        model, np.concatenate([X, X * np.nan, X]), np.tile(Y, [3, 1]), [measured, collect]
    )
    assert math.isnan(logs["noise_scale"])
    assert logs["skipped_examples"] == 10
    assert norms[0] == norms[1] == norms[2] > 0
    assert "The gradient noise scale is not known" in measured.advice()


def own_step():
    from fit import step_cases

    return step_cases.functional(step_cases.Guide)


def of_any_length():
    table = layers.Embedding(9, 3, mask_zero=True)
    return keras.Sequential([keras.Input([None]), table, layers.Dense(1)])


@pytest.mark.parametrize(
    ("build", "cut", "message"),
    [
        (regularised, None, "which is not accumulated"),
        pytest.param(own_step, 3, "a train_step of its own", marks=on_tensorflow),
        (regularised, {"micro_batch_size": 3, "whole_batch_loss": True}, "whole_batch_loss=True"),
        (of_any_length, {"micro_batch_size": 3, "sequence_axis": 1}, "sequence_axis=1"),
    ],
)
def test_what_cannot_be_measured_is_refused(build, cut, message):
    model = compiled(build, cut=cut)
    x, y = (WORDS, TAGS) if build is of_any_length else (X, Y)
    before = [array(v) for v in model.variables]
    with pytest.raises(ValueError, match=message):
        fitted(model, x, y, [macrobatch.GradientNoiseScale()])
    for left, right in zip(before, model.variables):
        np.testing.assert_array_equal(left, array(right))


@pytest.mark.parametrize(
    "arguments", [{"every": 0}, {"every": 2.0}, {"every": True}, {"decay": 1}, {"decay": "0.9"}]
)
def test_bad_arguments(arguments):
    with pytest.raises(ValueError, match=f"Received: {next(iter(arguments))}="):
        macrobatch.GradientNoiseScale(**arguments)


@slow_on("jax")
@pytest.mark.eager
@pytest.mark.parametrize(
    ("scale", "batch", "text"),
    [
        (343, 64, "scale 340: a batch of 64 is below it, so a larger batch, up to about 340,"),
        (30.4, 256, "scale 30: a batch of 256 is above it, so a smaller batch, down to about 30,"),
        (300, 256, "Gradient noise scale 300: a batch of 256 is close to it"),
        (0.012, 256, "Gradient noise scale 0.012: a batch of 256 is above it"),
        (0.0, 256, "Gradient noise scale 0: a batch of 256 is above it"),
        (math.inf, 64, "far above a batch of 64"),
    ],
)
def test_the_advice(scale, batch, text):
    """Of two micro-batches with the gradients 1 + b and 1 - b: the scale is B b^2 / (1 - b^2)."""

    def constant():
        dense = layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        return keras.Sequential([keras.Input([1]), dense])

    half = batch // 2
    apart = 1.0 if math.isinf(scale) else math.sqrt(scale / (batch + scale))
    y = np.repeat([[1 + apart], [1 - apart]], half, axis=0)
    measured = macrobatch.GradientNoiseScale()
    fitted(compiled(constant, cut=half), np.ones([batch, 1]), y, [measured], batch)
    assert measured.result() == pytest.approx({"noise_scale": scale, "gradient_norm": 2.0})
    assert text in measured.advice()


# Loops


@on_tensorflow
@thorough_for("means-compiled")
@pytest.mark.parametrize("mode", ["eager", "graph", "compiled"])
@pytest.mark.parametrize("learned", [False, True], ids=["means", "learned weights"])
def test_in_a_loop(mode, learned):
    import tensorflow as tf

    model, power = compiled(cut=None), tf.Variable(0.3, dtype=tf.float64)
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

    def step(x, y):
        return macrobatch.value_and_gradients(
            losses, weights, (x, y), micro_batch_size=4, noise_scale=measured
        )

    if mode != "eager":
        step = tf.function(step, jit_compile=mode == "compiled")
    for _ in range(2):
        step(tf.constant(X), tf.constant(Y))
        found = {"noise_scale": noise / signal, "gradient_norm": math.sqrt(whole @ whole)}
        assert measured.result() == pytest.approx(found, rel=1e-9)
    assert "a batch of 10" in measured.advice()


@on_tensorflow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"noise_scale": 3}, "Received: noise_scale=3"),
        ({"forward": lambda batch: batch}, "noise_scale= and forward="),
        ({"sequence_axis": 1}, "sequence_axis=1"),
    ],
)
def test_what_a_loop_cannot_measure_is_refused(arguments, message):
    import tensorflow as tf

    arguments = {"noise_scale": macrobatch.GradientNoiseScale(), **arguments}
    two = "forward" in arguments
    loss_fn = (lambda outputs, batch: outputs) if two else (lambda batch: batch)
    with pytest.raises(ValueError, match=message):
        macrobatch.value_and_gradients(
            loss_fn, [tf.Variable(1.0)], tf.ones([4]), micro_batch_size=2, **arguments
        )
