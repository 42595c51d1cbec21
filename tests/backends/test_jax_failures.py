"""A step on JAX that fails has changed nothing, and what is refused says what to do."""

import keras
import numpy as np
import pytest
from jax_support import (
    accumulate,
    data,
    double_precision,  # noqa: F401 - a fixture
    jax,
)
from keras import layers

from macrobatch._jax import turns
from macrobatch._jax.state import State
from macrobatch._jax.steps import batch_of

X, Y = data(21, 4), data(21, 2, seed=1)


class Fails(layers.Layer):
    """Raises for two examples: when the step is traced, or on the host when it runs."""

    def __init__(self, when):
        super().__init__()
        self.when = when

    def call(self, inputs):
        if self.when == "trace":
            if inputs.shape[0] == 2:
                raise RuntimeError("it fails")
            return inputs

        def check(found):
            if found.shape[0] == 2:
                raise RuntimeError("it fails")
            return found

        shape = jax.ShapeDtypeStruct(inputs.shape, inputs.dtype)

        @jax.custom_jvp
        def checked(inputs):
            return jax.pure_callback(check, shape, inputs)

        checked.defjvp(lambda values, tangents: (checked(*values), tangents[0]))
        return checked(inputs)


def build(when, **options):
    # keras.Sequential would call the layer while it is made.
    inputs = keras.Input([4])
    fails = Fails(when)
    fails.compute_output_spec = lambda inputs: keras.KerasTensor(inputs.shape, inputs.dtype)
    hidden = layers.Dropout(0.5, seed=1)(layers.Dense(5, "tanh")(inputs))
    model = keras.Model(inputs, layers.Dense(2)(fails(hidden)))
    model.compile(keras.optimizers.Adam(0.1), "mse", metrics=["mae"], **options)
    return model


def values_of(model):
    variables = [*model.variables, *model.optimizer.variables]
    return [np.array(variable.value) for variable in variables]


@pytest.mark.parametrize("when", ["trace", "run"])
@pytest.mark.parametrize("options", [{}, {"run_eagerly": True}, {"steps_per_execution": 3}])
def test_nothing_has_changed_since_the_batch_before(when, options):
    model = build(when, **options)
    accumulate(model, micro_batch_size=4)
    seen = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.jax_state_sync()
            seen.append(values_of(self.model))

    def batches():
        yield X[:8], Y[:8]
        yield X[8:14], Y[8:14]  # with a tail of two examples

    with pytest.raises(Exception, match="it fails"):
        model.fit(batches(), shuffle=False, callbacks=[Look()], verbose=0)
    now = values_of(model)
    assert all(np.isfinite(value).all() for value in now)
    assert int(model.optimizer.iterations.value) == 1  # the first batch was trained on
    for one, other in zip(now, seen[0] if seen else now):
        np.testing.assert_array_equal(one, other)


def test_a_first_step_that_fails_leaves_all_weights():
    model = build("trace")
    accumulate(model, micro_batch_size=4)
    before = values_of(model)
    with pytest.raises(RuntimeError, match="it fails"):
        model.fit(X[:6], Y[:6], batch_size=6, verbose=0)
    for one, other in zip(before, values_of(model)):
        np.testing.assert_array_equal(one, other)


def test_an_own_train_step_is_refused():
    class Own(keras.Model):
        def train_step(self, state, data):
            return super().train_step(state, data)

    with pytest.raises(ValueError, match=r"overrides train_step.*compute_loss"):
        accumulate(Own())


def test_an_optimizer_that_accumulates_is_refused_before_anything_changes():
    model = build("run")
    model.compile(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), "mse")
    accumulate(model)
    with pytest.raises(ValueError, match="gradient_accumulation_steps=2"):
        model.fit(X, Y, verbose=0)


def test_nnx_is_refused(monkeypatch):
    monkeypatch.setattr(keras.config, "is_nnx_enabled", lambda: True)
    with pytest.raises(ValueError, match="KERAS_NNX_ENABLED"):
        accumulate(build("run"))


@pytest.mark.parametrize("in_one_piece", [True, False])
def test_memory_does_not_grow_with_the_number_of_micro_batches(in_one_piece):
    """The temporaries of the compiled step: those of a micro-batch, however many there are."""
    model = keras.Sequential([keras.Input([64]), *[layers.Dense(64, "tanh") for _ in range(4)]])
    model.compile("sgd", "mse")
    model.optimizer.build(model.trainable_variables)
    accumulation = accumulate(model, micro_batch_size=8)

    def temporaries(examples):
        state = [
            [v.value for v in variables]
            for variables in (
                model.trainable_variables,
                model.non_trainable_variables,
                model.optimizer.variables,
                model.metrics_variables,
            )
        ]
        rows = np.zeros([examples, 64])
        model.train_on_batch(rows[:9], rows[:9])
        if in_one_piece:
            lowered = jax.jit(accumulation.steps.found).lower(state, (rows, rows))
            return lowered.compile().memory_analysis().temp_size_in_bytes
        batch, state = batch_of((rows, rows)), State(*state)
        found = turns.Turns(accumulation.steps, True, False, state, batch, examples)
        turn, total = found._turns[0], found._start(state)
        compiled = turn.lower(total, state, batch, found._no_counts, 0).compile()
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes > 0  # The sums stay in their place.
        return memory.temp_size_in_bytes

    few, many = temporaries(16), temporaries(512)
    row = 64 * 8 * 2  # x and y
    assert many <= few + 0.1 * row * 512
