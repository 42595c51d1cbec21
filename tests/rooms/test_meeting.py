"""Whether examples meet: groups, the formula, tolerances, and names. Runs on NumPy too."""

import keras
import numpy as np
import pytest
from keras import layers, ops

from macrobatch._engine import BatchEngine
from macrobatch._keras import comparison, meeting


class Slicing(BatchEngine):
    def slice_of(self, leaf, start, size, static):
        return leaf[start : start + size]


ENGINE = Slicing()


def groups(examples=20, size=6, dtype="float64"):
    x = np.random.default_rng(0).normal(size=[examples, 3]).astype(dtype)
    return meeting.groups({"x": x, "none": None}, examples, size, ENGINE)


class Function(meeting.Tried):
    """A function of an array, of any number of examples."""

    def __init__(self, run):
        self._run = run

    def found(self, batch):
        return self._run(ops.convert_to_tensor(batch["x"]))

    alone = found


def find(run, is_coarse=False, **options):
    return meeting.find(Function(run), groups(**options), ENGINE, is_coarse)


def values(run, **options):
    """The names of values in which examples meet."""
    return list(find(run, **options).values)


def sized(run, size=12, **options):
    """The names of values that depend on how many examples there are, each once."""
    verdict = find(run, size=size, **options)
    assert not verdict.values
    return list(dict.fromkeys(verdict.sized))


@pytest.mark.parametrize("examples", [2, 3, 5, 6, 7, 11, 12, 20])
@pytest.mark.parametrize("size", [2, 5, 6])
def test_groups_are_of_the_batch_and_differ(examples, size):
    found = meeting.groups(np.arange(examples), examples, size, ENGINE)
    assert found.size == min(size, examples)
    here, other_a, other_b, both = (np.split(each, [found.first]) for each in found.micro_batches)
    np.testing.assert_array_equal(np.concatenate(here), np.arange(found.size))
    for left, right in [(other_a[1], here[1]), (other_b[0], here[0])]:
        np.testing.assert_array_equal(left, right)
    for left, right in [(both[0], other_a[0]), (both[1], other_b[1])]:
        np.testing.assert_array_equal(left, right)
    assert (other_a[0] != here[0]).any()
    assert (other_b[1] != here[1]).any()


def test_one_example_is_no_group():
    assert meeting.groups(np.arange(1), 1, 6, ENGINE) is None


@pytest.mark.parametrize("examples", [2, 3, 7, 20])
def test_sums_and_rows_of_each_example_are_apart(examples):
    found = values(
        lambda x: {
            "sum": ops.sum(ops.square(x)) + 1e3,
            "mean": ops.mean(ops.exp(x)),
            "rows": ops.tanh(x),
            "positions": ops.reshape(x, (-1,)),
            "not comparable": ops.sum(x)[None],
            "numbers": ops.argmax(x, axis=1),
        },
        examples=examples,
    )
    assert found == []


@pytest.mark.parametrize("examples", [2, 3, 7, 20])
@pytest.mark.parametrize(
    "meets",
    [
        lambda x: ops.square(ops.sum(x)),
        lambda x: ops.log(ops.sum(ops.exp(x))),
        lambda x: x - ops.mean(x, axis=0),
        lambda x: ops.cumsum(x, axis=0),  # Only later rows depend on others.
        lambda x: ops.flip(ops.cumsum(ops.flip(x, 0), 0), 0),  # Only earlier ones do.
        lambda x: ops.where(ops.max(x) > 10, x, x / ops.max(ops.abs(x))),
    ],
)
def test_what_meets_is_found(meets, examples):
    assert values(lambda x: {"apart": ops.sum(x), "meets": meets(x)}, examples=examples) == [
        "meets"
    ]


def places(x):
    """The place of each example."""
    return ops.expand_dims(ops.cast(ops.arange(x.shape[0]), x.dtype), 1)


@pytest.mark.parametrize(
    "depends",
    [
        lambda x: ops.sum(ops.square(x)) / x.shape[0],
        lambda x: ops.sum(places(x) * x),
        lambda x: 1.0 + ops.sum(x - x),  # Counts once per micro-batch.
        lambda x: x / x.shape[0],
        lambda x: x + places(x),
        lambda x: ops.reshape(x / x.shape[0], (-1,)),
    ],
)
@pytest.mark.parametrize(("examples", "size"), [(40, 12), (13, 12), (40, 9)])
def test_what_depends_on_how_many_examples_there_are_is_found(depends, examples, size):
    found = {"sum": ops.sum, "rows": ops.tanh, "depends": depends}
    run = lambda x: {name: function(x) for name, function in found.items()}  # noqa: E731
    assert sized(run, examples=examples, size=size) == ["depends"]


@pytest.mark.parametrize("examples", [7, 8, 9, 20])
def test_what_is_the_same_of_any_number_of_examples_is_silent(examples):
    """Of fewer than four, two pieces would say little."""

    def run(x):
        return {
            "sum": ops.sum(ops.square(x)),
            "rows": ops.tanh(x),
            "positions": ops.reshape(x, (-1,)),
            "of nobody": ops.zeros([7]),
            "numbers": ops.argmax(x, axis=1),
            "infinite": ops.sum(x) * float("inf"),
        }

    assert sized(run, examples=examples, size=examples) == []


def test_a_few_examples_that_rounding_turns_are_no_dependence():
    """Another size may round in another way, and a layer that rounds makes much of little."""

    def run(turned):
        def rows(x):
            few = ops.cast(ops.arange(x.shape[0]) < (turned if x.shape[0] < 12 else 0), x.dtype)
            return {"rows": ops.sign(x) * (1 - 2 * few[:, None])}

        return sized(rows)

    assert run(2) == []
    assert run(5) == ["rows"]


@pytest.mark.parametrize(
    ("dtype", "is_coarse", "tolerance"),
    [("float64", False, 1e-2), ("float64", True, 5e-2), ("float16", False, 5e-2)],
)
@pytest.mark.parametrize("kind", ["sum", "rows"])
def test_tolerances_of_sizes(dtype, is_coarse, tolerance, kind):
    def run(part):
        def found(x):
            factor = 1 + part / x.shape[0]
            x = ops.cast(ops.abs(x) * factor, dtype)
            return {kind: ops.sum(x) if kind == "sum" else x}

        return sized(found, is_coarse=is_coarse)

    assert run(8 * tolerance) == []
    assert run(24 * tolerance) == [kind]


def test_a_model_for_one_number_of_examples_is_not_tried_with_others():
    def run(x):
        assert x.shape[0] == 12
        return {"rows": x}

    assert sized(run) == []


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_tolerances(dtype):
    """Rounding of the dtype is none of the examples' business; ten times a tolerance is."""
    tolerance = {
        "float16": comparison.COARSE,
        "float32": comparison.SINGLE,
        "float64": comparison.DOUBLE,
    }

    def run(factor):
        def rows(x):
            x = ops.cast(x, dtype)
            return {"rows": x + ops.cast(factor * tolerance[dtype].rows * ops.sum(x), dtype)}

        return values(rows, dtype=dtype)

    assert run(0.01) == []
    assert run(10.0) == ["rows"]


def test_a_sum_of_float32_inside_of_float64_is_no_meeting():
    assert values(lambda x: {"sum": ops.cast(ops.sum(ops.cast(x, "float32")), "float64")}) == []


def test_numbers_that_are_not_finite():
    infinite = float("inf")
    assert values(lambda x: {"sum": ops.sum(x) * infinite, "rows": x * infinite}) == []
    assert values(lambda x: {"rows": ops.where(ops.max(x) > 2.1, x * infinite, x)}) in (
        ["rows"],
        [],
    )


def test_draws_that_are_not_put_back_leave_no_verdict():
    random = np.random.default_rng(0)
    verdict = find(lambda x: {"rows": x + random.normal(size=[3])})
    assert verdict == meeting.Verdict(is_random=True)


class Centred(layers.Layer):
    def call(self, x):
        return x - ops.mean(x, axis=0, keepdims=True)


def named(*inner, of=lambda y: {"y": y}, **options):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input([3]), *inner])
    return find(lambda x: of(model(x, training=True)), **options)


class ByNumber(layers.Layer):
    def call(self, x):
        return x / ops.sum(ops.ones_like(x), axis=0)


class ByPlace(layers.Layer):
    def call(self, x):
        return x + ops.cumsum(ops.ones_like(x), axis=0)


@pytest.mark.parametrize("kind", [ByNumber, ByPlace])
def test_a_layer_that_depends_on_how_many_examples_there_are_is_named(kind):
    dense = [layers.Dense(3, activation=each, dtype="float64") for each in ("tanh", None)]
    inner = keras.Sequential([keras.Input([3]), kind(name="culprit", dtype="float64")])
    verdict = named(dense[0], inner, dense[1], size=12)
    assert list(verdict.sized_layers) == ["culprit"]
    assert not verdict.layers


def test_layers_are_named_and_what_follows_is_not():
    dense = [layers.Dense(3, activation="tanh", dtype="float64") for _ in range(2)]
    verdict = named(dense[0], Centred(name="culprit", dtype="float64"), dense[1])
    assert verdict == meeting.Verdict(["culprit"], [])


def test_what_meets_besides_is_named_too():
    parts = [Centred(name=n, dtype="float64") for n in ("one", "two")]
    between = layers.Dense(3, activation="tanh", dtype="float64")
    verdict = named(
        parts[0],
        between,
        parts[1],
        of=lambda y: {"y": y, "soft": ops.log(ops.sum(ops.exp(y))), "sum": ops.sum(y)},
    )
    assert verdict == meeting.Verdict(["one", "two"], ["soft"])


def test_batch_normalization_is_frozen():
    normalized = layers.BatchNormalization(dtype="float64")
    assert not any(named(normalized))
    culprit = Centred(name="culprit", dtype="float64")
    tanh = layers.Activation("tanh", dtype="float64")
    assert named(normalized, tanh, culprit).layers == ["culprit"]
