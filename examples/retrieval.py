"""Two towers with an in-batch softmax: each question finds its answer among all of the batch.

Half of a digit is a question, and the other half is its answer. Two encoders and a temperature are
trained so that the halves of one image meet, in a loop of your own: with one tape over the whole
batch, with value_and_gradients(..., forward=), whose encoders see one micro-batch at a time, and
without forward=, where questions meet only the answers of their micro-batch.

    python examples/retrieval.py [--output retrieval.png] [--steps 150]
"""

import argparse
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import macrobatch

BATCH_SIZE, MICRO_BATCH_SIZE = 512, 32
CHECKED = 10  # how often the training is looked at


def halves():
    """Upper and lower halves of images: 1297 to train on, 500 to search in."""
    from sklearn.datasets import load_digits

    images = load_digits().data.astype("float32") / 16
    images = images[np.random.default_rng(0).permutation(len(images))]
    images = tf.constant(images)
    return (images[:-500, :32], images[:-500, 32:]), (images[-500:, :32], images[-500:, 32:])


class Towers:
    """Two encoders, and a temperature that only the loss uses."""

    def __init__(self):
        keras.utils.set_random_seed(0)
        self.questions, self.answers = self.tower(), self.tower()
        self.temperature = tf.Variable(1.0)
        encoders = (self.questions, self.answers)
        self.variables = [v for tower in encoders for v in tower.trainable_variables]
        self.variables.append(self.temperature)

    def tower(self):
        hidden = keras.layers.Dense(128, activation="gelu")
        return keras.Sequential([keras.Input([32]), hidden, keras.layers.Dense(32)])

    def encode(self, micro_batch):
        """The forward pass: one vector for each half, whatever else is in the batch."""
        questions, answers = micro_batch
        return {
            "questions": tf.linalg.l2_normalize(self.questions(questions, training=True), 1),
            "answers": tf.linalg.l2_normalize(self.answers(answers, training=True), 1),
        }

    def loss(self, vectors, batch):
        """The loss: all questions against all answers."""
        logits = vectors["questions"] @ tf.transpose(vectors["answers"])
        logits *= tf.exp(self.temperature)
        own = tf.range(tf.shape(logits)[0])
        return tf.nn.sparse_softmax_cross_entropy_with_logits(own, logits)


def whole(towers, batch):
    """The textbook: all activations of a batch are in memory at once."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(towers.loss(towers.encode(batch), batch))
    weights = [v if isinstance(v, tf.Variable) else v.value for v in towers.variables]
    return loss, tape.gradient(loss, weights)


def accumulated(towers, batch):
    """The same, in the memory of a micro-batch."""
    return macrobatch.value_and_gradients(
        towers.loss,
        towers.variables,
        batch,
        micro_batch_size=MICRO_BATCH_SIZE,
        forward=towers.encode,
    )


def apart(towers, batch):
    """Without forward=: each question meets the answers of its micro-batch only."""
    return macrobatch.value_and_gradients(
        lambda micro_batch: towers.loss(towers.encode(micro_batch), micro_batch),
        towers.variables,
        batch,
        micro_batch_size=MICRO_BATCH_SIZE,
    )


def found(towers, batch):
    """For how many questions the nearest of all answers is their own."""
    vectors = towers.encode(batch)
    nearest = tf.argmax(vectors["questions"] @ tf.transpose(vectors["answers"]), 1)
    return float(tf.reduce_mean(tf.cast(nearest == tf.range(500, dtype=tf.int64), tf.float32)))


def train(data, unseen, loss_and_gradients, steps):
    """The towers after training, the loss of the last batch, and what was found on the way."""
    towers = Towers()
    optimizer = keras.optimizers.Adam(0.003)
    optimizer.build(towers.variables)

    @tf.function
    def train_step(batch):
        loss, gradients = loss_and_gradients(towers, batch)
        optimizer.apply(gradients, towers.variables)
        return loss

    dataset = tf.data.Dataset.from_tensor_slices(data).shuffle(2000, seed=1).repeat()
    curve = []
    for step, batch in enumerate(dataset.batch(BATCH_SIZE).take(steps), 1):
        loss = train_step(batch)
        if step % max(1, steps // CHECKED) == 0:
            curve.append((step, found(towers, unseen)))
    return towers, float(loss), curve


def draw(curves, difference, output):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.8), layout="constrained")
    axes = figure.add_subplot()
    styles = {
        "whole": ("#c44e52", 6, 0.45),
        "accumulated": ("#2a6f97", 1.8, 1.0),
        "apart": ("#888888", 1.8, 1.0),
    }
    for way, (colour, width, alpha) in styles.items():
        steps, rates = zip(*curves[way])
        axes.plot(steps, [100 * r for r in rates], color=colour, linewidth=width, alpha=alpha)
    axes.legend(
        [
            f"one tape, batches of {BATCH_SIZE}",
            f"macrobatch, in {MICRO_BATCH_SIZE}s, forward=",
            f"macrobatch, in {MICRO_BATCH_SIZE}s, without it: another loss",
        ],
        frameon=False,
        loc="lower right",
    )
    axes.set_title(
        "An in-batch softmax in micro-batches learns as the whole batch does\n"
        f"(weights differ by at most {difference:.0e})",
        loc="left",
    )
    axes.set_xlabel("update")
    axes.set_ylabel("questions that find their answer, %")
    axes.set_ylim(0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    figure.savefig(output, dpi=150)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("retrieval.png"))
    parser.add_argument("--steps", type=int, default=150)
    options = parser.parse_args()
    data, unseen = halves()
    ways = {
        "whole": ("one tape", whole),
        "accumulated": (f"macrobatch, in {MICRO_BATCH_SIZE}s, forward=", accumulated),
        "apart": (f"macrobatch, in {MICRO_BATCH_SIZE}s, without it", apart),
    }
    towers, curves = {}, {}
    print(f"{f'batches of {BATCH_SIZE}':40}{'last loss':>12}{'found of 500':>14}")
    for way, (name, loss_and_gradients) in ways.items():
        result = train(data, unseen, loss_and_gradients, options.steps)
        towers[way], loss, curves[way] = result
        print(f"{name:40}{loss:12.4f}{found(towers[way], unseen):14.1%}", flush=True)
    pairs = zip(towers["whole"].variables, towers["accumulated"].variables)
    difference = max(float(np.abs(a.numpy() - b.numpy()).max()) for a, b in pairs)
    print(f"\nThe weights of the first two differ by at most {difference:.1e} (rounding).")
    draw(curves, difference, options.output)
    print(f"The curves: {options.output}")


if __name__ == "__main__":
    main()
