"""A new head on a network whose layers are frozen."""

import sys

import keras
import numpy as np

keras.config.set_floatx("float64")
keras.utils.set_random_seed(1)
random = np.random.default_rng(0)
images, labels = random.uniform(0, 255, [14, 32, 32, 3]), random.integers(0, 2, [14])

base = keras.applications.MobileNetV2([32, 32, 3], alpha=0.35, include_top=False, weights=None)
base.trainable = False
inputs = keras.Input([32, 32, 3])
x = keras.applications.mobilenet_v2.preprocess_input(inputs)
x = keras.layers.GlobalAveragePooling2D()(base(x, training=False))
model = keras.Model(inputs, keras.layers.Dense(2, activation="softmax")(x))
model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
model.fit(images, labels, batch_size=8, epochs=2, verbose=0)
model.save_weights(sys.argv[1])
