"""What is trained: sizes of models and their data, the same for Keras and for PyTorch."""

import numpy as np

LEARNING_RATE, ADAM_EPSILON = 1e-4, 1e-7
SEQUENCE = 64
CNN_LAYERS = [(32, 1), (32, 2), (64, 1), (64, 2)]  # filters and strides
MLP_WIDTHS = [784, 2048, 2048, 2048, 2048, 10]  # 14.2 million parameters
TINY_WIDTHS = [32, 32, 10]
TRANSFORMERS = {
    "transformer": {"layers": 2, "width": 128, "vocabulary": 2000},
    "padded transformer": {"layers": 2, "width": 128, "vocabulary": 2000},
    "encoder": {"layers": 2, "width": 128, "vocabulary": 2000},
    "large transformer": {"layers": 4, "width": 256, "vocabulary": 4000},
}
LAYER_NORM_EPSILON = 1e-3
HEADS = 4
EMBEDDING_ROWS, EMBEDDING_WIDTH, IDS = 1_000_000, 64, 8  # ids in an example


def data(model, examples):
    """Inputs and labels of one batch."""
    random = np.random.default_rng(0)
    labels = random.integers(0, 10, examples, dtype="int32")
    if model == "cnn":
        return random.normal(size=(examples, 32, 32, 3)).astype("float32"), labels
    if model == "small cnn":
        return random.normal(size=(examples, 16, 16, 3)).astype("float32"), labels
    if model in ("mlp", "tiny"):
        widths = MLP_WIDTHS if model == "mlp" else TINY_WIDTHS
        return random.normal(size=(examples, widths[0])).astype("float32"), labels
    if model == "embedding":
        return random.integers(0, EMBEDDING_ROWS, (examples, IDS), dtype="int32"), labels
    vocabulary = TRANSFORMERS[model]["vocabulary"]
    if model == "padded transformer":
        return padded_sequences(lognormal_lengths(examples), vocabulary)
    tokens = random.integers(0, vocabulary, (examples, SEQUENCE + 1), dtype="int32")
    if model == "encoder":
        return tokens[:, 1:], labels
    return tokens[:, :-1], tokens[:, 1:]


def lognormal_lengths(examples):
    """Lengths as of sentences in real text: of 64, the mean is 37 and the longest 118."""
    lengths = np.random.default_rng(30).lognormal(3.5, 0.5, examples)
    return lengths.astype(int)


def padded_sequences(lengths, vocabulary):
    """Tokens from 1 on; 0 is padding, up to the longest sequence of the batch."""
    shape = (len(lengths), lengths.max() + 1)
    tokens = np.random.default_rng(0).integers(1, vocabulary, shape, dtype="int32")
    real = np.arange(lengths.max()) < lengths[:, None]
    return tokens[:, :-1] * real, tokens[:, 1:] * real
