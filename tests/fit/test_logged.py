"""What the log says of the first fit of a model: how its batches are cut."""

import keras
import numpy as np
import pytest
from support import BACKEND, PLAIN, mirrored

import macrobatch

RANDOM = np.random.RandomState(0)
X, TOKENS, Y = RANDOM.randn(12, 4), RANDOM.randint(1, 9, [12, 6]), RANDOM.randn(12, 1)


def dense(*layers):
    model = keras.Sequential([keras.Input([4]), *layers, keras.layers.Dense(1)])
    model.compile("sgd", "mse", **PLAIN)
    return model


def of_tokens():
    layers = [keras.layers.Embedding(9, 2), keras.layers.GlobalAveragePooling1D()]
    model = keras.Sequential([keras.Input([None], dtype="int32"), *layers, keras.layers.Dense(1)])
    model.compile("sgd", "mse", **PLAIN)
    return model


@pytest.fixture
def lines(caplog):
    """The lines of the package so far. Python shows them where nobody has set up a log."""

    def lines():
        own = [record for record in caplog.records if record.name == "macrobatch"]
        assert {record.levelname for record in own} <= {"WARNING"}
        return [record.message for record in own]

    return lines


@pytest.mark.parametrize(
    ("cut", "line"),
    [
        ({"micro_batch_size": 4}, "3 micro-batches of 4"),
        ({"micro_batch_size": 5}, "3 micro-batches of up to 5"),
        (
            {"micro_batch_size": 4, "sequence_axis": 1},
            "micro-batches of up to 4 examples of similar length",
        ),
        (
            {"micro_batch_tokens": 30, "sequence_axis": 1},
            "micro-batches of up to 30 tokens of similar length",
        ),
        ({"micro_batch_size": 4, "whole_batch_loss": True}, "3 micro-batches of 4"),
    ],
)
def test_how_batches_are_cut(lines, cut, line):
    x, build = (TOKENS, of_tokens) if "sequence_axis" in cut else (X, dense)
    model = macrobatch.accumulate(build(), **cut)
    model.fit(x, Y, batch_size=12, verbose=0)
    assert lines() == [f"macrobatch: batches of 12 in {line}"]


def test_once_for_each_model(lines):
    model = macrobatch.accumulate(dense(), 2)
    for size in (8, 8, 4):
        model.fit(X, Y, batch_size=size, epochs=2, verbose=0)
    model.compile("sgd", "mae", **PLAIN)
    model.fit(X, Y, batch_size=6, verbose=0)
    model.train_on_batch(X, Y)
    assert lines() == ["macrobatch: batches of 8 in 4 micro-batches of 2"]
    macrobatch.accumulate(model, 3).fit(X, Y, verbose=0)
    assert lines()[1:] == ["macrobatch: batches of 12 in 4 micro-batches of 3"]


def test_a_batch_that_is_not_cut_has_a_warning_instead(lines):
    model = macrobatch.accumulate(dense(), 4)
    for _ in range(2):
        with pytest.warns(UserWarning, match="Nothing is being accumulated: the first batch has 4"):
            model.fit(X, Y, batch_size=4, verbose=0)
    assert lines() == []
    model.fit(X, Y, batch_size=6, verbose=0)
    assert lines() == ["macrobatch: batches of 6 in 2 micro-batches of up to 4"]


def test_a_size_that_is_looked_for(lines):
    macrobatch.accumulate(dense()).fit(X[:2], Y[:2], verbose=0)
    (line,) = lines()
    assert line.startswith("macrobatch: batches of 2 in micro-batches of ")
    assert line.endswith(" at first; the fastest micro_batch_size is being looked for")


def test_a_size_that_is_found_at_once(lines):
    """As where random layers draw: there the largest is taken, which has a line of its own."""
    macrobatch.accumulate(dense(keras.layers.Dropout(0.5))).fit(X[:2], Y[:2], verbose=0)
    (line,) = lines()
    assert line.startswith("macrobatch: micro_batch_size=")


@pytest.mark.skipif(BACKEND == "torch", reason="one device")
def test_on_several_replicas(lines):
    if BACKEND == "tensorflow":
        with mirrored(2).scope():
            model = dense()
    else:
        devices = keras.distribution.list_devices()[:2]
        keras.distribution.set_distribution(keras.distribution.DataParallel(devices=devices))
        model = dense()
    try:
        macrobatch.accumulate(model, 2).fit(X, Y, verbose=0)
    finally:
        if BACKEND == "jax":
            keras.distribution.set_distribution(None)
    line = "macrobatch: batches of 12 in 3 micro-batches of 2 on each of 2 replicas"
    assert lines() == [line]


def test_nothing_is_said_of_fits_of_the_package_itself(lines):
    model = macrobatch.accumulate(dense(), 4)
    assert macrobatch.verify(model, X, Y).exact
    if BACKEND == "tensorflow":
        macrobatch.find_micro_batch_size(model, X[:2], Y[:2])
    assert lines() == []
