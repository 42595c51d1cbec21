"""verify: the verdict is right on exact models and on inexact ones, and nothing changes."""

import json
import random

import keras
import numpy as np
import pytest
import tensorflow as tf
import verify_models as models
from keras import layers, ops
from verify_models import EXACT, SIZE, X, Y, compiled, mlp

import macrobatch


def verified(model, batch, settings=None, **options):
    return macrobatch.verify(model, *batch, **(settings or SIZE), **options)


def kinds(report):
    return [cause.kind for cause in report.causes]


@pytest.mark.parametrize("name", EXACT)
def test_exact_models(name):
    report = verified(*EXACT[name]())
    assert report.exact is True, str(report)
    assert report.causes == []
    assert report.dtype == ("float32" if name == "not-copied" else "float64")
    assert bool(report.notes) == (name == "not-copied")


# What is not exact, each for one reason: the causes, and the names of the first.
INEXACT = {
    "batch-norm": (
        lambda: (mlp(layers.BatchNormalization(name="norm")), (X, Y)),
        {"batch_normalization": ("norm",)},
    ),
    "two-batch-norms": (
        lambda: (
            mlp(
                layers.BatchNormalization(name="first"),
                layers.Dense(3),
                layers.BatchNormalization(name="second"),
            ),
            (X, Y),
        ),
        {"batch_normalization": ("first", "second")},
    ),
    "layer": (
        lambda: (mlp(models.Centered(name="centered")), (X, Y)),
        {"examples_meet": ("centered",)},
    ),
    "contrastive": (
        lambda: (mlp(layers.Dense(3), loss=models.contrastive), (X, Y)),
        {"examples_meet": ("contrastive",)},
    ),
    "dice": (
        lambda: (
            mlp(layers.Activation("sigmoid"), loss=keras.losses.Dice(name="dice")),
            (X, (Y > 0).astype("float64")),
        ),
        {"scalar_loss": ("dice",)},
    ),
    "sum": (
        lambda: (mlp(loss=models.sum_of_all), (X, Y)),
        {"scalar_loss": ("sum_of_all",)},
    ),
    "own-loss": (
        lambda: (compiled(models.OwnLoss("tokens")), (X, models.OWN)),
        {"scalar_loss": ("compute_loss",)},
    ),
    "added": (
        lambda: (mlp(models.Balanced(name="balanced")), (X, Y)),
        {"scalar_loss": ("balanced",)},
    ),
    "state": (
        lambda: (mlp(models.Counting(name="counting"), name="model"), (X, Y)),
        {"state": ("model/counting/count",)},
    ),
    "two-causes": (
        lambda: (
            mlp(layers.BatchNormalization(name="norm"), models.Centered(name="centered")),
            (X, Y),
        ),
        {"batch_normalization": ("norm",), "examples_meet": ("centered",)},
    ),
    "norm-and-loss": (
        lambda: (mlp(layers.BatchNormalization(name="norm"), loss=models.sum_of_all), (X, Y)),
        {"batch_normalization": ("norm",), "scalar_loss": ("sum_of_all",)},
    ),
}


@pytest.mark.parametrize("name", INEXACT)
def test_inexact_models(name):
    make, expected = INEXACT[name]
    report = verified(*make())
    assert report.exact is False
    assert {cause.kind: cause.names for cause in report.causes} == expected, str(report)
    assert all(cause.explanation and cause.advice for cause in report.causes)
