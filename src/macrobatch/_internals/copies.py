"""Private names with which `verify` works on a copy of a model, and puts everything back."""

import contextlib
from typing import Any, Dict, Iterator

from macrobatch._internals.models import shallow_copy

# Models


def copy_of_model(model: Any) -> Any:
    """Another model of the same layers and variables, whose attributes can be set apart.

    `copy.copy` would make new variables. Lists of TensorFlow's for checkpoints are its own.
    """
    copied = shallow_copy(model)
    for name, value in vars(model).items():
        if name.startswith("_self_") and isinstance(value, (list, dict)):
            vars(copied)[name] = value.copy()
    return copied


def set_compiled_apart(model: Any) -> None:
    """Gives a copy of a model its own compiled loss and metrics, where they have yet to be built.

    Building them would show in the model that they are shared with.
    """
    loss, metrics = vars(model).get("_compile_loss"), vars(model).get("_compile_metrics")
    if loss is not None and not loss.built:
        vars(model)["_compile_loss"] = type(loss)(
            loss._user_loss, loss._user_loss_weights, output_names=loss.output_names
        )
    if metrics is not None and not metrics.built:
        vars(model)["_compile_metrics"] = type(metrics)(
            metrics._user_metrics, metrics._user_weighted_metrics, output_names=metrics.output_names
        )


def compile_arguments(model: Any) -> Dict[str, Any]:
    """What `keras.Model.compile` was called with. The public config has it serialised."""
    return dict(model._compile_config.config)


def in_float64(loss: Any) -> Any:
    """A loss that computes in float64. Its dtype is fixed when it is made."""
    copied = shallow_copy(loss)
    copied._dtype = "float64"
    return copied


# Data


def data_of_fit(x: Any, **options: Any) -> Any:
    """What `fit` makes of its data: an object with `get_tf_dataset()` and `num_batches`.

    It knows all kinds of data that `fit` takes, and makes sample weights of class weights.
    """
    from keras.src.trainers.data_adapters import get_data_adapter

    return get_data_adapter(x, **options)


# Global state

# What Keras numbers new names with, and draws from where nobody gives a seed.
_NAMES, _SEEDS = "object_name_uids", "global_seed_generator"


@contextlib.contextmanager
def same_global_state() -> Iterator[None]:
    """Puts back the names that Keras gives next, and the seeds that it and TensorFlow draw from."""
    from keras.src.backend.common import global_state
    from tensorflow.python.eager import context
    from tensorflow.python.ops import stateful_random_ops

    names = global_state.get_global_attribute(_NAMES)
    counted = dict(names or {})
    of_keras = global_state.get_global_attribute(_SEEDS)
    # The public function makes a generator where there is none.
    of_tensorflow = stateful_random_ops.global_generator
    states = [each.state for each in (of_keras, of_tensorflow) if each is not None]
    values = [state.numpy() for state in states]
    of_operations = getattr(context.context(), "_rng", None)  # there once a seed was set
    drawn = None if of_operations is None else of_operations.getstate()
    try:
        yield
    finally:
        if names is not None:
            names.clear()
            names.update(counted)
        global_state.set_global_attribute(_NAMES, names)
        global_state.set_global_attribute(_SEEDS, of_keras)
        stateful_random_ops.global_generator = of_tensorflow
        for state, value in zip(states, values):
            state.assign(value)
        if of_operations is not None:
            of_operations.setstate(drawn)
