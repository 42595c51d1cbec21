"""A text classifier of KerasHub, made from a small config, of which LoRA's parts are trained."""

import sys

import keras
import keras_hub
import numpy as np

keras.config.set_floatx("float64")
keras.utils.set_random_seed(1)
random = np.random.default_rng(0)
mask = (np.arange(12) < random.integers(3, 13, [22, 1])).astype("int32")
x = {
    "token_ids": random.integers(1, 50, [22, 12]) * mask,
    "segment_ids": np.zeros([22, 12], "int32"),
    "padding_mask": mask,
}
y = random.integers(0, 3, [22])

backbone = keras_hub.models.BertBackbone(
    vocabulary_size=50,
    num_layers=1,
    num_heads=2,
    hidden_dim=8,
    intermediate_dim=16,
    max_sequence_length=12,
    dropout=0.0,
)
backbone.enable_lora(rank=2)
model = keras_hub.models.BertTextClassifier(backbone, num_classes=3, preprocessor=None, dropout=0.0)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
model.fit(x, y, batch_size=11, epochs=2, verbose=0)
model.save_weights(sys.argv[1])
