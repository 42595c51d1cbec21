"""Train steps as people write them. Random draws come with the data, so that the whole batch and
its micro-batches see the same.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

EXAMPLES = 45  # in batches of 20, 20 and 5


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=[EXAMPLES, *shape])


X, Y = numbers(4), numbers(2, seed=1)
NOISE, OTHER = numbers(3, seed=2), numbers(4, seed=3)
UNIFORM = np.random.default_rng(4).uniform(size=[EXAMPLES, 1])
TOKENS = np.random.default_rng(5).integers(1, 9, size=[EXAMPLES, 6]) * (
    np.arange(6) < 1 + np.arange(EXAMPLES)[:, None] * 5 % 6
)


def mlp(*sizes, **options):
    return keras.Sequential([layers.Dense(size, activation="tanh", **options) for size in sizes])


def adam():
    return keras.optimizers.Adam(0.03)


class Networks(keras.Model):
    """A model that is made of networks, with an optimizer for each of some."""

    def __init__(self, *optimizers, **networks):
        super().__init__()
        for name, network in networks.items():
            setattr(self, name, network)
        self.trackers = {name: keras.metrics.Mean(name) for name in self.tracked}
        self.optimizers = optimizers

    tracked = ("loss",)

    @property
    def metrics(self):
        return list(self.trackers.values())

    def compile(self, **mode):
        super().compile(optimizer=self.optimizers[0], **mode)

    def track(self, **values):
        for name, value in values.items():
            self.trackers[name].update_state(value)
        return {name: tracker.result() for name, tracker in self.trackers.items()}


def functional(kind, **options):
    inputs = keras.Input([4])
    hidden = layers.Dense(5, activation="tanh", kernel_regularizer="l2")(inputs)
    return kind(inputs, layers.Dense(2, **options)(hidden))


class Guide(keras.Model):
    """The step of Keras' guide: compiled loss, regularisers, compiled metrics."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}


def guide(mode):
    model = functional(Guide, activity_regularizer="l1")
    model.compile(adam(), "mae", metrics=["mse"], **mode)
    return model


class Plain(keras.Model):
    """A loss of the step's own, one value per example, with weights."""

    def train_step(self, data):
        x, y, weights = data
        with tf.GradientTape() as tape:
            losses = tf.reduce_mean(tf.square(y - self(x, training=True)), -1) * weights
        gradients = tape.gradient(losses, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return {"loss": tf.reduce_mean(losses), "rate": self.optimizer.learning_rate}


def plain(mode):
    model = functional(Plain)
    schedule = keras.optimizers.schedules.ExponentialDecay(0.03, 1, 0.5)
    model.compile(keras.optimizers.SGD(schedule, momentum=0.9), **mode)
    return model


class Autoencoder(Networks):
    """A variational autoencoder with three trackers."""

    tracked = ("total", "reconstruction", "kl")

    def train_step(self, data):
        x, noise = data
        with tf.GradientTape() as tape:
            mean, log_var = tf.split(self.encoder(x), 2, axis=1)
            decoded = self.decoder(mean + tf.exp(0.5 * log_var) * noise)
            reconstruction = tf.reduce_mean(tf.reduce_sum(tf.square(x - decoded), 1))
            kl = -0.5 * (1 + log_var - tf.square(mean) - tf.exp(log_var))
            kl = tf.reduce_mean(tf.reduce_sum(kl, axis=1))
            total = reconstruction + kl
        gradients = tape.gradient(total, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights))
        return self.track(total=total, reconstruction=reconstruction, kl=kl)


def autoencoder(mode):
    model = Autoencoder(adam(), encoder=mlp(5, 6), decoder=mlp(5, 4))
    model.compile(**mode)
    return model


class Distiller(keras.Model):
    """A student that learns from labels and from a teacher."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = functional(keras.Model), mlp(7, 2)
        self.student_loss = keras.losses.MeanSquaredError()
        self.teacher_loss = keras.losses.KLDivergence()

    def call(self, x):
        return self.student(x)

    def train_step(self, data):
        x, y = data
        soft = self.teacher(x, training=False)
        with tf.GradientTape() as tape:
            y_pred = self.student(x, training=True)
            of_labels = self.student_loss(y, y_pred)
            of_teacher = self.teacher_loss(tf.nn.softmax(soft / 3), tf.nn.softmax(y_pred / 3))
            loss = 0.1 * of_labels + 0.9 * of_teacher * 9
        gradients = tape.gradient(loss, self.student.trainable_variables)
        self.optimizer.apply(gradients, self.student.trainable_variables)
        logs = self.compute_metrics(x, y, y_pred, None)
        return {**logs, "student_loss": of_labels, "teacher_loss": of_teacher}


def distiller(mode):
    model = Distiller()
    model.compile(adam(), metrics=["mae"], **mode)
    return model


class Diffusion(Networks):
    """A diffusion model whose slow copy follows the trained network after each update."""

    tracked = ("noise_loss",)

    def train_step(self, data):
        images, noise, times = data
        signal, rate = tf.cos(times), tf.sin(times)
        noisy = signal * images + rate * noise
        with tf.GradientTape() as tape:
            predicted = self.network(tf.concat([noisy, rate**2], 1), training=True)
            loss = tf.reduce_mean(tf.abs(noise - predicted))
        gradients = tape.gradient(loss, self.network.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.network.trainable_weights))
        for weight, slow in zip(self.network.weights, self.ema.weights):
            slow.assign(0.9 * slow + 0.1 * weight)
        return self.track(noise_loss=loss)


def diffusion(mode):
    model = Diffusion(adam(), network=mlp(6, 4), ema=mlp(6, 4))
    for network in (model.network, model.ema):
        network.build([None, 5])
    model.ema.set_weights(model.network.get_weights())
    model.compile(**mode)
    return model


class Gan(Networks):
    """A generator that sees the discriminator after its update."""

    tracked = ("d_loss", "g_loss")

    def train_step(self, data):
        real, noise = data
        size = tf.shape(real)[0]
        both = tf.concat([self.generator(noise), real], 0)
        labels = tf.concat([tf.ones([size, 1]), tf.zeros([size, 1])], 0)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(both))
        gradients = tape.gradient(d_loss, self.discriminator.trainable_weights)
        self.d_optimizer.apply(gradients, self.discriminator.trainable_weights)
        with tf.GradientTape() as tape:
            judged = self.discriminator(self.generator(noise))
            g_loss = self.loss_fn(tf.zeros([size, 1]), judged)
        gradients = tape.gradient(g_loss, self.generator.trainable_weights)
        self.g_optimizer.apply(gradients, self.generator.trainable_weights)
        return self.track(d_loss=d_loss, g_loss=g_loss)

    def compile(self, **mode):
        keras.Model.compile(self, **mode)
        self.d_optimizer, self.g_optimizer = self.optimizers
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)


def gan(mode):
    model = Gan(adam(), adam(), generator=mlp(5, 5, 4), discriminator=mlp(6, 1))
    model.compile(**mode)
    return model


class Spectral(Gan):
    """A discriminator whose kernels are normalised in each call."""


def spectral(mode):
    normalised = layers.SpectralNormalization(layers.Dense(6, activation="tanh"))
    discriminator = keras.Sequential([normalised, layers.Dense(1)])
    model = Spectral(adam(), adam(), generator=mlp(5, 4), discriminator=discriminator)
    model.compile(**mode)
    return model


class Wgan(Gan):
    """A WGAN with gradient penalty and several updates of the critic."""

    def train_step(self, data):
        real, noise, mix = data
        for _ in range(2):
            with tf.GradientTape() as tape:
                fake = self.generator(noise, training=True)
                cost = tf.reduce_mean(self.discriminator(fake)) - tf.reduce_mean(
                    self.discriminator(real)
                )
                d_loss = cost + 10.0 * self.penalty(real, fake, mix)
            gradients = tape.gradient(d_loss, self.discriminator.trainable_variables)
            self.d_optimizer.apply(gradients, self.discriminator.trainable_variables)
        with tf.GradientTape() as tape:
            g_loss = -tf.reduce_mean(self.discriminator(self.generator(noise, training=True)))
        gradients = tape.gradient(g_loss, self.generator.trainable_variables)
        self.g_optimizer.apply(gradients, self.generator.trainable_variables)
        return {"d_loss": d_loss, "g_loss": g_loss}

    def penalty(self, real, fake, mix):
        between = real + mix * (fake - real)
        with tf.GradientTape() as tape:
            tape.watch(between)
            judged = self.discriminator(between)
        slopes = tape.gradient(judged, [between])[0]
        norms = tf.sqrt(tf.reduce_sum(tf.square(slopes), 1))
        return tf.reduce_mean((norms - 1.0) ** 2)


def wgan(mode):
    model = Wgan(adam(), adam(), generator=mlp(5, 4), discriminator=mlp(6, 1))
    model.compile(**mode)
    return model


class Cycle(Networks):
    """Two generators and two discriminators, one persistent tape, then all updates."""

    tracked = ("to", "back", "d")

    def train_step(self, data):
        x, y = data
        mse = keras.losses.MeanSquaredError()
        with tf.GradientTape(persistent=True) as tape:
            fake_y, fake_x = self.to(x), self.back(y)
            cycle = tf.reduce_mean(tf.abs(self.back(fake_y) - x))
            cycle += tf.reduce_mean(tf.abs(self.to(fake_x) - y))
            judged = self.judge_x(fake_x), self.judge_y(fake_y)
            to = mse(tf.ones_like(judged[1]), judged[1]) + cycle
            back = mse(tf.ones_like(judged[0]), judged[0]) + cycle
            d_x = mse(tf.ones_like(judged[0]), self.judge_x(x)) + mse(
                tf.zeros_like(judged[0]), judged[0]
            )
            d_y = tf.reduce_mean(judged[1] ** 2) + tf.reduce_mean((self.judge_y(y) - 1) ** 2)
        pairs = [(to, self.to), (back, self.back), (d_x, self.judge_x), (d_y, self.judge_y)]
        found = [tape.gradient(loss, network.trainable_variables) for loss, network in pairs]
        for optimizer, gradients, (_, network) in zip(self.optimizers, found, pairs):
            optimizer.apply(gradients, network.trainable_variables)
        return self.track(to=to, back=back, d=d_x + d_y)


class Interleaved(Cycle):
    """The same tape, whose second gradient is taken when the first network has been updated."""

    tracked = ("to", "judge")

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            fake = self.to(x)
            judged = self.judge_y(fake)
            to = -tf.reduce_mean(judged) + tf.reduce_mean((fake - y) ** 2)
            judge = tf.reduce_mean(judged) - tf.reduce_mean(self.judge_y(y) ** 3)
        for loss, network, optimizer in (
            (judge, self.judge_y, self.optimizers[0]),
            (to, self.to, self.optimizers[1]),
        ):
            gradients = tape.gradient(loss, network.trainable_variables)
            optimizer.apply(gradients, network.trainable_variables)
        return self.track(to=to, judge=judge)


def cycle(mode, kind=Cycle):
    networks = {"to": mlp(5, 2), "back": mlp(5, 4), "judge_x": mlp(3, 1), "judge_y": mlp(3, 1)}
    model = kind(*(adam() for _ in range(4)), **networks)
    model.compile(**mode)
    return model


def interleaved(mode):
    return cycle(mode, Interleaved)


class Language(keras.Model):
    """A masked language model: weights of tokens, and padding that is masked."""

    def train_step(self, data):
        tokens, labels, weights = data
        with tf.GradientTape() as tape:
            y_pred = self(tokens, training=True)
            loss = self.compute_loss(tokens, labels, y_pred, weights)
        gradients = tape.gradient(loss, self.trainable_variables)
        gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]
        self.optimizer.apply(gradients, self.trainable_variables)
        self.own.update_state(loss, sample_weight=tf.shape(tokens)[0])
        masked = self.masked(labels, y_pred)
        return {"loss": self.own.result(), "masked": masked}


def language(mode, reduction="mean_with_sample_weight"):
    inputs = keras.Input([6], dtype="int32")
    hidden = layers.Dense(4, "tanh")(layers.Embedding(9, 3, mask_zero=True)(inputs))
    model = Language(inputs, layers.Dense(9)(hidden))
    model.own = keras.metrics.Mean()
    model.masked = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    model.compile(adam(), loss, **mode)
    return model


class Clipped(keras.Model):
    """Gradients that are clipped by hand, and their norm as a metric and in the logs."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.norm = keras.metrics.Mean("norm")

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((y - self(x)) ** 2) + tf.add_n(self.losses)
        gradients = tape.gradient(loss, self.trainable_weights)
        gradients, norm = tf.clip_by_global_norm(gradients, 0.3)
        self.optimizer.apply(gradients, self.trainable_weights)
        self.norm.update_state(norm)
        return {"loss": loss, "mean_norm": self.norm.result(), "norm": norm}


def clipped(mode):
    model = functional(Clipped)
    model.compile(adam(), **mode)
    return model


class Sharpness(keras.Model):
    """SAM: the gradient at weights that were moved along the first gradient."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x))
        gradients = tape.gradient(loss, self.trainable_variables)
        norm = tf.linalg.global_norm(gradients)
        moves = [0.05 * gradient / norm for gradient in gradients]
        for weight, move in zip(self.trainable_variables, moves):
            weight.assign_add(move)
        with tf.GradientTape() as tape:
            moved = self.compute_loss(y=y, y_pred=self(x))
        gradients = tape.gradient(moved, self.trainable_variables)
        for weight, move in zip(self.trainable_variables, moves):
            weight.assign_sub(move)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss, "moved": moved, "first_norm": norm}


def sharpness(mode):
    model = functional(Sharpness)
    model.compile(adam(), "mse", **mode)
    return model


class Momentum(Networks):
    """Self-supervised: two views, and an encoder that follows slowly, before the update."""

    def train_step(self, data):
        one, two = data
        for weight, slow in zip(self.encoder.weights, self.slow.weights):
            slow.assign(0.8 * slow + 0.2 * weight)
        target = tf.math.l2_normalize(self.slow(two, training=False), 1)
        with tf.GradientTape() as tape:
            found = tf.math.l2_normalize(self.head(self.encoder(one, training=True)), 1)
            loss = tf.reduce_mean(2 - 2 * tf.reduce_sum(found * target, 1))
        weights = self.encoder.trainable_weights + self.head.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return self.track(loss=loss)


def momentum(mode):
    model = Momentum(adam(), encoder=mlp(5, 3), slow=mlp(5, 3), head=mlp(3))
    for network in (model.encoder, model.slow):
        network.build([None, 4])
    model.compile(**mode)
    return model


class Physics(Networks):
    """Second order: u'' + u = 0, and what is known at some points."""

    tracked = ("residual", "known")

    def train_step(self, data):
        times, points, values = data
        with tf.GradientTape() as tape:
            with tf.GradientTape() as second:
                second.watch(times)
                with tf.GradientTape() as first:
                    first.watch(times)
                    u = self.network(times)
                slope = first.gradient(u, times)
            curvature = second.gradient(slope, times)
            residual = tf.reduce_mean((curvature + u) ** 2)
            known = tf.reduce_mean((self.network(points) - values) ** 2)
            loss = residual + known
        gradients = tape.gradient(loss, self.network.trainable_variables)
        self.optimizer.apply(gradients, self.network.trainable_variables)
        return self.track(residual=residual, known=known)


def physics(mode):
    model = Physics(adam(), network=mlp(6, 1))
    model.compile(**mode)
    return model


class Adversarial(Networks):
    """Inputs that are moved along the gradient of a mean, by as much as it is large."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_mean((self.network(x) - y) ** 2)
        moved = x + 3.0 * tape.gradient(loss, x)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.network(moved) - y) ** 2)
        gradients = tape.gradient(loss, self.network.trainable_variables)
        self.optimizer.apply(gradients, self.network.trainable_variables)
        return self.track(loss=loss)


def adversarial(mode):
    model = Adversarial(adam(), network=mlp(5, 2))
    model.compile(**mode)
    return model


class Repeated(keras.Model):
    """Three updates of the same weights, by hand, and a counter that the loss depends on."""

    def train_step(self, data):
        x, y = data
        logs = {}
        for i in range(3):
            self.count.assign_add(1.0)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x) - y) ** 2) * (1 + 1 / self.count)
            for weight, gradient in zip(
                self.trainable_weights, tape.gradient(loss, self.trainable_weights)
            ):
                weight.assign_sub(0.1 * gradient)
            logs[f"loss_{i}"] = loss
        return {**logs, "count": self.count + 0.0}


def repeated(mode):
    model = functional(Repeated)
    model.count = keras.Variable(0.0, dtype="float64", trainable=False)
    model.compile(**mode)
    return model


class Decorated(Guide):
    """A step that is a tf.function, with an `if` on a tensor."""

    @tf.function
    def train_step(self, data):
        x, y = data
        factor = tf.constant(1.0)
        if self.optimizer.iterations % 2 == 0:
            factor = tf.constant(0.5)
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = tf.reduce_sum(self.compute_loss(y=y, y_pred=y_pred)) * tf.cast(factor, y.dtype)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def decorated(mode):
    model = functional(Decorated)
    model.compile(adam(), keras.losses.MeanSquaredError(reduction="sum"), **mode)
    return model


class Statistics(keras.Model):
    """BatchNormalization that only looks: its output is not in the loss."""

    def __init__(self):
        super().__init__()
        self.dense, self.norm = layers.Dense(2), layers.BatchNormalization(momentum=0.7)
        self.area = keras.metrics.AUC(5, name="area")
        self.sum = keras.metrics.Sum("sum")

    def call(self, x, training=None):
        return self.dense(x), self.norm(x, training=training)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred, _ = self(x, training=True)
            loss = tf.reduce_mean((y - y_pred) ** 2)
        gradients = tape.gradient([loss, loss], self.dense.trainable_weights)
        self.optimizer.apply(gradients, self.dense.trainable_weights)
        self.area.update_state(y > 0, tf.sigmoid(y_pred))
        self.sum.update_state(loss)
        return {"loss": loss, "area": self.area.result(), "sum": self.sum.result()}


def statistics(mode):
    model = Statistics()
    model.compile(adam(), **mode)
    return model


# For each kind of step, the function that makes the model, and its data.
CASES = {
    "guide": (guide, (X, Y)),
    "values": (plain, (X, Y, 1 + UNIFORM[:, 0])),
    "autoencoder": (autoencoder, (X, NOISE)),
    "distiller": (distiller, (X, Y)),
    "diffusion": (diffusion, (X, OTHER, UNIFORM)),
    "gan": (gan, (X, NOISE)),
    "spectral": (spectral, (X, NOISE)),
    "wgan": (wgan, (X, NOISE, UNIFORM)),
    "cycle": (cycle, (X, Y)),
    "interleaved": (interleaved, (X, Y)),
    "language": (language, (TOKENS, (TOKENS + 1) % 9, np.abs(numbers(6, seed=6)))),
    "clipped": (clipped, (X, Y)),
    "sharpness": (sharpness, (X, Y)),
    "momentum": (momentum, (X, OTHER)),
    "physics": (physics, (UNIFORM, X[:, :1], Y[:, :1])),
    "adversarial": (adversarial, (X, Y)),
    "repeated": (repeated, (X, Y)),
    "decorated": (decorated, (X, Y)),
    "statistics": (statistics, (X, Y)),
}
