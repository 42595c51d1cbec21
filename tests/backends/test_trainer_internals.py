"""The private names of Keras' trainer that macrobatch uses on JAX and on torch."""

import keras
import numpy as np
import pytest
from keras import layers
from support import BACKEND

from macrobatch import _internals


@pytest.mark.parametrize("steps", [1, *([2] if BACKEND == "jax" else [])])
def test_keras_builds_with_the_first_batch(steps):
    seen = []

    class Watched(keras.Sequential):
        pass

    def build(self, iterator=None, data_batch=None):
        if iterator is not None:
            data_batch = _internals.batch_to_build_with(iterator)
        seen.append(np.asarray(data_batch[0]))
        keras.Sequential._symbolic_build(self, data_batch=data_batch)

    setattr(Watched, _internals.BUILDING_AT_ONCE, build)
    model = Watched([layers.Dense(1)])
    model.compile("sgd", "mse", steps_per_execution=steps)
    x = np.arange(8.0).reshape(4, 2)
    model.fit(x, np.ones([4, 1]), batch_size=1, shuffle=False, verbose=0)
    assert int(model.optimizer.iterations) == 4  # The first batch is trained on all the same.
    model.train_on_batch(x, np.ones([4, 1]))
    assert [len(each) for each in seen] == [1, 4]
    np.testing.assert_array_equal(seen[0], x[:1])


def test_a_sequential_that_cannot_be_built_is_as_before():
    model = keras.Sequential([layers.Flatten(), layers.Dense(2)])
    with pytest.raises(ValueError, match="None"):
        _internals.build_sequential(model, (None, None, 3))
    assert not model.built
    _internals.build_sequential(model, (None, 2, 3))
    assert model.input_shape == (None, 2, 3)
    assert model(np.ones([4, 2, 3])).shape == (4, 2)
