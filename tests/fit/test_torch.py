"""fit() in what torch alone has: its modules, gradients on weights, torch.compile."""

import weakref

import keras
import numpy as np
import pytest
import torch
from builders import X, Y, compiled, data, dense, fit, tokens
from keras import layers, optimizers
from keras.losses import MeanSquaredError
from loss_cases import two_heads
from support import assert_same, build_pair
from support.inside import make_running_out_an_error, skip_interaction_check

from macrobatch import ExactnessWarning, accumulate

TOKENS, TAGS = tokens(), data(19, 6, 2)


def test_gradients_are_left_where_callbacks_look_for_them():
    models = build_pair(dense)
    accumulate(models[1], 3)
    for model in models:
        model.compile("sgd", "mse")
        model.train_on_batch(X, Y)
    for one, other in zip(*(model.trainable_weights for model in models)):
        np.testing.assert_allclose(one.value.grad, other.value.grad, rtol=1e-10)


def test_gradients_that_count_nothing_are_0_even_if_not_finite():
    model = two_heads()
    loss = [MeanSquaredError(reduction="mean_with_sample_weight") for _ in range(2)]
    compiled(model, loss=loss)
    before = model.get_weights()
    labels, weights = [Y, np.full_like(Y, np.inf)], [np.ones(19), np.zeros(19)]
    fit(model, X, labels, sample_weight=weights)
    changed = [(one != other).any() for one, other in zip(before, model.get_weights())]
    assert changed == [True, True, False, False]


def test_outputs_of_one_micro_batch_are_in_memory(monkeypatch):
    skip_interaction_check(monkeypatch)
    alive, counts = [], []

    class Seen(layers.Layer):
        def call(self, x):
            if x.device.type != "meta":
                alive.append(weakref.ref(x))
                counts.append(sum(each() is not None for each in alive))
            return x

    model = keras.Sequential([keras.Input([4]), layers.Dense(2), Seen()])
    compiled(model, 1, metrics=["mae"]).train_on_batch(X, Y)
    assert counts == [1] * len(X)


# Modules


def with_module(module):
    return keras.Sequential(
        [keras.Input([4]), layers.TorchModuleWrapper(module.double()), layers.Dense(2)]
    )


@pytest.mark.filterwarnings("ignore:Examples meet")
def test_batch_norm_of_torch_is_warned_of():
    with pytest.warns(ExactnessWarning, match="torch.nn.BatchNorm"):
        fit(compiled(with_module(torch.nn.BatchNorm1d(4))))


def test_a_distributed_module_is_refused(monkeypatch):
    model = compiled(with_module(torch.nn.Linear(4, 2)))
    monkeypatch.setattr(torch.nn.parallel, "DistributedDataParallel", torch.nn.Linear)
    with pytest.raises(ValueError, match="once per micro-batch"):
        fit(model)


def test_a_distributed_model_is_refused():
    wrapped = torch.nn.DataParallel(dense())  # the other one needs several processes
    with pytest.raises(ValueError, match=r"once per micro-batch.*inside of DataParallel"):
        accumulate(wrapped, 4)


# Keras on torch multiplies masks into sample weights, in place. Micro-batches are views.


def tagger(heads=1, kind=keras.Model):
    inputs = keras.Input([None], dtype="int32")
    embedded = [layers.Embedding(11, 3, mask_zero=not index)(inputs) for index in range(heads)]
    outputs = [layers.Dense(2)(each) for each in embedded]
    return kind(inputs, outputs if heads > 1 else outputs[0])


class OwnLoss(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return super().compute_loss(x, y, y_pred, sample_weight, training=training)


quiet_about_own_losses = pytest.mark.filterwarnings("ignore:The model overrides compute_loss")


def test_weights_of_the_user_stay_as_they_are():
    model = compiled(tagger(), weighted_metrics=["mae"])
    weights = torch.ones([19, 6], dtype=torch.float64)  # of another dtype, Keras makes copies
    model.train_on_batch(TOKENS, TAGS, weights)
    model.test_on_batch(TOKENS, TAGS, weights)
    assert bool((weights == 1).all())


@quiet_about_own_losses
def test_metrics_do_not_change_the_weights_of_an_own_loss():
    """The gradient of the loss needs them."""
    models = build_pair(lambda: tagger(kind=OwnLoss))
    accumulate(models[1], 3)
    for model in models:
        model.compile(optimizers.SGD(0.1), "mse", weighted_metrics=["mae"])
        fit(model, np.tile(TOKENS[5:6], (19, 1)), TAGS, sample_weight=np.abs(data(19, 6)))
    assert_same(*models)


@quiet_about_own_losses
@pytest.mark.examples_meet
def test_the_check_does_not_change_the_weights_of_an_own_loss():
    """Two runs of the same examples would come to different numbers."""
    model = compiled(tagger(kind=OwnLoss))
    with pytest.warns(ExactnessWarning, match="Examples meet in these losses: 'compute_loss'"):
        fit(model, TOKENS, TAGS, sample_weight=np.abs(data(19, 6)))


def test_a_mask_of_one_output_does_not_reach_the_weights_of_another():
    """In plain Keras it does on torch, so the reference has weights of their own."""
    weights = torch.tensor(np.linspace(0.5, 2, 19 * 6).reshape(19, 6))
    models = build_pair(lambda: tagger(heads=2))
    accumulate(models[1], 3)
    for model in models:
        model.compile(optimizers.SGD(0.1), ["mse", "mse"])
        shared = [weights.clone(), weights.clone()] if model is models[0] else [weights, weights]
        model.train_on_batch(TOKENS, [TAGS, data(19, 6, 2, seed=1)], shared)
    assert_same(*models)


# torch.compile


@pytest.mark.filterwarnings("ignore:Dynamo")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_forward_passes_that_torch_compiles(monkeypatch):
    """Traced by torch.compile. To make kernels of it would take a minute, and test torch."""
    functions, of_torch = [], torch.compile

    def compile_call(function):
        functions.append(function)
        return of_torch(function, backend="eager")

    monkeypatch.setattr(torch, "compile", compile_call)
    models = build_pair(
        lambda: keras.Sequential([keras.Input([4]), layers.Dropout(0.5), layers.Dense(2)])
    )
    for model, jit_compile in zip(models, (False, True)):
        compiled(model, metrics=["mae"], jit_compile=jit_compile)
        keras.utils.set_random_seed(0)
        fit(model)
        model.evaluate(X, Y, verbose=0)
        assert "call" not in vars(model)
    assert len(functions) == 1
    assert models[1].jit_compile
    assert_same(*models)


LOSES = {
    "statistics": layers.BatchNormalization,
    "seed": lambda: layers.Dropout(0.5, seed=3),
    "added loss": lambda: layers.ActivityRegularization(l2=0.1),
    "mask": layers.Masking,
}


@pytest.mark.filterwarnings("ignore::macrobatch.ExactnessWarning")
@pytest.mark.parametrize("layer", LOSES.values(), ids=LOSES)
def test_what_torch_may_lose_is_not_compiled(layer, monkeypatch):
    monkeypatch.delattr(torch, "compile")
    model = keras.Sequential([keras.Input([3, 4]), layer(), layers.Dense(2)])
    compiled(model, jit_compile=True)
    with pytest.warns(UserWarning, match="jit_compile=True has no effect"):
        fit(model, data(19, 3, 4), data(19, 3, 2))


# Memory


def host_error():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)
    return caught.value


CUBLAS = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
ERRORS = {
    "host": (host_error(), True),
    "CUDA": (torch.OutOfMemoryError("CUDA out of memory."), True),
    "accelerator": (torch.AcceleratorError("CUDA error: out of memory"), True),
    "cuBLAS": (RuntimeError(CUBLAS), True),
    "Python": (MemoryError(), True),
    "something else": (RuntimeError("shapes do not fit"), False),
    "a value": (ValueError("not enough memory"), False),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_after_which_a_smaller_size_is_tried(name, monkeypatch):
    make_running_out_an_error(monkeypatch)
    error, is_of_memory = ERRORS[name]

    def loss(y, y_pred):
        if y.device.type != "meta" and len(y) > 2:
            raise error
        return torch.mean((y - y_pred) ** 2, -1)

    model = compiled(dense(), "auto", loss=loss)
    if is_of_memory:
        assert fit(model).history["micro_batch_size"][0] <= 2
    else:
        with pytest.raises(type(error), match=str(error)):
            fit(model)
