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


def _array(variable: Any) -> Any:
    from keras import ops

    return ops.convert_to_numpy(variable)


@contextlib.contextmanager
def same_global_state() -> Iterator[None]:
    """Puts back the names that Keras gives next, and the seeds that it draws from."""
    from keras.src.backend.common import global_state

    names = global_state.get_global_attribute(_NAMES)
    counted = dict(names or {})
    seeds = global_state.get_global_attribute(_SEEDS)
    drawn = None if seeds is None else _array(seeds.state)
    try:
        yield
    finally:
        if names is not None:
            names.clear()
            names.update(counted)
        global_state.set_global_attribute(_NAMES, names)
        global_state.set_global_attribute(_SEEDS, seeds)
        if seeds is not None:
            seeds.state.assign(drawn)


@contextlib.contextmanager
def same_generators_of_tensorflow() -> Iterator[None]:
    """Puts back what TensorFlow draws from."""
    from tensorflow.python.eager import context
    from tensorflow.python.ops import stateful_random_ops

    # The public function makes a generator where there is none.
    generator = stateful_random_ops.global_generator
    state = None if generator is None else generator.state.numpy()
    of_operations = getattr(context.context(), "_rng", None)  # there once a seed was set
    drawn = None if of_operations is None else of_operations.getstate()
    try:
        yield
    finally:
        stateful_random_ops.global_generator = generator
        if generator is not None:
            generator.state.assign(state)
        if of_operations is not None:
            of_operations.setstate(drawn)


# Dtypes


@contextlib.contextmanager
def with_float64() -> Iterator[None]:
    """Lets Keras on JAX and torch compute in float64 where it is asked to.

    Keras makes float32 of it there, by a table, and has no setting for it. All threads see it.
    """
    from keras.src.backend.common import dtypes

    table = dtypes.BIT64_TO_BIT32_DTYPE
    before = table["float64"]
    table["float64"] = "float64"
    try:
        yield
    finally:
        table["float64"] = before
