"""find_micro_batch_size: the choice, the table that it rests on, and that nothing changes."""

import contextlib
import json
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from fit import step_cases
from keras import layers
from support import MODES, draws, everything, thorough
from test_accumulator_everywhere import mirrored
from verify_models import X, Y, compiled, mlp

import macrobatch
from macrobatch import settings_of
from macrobatch._keras.written import variables_of
from macrobatch._no_trace.unchanged import Values, unchanged
from macrobatch._plan import find, search
from macrobatch._plan.plot import draw
from macrobatch._plan.report import NothingFits
from macrobatch._plan.search import Memory
from macrobatch._plan.trial import Trial, sizes_between, sizes_to_try
from macrobatch._sizes.limit import Limit
from macrobatch._sizes.peaks import ONCE, Peak
from macrobatch._tensorflow import device_memory

MIB = 1024**2
BASE = 1000 * MIB
EXAMPLES = len(X)  # 14


class Meter:
    """A counter of a machine on which nothing else happens."""

    can_reset = True

    def now(self):
        return BASE


class Machine:
    """A machine on which a micro-batch takes what a test says: nothing runs."""

    def __init__(self, monkeypatch):
        self.slope, self.once = 50 * MIB, 0
        self.largest = 10**9  # examples, beyond which memory is gone
        self.seconds = {}
        self.tried = []
        self.before = self.more = lambda size: 0
        self._memory = None
        monkeypatch.setattr(find, "_memory", lambda given: self._memory)
        monkeypatch.setattr(search, "peak_of", self.peak_of)
        monkeypatch.setattr(search, "Trial", lambda *args: Untried(args[3], self))

    def peak_of(self, work, counter):
        trial = work.__self__
        size = trial.size or EXAMPLES
        before = BASE + self.before(len(self.tried))
        self.tried.append(trial.size)
        work()
        return Peak(before, before + self.once + self.slope * size + self.more(trial.size), True)

    def plan(
        self, limit=None, room=None, device="CPU", objective="fastest", model=None, **settings
    ):
        """Plans with so many bytes beyond what is there before."""
        given = None if limit is None else Limit(BASE + limit, "a test")
        self._memory = Memory(Meter(), given, room, device)
        return find.find(model or MODEL, X, Y, None, None, objective, settings)


class Untried:
    """A trial that does nothing."""

    def __init__(self, size, machine):
        self.size, self.machine, self.seconds = size, machine, []

    def start(self):
        if (self.size or EXAMPLES) > self.machine.largest:
            raise tf.errors.ResourceExhaustedError(None, None, "out of memory")
        self.update()

    def update(self):
        self.seconds.append(self.machine.seconds.get(self.size, 1.0))


# It has no optimizer with slots, and so few weights that they do not show.
MODEL = mlp(optimizer="sgd")


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch):
    monkeypatch.setattr(search, "ROUNDS", 1)


@pytest.fixture
def machine(monkeypatch):
    return Machine(monkeypatch)


def approx(size):
    return pytest.approx(size, rel=1e-5)  # the weights that are kept


# The choice


def test_sizes():
    assert sizes_to_try(14) == [1, 2, 4, 8, 14]
    assert sizes_to_try(8) == [1, 2, 4, 8]
    assert sizes_to_try(1) == [1]
    assert sizes_between(16, 32) == [20, 24, 28]
    assert sizes_between(2, 4) == [3, 3]
    assert sizes_between(8, 9) == []


def test_everything_fits(machine):
    machine.seconds = {4: 0.5, 14: 0.9, None: 0.8}
    plan = machine.plan(limit=10_000 * MIB)
    assert machine.tried == [1, 2, 4, 8, 14, None]
    assert (plan.micro_batch_size, plan.fastest, plan.largest) == (4, 4, 14)
    assert [row.size for row in plan.rows] == [1, 2, 4, 8, 14]
    assert all(row.fits for row in [*plan.rows, plan.plain])
    assert plan.row_of(4).peak == approx(BASE + 4 * machine.slope)
    assert plan.row_of(4).examples_per_second == pytest.approx(EXAMPLES / 0.5)
    assert plan.slope == approx(machine.slope)
    assert plan.base == approx(BASE)
    assert plan.whole_batch_peak == approx(BASE + EXAMPLES * machine.slope)
    assert plan.advice == (
        "Batch 14 fits in 10.7 GiB as a whole; 4 is fastest: 0.62 x the time of the plain batch."
    )


def test_networks_that_are_built_are_all_the_weights_of_a_gan(machine):
    model = step_cases.gan(MODES["eager"])
    with pytest.raises(ValueError, match="has no weights yet"):
        machine.plan(model=model)
    model.generator(step_cases.NOISE)
    model.discriminator(step_cases.X)
    assert machine.plan(model=model).micro_batch_size


def test_no_size_is_tried_that_the_line_does_not_allow(machine):
    # A twentieth stays free of 1500 MiB: 425 MiB are left, and growth counts one and a half times.
    machine.seconds = {8: 2.0, 6: 3.0}
    plan = machine.plan(limit=500 * MIB)
    assert machine.tried == [1, 2, 4, 7]
    assert (plan.fastest, plan.largest) == (1, 7)
    eight = plan.row_of(8)
    assert (eight.peak, eight.fits, eight.note) == (None, False, "not tried")
    assert eight.expected == approx(BASE + 8 * machine.slope)
    assert (plan.plain.fits, plan.plain.note) == (False, "not tried")
    assert plan.advice == (
        "Batch 14 fits in 1.46 GiB with micro_batch_size=7; 1 is fastest: 14 examples/s; the plain "
        "batch would not fit (about 1.66 GiB)."
    )
    assert machine.plan(limit=500 * MIB, objective="largest").micro_batch_size == 7


def test_what_is_kept_to_be_put_back_needs_room_too(machine, monkeypatch):
    monkeypatch.setattr(find, "unchanged", with_bytes_kept)
    machine.before = lambda trials: 300 * MIB
    plan = machine.plan(limit=10_000 * MIB, room=BASE + 650 * MIB)
    assert machine.tried == [1, 2, 4, 5]
    assert plan.row_of(4).peak == BASE + 4 * machine.slope


@contextlib.contextmanager
def with_bytes_kept(model):
    with unchanged(model) as kept:
        kept.bytes = 300 * MIB
        yield kept


def test_what_the_first_size_takes_for_itself_is_no_slope(machine):
    machine.slope, machine.once = MIB, ONCE
    plan = machine.plan(limit=ONCE + 100 * MIB)
    assert plan.largest == 14


def test_not_even_one_example_fits(machine):
    with pytest.raises(NothingFits, match=r"one example fits: it took 1.03 GiB\. Received: 1 GiB"):
        machine.plan(limit=24 * MIB, device="GPU")
    with pytest.raises(ValueError, match="must be more than what TensorFlow, the weights"):
        machine.plan(limit=-MIB)


def test_where_running_out_is_an_error(machine):
    machine.largest = 5
    plan = machine.plan(limit=None, device="GPU")
    assert machine.tried == [1, 2, 4, 8, 7, None]
    assert plan.largest == 4
    assert [plan.row_of(size).note for size in (4, 7, 8)] == ["", *["ran out of memory"] * 2]
    assert "Batch 14 fits in memory with micro_batch_size=4" in plan.advice
    machine.largest = 0
    with pytest.raises(NothingFits, match="one example fits: it ran out of memory"):
        machine.plan(limit=None, device="GPU")


def test_a_measured_peak_over_the_limit_does_not_fit(machine):
    """Memory that jumps: the line did not know."""
    machine.more = lambda size: (size == 8) * 9000 * MIB
    plan = machine.plan(limit=2000 * MIB)
    assert machine.tried == [1, 2, 4, 8]
    assert plan.largest == 4
    assert (plan.row_of(8).fits, plan.row_of(8).note) == (False, "")
    assert plan.row_of(8).peak > 9000 * MIB


def test_what_earlier_sizes_have_left_does_not_count(machine):
    machine.before = lambda trials: 20 * MIB * trials
    plan = machine.plan(limit=9000 * MIB)
    # The first one leaves what a training has as well.
    assert plan.row_of(2).peak == approx(BASE + 20 * MIB + 2 * machine.slope)
    assert plan.row_of(14).peak == approx(BASE + 20 * MIB + 14 * machine.slope)


# What is tried


class Noting(layers.Layer):
    """Notes how many examples it sees in training."""

    def call(self, inputs, training=False):
        if training:
            self.__dict__.setdefault("seen", []).append(int(inputs.shape[0]))
        return inputs


def test_trials_are_updates_of_accumulate():
    """The same weights as those of `fit` after as many updates; and the same micro-batches."""
    noting = Noting()
    expected, model = mlp(layers.Dropout(0.0)), mlp(noting)
    expected.set_weights(model.get_weights())
    model.optimizer.build(model.trainable_variables)
    trial = Trial(model, (X, Y, None), EXAMPLES, 4, {})
    trial.start()
    trial.update()
    updates = int(model.optimizer.iterations)
    assert updates == 1 + len(trial.seconds) == 4
    macrobatch.accumulate(expected, micro_batch_size=4)
    expected.fit(X, Y, batch_size=EXAMPLES, epochs=updates, verbose=0, shuffle=False)
    for found, wanted in zip(model.get_weights(), expected.get_weights()):
        np.testing.assert_allclose(found, wanted, rtol=1e-12)
    # The first batch is also looked at for examples that meet.
    assert noting.seen[:4] == noting.seen[-4:] == [4, 4, 4, 2]


def test_tokens(machine, tmp_path):
    width = X.shape[1]  # of the longest example
    machine.seconds = {4: 0.5}
    plan = machine.plan(limit=500 * MIB, sequence_axis=1, micro_batch_tokens="auto")
    assert machine.tried == [1, 2, 4, 7]  # examples of that width
    assert plan.micro_batch_size is None
    assert (plan.micro_batch_tokens, plan.largest) == (4 * width, 7 * width)
    assert [row.size for row in plan.rows] == [size * width for size in (1, 2, 4, 7, 8)]
    assert f"fits in 1.46 GiB with micro_batch_tokens={7 * width}; {4 * width} is" in plan.advice
    assert plan.slope == pytest.approx(machine.slope / width, rel=0.2)
    draw(plan, str(tmp_path / "plan.png"))
    found = json.loads(plan.to_json())
    assert (found["micro_batch_tokens"], found["whole"]) == (4 * width, 14 * width)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"micro_batch_tokens": "auto"}, "needs sequence_axis="),
        ({"micro_batch_tokens": 64, "sequence_axis": 1}, 'must be "auto" here'),
    ],
)
def test_tokens_that_cannot_be(settings, message):
    with pytest.raises(ValueError, match=message):
        macrobatch.find_micro_batch_size(MODEL, X, Y, **settings)


@pytest.mark.filterwarnings("ignore::macrobatch.ExactnessWarning")
def test_settings_of_the_model_count(monkeypatch):
    seen = []

    def accumulate(model, **settings):
        seen.append(settings)
        return model

    monkeypatch.setattr("macrobatch._plan.trial.accumulate", accumulate)
    model = mlp(loss=keras.losses.Dice())
    macrobatch.accumulate(model, micro_batch_size=2, whole_batch_loss=True)
    macrobatch.find_micro_batch_size(model, X[:1], Y[:1])
    assert seen == [{"micro_batch_size": 1, "whole_batch_loss": True}]
    weight = len
    macrobatch.find_micro_batch_size(model, X[:1], Y[:1], micro_batch_weight=weight)
    assert seen[1:] == [{"micro_batch_size": 1, "micro_batch_weight": weight}]
    settings = {"sequence_axis": 1, "micro_batch_tokens": "auto"}
    macrobatch.find_micro_batch_size(model, X[:1], Y[:1], **settings)
    assert seen[2:] == [{"micro_batch_tokens": X.shape[1], "sequence_axis": 1}]


# Nothing changes


def with_statistics(eager=True):
    between = layers.BatchNormalization(), layers.Dropout(0.5)
    return mlp(*between, metrics=["mae"], eager=eager)


@pytest.mark.parametrize(
    "build", [with_statistics, pytest.param(lambda: with_statistics(False), marks=thorough)]
)
@pytest.mark.filterwarnings("ignore::macrobatch.ExactnessWarning")
def test_nothing_changes(build):
    """Of a model that has trained, in the middle of its metrics, and is accumulated."""
    ends = []
    for plans in (False, True):
        keras.utils.set_random_seed(5)
        keras.backend.clear_session()
        model = macrobatch.accumulate(build(), micro_batch_size=4)
        model.fit(X, Y, batch_size=7, verbose=0)
        before, functions = everything(model), (model.train_function, model.test_function)
        if plans:
            plan = macrobatch.find_micro_batch_size(model, X[:2], Y[:2])
            assert [row.size for row in plan.rows] == [1, 2]
        assert everything(model) == before
        assert (model.train_function, model.test_function) == functions
        drawn = draws()
        history = model.fit(X, Y, batch_size=7, verbose=0, shuffle=False).history
        ends.append((drawn, history, [np.array(v).tolist() for v in model.variables]))
    assert ends[0] == ends[1]


def test_each_size_has_a_model_of_its_own():
    """Sizes take turns: a model that they shared would have the size of the last one."""
    model = mlp()
    trials = [Trial(model, (X, Y, None), EXAMPLES, size, {}) for size in (None, 2, 4)]
    found = [settings_of(each) for each in (model, *(trial._model for trial in trials))]
    assert found[:2] == [None, None]
    assert [each.arguments() for each in found[2:]] == [
        {"micro_batch_size": 2},
        {"micro_batch_size": 4},
    ]


class OwnCompile(keras.Sequential):
    def compile(self, *args, **kwargs):
        super().compile(*args, **kwargs)


def with_own_compile(**options):
    return compiled(OwnCompile([keras.Input([5]), layers.Dense(1)]), **options)


@pytest.mark.parametrize("build", [mlp, with_own_compile])
def test_what_was_never_trained_stays_so(build):
    model = build(metrics=["mae"])
    before = everything(model)
    macrobatch.find_micro_batch_size(model, X[:2], Y[:2])
    assert everything(model) == before
    assert not model.optimizer.built
    assert not model._compile_metrics.built
    assert not model._compile_loss.built


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failure_changes_nothing(monkeypatch, error):
    model = mlp(layers.Dropout(0.5), metrics=["mae"])
    model.fit(X, Y, verbose=0)
    before, plain = everything(model), Trial.update

    def failing(self):
        plain(self)
        if self.size == 2:
            raise error("in the middle")

    monkeypatch.setattr(Trial, "update", failing)
    with pytest.raises(error, match="in the middle"):
        macrobatch.find_micro_batch_size(model, X, Y)
    assert everything(model) == before


def test_frozen_weights_are_not_copied():
    model = mlp(layers.Dense(50, trainable=False))
    trained = sum(v.numpy().nbytes for v in model.trainable_variables)
    kept = Values(variables_of(model), rarely_written=model.non_trainable_variables)
    assert trained <= kept.bytes < trained + 200  # and a few of the optimizer and the metrics
    model.set_weights([weight * 2 for weight in model.get_weights()])
    changed = model.get_weights()
    kept.put_back()
    for before, after in zip(changed, model.get_weights()):
        np.testing.assert_array_equal(before, after * 2)


# The report


def test_the_table(machine):
    machine.seconds = {7: 0.25}
    text = str(machine.plan(limit=500 * MIB))
    assert text.splitlines()[3:11] == [
        "       size  peak memory  examples/s  fits",
        "-" * 69,
        "          1     1.03 GiB          14   yes",
        "          2     1.07 GiB          14   yes",
        "          4     1.17 GiB          14   yes",
        "          7     1.32 GiB          56   yes  chosen",
        "          8                             no  not tried: about 1.37 GiB",
        "plain batch                             no  not tried: about 1.66 GiB",
    ]
    assert "Memory limit: 1.46 GiB: a test.\n" in text
    assert "\nA micro-batch takes about 1000 MiB + size x 50 MiB.\nBatch 14 fits" in text


def test_json(machine):
    found = json.loads(machine.plan(limit=500 * MIB).to_json())
    assert found["micro_batch_size"] == 1
    assert found["rows"][0] == {
        "size": 1,
        "unit": "micro_batch_size",
        "peak": approx(BASE + 50 * MIB),
        "examples_per_second": 14.0,
        "fits": True,
        "note": "",
        "expected": None,
    }
    assert found["advice"].startswith("Batch 14 fits in")
    assert found["whole_batch_peak"] == found["plain"]["expected"]


def test_a_peak_that_cannot_be_told_by_itself(machine, monkeypatch):
    plain = machine.peak_of
    monkeypatch.setattr(search, "peak_of", lambda *args: plain(*args)._replace(is_new=False))
    assert machine.plan(limit=9000 * MIB).notes == [search.NOT_NEW]


# What goes in


def test_bad_arguments():
    model = mlp()
    planned = macrobatch.find_micro_batch_size
    with pytest.raises(ValueError, match=r"Received: memory_limit='6 apples'"):
        planned(model, X, Y, memory_limit="6 apples")
    with pytest.raises(ValueError, match=r'must be "fastest" or "largest". Received: .*7'):
        planned(model, X, Y, objective=7)
    with pytest.raises(ValueError, match="must be a Keras 3 model"):
        planned("model", X, Y)
    with pytest.raises(ValueError, match="must be compiled"):
        planned(keras.Sequential([keras.Input([5]), layers.Dense(1)]), X, Y)
    with pytest.raises(ValueError, match=r"has no weights yet. Build it first"):
        planned(compiled(keras.Sequential([layers.Dense(1)])), X, Y)
    with mirrored(2).scope():
        of_strategy = mlp()
    with pytest.raises(ValueError, match="pass the examples of one replica"):
        planned(of_strategy, X, Y)


def test_a_limit_below_what_the_weights_need():
    model = mlp()
    before = everything(model)
    with pytest.raises(ValueError, match=r"must be more than what TensorFlow, the .*'50MB'"):
        macrobatch.find_micro_batch_size(model, X, Y, memory_limit="50MB")
    assert everything(model) == before


def test_memory_of_gpus(monkeypatch):
    monkeypatch.setattr(device_memory, "gpus", lambda: [tf.config.list_logical_devices()[0]])
    assert find._memory(None)[1:] == (None, None, "GPU")
    assert find._memory("6GiB").limit.bytes == 6 * 1024 * MIB
    with pytest.raises(ValueError, match=re.escape("Received: memory_limit=0.5. Pass a size")):
        find._memory(0.5)
    monkeypatch.setattr(device_memory, "size", lambda: 8 * 1024 * MIB)
    assert find._memory(0.5).limit.bytes == 4 * 1024 * MIB


def test_memory_where_running_out_is_an_error(monkeypatch):
    monkeypatch.setattr("macrobatch._sizes.limit.address_space", lambda: 2**45)
    found = find._memory(None)
    assert (found.limit, found.room, found.device) == (None, None, "CPU")
    assert find._memory("1GiB").limit.bytes == 1024 * MIB
