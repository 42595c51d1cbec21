"""find_micro_batch_size: the choice, the table that it rests on, and that nothing changes."""

import json
import sys

import keras
import numpy as np
import pytest
from keras import layers
from support import BACKEND, draws, everything, mirrored, thorough
from support.inside import make_available, make_running_out_an_error, skip_interaction_check
from support.memory import BASE, MIB, Room, pretend_gpu
from verify_models import X, Y, compiled, mlp, sequential

import macrobatch

pytestmark = pytest.mark.skipif(BACKEND != "tensorflow", reason="not on this backend yet")

EXAMPLES = len(X)  # 14
EXAMPLE = 50 * MIB  # what each takes in the machine below
ONCE = 200 * MIB  # what the first size may take for itself


def seconds(numbers):
    """Small micro-batches are slow, and large ones too: those of four are the fastest."""
    return 1 + (numbers / 5) ** 2 / 16


def seconds_of_batch(size):
    sizes = [size] * (EXAMPLES // size) + [EXAMPLES % size] * (EXAMPLES % size > 0)
    return sum(seconds(5 * each) for each in sizes)


def roomy(*between):
    return sequential(Room(), *between, layers.Dense(1), optimizer="sgd", name="roomy")


@pytest.fixture
def machine(counted, clock, monkeypatch):
    """A machine whose memory and time only the layer `Room` takes; a function that plans on it."""
    skip_interaction_check(monkeypatch)
    make_available(monkeypatch, 4000 * MIB)
    monkeypatch.setattr(clock, "bytes", lambda numbers: EXAMPLE * numbers // 5)
    monkeypatch.setattr(clock, "seconds", seconds)

    def plan(beyond=None, model=None, **options):
        """Plans with so many bytes beyond what was there before."""
        limit = None if beyond is None else BASE + beyond
        return macrobatch.find_micro_batch_size(
            model or roomy(), X, Y, memory_limit=limit, **options
        )

    return plan


def tried(plan):
    return [row.size for row in plan.rows if row.peak]


def approx(size):
    return pytest.approx(size, rel=1e-5)  # the weights that are kept


# The choice


def test_everything_fits(machine):
    plan = machine(1000 * MIB)
    assert tried(plan) == [1, 2, 4, 8, 14]
    assert (plan.micro_batch_size, plan.fastest, plan.largest) == (4, 4, 14)
    assert all(row.fits for row in [*plan.rows, plan.plain])
    for row in plan.rows:  # Each has a model of its own: sizes take turns.
        assert row.peak == approx(BASE + row.size * EXAMPLE)
        assert row.examples_per_second == pytest.approx(EXAMPLES / seconds_of_batch(row.size))
    assert (plan.base, plan.slope) == (approx(BASE), approx(EXAMPLE))
    assert plan.whole_batch_peak == approx(BASE + EXAMPLES * EXAMPLE)
    assert plan.advice == (
        "Batch 14 fits in 1.04 GiB as a whole; 4 is fastest: 0.55 x the time of the plain batch."
    )
    assert machine(1000 * MIB, objective="largest").micro_batch_size == 14


def test_no_size_is_tried_that_the_line_does_not_allow(machine):
    # A twentieth stays free, and growth counts one and a half times.
    plan = machine(500 * MIB)
    assert tried(plan) == [1, 2, 4, 7]
    assert (plan.fastest, plan.largest) == (4, 7)
    eight = plan.row_of(8)
    assert (eight.peak, eight.fits, eight.note) == (None, False, "not tried")
    assert eight.expected == approx(BASE + 8 * EXAMPLE)
    assert (plan.plain.fits, plan.plain.note) == (False, "not tried")
    assert plan.advice == (
        "Batch 14 fits in 564 MiB with micro_batch_size=7; "
        "4 is fastest: 1.93 examples/s; the plain batch would not fit (about 764 MiB)."
    )


class Large(layers.Layer):
    """Has weights of 40 MiB."""

    def build(self, shape):
        self.weight = self.add_weight(shape=[5 * MIB], initializer="zeros")

    def call(self, inputs):
        return inputs + self.weight[0]


@pytest.mark.parametrize("trainable", [True, False])
def test_what_is_kept_to_be_put_back_needs_room_too(trainable, machine, counted, monkeypatch):
    """Frozen weights are not copied."""
    monkeypatch.setattr(Room, "bytes", lambda numbers: 20 * MIB * numbers // 5)
    make_available(monkeypatch, BASE + 180 * MIB)
    counted.base = BASE + 40 * MIB * trainable
    plan = machine(1000 * MIB, roomy(Large(trainable=trainable)))
    # Gradients of what is trained need room as well.
    assert tried(plan) == ([1, 2, 3] if trainable else [1, 2, 4, 6])
    assert plan.row_of(2).peak == approx(BASE + 2 * 20 * MIB)


def test_what_the_first_size_takes_for_itself_is_no_slope(machine, monkeypatch):
    monkeypatch.setattr(Room, "bytes", lambda numbers: ONCE + MIB * numbers // 5)
    assert machine(ONCE + 100 * MIB).largest == 14


def test_not_even_one_example_fits(machine):
    with pytest.raises(ValueError, match=r"one example fits: it took 114 MiB\. Received: 88 MiB"):
        machine(24 * MIB)
    with pytest.raises(ValueError, match="must be more than what TensorFlow, the weights"):
        machine(-MIB)


def test_where_running_out_is_an_error(machine, room, monkeypatch):
    make_running_out_an_error(monkeypatch)
    room.narrow(5 * 5)
    plan = machine()
    assert (plan.limit, plan.largest) == (None, 4)
    assert [plan.row_of(size).note for size in (4, 7, 8)] == ["", *["ran out of memory"] * 2]
    assert "Batch 14 fits in memory with micro_batch_size=4" in plan.advice
    room.narrow(0)
    with pytest.raises(ValueError, match="one example fits: it ran out of memory"):
        machine()


def test_a_measured_peak_over_the_limit_does_not_fit(machine, monkeypatch):
    """Memory that jumps: the line did not know."""
    jump = {5 * 8: 2000 * MIB}
    monkeypatch.setattr(Room, "bytes", lambda numbers: jump.get(numbers, EXAMPLE * numbers // 5))
    plan = machine(1000 * MIB)
    assert tried(plan) == [1, 2, 4, 8]
    assert plan.largest == 4
    assert (plan.row_of(8).fits, plan.row_of(8).note) == (False, "")


def test_what_earlier_sizes_have_left_does_not_count(machine, counted):
    counted.left = 20 * MIB
    plan = machine(2000 * MIB)
    # The first one leaves what a training has as well.
    for size in (2, 14):
        assert plan.row_of(size).peak == approx(BASE + 20 * MIB + size * EXAMPLE)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_what_was_taken_before_does_not_count():
    """With the counter of this system."""
    earlier = np.ones(500 * MIB, "uint8")
    del earlier
    with open("/proc/self/status") as lines:
        fields = dict(line.split(":", 1) for line in lines)
    plan = macrobatch.find_micro_batch_size(mlp(), X[:2], Y[:2])
    highest = 1024 * int(fields["VmHWM"].split()[0])
    # Not every system tells the peak of a size by itself.
    assert plan.notes or 100 * MIB < plan.rows[0].peak < highest - 300 * MIB
    assert plan.limit > plan.rows[0].peak


@pytest.mark.parametrize("size", [2000 * MIB, None])
def test_a_gpu(size, machine, monkeypatch):
    pretend_gpu(monkeypatch, size)
    make_available(monkeypatch, MIB)  # which is none of its
    plan = machine()
    assert (plan.device, plan.limit, plan.largest) == ("GPU", size, 14)
    assert machine(500 * MIB).largest == 7
    if size is None:
        with pytest.raises(ValueError, match=r"Received: memory_limit=0.3. Pass a size"):
            macrobatch.find_micro_batch_size(roomy(), X, Y, memory_limit=0.3)
    else:
        plan = macrobatch.find_micro_batch_size(roomy(), X, Y, memory_limit=0.3)
        assert plan.limit == int(size * 0.3)


def test_tokens(machine):
    model = sequential(
        *(layers.Embedding(9, 1), Room(), layers.Dense(1)),
        inputs=keras.Input([None], dtype="int32"),
        optimizer="sgd",
    )
    options = {"sequence_axis": 1, "micro_batch_tokens": "auto", "memory_limit": BASE + 500 * MIB}
    tokens, labels = np.ones([EXAMPLES, 5], "int32"), np.ones([EXAMPLES, 5, 1])
    plan = macrobatch.find_micro_batch_size(model, tokens, labels, **options)
    assert tried(plan) == [5, 10, 20, 35]  # examples of five tokens
    assert plan.micro_batch_size is None
    assert (plan.micro_batch_tokens, plan.largest) == (20, 35)
    assert [row.size for row in plan.rows] == [5, 10, 20, 35, 40]
    assert "fits in 564 MiB with micro_batch_tokens=35; 20 is fastest" in plan.advice
    assert plan.slope == pytest.approx(EXAMPLE / 5, rel=0.2)
    found = json.loads(plan.to_json())
    assert (found["micro_batch_tokens"], found["whole"]) == (20, 70)


@pytest.mark.filterwarnings("ignore::macrobatch.ExactnessWarning")
def test_settings_of_the_model_count():
    """As long as none is given here."""
    seen = []

    def weight(x, y, sample_weight):
        seen.append(1)
        return len(x)

    model = macrobatch.accumulate(mlp(), micro_batch_size=2, micro_batch_weight=weight)
    macrobatch.find_micro_batch_size(model, X[:2], Y[:2])
    assert seen
    seen.clear()
    macrobatch.find_micro_batch_size(model, X[:2], Y[:2], whole_batch_loss=True)
    assert not seen


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


class Fails(layers.Layer):
    """Fails in the second update in micro-batches of two, of a batch of four."""

    def __init__(self, error):
        super().__init__()
        self.error, self.calls = error, 0

    def call(self, inputs):
        self.calls += inputs.shape[0] == 2
        if self.calls == 4:
            raise self.error("in the middle")
        return inputs


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failure_changes_nothing(monkeypatch, error):
    skip_interaction_check(monkeypatch)
    model = mlp(Fails(error), layers.Dropout(0.5), metrics=["mae"])
    model.fit(X, Y, verbose=0)
    before = everything(model)
    with pytest.raises(error, match="in the middle"):
        macrobatch.find_micro_batch_size(model, X[:4], Y[:4])
    assert everything(model) == before


# The report


def test_the_table(machine):
    text = str(machine(500 * MIB))
    assert text.splitlines()[3:11] == [
        "       size  peak memory  examples/s  fits",
        "-" * 68,
        "          1      114 MiB       0.941   yes",
        "          2      164 MiB         1.6   yes",
        "          4      264 MiB        1.93   yes  chosen",
        "          7      414 MiB        1.72   yes",
        "          8                             no  not tried: about 464 MiB",
        "plain batch                             no  not tried: about 764 MiB",
    ]
    assert "Memory limit: 564 MiB: memory_limit=" in text
    assert "\nA micro-batch takes about 64 MiB + size x 50 MiB.\nBatch 14 fits" in text


def test_json(machine):
    found = json.loads(machine(500 * MIB).to_json())
    assert found["micro_batch_size"] == 4
    assert found["rows"][0] == {
        "size": 1,
        "unit": "micro_batch_size",
        "peak": approx(BASE + 50 * MIB),
        "examples_per_second": pytest.approx(EXAMPLES / seconds_of_batch(1)),
        "fits": True,
        "note": "",
        "expected": None,
    }
    assert found["advice"].startswith("Batch 14 fits in")
    assert found["whole_batch_peak"] == found["plain"]["expected"]


def test_peaks_that_cannot_be_told_one_by_one(machine, counted):
    counted.can_reset = False
    (note,) = machine(1000 * MIB).notes
    assert note.startswith("This system does not tell the peak of each size by itself")


# What goes in


def with_replicas():
    with mirrored(2).scope():
        return mlp()


@pytest.mark.parametrize(
    ("build", "settings", "message"),
    [
        (mlp, {"memory_limit": "6 apples"}, r"Received: memory_limit='6 apples'"),
        (mlp, {"objective": 7}, r'must be "fastest" or "largest". Received: .*7'),
        (mlp, {"micro_batch_tokens": "auto"}, "needs sequence_axis="),
        (mlp, {"micro_batch_tokens": 64, "sequence_axis": 1}, 'must be "auto" here'),
        (lambda: "model", {}, "must be a Keras 3 model"),
        (lambda: keras.Sequential([keras.Input([5]), layers.Dense(1)]), {}, "must be compiled"),
        (
            lambda: compiled(keras.Sequential([layers.Dense(1)])),
            {},
            r"no weights yet. Build it fir",
        ),
        (with_replicas, {}, "pass the examples of one replica"),
    ],
)
def test_refusals(build, settings, message):
    with pytest.raises(ValueError, match=message):
        macrobatch.find_micro_batch_size(build(), X, Y, **settings)
