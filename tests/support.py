"""What the equivalence tests share: training a model plainly and accumulated, and comparing."""

import contextlib

import keras
import numpy as np
import tensorflow as tf

import macrobatch

MODES = {
    "graph": {},
    "eager": {"run_eagerly": True},
    "compiled": {"jit_compile": True},
}


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


# In whose scope the accumulated model is made; the plain one is always on one device.
strategy = tf.distribute.get_strategy()


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


def assert_same(left, right, tolerance=1e-10):
    """Asserts that two models have the same variables, those of their optimizers included."""
    pairs = list(zip(variables(left), variables(right)))
    assert len(pairs) == len(variables(left)) == len(variables(right))
    for a, b in pairs:
        a_value = np.array(a)
        scale = max(1.0, np.abs(a_value).max(initial=0.0))
        for b_value in strategy.experimental_local_results(b.value):
            difference = np.abs(a_value - b_value.numpy()).max(initial=0.0) / scale
            assert difference <= tolerance, f"{a.path} differs by {difference}"


def assert_same_history(left, right, tolerance=1e-10):
    assert left.history.keys() == right.history.keys()
    for name, values in left.history.items():
        np.testing.assert_allclose(values, right.history[name], rtol=tolerance, err_msg=name)


def _is_lambda(value):
    return getattr(value, "__name__", "") == "<lambda>"


def check(
    build,
    x,
    y=None,
    *,
    micro_batch_size=3,
    batch_size=8,
    epochs=2,
    optimizer=lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    micro_batch_weight=None,
    cut=None,
    fit=None,
    before=None,
    moved=True,
    **compiled,
):
    """Trains two equal models, plainly on whole batches and accumulated; they end the same."""
    plain, accumulated = build_pair(build)
    compiled.setdefault("loss", "mse")
    histories = []
    for model in (plain, accumulated):
        # A lambda makes a new loss or metric for each model: metrics keep state.
        with model.distribute_strategy.scope():
            arguments = {k: v() if _is_lambda(v) else v for k, v in compiled.items()}
            model.compile(optimizer=optimizer(), **arguments)
        if before:
            before(model)
        if model is accumulated:
            how = cut or {"micro_batch_size": micro_batch_size}
            macrobatch.accumulate(model, micro_batch_weight=micro_batch_weight, **how)
        start = [np.array(w) for w in model.trainable_weights]
        arguments = dict(fit() if callable(fit) else fit or {})
        if not isinstance(x, tf.data.Dataset):
            arguments.setdefault("batch_size", batch_size)
        keras.utils.set_random_seed(3)
        histories.append(model.fit(x, y, epochs=epochs, shuffle=False, verbose=0, **arguments))
        if moved and start:
            ends = [np.array(w) for w in model.trainable_weights]
            assert any(np.abs(a - b).max() > 1e-4 for a, b in zip(start, ends)), "did not train"
    assert_same(plain, accumulated)
    assert_same_history(*histories)
    return plain, accumulated
