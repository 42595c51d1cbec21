"""Loops of one's own on TensorFlow: value_and_gradients and GradientAccumulator."""

import keras
import numpy as np
import support
import tensorflow as tf

import macrobatch


def in_mode(run, function):
    """A step on a batch as the case runs it: eagerly, in a graph, compiled, on replicas."""
    mode, strategy = run.case["mode"], support.strategy
    if strategy.num_replicas_in_sync == 1:
        if mode == "eager":
            return function
        return tf.function(function, jit_compile=mode == "compiled", reduce_retracing=True)
    on_replicas = tf.function(lambda batch: strategy.run(function, args=(batch,)))

    def step(batch):
        cut = run.case["seed"] % (len(batch[0]) + 1)  # a replica may have no example
        distributed = tf.nest.map_structure(
            lambda each: strategy.experimental_distribute_values_from_function(
                lambda context: (each[:cut], each[cut:])[context.replica_id_in_sync_group]
            ),
            batch,
        )
        results = on_replicas(distributed)
        return tf.nest.map_structure(lambda r: strategy.experimental_local_results(r)[0], results)

    return step


def losses_of(y, y_pred):
    """A loss for each example, or for each position."""
    if y.dtype.is_integer:
        return keras.losses.sparse_categorical_crossentropy(y, y_pred)
    return tf.reduce_mean(tf.square(y - y_pred), axis=-1)


def loop(run):
    """Steps with value_and_gradients, whole batches in hand."""
    model, form = run.model(), run.case["form"]
    model(next(run.batches())[0])
    variables = model.trainable_variables
    model.optimizer.build(variables)
    noise = macrobatch.GradientNoiseScale(every=1) if run.case["noise"] else None
    names = ("micro_batch_size", "micro_batch_tokens", "sequence_axis", "memory_limit")
    asked = run.cut()
    cut = {name: asked[name] for name in names if name in asked}
    if "lengths" in asked:
        cut["lengths"] = lambda batch: asked["lengths"](batch[0], None, None)

    def loss_fn(batch):
        losses = losses_of(batch[1], model(batch[0], training=True))
        weights = tf.cast(tf.reduce_sum(tf.abs(tf.cast(losses, "float64")) + 1.0), "float64")
        return {
            "losses": lambda: losses,
            "weighted": lambda: (losses, tf.abs(losses) + 1.0),
            "scalar": lambda: tf.reduce_mean(losses),
            "weighted_scalar": lambda: (tf.reduce_mean(losses), weights),
            "aux": lambda: (losses, {"losses": losses, "sum": tf.reduce_sum(losses)}),
        }[form]()

    def of_whole_batch(y_pred, batch):
        return tf.math.log(tf.reduce_mean(losses_of(batch[1], y_pred)))

    def step(batch):
        options = {"has_aux": form == "aux", "noise_scale": noise, **cut}
        function = loss_fn
        if form == "forward":
            options["forward"], function = lambda b: model(b[0], training=True), of_whole_batch
        value, gradients = macrobatch.value_and_gradients(function, variables, batch, **options)
        model.optimizer.apply(gradients, variables)
        return value

    step = in_mode(run, step)
    for batch in run.batches():
        batch = tf.nest.map_structure(tf.constant, batch)
        run.log("loss", tf.nest.map_structure(np.array, step(batch)))
    if noise is not None:
        run.log("noise", noise.result())


def accumulator(run):
    """Micro-batches that arrive one by one, in windows of any length."""
    model, case = run.model(), run.case
    model(next(run.batches())[0])
    variables = model.trainable_variables
    window = macrobatch.GradientAccumulator(
        model.optimizer,
        variables,
        case["steps"],
        reduction=case["reduction"],
        nonfinite=case["nonfinite"],
    )

    def gradients_of(x, y):
        with tf.GradientTape() as tape:
            losses = losses_of(y, model(x, training=True))
            loss = tf.reduce_mean(losses) if case["reduction"] == "mean" else tf.reduce_sum(losses)
        weight = tf.cast(tf.shape(y)[0], "float64") if case["reduction"] == "mean" else None
        return tape.gradient(loss, variables), weight

    def add(batch):
        gradients, weight = gradients_of(*batch)
        if case["steps"]:
            return window.step(gradients, weight=weight)
        window.add(gradients, weight=weight)
        return tf.constant(False)

    add = in_mode(run, add)
    for index, batch in enumerate(run.batches()):
        applied = add(tf.nest.map_structure(tf.constant, batch[:2]))
        run.log("window", [window.pending, window.total_weight, window.skipped, bool(applied)])
        if not case["steps"] and index % 2:
            window.apply()
    run.log("flushed", bool(window.flush()))
    run.log("window", [window.pending, window.total_weight, window.skipped])


WAYS = {"loop": loop, "accumulator": accumulator}
