"""Two outputs, of which one has labels that are rare and weigh more."""

import sys

import keras
import numpy as np

keras.config.set_floatx("float64")
keras.utils.set_random_seed(1)
random = np.random.default_rng(0)
x = random.normal(size=[46, 5])
weights = np.where(x[:, 0] > 1, 5.0, 1.0)
price, kind = random.normal(size=[46, 1]), random.integers(0, 2, [46, 1]).astype(float)

inputs = keras.Input([5])
hidden = keras.layers.Dense(8, activation="relu")(inputs)
model = keras.Model(
    inputs,
    {
        "price": keras.layers.Dense(1, name="price")(hidden),
        "kind": keras.layers.Dense(1, activation="sigmoid", name="kind")(hidden),
    },
)
model.compile(
    "adam",
    loss={"price": "mse", "kind": "binary_crossentropy"},
    loss_weights={"price": 1.0, "kind": 0.3},
)
y, w = {"price": price, "kind": kind}, {"price": np.ones(46), "kind": weights}
model.fit(x, y, sample_weight=w, batch_size=16, epochs=2, verbose=0)
single = keras.Model(inputs, model.output["kind"])
single.compile("adam", "binary_crossentropy")
single.fit(x, kind[:, 0], class_weight={0: 1.0, 1: 4.0}, batch_size=16, verbose=0)
model.save_weights(sys.argv[1])
