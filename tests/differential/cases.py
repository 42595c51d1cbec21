"""The cases of the differential test, drawn as data from a seed.

A case begins with one of the models that other tests have: a case of equivalence, a train_step of
its own, or one of MORE, whose update is not exact or which is refused. All else is drawn.
"""

import importlib
import random

import keras
import loss_cases
import model_cases
from builders import TAGS, X, Y, data, dense, masked, padded, tagger, tokens
from case import case
from keras import layers, ops
from model_cases import OPTIMIZERS
from support import BACKEND
from support.interaction import Balanced, ByNumber, Centred, contrastive, of_number

own_cases = importlib.import_module(f"{BACKEND}_cases")
STEPS = importlib.import_module("step_cases").CASES if BACKEND == "tensorflow" else {}


class Counting(layers.Layer):
    """Writes a variable whenever it is called."""

    def build(self, shape):
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, inputs):
        self.calls.assign(self.calls + 1.0)
        return inputs


def sequential(*between):
    return lambda: keras.Sequential(
        [keras.Input([4]), *(make() for make in between), layers.Dense(2)]
    )


def lstm():
    inputs = keras.Input([None, 2])
    states = layers.LSTM(4)(layers.Masking()(inputs))
    return keras.Model(inputs, layers.Dense(3, activation="softmax")(states))


def stateful():
    inputs = keras.Input(batch_shape=[8, 4])
    states = layers.SimpleRNN(3, stateful=True)(layers.Reshape([2, 2])(inputs))
    return keras.Model(inputs, layers.Dense(2)(states))


NO_XLA = "graph eager replicas"
CROSSENTROPY = {"loss": "sparse_categorical_crossentropy", "metrics": ["accuracy"]}
MORE = {
    "dropout": case(sequential(lambda: layers.Dropout(0.3, seed=5)), X, Y, warns="draws"),
    "noise": case(sequential(lambda: layers.GaussianNoise(0.3)), X, Y, warns="draws"),
    "normalised": case(
        sequential(lambda: layers.BatchNormalization(momentum=0.7)), X, Y, warns="statistics"
    ),
    "interacting": case(sequential(Centred), X, Y, warns="Examples meet"),
    "by number": case(sequential(ByNumber), X, Y, warns="number"),
    "balanced": case(sequential(Balanced), X, Y, warns="add_loss"),
    "counting": case(sequential(Counting), X, Y, warns="writes"),
    "contrastive": case(dense, X, Y, loss=contrastive, warns="Examples meet"),
    "loss by number": case(dense, X, Y, loss=of_number, warns="number"),
    "dice": case(dense, X, Y > 0.0, loss=lambda: keras.losses.Dice(), warns="scalar"),
    "lambda": case(sequential(lambda: layers.Lambda(ops.sin)), X, Y),
    "lstm": case(lstm, padded(), TAGS[:, 0], modes=NO_XLA, **CROSSENTROPY),
    "tagger": case(tagger, tokens(), TAGS, **CROSSENTROPY),
    "unmasked": case(masked, data(19, 6, 2), TAGS, **CROSSENTROPY),
    "stateful": case(stateful, X, Y, modes=NO_XLA),
}
# Models of sequences of any length, and in what there are their lengths.
SEQUENCES = {"lstm": "lengths", "tagger": None, "repeated-rows-sgd": None, "unmasked": "lengths"}
BASES = {
    name: each
    for name, each in [
        *({**loss_cases.CASES, **model_cases.CASES, **own_cases.CASES}).items(),
        *MORE.items(),
        *[(f"step {name}", None) for name in STEPS],
    ]
    if each is None or BACKEND in each.backends.split()
}
# For loops of one's own: models with one input and one output.
LOOPS = "reduction-mean dropout normalised lstm tagger nested repeated-rows-adam contrastive"

MODES = {
    "tensorflow": "graph graph graph graph eager eager compiled compiled several",
    "jax": "compiled compiled compiled compiled eager not-compiled several",
    "torch": "eager",
}[BACKEND]
FORMS = {"tensorflow": "dataset generator", "jax": "generator", "torch": "loader generator"}[
    BACKEND
]
WAYS = "fit " * 12 + "batches batches verify "
WAYS += "plan loop loop loop accumulator accumulator" if BACKEND == "tensorflow" else ""
CALLBACKS = "noise schedule stopping resize release backup"
AFTERWARDS = (
    "evaluate evaluate predict predict train_on_batch test_on_batch again recompile release "
    "reload verify"
)


def draw(seed):
    """The case of a seed: what `worker.run` takes."""
    rng = random.Random(f"{BACKEND} {seed}")

    def one(words):
        return rng.choice(words.split() if isinstance(words, str) else words)

    def maybe(chance, value, otherwise=None):
        return value if rng.random() < chance else otherwise

    way = one(WAYS)
    name = one(LOOPS if way in ("loop", "accumulator") else list(BASES))
    base, is_step = BASES[name], name in BASES and BASES[name] is None
    modes = "graph eager compiled several" if is_step else base.modes
    has_devices = BACKEND != "torch" and way not in ("verify", "plan")
    two = has_devices and ("replicas" in modes or BACKEND == "jax") and maybe(0.15, True, False)
    mode = one(MODES)
    if BACKEND == "tensorflow" and (mode not in f"{modes} several" or two):
        mode = "graph" if "graph" in modes and not two else one("graph eager")
    is_exact = not is_step and not base.warns and "Exactness" not in str(base.filters)
    cut = _cut(rng, name, base, is_exact)
    return {
        "seed": seed,
        "way": way,
        "base": name,
        "mode": mode,
        "cut": cut,
        "by_time": way == "plan"
        or not {"micro_batch_size", "micro_batch_tokens"}.intersection(cut),
        "batch": 8 if two else rng.randint(6, 9),
        "epochs": rng.randint(1, 2),
        "optimizer": maybe(0.3, one(sorted(OPTIMIZERS))),
        "metrics": not is_step and maybe(0.2, True, False),
        "weights": maybe(0.2, True, False),
        "data": maybe(0.4, one(FORMS), "arrays"),
        "validation": maybe(0.3, True, False),
        "shuffle": maybe(0.15, True, False),
        "devices": 2 if two else 1,
        "grappler": maybe(0.2, True, False),
        "callback": maybe(0.25, one(CALLBACKS)),
        "afterwards": [one(AFTERWARDS) for _ in range(maybe(0.5, rng.randint(1, 3), 0))],
        "bad": sorted(rng.sample(range(16), rng.randint(1, 4))) if "nonfinite" in cut else [],
        # For loops of one's own.
        "form": one("losses weighted scalar weighted_scalar forward aux"),
        "noise": maybe(0.2, True, False),
        "reduction": one("mean mean sum"),
        "steps": maybe(0.5, rng.randint(1, 4)) if not two else None,
        "nonfinite": one("propagate skip raise"),
    }


def _cut(rng, name, base, is_exact):
    """The arguments of `accumulate`; functions by name."""
    cut = {"micro_batch_size": rng.randint(1, 5), **(base.cut if base else {})}
    kind, other = rng.random(), rng.random()
    if kind < 0.06:
        cut["micro_batch_size"] = 50
    elif kind < 0.14 and is_exact:
        cut = rng.choice([{}, {"memory_limit": 0.9}])
    if name in SEQUENCES and rng.random() < 0.6:
        cut["sequence_axis"] = 1
        if rng.random() < 0.4:
            cut = {"micro_batch_tokens": rng.randint(6, 20), "sequence_axis": 1}
        if SEQUENCES[name] or rng.random() < 0.2:
            cut["lengths"] = "lengths"
    if other < 0.1:
        cut["micro_batch_weight"] = "squares"
    elif other < 0.2 or (name in ("contrastive", "dice") and other < 0.7):
        cut["whole_batch_loss"] = True
    if rng.random() < 0.12:
        cut["nonfinite"] = rng.choice(["skip", "skip", "skip", "raise"])
    return cut
