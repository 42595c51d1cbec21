"""torch: nothing changed by a step that fails, draws, narrow weights, modules of torch."""

import weakref

import keras
import numpy as np
import pytest
from keras import layers, ops
from torch_support import (
    accumulate,
    assert_same,
    check,
    data,
    double_precision,  # noqa: F401 - a fixture
    pair,
    torch,
)

import macrobatch
from macrobatch._checks import ExactnessWarning
from macrobatch._keras.installed import accumulation_of
from macrobatch._torch import sums
from macrobatch._torch.memory import is_out_of_memory

X, Y = data(21, 4), data(21, 2, seed=1)


class Fails(layers.Layer):
    """Fails in the forward pass, or in the backward pass, of one of its next calls."""

    remaining = None  # calls before the one that fails
    in_backward = False

    def call(self, x):
        if x.device.type == "meta" or self.remaining is None:
            return x
        self.remaining -= 1
        if self.remaining != 0:
            return x
        if not self.in_backward:
            self._fail()
        x = x * 1.0
        x.register_hook(self._fail)
        return x

    def _fail(self, gradient=None):
        raise RuntimeError("this is the call")


def everything(model):
    variables = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    found = [v.value.detach().numpy().copy() for v in variables]
    found += [b.numpy().copy() for layer in model.layers for b in layer.buffers()]
    found += [torch.get_rng_state().numpy().copy()]
    return found + [v.value.grad for v in model.trainable_weights]


@pytest.mark.filterwarnings("ignore::macrobatch._checks.ExactnessWarning")
@pytest.mark.parametrize(
    ("whole_batch_loss", "remaining", "in_backward"),
    [(False, 5, False), (False, 5, True), (True, 5, False), (True, 12, False), (True, 12, True)],
)
def test_a_step_that_fails_changes_nothing(whole_batch_loss, remaining, in_backward):
    fails = Fails()
    model = keras.Sequential(
        [
            keras.Input([4]),
            layers.Dense(5, kernel_regularizer="l2"),
            layers.BatchNormalization(),
            layers.Dropout(0.5),
            layers.Dropout(0.5, seed=3),
            layers.TorchModuleWrapper(torch.nn.BatchNorm1d(5).double()),
            fails,
            layers.Dense(2),
        ]
    )
    model.compile(keras.optimizers.Adam(0.1), "mse", metrics=["mae"])
    accumulate(model, whole_batch_loss=whole_batch_loss)
    model.train_on_batch(X, Y)
    fails.remaining, fails.in_backward = remaining, in_backward  # of 7, or 14, calls
    before = everything(model)
    with pytest.raises(RuntimeError, match="this is the call"):
        model.train_function([(X, Y)])
    for one, other in zip(before, everything(model), strict=True):
        if isinstance(one, np.ndarray):
            np.testing.assert_array_equal(one, other)
        else:
            assert one is other


def test_each_micro_batch_draws_anew():
    kept = []

    class Seen(layers.Layer):
        def call(self, x):
            if x.device.type != "meta":
                kept.append(x.detach().numpy().copy())
            return x

    for seed in (None, 3):
        kept.clear()
        model = keras.Sequential(
            [keras.Input([50]), layers.Dropout(0.5, seed=seed), Seen(), layers.Dense(1)]
        )
        model.compile(keras.optimizers.SGD(0.1), "mse")
        accumulate(model).meeting.is_wanted = False  # It would be seen too.
        model.fit(np.ones([6, 50]), np.ones([6, 1]), batch_size=6, epochs=2, verbose=0)
        assert len({each.tobytes() for each in kept}) == len(kept) == 4


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "bfloat16", "float16"])
def test_mixed_precision_is_as_close_as_its_rounding(policy):
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy(policy)
    models = pair(lambda: keras.Sequential([keras.Input([4]), layers.Dense(5), layers.Dense(2)]))
    accumulate(models[1])
    for model in models:
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    dtypes = {v.value.dtype for v in models[1].variables}
    assert "mixed" in policy or dtypes == {getattr(torch, policy)}
    for one, other in zip(*(model.variables for model in models)):
        left, right = (v.value.detach().float().numpy() for v in (one, other))
        np.testing.assert_allclose(left, right, atol=3e-2)


def test_sums_of_narrow_gradients_have_32_bits():
    weight = torch.nn.Parameter(torch.ones([], dtype=torch.bfloat16))
    gradients = sums.Gradients([weight])
    for _ in range(1000):
        gradients.add([weight * 1.0])
    (total,) = gradients.total([])
    assert total.dtype == torch.bfloat16
    assert float(total) == 1000.0  # In bfloat16 the sum would stay at 256.


def test_gradients_are_left_where_callbacks_look_for_them():
    models = pair(lambda: keras.Sequential([keras.Input([4]), layers.Dense(2)]))
    accumulate(models[1])
    for model in models:
        model.compile(keras.optimizers.SGD(0.1), "mse")
        model.train_on_batch(X, Y)
    for one, other in zip(*(model.trainable_weights for model in models)):
        np.testing.assert_allclose(one.value.grad, other.value.grad, rtol=1e-10)


@pytest.mark.filterwarnings("ignore:Examples meet")
def test_batch_norm_of_torch_is_warned_of():
    model = keras.Sequential(
        [
            keras.Input([4]),
            layers.TorchModuleWrapper(torch.nn.BatchNorm1d(4).double()),
            layers.Dense(2),
        ]
    )
    model.compile(keras.optimizers.SGD(0.1), "mse")
    accumulate(model)
    with pytest.warns(ExactnessWarning, match="torch.nn.BatchNorm"):
        model.fit(X, Y, batch_size=8, verbose=0)


def test_modules_of_torch_are_trained():
    def build():
        torch.manual_seed(1)
        module = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh()).double()
        return keras.Sequential(
            [keras.Input([4]), layers.TorchModuleWrapper(module), layers.Dense(2)]
        )

    check(build, X, Y)


def test_micro_batch_weight():
    """A mean over tokens: without the weight it would be a mean of means."""

    class Own(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            there = ops.cast(ops.not_equal(y, 0), y_pred.dtype)
            return ops.sum(ops.square(y - y_pred) * there) / ops.sum(there)

    def build():
        inputs = keras.Input([4])
        return Own(inputs, layers.Dense(2)(layers.Dense(5, "tanh")(inputs)))

    y = np.where(data(21, 2, seed=5) > 0.3, Y, 0.0)
    y[3:6] = 0.0  # a micro-batch of nothing: 0 / 0
    check(
        build,
        X,
        y,
        micro_batch_weight=lambda x, y, w: ops.sum(ops.cast(ops.not_equal(y, 0), "float64")),
    )


def test_values_given_to_add_loss():
    class Adds(layers.Layer):
        def call(self, x):
            self.add_loss(ops.sum(ops.square(x), -1))
            return x

    def build():
        return keras.Sequential([keras.Input([4]), layers.Dense(3), Adds(), layers.Dense(2)])

    check(build, X, Y)


def test_nested_inputs_with_none():
    class Nested(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(2)

        def build(self, shapes):
            self.dense.build([None, 4])

        def call(self, x):
            assert x["none"] is None
            return self.dense(x["some"][0])

    models = pair(Nested)
    accumulate(models[1])
    for model in models:
        model.compile(keras.optimizers.SGD(0.1), "mse")
        for _ in range(2):
            model.train_step(({"some": [torch.tensor(X)], "none": None}, torch.tensor(Y)))
    assert_same(*models)


@pytest.mark.examples_meet
def test_examples_that_meet_are_found():
    def build():
        inputs = keras.Input([4])
        centred = layers.Lambda(lambda x: x - ops.mean(x, 0, keepdims=True), name="centred")
        return keras.Model(inputs, layers.Dense(2)(centred(layers.Dropout(0.3)(inputs))))

    model = build()
    model.compile(keras.optimizers.SGD(0.1), "mse")
    accumulate(model)
    with pytest.warns(ExactnessWarning, match="Examples meet in these layers: 'centred'"):
        model.fit(X, Y, batch_size=8, verbose=0)


class ByNumber(layers.Layer):
    def call(self, x):
        return x / ops.shape(x)[0]


def of_number(y_true, y_pred):
    return ops.mean(ops.square(y_true - y_pred), axis=-1) / ops.shape(y_pred)[0]


@pytest.mark.examples_meet
@pytest.mark.parametrize(
    ("inner", "loss", "expected"),
    [
        ([ByNumber(name="culprit")], "mse", "layers depend on .*'culprit'"),
        ([layers.Dropout(0.3), layers.GaussianNoise(0.1)], of_number, "losses depend on .*'of_num"),
    ],
)
def test_what_depends_on_how_many_examples_there_are_is_found(inner, loss, expected):
    model = keras.Sequential([keras.Input([4]), *inner, layers.Dense(2)])
    model.compile(keras.optimizers.SGD(0.1), loss)
    accumulate(model)
    with pytest.warns(ExactnessWarning, match=f"These {expected}"):
        model.fit(X, Y, batch_size=8, verbose=0)


@pytest.mark.examples_meet
def test_a_trial_changes_nothing():
    """With the trial and without: the same draws afterwards."""
    ends = []
    for is_wanted in (True, False):
        keras.utils.set_random_seed(1)
        model = keras.Sequential(
            [
                keras.Input([4]),
                layers.Dropout(0.5),
                layers.GaussianNoise(0.1),
                layers.Dropout(0.5, seed=2),
                layers.Dense(2),
            ]
        )
        model.compile(keras.optimizers.SGD(0.1), "mse")
        accumulate(model).meeting.is_wanted = is_wanted
        model.fit(X, Y, batch_size=8, verbose=0)
        ends.append([v.value.detach().numpy() for v in model.variables])
    for one, other in zip(*ends):
        np.testing.assert_array_equal(one, other)


def test_what_is_refused():
    class Own(keras.Model):
        def train_step(self, data):
            return {}

    inputs = keras.Input([4])
    model = Own(inputs, layers.Dense(2)(inputs))
    with pytest.raises(ValueError, match="Override compute_loss"):
        accumulate(model)
    plain = keras.Sequential([keras.Input([4]), layers.Dense(2)])
    plain.compile(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), "mse")
    accumulate(plain)
    with pytest.raises(ValueError, match="accumulates gradients by itself"):
        plain.fit(X, Y, verbose=0)


def test_a_model_gets_its_own_steps_back():
    models = pair(lambda: keras.Sequential([keras.Input([4]), layers.Dense(2)]))
    accumulation = accumulate(models[1])
    assert accumulation_of(models[1]) is accumulation
    accumulation.uninstall()
    assert accumulation_of(models[1]) is None
    assert not {"train_step", "test_step", "make_train_function"} & set(vars(models[1]))
    for model in models:
        model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(X, Y, verbose=0, shuffle=False)
    assert_same(*models)


def test_a_part_of_another_model():
    part = keras.Sequential([keras.Input([4]), layers.Dense(2)])
    accumulate(part)
    model = keras.Sequential([keras.Input([4]), part])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    with pytest.warns(UserWarning, match="is not accumulated: its part"):
        model.fit(X, Y, verbose=0)


def test_a_distributed_module_is_refused(monkeypatch):
    module = torch.nn.Linear(4, 2).double()
    model = keras.Sequential([keras.Input([4]), layers.TorchModuleWrapper(module)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    accumulate(model)
    monkeypatch.setattr(torch.nn.parallel, "DistributedDataParallel", torch.nn.Linear)
    with pytest.raises(ValueError, match="once per micro-batch"):
        model.fit(X, Y, verbose=0)


def test_a_distributed_model_is_refused():
    model = keras.Sequential([keras.Input([4]), layers.Dense(2)])
    wrapped = torch.nn.DataParallel(model)  # the other one needs several processes
    with pytest.raises(ValueError, match=r"once per micro-batch.*inside of DataParallel"):
        macrobatch.accumulate(wrapped, 4)


def test_out_of_memory_is_known():
    with pytest.raises(RuntimeError) as host:
        torch.empty(2**60)
    assert is_out_of_memory(host.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert is_out_of_memory(torch.AcceleratorError("CUDA error: out of memory"))
    cublas = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
    assert is_out_of_memory(RuntimeError(cublas))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("shapes do not fit"))
    assert not is_out_of_memory(ValueError("not enough memory"))


@pytest.mark.filterwarnings("ignore:Dynamo")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_forward_passes_that_torch_compiles(monkeypatch):
    """Traced by torch.compile. To make kernels of it would take a minute, and test torch."""
    compiled = []

    def compile_call(function):
        compiled.append(function)
        return of_torch(function, backend="eager")

    of_torch = torch.compile
    monkeypatch.setattr(torch, "compile", compile_call)

    def build():
        return keras.Sequential(
            [keras.Input([4]), layers.Dense(5, "tanh"), layers.Dropout(0.5), layers.Dense(2)]
        )

    models = pair(build)
    for model, jit_compile in zip(models, (False, True)):
        accumulate(model)
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"], jit_compile=jit_compile)
        keras.utils.set_random_seed(0)
        model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
        model.evaluate(X, Y, verbose=0)
        assert "call" not in vars(model)
    assert len(compiled) == 1
    assert models[1].jit_compile
    assert_same(*models)


@pytest.mark.filterwarnings("ignore::macrobatch._checks.ExactnessWarning")
@pytest.mark.parametrize(
    "layer",
    [
        lambda: layers.BatchNormalization(),
        lambda: layers.Dropout(0.5, seed=3),
        lambda: layers.ActivityRegularization(l2=0.1),
        lambda: layers.Masking(),
    ],
    ids=["statistics", "seed", "added loss", "mask"],
)
def test_what_torch_may_lose_is_not_compiled(layer, monkeypatch):
    monkeypatch.delattr(torch, "compile")
    model = keras.Sequential([keras.Input([3, 4]), layer(), layers.Dense(2)])
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=True)
    accumulate(model)
    with pytest.warns(UserWarning, match="jit_compile=True has no effect"):
        model.fit(data(21, 3, 4), data(21, 3, 2), batch_size=8, verbose=0)


def test_gradients_that_count_nothing_are_0_even_if_not_finite():
    weight = torch.nn.Parameter(torch.ones([2]))
    gradients = sums.Gradients([weight])
    gradients.add([weight.sum() * 2.0, weight.sum() * float("inf")])
    (total,) = gradients.total(sums.factors_of([torch.zeros([])], [torch.ones([])], [0.0]))
    assert total.tolist() == [2.0, 2.0]


def test_the_loss_scale_is_in_regularisers_too():
    check(
        lambda: keras.Sequential([keras.Input([4]), layers.Dense(2, kernel_regularizer="l2")]),
        X,
        Y,
        optimizer=lambda: keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.1), initial_scale=64.0
        ),
    )


def test_outputs_of_one_micro_batch_are_in_memory():
    alive = []

    class Seen(layers.Layer):
        def call(self, x):
            if x.device.type != "meta":
                alive.append(weakref.ref(x))
                most.append(sum(each() is not None for each in alive))
            return x

    most = []
    model = keras.Sequential([keras.Input([4]), layers.Dense(2), Seen()])
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    accumulate(model, 1).meeting.is_wanted = False
    model.train_on_batch(X, Y)
    assert len(most) == 21
    assert max(most) == 1
