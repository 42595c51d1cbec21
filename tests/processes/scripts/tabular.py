"""Numbers and categories of a table, through preprocessing layers."""

import sys

import keras
import numpy as np

keras.config.set_floatx("float64")
keras.utils.set_random_seed(1)
random = np.random.default_rng(0)
age, city = random.uniform(18, 90, [45, 1]), random.choice(["Oslo", "Lima", "Pune"], [45, 1])
y = (age > 40).astype(float)

normalized = keras.layers.Normalization()
normalized.adapt(age)
lookup = keras.layers.StringLookup(output_mode="one_hot")
lookup.adapt(city)
inputs = {"age": keras.Input([1], name="age"), "city": keras.Input([1], name="city", dtype="int64")}
x = keras.layers.Concatenate()(
    [normalized(inputs["age"]), keras.layers.CategoryEncoding(4)(inputs["city"])]
)
model = keras.Model(inputs, keras.layers.Dense(1, activation="sigmoid")(x))
model.compile("nadam", "binary_crossentropy", metrics=["AUC"])
indices = np.argmax(lookup(city), -1).reshape([45, 1])
model.fit({"age": age, "city": indices}, y, batch_size=20, epochs=2, verbose=0)
model.save_weights(sys.argv[1])
