"""How accumulate() and release() behave around fit(), on any backend."""

import gc
import subprocess
import sys
import warnings
import weakref

import keras
import numpy as np
import pytest
from builders import (
    X,
    Y,
    compiled,
    data,
    dense,
    fit,
    linear,
    masks_drawn,
    own_loss,
    update_of_narrow_sums,
)
from keras import callbacks, layers, ops, optimizers
from keras.src.backend.common.symbolic_scope import in_symbolic_scope
from loss_cases import mean_of_tokens, tokens_of
from support import (
    BACKEND,
    MODES,
    array,
    assert_same,
    build_pair,
    modes,
    only_on,
    slow_on,
    thorough,
    thorough_for,
    variables,
)
from support.inside import skip_interaction_check

import macrobatch
from macrobatch import settings_of

# In which layers know how many examples they are called with, or traced.
WITH_SIZES = {"run_eagerly": True} if BACKEND == "tensorflow" else {}


@pytest.fixture
def no_check(monkeypatch):
    """No layer is called by the check whether examples interact."""
    skip_interaction_check(monkeypatch)


class Seen(layers.Layer):
    """Notes the sizes of the batches that it is called with, or traced."""

    def __init__(self):
        super().__init__()
        self.sizes, self.supports_masking = [], True

    def call(self, inputs):
        if not in_symbolic_scope():  # in which Keras asks for shapes
            self.sizes.append(inputs.shape[0])
        return inputs


def sizes_of(model):
    """The sizes that the first layer has seen since the last call."""
    layer = next(layer for layer in model.layers if isinstance(layer, Seen))
    seen = [size for size in layer.sizes if size]
    layer.sizes.clear()
    return seen


def watched():
    model = keras.Sequential([keras.Input([4]), Seen(), layers.Dense(2)])
    sizes_of(model)
    return model


# Coming and going


@pytest.mark.usefixtures("no_check")
def test_before_and_after_compile_and_again_with_another_size():
    model = watched()
    assert macrobatch.accumulate(model, 4) is model
    model.compile("sgd", "mse", **WITH_SIZES)
    fit(model)
    assert max(sizes_of(model)) == 4
    macrobatch.accumulate(model, 2)
    fit(model)
    assert max(sizes_of(model)) == 2
    model.compile("adam", "mae", **WITH_SIZES)
    fit(model)
    assert max(sizes_of(model)) == 2
    assert macrobatch.release(model) is model
    fit(model)
    assert set(sizes_of(model)) == {8, 3}


@pytest.mark.eager
def test_release_restores_the_plain_step():
    plain, released = build_pair(dense)
    for model in (plain, released):
        model.compile(optimizers.Adam(0.1), "mse")
    before = set(vars(plain))
    macrobatch.release(macrobatch.accumulate(released, 3))
    assert set(vars(released)) == before
    macrobatch.release(plain)
    for model in (plain, released):
        fit(model)
    assert_same(plain, released)


class AfterEachBatch(callbacks.Callback):
    """Calls functions, one after each batch."""

    def __init__(self, *functions):
        super().__init__()
        self.functions = functions

    def on_train_batch_end(self, batch, logs=None):
        self.functions[batch](self.model)


@pytest.mark.usefixtures("no_check")
def test_accumulate_and_release_in_the_middle_of_fit():
    """They take effect at the next batch."""
    plain, other = build_pair(watched)
    for model in (plain, other):
        model.compile(optimizers.SGD(0.1), "mse", **WITH_SIZES)
    sizes = []
    switch = AfterEachBatch(
        lambda model: sizes.append(sizes_of(model)) or macrobatch.accumulate(model, 2),
        lambda model: sizes.append(sizes_of(model)) or macrobatch.release(model),
        lambda model: sizes.append(sizes_of(model)),
    )
    fit(plain)
    sizes_of(other)
    fit(other, callbacks=[switch])
    assert [max(each) for each in sizes] == [8, 2, 3]
    assert_same(plain, other)


def test_a_model_with_an_accumulated_part_says_that_it_is_not_accumulated():
    inner = macrobatch.accumulate(dense(), 3)
    outer = keras.Sequential([keras.Input([4]), inner])
    outer.compile("sgd", "mse")
    with pytest.warns(UserWarning, match=r"not accumulated: its part .* has no effect"):
        fit(outer)
    macrobatch.accumulate(outer, 3)
    fit(outer)


@pytest.mark.examples_meet
def test_nothing_is_kept_of_models_that_are_gone():
    gone = []
    for _ in range(2):
        model = compiled(dense())
        fit(model)
        gone.append(weakref.ref(model))
        del model
    keras.utils.clear_session(free_memory=False)
    gc.collect()
    assert [reference() for reference in gone] == [None] * 2


# Beside fit


@pytest.mark.usefixtures("no_check")
def test_single_batches_and_evaluation_are_cut_too():
    models = build_pair(watched)
    for model in models:
        model.compile(optimizers.SGD(0.1), "mse", metrics=["mae"], **WITH_SIZES)
    macrobatch.accumulate(models[1], 3)
    for method, given in [
        ("train_on_batch", {"sample_weight": np.arange(19.0)}),
        ("evaluate", {"batch_size": 11, "verbose": 0}),
        ("test_on_batch", {}),
        ("train_on_batch", {}),
    ]:
        sizes_of(models[1])
        logs = [getattr(model, method)(X, Y, **given) for model in models]
        np.testing.assert_allclose(*logs, rtol=1e-10)
        # On JAX a function is traced once.
        assert max(sizes_of(models[1]), default=3) == 3
    assert_same(*models)


def own_test_step(*arguments):
    logs = {"mine": ops.ones([])}
    return (logs, arguments[0]) if BACKEND == "jax" else logs


@pytest.mark.eager
@pytest.mark.parametrize("of_class", [True, False])
def test_a_test_step_of_the_users_is_left_alone(of_class):
    class Own(keras.Sequential):
        if of_class:

            def test_step(self, *arguments):
                return own_test_step(*arguments)

    model = Own([keras.Input([4]), layers.Dense(2)])
    if not of_class:
        model.test_step = own_test_step
    fit(compiled(model))
    for _ in range(2):
        assert model.evaluate(X, Y, verbose=0, return_dict=True) == {"mine": 1.0}
        macrobatch.release(model)


# How often a model runs

# Micro-batches of 3, 3 and 2, and one of 3: how often fit and evaluate call a layer.
CALLS = {
    "tensorflow": {"graph": (1, 1, 0), "compiled": (1, 1, 0), "eager": (4, 4, 8)},
    "torch": {"eager": (4, 4, 8)},
    "jax": {"compiled": (3, 3, 0)},
}[BACKEND]


@pytest.mark.usefixtures("no_check")
@thorough_for(*(["compiled"] if BACKEND == "tensorflow" else []))
@pytest.mark.parametrize("mode", CALLS)
@pytest.mark.parametrize("masked", [False, True])
def test_each_micro_batch_runs_once(masked, mode):
    """Plain Keras traces a model twice, because it makes variables while it traces."""
    inputs = keras.Input([5, 2])
    hidden = layers.Dense(3)(Seen()(layers.Masking()(inputs) if masked else inputs))
    model = keras.Model(inputs, [layers.Dense(2, name=name)(hidden) for name in "ab"])
    model = compiled(model, optimizer="adam", metrics=[["mae"], ["mse"]], **MODES[mode])
    seen = next(layer for layer in model.layers if isinstance(layer, Seen)).sizes
    x, y = data(11, 5, 2), data(11, 5, 2)
    x[::2, 2:] = x[3, 1:] = 0
    counts = []
    for _ in range(2):
        for run in (model.fit, model.evaluate):
            seen.clear()
            run(x, [y, y], batch_size=8, verbose=0)
            counts.append(len(seen))
    *first, later = CALLS[mode]
    assert counts[:2] == first
    assert sum(counts[2:]) == later


@pytest.mark.xfail(BACKEND == "torch", reason="raises: No gradients provided for any variable")
def test_a_batch_without_weight_changes_nothing():
    """Its loss is 0 / 0."""
    cut = {"micro_batch_size": 3, "micro_batch_weight": tokens_of}
    model = compiled(own_loss(mean_of_tokens)(), cut)
    before = model.get_weights()
    fit(model, y=np.zeros_like(Y))
    for left, right in zip(before, model.get_weights()):
        np.testing.assert_array_equal(left, right)


# What is said


@pytest.mark.parametrize("size", [8, 5])
def test_one_warning_if_nothing_is_accumulated(size):
    """A small last batch is no reason to warn."""
    model = compiled(linear(), size, **({} if BACKEND == "torch" else {"steps_per_execution": 2}))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(model, X[:12], Y[:12], epochs=2)
    said = [str(w.message) for w in caught if "Nothing is being accumulated" in str(w.message)]
    assert len(said) == (size == 8)
    assert all("batch_size=" in each and "dataset.rebatch(n)" in each for each in said)


def test_no_trained_weights():
    model = dense()
    model.trainable = False
    compiled(model)
    with pytest.warns(UserWarning, match="does not have any trainable weights"):
        fit(model)


@pytest.mark.filterwarnings("ignore::macrobatch.ExactnessWarning")
def test_other_variables_written_by_layers_are_carried_with_a_warning():
    class Counter(layers.Layer):
        def build(self, shape):
            self.calls = self.add_weight(
                shape=(), initializer="zeros", trainable=False, name="calls"
            )

        def call(self, inputs):
            self.calls.assign_add(1.0)
            return inputs

    counter = Counter()
    model = compiled(linear(counter))
    with pytest.warns(macrobatch.ExactnessWarning, match="written by the forward pass.*calls"):
        fit(model)
    assert float(counter.calls.value) == 7


# Batches of another kind


def tagger():
    tokens = keras.Input([None], dtype="int32")
    return keras.Model(tokens, layers.Dense(2)(layers.Embedding(9, 4, mask_zero=True)(tokens)))


TOKENS = np.where(np.arange(6) < np.array([6, 2, 1, 3, 2, 1])[:, None], 1 + np.arange(6), 0)
TAGS = data(6, 6, 2)
BY_LENGTH = {"micro_batch_size": 2, "sequence_axis": 1}
LATER = {
    "weights, which have to be counted": (
        dense,
        lambda: keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"),
        {"micro_batch_size": 3},
        [(X, Y), (X, Y, np.arange(19.0))],
    ),
    "weights of positions": (
        tagger,
        lambda: "mse",
        BY_LENGTH,
        [(TOKENS, TAGS), (TOKENS, TAGS, (TOKENS > 0).astype("float64"))],
    ),
    "labels that are not broadcast": (
        tagger,
        lambda: "mse",
        BY_LENGTH,
        [(TOKENS, TAGS[:, :1]), (TOKENS, TAGS)],
    ),
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(each, marks=slow_on("jax", *(["tensorflow"] if each[2] is BY_LENGTH else [])))
        for each in LATER.values()
    ],
    ids=LATER,
)
def test_what_comes_later_may_be_of_another_kind(case):
    build, loss, cut, batches = case
    models = build_pair(build)
    macrobatch.accumulate(models[1], **cut)
    for model in models:
        model.compile(optimizers.SGD(0.1), loss(), run_eagerly=BACKEND != "jax" and build is dense)
        for x, y, *weights in batches:
            fit(model, x, y, sample_weight=weights[0] if weights else None)
    assert_same(*models)


# Randomness


@pytest.mark.parametrize("seed", [None, 3])
def test_each_micro_batch_draws_anew_and_runs_can_be_repeated(seed):
    runs = []
    for _ in range(2):
        keras.utils.set_random_seed(11)
        masks, moved = masks_drawn(seed)
        assert len(set(masks)) == 4
        assert seed is None or moved.tolist() == [0, 4]
        runs.append(masks)
    assert runs[0] == runs[1]


@only_on("tensorflow", "torch")  # JAX draws with seeds of layers only.
@pytest.mark.filterwarnings("ignore:jit_compile=True has no effect")
@pytest.mark.parametrize("mode", modes("graph"))
def test_the_global_seed_generator_advances(mode):
    class Noise(layers.Layer):
        def call(self, inputs, training=False):
            return inputs + keras.random.normal(ops.shape(inputs), dtype="float64")

    model = compiled(linear(Noise()), optimizer=optimizers.SGD(0.0), **MODES[mode])
    assert len({float(model.train_on_batch(X, Y)) for _ in range(3)}) == 3


# Precision


@pytest.mark.parametrize("mode", modes("graph eager compiled"))
def test_an_overflow_skips_the_update_whole_and_halves_the_scale_once(mode):
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("mixed_float16")
    model = keras.Sequential([keras.Input([4]), layers.Dense(2)])
    optimizer = optimizers.LossScaleOptimizer(optimizers.SGD(0.1, momentum=0.9))
    compiled(model, optimizer=optimizer, **MODES[mode])
    x = X.astype("float32")
    model.train_on_batch(x, Y)
    before = {v.path: array(v.value) for v in variables(model)}
    scale = float(optimizer.dynamic_scale.value)
    x[-1] = np.inf  # in the last micro-batch only
    model.train_on_batch(x, Y)
    assert float(optimizer.dynamic_scale.value) == scale / 2
    for variable in variables(model):
        if variable.path.split("/")[-1] not in ("dynamic_scale", "step_counter"):
            np.testing.assert_array_equal(
                before[variable.path], array(variable.value), err_msg=variable.path
            )


def test_sums_of_narrow_gradients_are_wide():
    assert update_of_narrow_sums() == pytest.approx(0.1, rel=1e-2)


# Callbacks and saving


@thorough
def test_callbacks(tmp_path):
    models, histories = build_pair(dense), []
    for model in models:
        model.compile(optimizers.Adam(0.1), "mse")
        if model is models[1]:
            macrobatch.accumulate(model, 3)
        own = [
            callbacks.EarlyStopping("val_loss", patience=1),
            callbacks.ModelCheckpoint(tmp_path / f"{model.name}.keras", save_best_only=True),
            callbacks.BackupAndRestore(tmp_path / f"{model.name}.backup"),
            callbacks.ReduceLROnPlateau(patience=1),
        ]
        if BACKEND == "tensorflow":
            own.append(callbacks.TensorBoard(tmp_path / model.name, update_freq=1))
        validation = (data(5, 4, seed=8), data(5, 2, seed=9))
        histories.append(fit(model, epochs=8, callbacks=own, validation_data=validation).history)
    assert histories[0].keys() == histories[1].keys()
    np.testing.assert_allclose(*(each["val_loss"] for each in histories))
    assert_same(*models)


class Interrupt(callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1:
            raise KeyboardInterrupt


@thorough
def test_a_training_that_is_interrupted_goes_on_where_it_was(tmp_path):
    whole, interrupted = build_pair(dense)
    for model in (whole, interrupted):
        compiled(model, optimizer=optimizers.Adam(0.1))
    fit(whole, epochs=4)
    backups = [callbacks.BackupAndRestore(tmp_path / "backup") for _ in range(2)]
    with pytest.raises(KeyboardInterrupt):
        fit(interrupted, epochs=4, callbacks=[backups[0], Interrupt()])
    fit(interrupted, epochs=4, callbacks=[backups[1]])
    assert_same(whole, interrupted)


LOADING = """
import sys, keras, numpy as np
folder = sys.argv[1]
model = keras.models.load_model(folder + '/model.keras')
x, y = (np.load(f'{folder}/{name}.npy') for name in 'xy')
np.testing.assert_allclose(model.predict(x, verbose=0), y, rtol=1e-4)
model.fit(x, y, verbose=0)
assert 'macrobatch' not in sys.modules
"""


@thorough
def test_a_saved_model_is_a_plain_model(tmp_path):
    model = compiled(dense())
    fit(model)
    model.save(tmp_path / "model.keras")
    np.save(tmp_path / "x.npy", X)
    np.save(tmp_path / "y.npy", model.predict(X, verbose=0))
    run = subprocess.run(
        [sys.executable, "-c", LOADING, str(tmp_path)], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert settings_of(keras.models.load_model(tmp_path / "model.keras")) is None
    assert settings_of(keras.models.clone_model(model)) is None
