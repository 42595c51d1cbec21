"""SimCLR on handwritten digits: a loss that compares all examples of a batch, in micro-batches.

Each digit is shown twice, distorted at random, and an encoder learns to tell which two views belong
together among all views of the batch. So the loss needs the whole batch. The same training runs
three times from the same weights: on whole batches, accumulated with whole_batch_loss=True, and
accumulated without it, where views are told apart only within a micro-batch.

    python examples/contrastive.py [--output contrastive.png] [--epochs 8]
"""

import argparse
import warnings
from pathlib import Path

import keras
import numpy as np
from keras import layers, ops

import macrobatch

BATCH_SIZE, MICRO_BATCH_SIZE = 256, 16
TEMPERATURE = 0.2


def digits():
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8, 1).astype("float32") / 16
    return train_test_split(images, labels, test_size=500, random_state=0)


def views(images, seed):
    """Two views of each image: moved by up to a pixel, brighter or darker, with noise."""
    rng = np.random.default_rng(seed)

    def view():
        moved = [np.roll(image, rng.integers(-1, 2, 2), (0, 1)) for image in images]
        light = rng.uniform(0.6, 1.4, [len(images), 1, 1, 1])
        return (moved * light + rng.normal(0, 0.1, images.shape)).astype("float32")

    return {"left": view(), "right": view()}


class SimCLR(keras.Model):
    """Both views go through one encoder. The loss sees the vectors of the whole batch."""

    def __init__(self):
        super().__init__()
        self.encoder = keras.Sequential(
            [
                layers.Conv2D(16, 3, padding="same", activation="gelu"),
                layers.AveragePooling2D(2),
                layers.Conv2D(32, 3, padding="same", activation="gelu"),
                layers.Flatten(),
                layers.Dense(64, activation="gelu"),
            ]
        )
        self.head = layers.Dense(32)

    def call(self, inputs):
        return {name: self.head(self.encoder(inputs[name])) for name in ("left", "right")}

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        vectors = ops.concatenate([y_pred["left"], y_pred["right"]], 0)
        vectors = ops.normalize(vectors, axis=1)
        logits = ops.matmul(vectors, ops.transpose(vectors)) / TEMPERATURE
        count = ops.shape(vectors)[0]
        logits = logits - 1e4 * ops.eye(count)  # no vector is its own partner
        partners = ops.roll(ops.arange(count), count // 2)
        losses = keras.losses.sparse_categorical_crossentropy(partners, logits, from_logits=True)
        return ops.mean(losses)


def train(images, epochs, **accumulate):
    """The model after training, and the loss of each epoch."""
    keras.utils.set_random_seed(0)
    model = SimCLR()
    model(views(images[:1], seed=0))  # makes its weights
    model.compile(keras.optimizers.Adam(0.002))
    if accumulate:
        macrobatch.accumulate(model, **accumulate)
    losses = []
    for epoch in range(epochs):
        order = np.random.default_rng(epoch).permutation(len(images))
        pairs = views(images[order], seed=epoch)
        history = model.fit(pairs, batch_size=BATCH_SIZE, shuffle=False, verbose=0)
        losses += history.history["loss"]
    return model, losses


def accuracy(model, images, unseen, labels, unseen_labels):
    """Of a linear classifier on what the encoder makes of images."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    features = [np.array(model.encoder(each)) for each in (images, unseen)]
    scaler = StandardScaler().fit(features[0])
    classifier = LogisticRegression(max_iter=300).fit(scaler.transform(features[0]), labels)
    return classifier.score(scaler.transform(features[1]), unseen_labels)


def largest_difference(one, other):
    pairs = zip(one.get_weights(), other.get_weights())
    return max(float(np.abs(a - b).max()) for a, b in pairs)


def draw(losses, difference, output):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.8), layout="constrained")
    axes = figure.add_subplot()
    epochs = range(1, len(losses["whole"]) + 1)
    axes.plot(epochs, losses["whole"], color="#c44e52", linewidth=5, alpha=0.45)
    axes.plot(epochs, losses["accumulated"], color="#2a6f97", linewidth=1.6)
    axes.plot(epochs, losses["apart"], color="#888888", linewidth=1.6, linestyle="--")
    axes.legend(
        [
            f"whole batches of {BATCH_SIZE}",
            f"accumulated in {MICRO_BATCH_SIZE}s, whole_batch_loss=True",
            f"accumulated in {MICRO_BATCH_SIZE}s without it: another loss",
        ],
        frameon=False,
    )
    axes.set_ylim(0, 1.25 * max(losses["whole"]))
    axes.set_title(
        f"A contrastive loss, accumulated: the curve of the whole batch\n"
        f"(weights differ by at most {difference:.0e})",
        loc="left",
    )
    axes.set_xlabel("epoch")
    axes.set_ylabel("contrastive loss")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    figure.savefig(output, dpi=150)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("contrastive.png"))
    parser.add_argument("--epochs", type=int, default=8)
    options = parser.parse_args()
    images, unseen, labels, unseen_labels = digits()
    # Without whole_batch_loss= macrobatch warns that this loss cannot be exact.
    warnings.simplefilter("ignore", macrobatch.ExactnessWarning)
    cut = {"micro_batch_size": MICRO_BATCH_SIZE}
    ways = {
        "whole": ("whole", {}),
        "accumulated": (
            f"in {MICRO_BATCH_SIZE}s, whole_batch_loss=True",
            {**cut, "whole_batch_loss": True},
        ),
        "apart": (f"in {MICRO_BATCH_SIZE}s, without it", cut),
    }
    models, losses = {}, {}
    print(f"{f'batches of {BATCH_SIZE}':32}{'loss':>10}{'linear probe':>14}{'difference':>12}")
    for way, (name, accumulate) in ways.items():
        models[way], losses[way] = train(images, options.epochs, **accumulate)
        probe = accuracy(models[way], images, unseen, labels, unseen_labels)
        difference = largest_difference(models["whole"], models[way])
        print(
            f"{name:32}{losses[way][-1]:10.4f}{probe:14.1%}{difference:12.0e}",
            flush=True,
        )
    difference = largest_difference(models["whole"], models["accumulated"])
    print(f"\nWith whole_batch_loss=True, weights differ by at most {difference:.1e} (rounding).")
    print(
        f"Without it, each view is told from {2 * MICRO_BATCH_SIZE - 1} others and not from ",
        end="",
    )
    print(f"{2 * BATCH_SIZE - 1}: another, easier loss.")
    draw(losses, difference, options.output)
    print(f"The curves: {options.output}")


if __name__ == "__main__":
    main()
