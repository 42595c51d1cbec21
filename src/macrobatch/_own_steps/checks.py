"""What is refused of a step of a user's own, before anything has changed, and the way out."""

from typing import Any, List, Sequence

import tensorflow as tf

from macrobatch._checks import Refused, some

# The way out of everything that only the whole batch can tell.
INSIDE = (
    "Or leave macrobatch.accumulate out, and cut the batch inside the step with "
    "macrobatch.value_and_gradients"
)


def asks_for_nothing(count: int) -> None:
    """Raises for a test step that takes gradients."""
    if count:
        raise Refused("A test_step that takes gradients is not cut into micro-batches.")


def asks_for_gradients(count: int, last: int) -> None:
    """Raises for a step that takes no gradient which depends on the batch."""
    if count == 0:
        raise Refused(
            "The train_step takes no gradient of variables with tf.GradientTape.gradient, so that "
            "there is nothing to sum over micro-batches. Received: a step without a call of "
            "tape.gradient(loss, variables) that could be seen. A call inside a tf.function that "
            "was traced before cannot be seen: let the step call the plain function. "
            f"{INSIDE}."
        )
    if last < 0:
        raise Refused(
            "No gradient that the train_step takes depends on the batch. Received: losses that do "
            "not depend on any example. Expected: a loss of the batch."
        )


def in_the_step_itself(graph: Any, what: str) -> None:
    """Raises for what happens inside tf.cond, tf.while_loop or a tf.function of the step's."""
    if tf.compat.v1.get_default_graph() is not graph:
        raise Refused(
            f"{what} must be called by the train_step itself. Received: a call inside tf.cond, "
            "tf.while_loop or a tf.function, which would not be run again for each micro-batch. "
            "Move the call out of it (use the plain function, a Python loop, or tf.where). "
            f"{INSIDE}."
        )


def nothing_records(is_recording: bool) -> None:
    """Raises for a gradient of variables that another tape would differentiate."""
    if is_recording:
        raise Refused(
            "A gradient of variables is taken while a tape still records, as for a gradient of a "
            "gradient with respect to weights (MAML for instance). The gradient of the whole batch "
            "cannot be differentiated once more. Take it after the `with` blocks of all tapes. "
            f"{INSIDE}."
        )


def no_jacobian(of_variables: bool) -> None:
    """Raises for a Jacobian with respect to variables."""
    if of_variables:
        raise Refused(
            "tape.jacobian with respect to variables has a row for each value of the target, and "
            "cannot be summed over micro-batches. Received: a call in the train_step. Use "
            f"tape.gradient. {INSIDE}."
        )


def writes_no_variable_of_tensorflow(names: Any) -> None:
    """Raises for variables that are written each time a micro-batch runs."""
    if names:
        raise Refused(
            "The step writes variables of TensorFlow, which every micro-batch would write again: "
            f"{list(names)}. Make each a keras.Variable (trainable=False): the step then writes it "
            "once."
        )


def written_once(path: str, of_examples: bool, is_late: bool) -> None:
    """Raises for a variable into which examples go, and which is no metric's."""
    if of_examples:
        when = " and on the updated weights" if is_late else ""
        raise Refused(
            f"The step writes the variable {path!r} with a value that depends on the examples"
            f"{when}. It is written once, and would know one micro-batch only (a queue of a "
            "momentum encoder, a running mean of outputs). If it is a mean for your logs, make it "
            f"a keras.metrics.Mean. {INSIDE}(..., has_aux=True): aux comes back for the whole "
            "batch, and can be written to the variable."
        )


def gradients_of_the_batch(depend: bool) -> None:
    """Raises for gradients that a step has changed with what only one micro-batch knows."""
    if depend:
        raise Refused(
            "The step hands gradients to optimizer.apply that depend on the examples directly, and "
            "not through tape.gradient alone (gradients divided by the number of examples or of "
            "tokens, or multiplied by the loss). Received: values that one micro-batch comes to. "
            "Do it to the loss that tape.gradient gets: take a mean in place of a sum, for "
            f"instance. {INSIDE}."
        )


def result_in_time(name: str, is_early: bool) -> None:
    """Raises for the result of a metric that is read before all micro-batches are in it."""
    if is_early:
        raise Refused(
            f"{name!r} takes the result of a metric before the last call of tape.gradient, which "
            "is when the other micro-batches go into the metric. Take the result after it."
        )


def loss_without_metrics(depends: bool) -> None:
    """Raises for a loss that depends on what a metric has seen of this batch."""
    if depends:
        raise Refused(
            "A loss of the step depends on the result of a metric that the same step updates, "
            "which in a micro-batch is not that of the batch. Compute it from the loss itself."
        )


def metric_is_in_time(name: str, is_late: bool) -> None:
    """Raises for a metric of the examples and of what the step makes of their gradient."""
    if is_late:
        raise Refused(
            f"The metric {name!r} is updated with a value that depends on the examples and on the "
            "last gradient or on the weights after the last update. The micro-batches are through "
            "by then. Update it with values from before that update (the loss that the gradient is "
            "of). To measure the updated weights, use evaluate() or a callback."
        )


def counts_examples(name: str, does: bool) -> None:
    """Raises for a metric that would count micro-batches."""
    if not does:
        raise Refused(
            f"The metric {name!r} writes one of its variables with a value that does not depend on "
            "the examples, such as a number of batches, or zero (reset_state). It would do so for "
            "each micro-batch. Use keras.metrics.Mean, or count examples: "
            "keras.ops.shape(values)[0]."
        )


def log_is_in_time(name: str, is_late: bool) -> None:
    """Raises for a log of the examples and of what the step makes of their gradient."""
    if is_late:
        raise Refused(
            f"The log {name!r} depends on the examples and on the last gradient or on the weights "
            "after the last update. The micro-batches are through by then. Log values from before "
            "that update. To measure the updated weights, use evaluate() or a callback."
        )


def log_of_one_kind(name: str, of_metric: bool) -> None:
    """Raises for a log that is made of a metric's result and of this batch."""
    if of_metric:
        raise Refused(
            f"The log {name!r} is made of the examples and of the result of a metric. Of a "
            "micro-batch it is neither. Return both by themselves, or make each a metric's result."
        )


def log_is_a_number(name: str, shape: Any) -> None:
    """Raises for a log with several values, of which nobody knows what they are means of."""
    if len(shape) > 0:
        raise Refused(
            f"The log {name!r} must be a scalar: a mean over the examples, which counts by the "
            f"share of the micro-batch. Received: values of shape {tuple(shape)}."
        )


def logs_by_name(logs: Any) -> None:
    """Raises unless a step has returned a dictionary."""
    if not isinstance(logs, dict):
        raise Refused(
            "The step must return its logs as a dictionary of scalars. "
            f"Received: {type(logs).__name__}."
        )


def of_examples(is_not: bool) -> None:
    """Raises for a gradient with respect to what all micro-batches share, and is no variable."""
    if is_not:
        raise Refused(
            "The step takes the gradient of a mean over the examples with respect to a tensor that "
            "does not depend on the examples. It would be that of a micro-batch. Make the tensor a "
            f"keras.Variable and take the gradient of it. {INSIDE}."
        )


def weights_of_examples(shape: Any) -> None:
    """Raises for weights of a Keras loss of which there is not one for each example."""
    # In the trace, the number of examples is not known.
    if shape is not None and len(shape) > 0 and shape[0] is not None:
        raise Refused(
            "The sample_weight of a Keras loss must have the examples first. Received: weights of "
            f"shape {tuple(shape)}, which are the same for each example. Multiply the losses by "
            "them in the step itself."
        )


def counts_of_the_batch(is_late: bool) -> None:
    """Raises for masks or weights of a loss that depend on the weights of the model."""
    if is_late:
        raise Refused(
            "The mask or the weights of a Keras loss depend on gradients or updated weights, so "
            "that they cannot be counted before the step runs. Multiply the losses by them in the "
            "step itself."
        )


def draws_anew(groups: int, draws: bool) -> List[str]:
    """What to say of random numbers that are others when a micro-batch runs again."""
    if groups < 2 or not draws:
        return []
    return [
        "The train_step draws from tf.random, and takes several gradients one after the other. "
        "Each of them draws random numbers of its own, also where the step uses the same ones for "
        "two losses. Draw with keras.random and a keras.random.SeedGenerator: a micro-batch then "
        "draws the same for all gradients."
    ]


def examples_meet(layers: Sequence[str], places: Sequence[int]) -> str:
    """What to say of losses in which an example depends on others."""
    where = f" in these layers: {some(layers)}" if layers else ""
    which = f" ({_ordinals(places)} that the step takes)" if places else ""
    return (
        f"Examples meet{where} in the loss of a gradient{which}. What comes of an example depends "
        "on the other examples of its micro-batch, so that the update is not that of the whole "
        "batch. If examples are compared (contrastive losses), cut the batch inside the step with "
        "macrobatch.value_and_gradients(..., forward=...) and leave macrobatch.accumulate out. If "
        "the loss is a mean over tokens or weights, pass micro_batch_weight=."
    )


def no_mean(places: Sequence[int]) -> str:
    """What to say of losses that are sums over the batch."""
    return (
        f"The loss of a gradient ({_ordinals(places)} that the step takes) is a scalar that counts "
        "as a mean over the examples, and is none: for the same examples twice it is another "
        "number. The update is not that of the whole batch. Take a mean over the examples, or "
        "take the gradient of one value per example, which is summed."
    )


def no_sum(places: Sequence[int]) -> str:
    """What to say of losses with a value for each example, which depends on how many there are."""
    return (
        f"The loss of a gradient ({_ordinals(places)} that the step takes) has a value for each "
        "example, or is the sum of such values, and depends on how many examples there are: for "
        "the same examples twice it is not twice as much. Micro-batches have fewer examples, so "
        "that the update is not that of the whole batch. Take a mean over the examples "
        "(tf.reduce_mean), or divide by no number of examples."
    )


def reported_as_means(names: Sequence[str]) -> str:
    """What to say of logs and metrics that are no means over the examples."""
    return (
        f"These logs or metrics of the step are no means over the examples: {some(names)}. "
        "What is reported of the batch is the mean of what each micro-batch comes to, which is "
        "another number. The update is not affected. Update a metric with one value per example, "
        "or compute the number in evaluate() or a callback."
    )


def _ordinals(places: Sequence[int]) -> str:
    """Which gradients are meant, in words."""
    return ", ".join(f"number {place + 1}" for place in places)


def as_traced(expected: int, found: int, what: str) -> None:
    """Raises if a step does something else than its trace has shown."""
    if expected != found:
        raise Refused(
            f"The step called {what} {found} times. Expected: {expected} times, as in its first "
            "run. A step that decides in Python what it does cannot be cut into micro-batches: "
            "each run must do the same."
        )


def as_traced_so_far(count: int, expected: int, what: str) -> None:
    """Raises if a step does more than its trace has shown."""
    if count > expected:
        as_traced(expected, count, what)


def not_traced(error: Exception) -> ValueError:
    """What to say of a step that no graph can have."""
    return ValueError(
        "The step cannot be traced, which is how it is seen what it does: "
        f"{type(error).__name__}: {error}. A step that is accumulated must run in a graph, for any "
        "number of examples, with run_eagerly=True too: take sizes from tf.shape(x)[0], and leave "
        f".numpy() out. {INSIDE}."
    )


def no_whole_batch_loss(is_wanted: bool) -> None:
    """Raises if the loss in a step of the model's own is to see the whole batch."""
    if is_wanted:
        raise Refused(
            "whole_batch_loss=True is not for models with a train_step of their own: nobody knows "
            "where the step's predictions end and its loss begins. Received: "
            "whole_batch_loss=True. Call macrobatch.value_and_gradients(..., forward=...) inside "
            "the step, where both are functions of their own, and leave macrobatch.accumulate out."
        )


def no_lengths(axis: Any) -> None:
    """Raises if sequences are to be cut in a step of the model's own."""
    if axis is not None:
        raise Refused(
            "sequence_axis and micro_batch_tokens are not for models with a train_step of their "
            "own: nobody knows what the step makes of padding. Received: "
            f"sequence_axis={axis}. Cut by micro_batch_size alone, or cut the batch inside the "
            "step with macrobatch.value_and_gradients(..., sequence_axis=...) and leave "
            "macrobatch.accumulate out."
        )


def one_device(count: int) -> None:
    """Raises if a step of the model's own is to run on several replicas."""
    if count > 1:
        raise Refused(
            "A train_step of the model's own is accumulated on one device only. Received: a model "
            f"that was made in the scope of a strategy with {count} replicas. Leave "
            "macrobatch.accumulate out, and cut the batch of each replica inside the step with "
            "macrobatch.value_and_gradients: its gradients are the replica's part, and optimizers "
            "sum them."
        )
