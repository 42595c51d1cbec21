"""nonfinite= and the gradient noise scale on several devices of JAX, and what is compiled."""

import keras
import noise_by_hand
import numpy as np
import pytest
from jax_support import (
    accumulate,
    assert_same,
    data,
    double_precision,  # noqa: F401 - a fixture
    jax,
)
from keras import layers

import macrobatch

if len(jax.devices()) != 2:
    pytest.skip("this process has other devices", allow_module_level=True)

X, Y = data(20, 4), data(20, 2, seed=1)
BAD = [3, 12, 14]  # Of ten, nine are left, which two devices do not divide, and eight.


@pytest.fixture
def two_devices():
    keras.distribution.set_distribution(keras.distribution.DataParallel())
    yield
    keras.distribution.set_distribution(None)


def dense(*more):
    first = layers.Dense(5, "tanh", kernel_regularizer="l2")
    return keras.Sequential([keras.Input([4]), first, *more, layers.Dense(2)])


def compiled(build=dense, optimizer=lambda: keras.optimizers.SGD(0.1, momentum=0.9)):
    keras.utils.set_random_seed(7)
    model = build()
    model.compile(optimizer(), "mse")
    return model


def bad_x():
    x = X.copy()
    x[BAD] = np.nan
    return x


@pytest.mark.filterwarnings("ignore:The loss or the gradient of")
def test_the_update_of_the_other_examples(two_devices):
    model = compiled()
    accumulate(model, 3, nonfinite="skip")
    logs = model.fit(bad_x(), Y, batch_size=10, shuffle=False, verbose=0).history
    assert logs["skipped_examples"] == [3]
    keras.distribution.set_distribution(None)
    plain = compiled()
    for start in (0, 10):
        rows = [i for i in range(start, start + 10) if i not in BAD]
        plain.train_on_batch(X[rows], Y[rows])
    assert_same(plain, model)


@pytest.mark.thorough
def test_an_error(two_devices):
    model = compiled()
    accumulate(model, 3, nonfinite="raise")
    before = [np.array(v) for v in model.variables]
    with pytest.raises(ValueError, match=r"example 3 is not finite.*In example 3, .*'dense"):
        model.fit(bad_x(), Y, batch_size=10, shuffle=False, verbose=0)
    for value, variable in zip(before, model.variables):
        np.testing.assert_array_equal(value, np.array(variable))
    assert int(model.optimizer.iterations) == 0


def test_the_noise_of_all_devices(two_devices):
    model = compiled(noise_by_hand.tagger, noise_by_hand.scaled)
    accumulate(model, 3)
    noise = macrobatch.GradientNoiseScale(every=2, decay=0.5)
    noise_by_hand.check(model, noise, [0, 3, 5, 8, 10])


@pytest.mark.filterwarnings("ignore:The loss or the gradient of")
def test_parts_of_a_batch_are_not_compiled_for():
    """The batch without its bad examples is another shape. What is looked at is not."""
    shapes = []

    class Noted(layers.Layer):
        def call(self, x):
            shapes.append(x.shape[0])
            return x

    model = compiled(lambda: dense(Noted()))
    accumulate(model, 4, nonfinite="skip")
    x = X[:8].copy()
    model.train_on_batch(x, Y[:8])
    shapes.clear()
    x[5] = np.nan
    model.train_on_batch(x, Y[:8])
    assert set(shapes) == {4, 3}  # seven examples: a full micro-batch and a tail
    shapes.clear()
    model.train_on_batch(x[::-1], Y[:8])
    assert not shapes
