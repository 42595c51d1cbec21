"""find_micro_batch_size: which size fits, and which is fastest."""

import contextlib
import logging
import warnings
from typing import Any, Callable, Dict, Iterator, Literal, Optional

import tensorflow as tf

from macrobatch import _internals
from macrobatch._batches import checks as batch_checks
from macrobatch._checks import LOG
from macrobatch._keras import model_checks as checks
from macrobatch._no_trace.data import first_batch
from macrobatch._no_trace.twin import has_weights
from macrobatch._no_trace.unchanged import unchanged
from macrobatch._plan.report import Plan
from macrobatch._plan.search import Memory, Search, Tell
from macrobatch._plan.trial import EXAMPLES, Unit
from macrobatch._settings import settings_of
from macrobatch._sizes import limit as limits
from macrobatch._sizes import watch
from macrobatch._sizes.limit import MemoryLimit
from macrobatch._sizes.peaks import ProcessCounter
from macrobatch._tensorflow import device_memory
from macrobatch._tensorflow.engine import ENGINE
from macrobatch._tensorflow.extents import Batches

OBJECTIVES = ("fastest", "largest")
# What of the settings of an accumulated model counts here too.
KEPT = (
    *("sequence_axis", "lengths", "micro_batch_weight", "whole_batch_loss", "micro_batch_tokens"),
)


def find_micro_batch_size(
    model: Any,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    memory_limit: MemoryLimit = None,
    objective: Literal["fastest", "largest"] = "fastest",
    sequence_axis: Optional[int] = None,
    lengths: Optional[Callable[[Any, Any, Any], Any]] = None,
    micro_batch_weight: Optional[Callable[[Any, Any, Any], Any]] = None,
    whole_batch_loss: bool = False,
    micro_batch_tokens: Optional[Literal["auto"]] = None,
) -> Plan:
    """Finds the size of micro-batches that fits into memory and trains fastest.

    Sizes 1, 2, 4, ... are tried on one batch, with the train function of `accumulate` and `fit`:
    the peak memory and the time of a few updates of each. On a CPU a size is tried only if the
    line through the peaks of smaller ones says that it fits, because running out of memory would
    be the end of the process. Afterwards weights, optimizer, metrics, moving statistics, seeds and
    the functions of the model are as before.

    This takes as long as tracing the model and making a few updates for each size, about a dozen
    sizes at most. Nothing else should run at the same time.

    Args:
        model: a compiled Keras 3 model on the TensorFlow backend that has its weights, accumulated
            or not. On several replicas, a model made outside of the scope of the strategy, with
            the examples of one replica.
        x: the inputs of one batch, as large as the batches that are to be trained on; or a dataset
            as `fit` takes it, of which the first batch is taken.
        y: the targets.
        sample_weight: the sample weights, if there are any.
        memory_limit: what the process may take in all ("6GiB", "500 MB", or bytes), or a fraction
            of what is there (0.5, "50%"). By default all that the machine, the container (cgroup)
            and `ulimit -v` allow, less what others use. A twentieth of it stays free. On a GPU, the
            memory of the device; by default there is no limit but the device's own.
        objective: "fastest", or "largest": the largest size that fits.
        sequence_axis: as in `accumulate`. Of an accumulated model, its own settings are taken if no
            setting is given here.
        lengths: as in `accumulate`.
        micro_batch_weight: as in `accumulate`.
        whole_batch_loss: as in `accumulate`.
        micro_batch_tokens: "auto", with `sequence_axis`: sizes are what `micro_batch_tokens` is in
            `accumulate`, from one example of the longest on.

    Returns:
        A plan. `plan.micro_batch_size` (or `plan.micro_batch_tokens`) is the choice,
        `plan.advice` the finding in one sentence.
        `print(plan)` shows the table that the choice rests on, `plan.rows` has it, each row with
        `size`, `peak` (bytes), `examples_per_second`, `fits` and `note`. `plan.to_json()` has all
        of it.

    Raises:
        ValueError: if `memory_limit` cannot be read, or is less than the weights need; if not even
            one example fits; if the model is not compiled or has no weights; or if `accumulate` or
            `fit` would raise one.

    Examples:
        >>> import keras, macrobatch, numpy as np
        >>> model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
        >>> model.compile("adam", "mse")
        >>> x, y = np.ones([4, 3]), np.ones([4, 1])
        >>> plan = macrobatch.find_micro_batch_size(model, x, y)
        >>> model = macrobatch.accumulate(model, plan.micro_batch_size)
    """
    given = {
        "sequence_axis": sequence_axis,
        "lengths": lengths,
        "micro_batch_weight": micro_batch_weight,
        "whole_batch_loss": whole_batch_loss or None,
        "micro_batch_tokens": micro_batch_tokens,
    }
    settings = {name: value for name, value in given.items() if value is not None}
    return find(model, x, y, sample_weight, memory_limit, objective, settings)


def find(
    model: Any,
    x: Any,
    y: Any,
    sample_weight: Any,
    memory_limit: MemoryLimit,
    objective: str,
    settings: Any,
    tell: Tell = lambda *now: None,
) -> Plan:
    """As `find_micro_batch_size`, and tells what is going on."""
    if objective not in OBJECTIVES:
        raise ValueError(
            f'objective must be "fastest" or "largest". Received: objective={objective!r}.'
        )
    limits.parsed(memory_limit)  # A slip should not wait for the model.
    checks.keras_model(model)
    _check(model)
    accumulated = settings_of(model)
    own = {} if accumulated is None else accumulated.arguments()
    if not settings:
        settings = {name: own[name] for name in KEPT if own.get(name) is not None}
        if "micro_batch_tokens" in settings:  # whatever it was
            settings["micro_batch_tokens"] = batch_checks.AUTO
    tokens = settings.get("micro_batch_tokens")
    settings = {name: value for name, value in settings.items() if name != "micro_batch_tokens"}
    _check_tokens(tokens, settings)
    batch = first_batch(x, y, sample_weight)
    examples = int(ENGINE.examples(batch))
    with _quiet(), unchanged(model) as kept:
        memory, unit = _memory(memory_limit), EXAMPLES
        if tokens is not None:
            sizes = Batches(None, settings["sequence_axis"], in_tokens=True)
            unit = Unit("micro_batch_tokens", int(sizes.measured(batch).extent))
        search = Search(model, batch, examples, settings, memory, kept, tell, unit)
        return search.plan(objective)


def _memory(given: MemoryLimit) -> Memory:
    """The memory that there is, and the limit of it."""
    if device_memory.gpus():
        limit = watch.limit_of_gpu(given, device_memory)
        return Memory(device_memory.GpuCounter(), limit, None, "GPU")
    is_error = limits.running_out_is_an_error(on_gpu=False)
    room = None if is_error else limits.available().bytes
    of_process = None if is_error and given is None else limits.memory_limit(given)
    return Memory(ProcessCounter(), of_process, room, "CPU")


def _check_tokens(tokens: Any, settings: Dict[str, Any]) -> None:
    if tokens is None:
        return
    axis, lengths = settings.get("sequence_axis"), settings.get("lengths")
    batch_checks.sizes(None, tokens, axis, lengths, of=["x", "y", "sample_weight"])
    if tokens != batch_checks.AUTO:
        raise ValueError(
            'micro_batch_tokens must be "auto" here: numbers of tokens are looked for. '
            f"Received: micro_batch_tokens={tokens!r}."
        )


def _check(model: Any) -> None:
    if not getattr(model, "compiled", False):
        raise ValueError(
            f"The model {model.name!r} must be compiled: sizes are tried with its loss and its "
            "optimizer. Received: a model without compile()."
        )
    if not has_weights(model):
        raise ValueError(
            f"The model {model.name!r} has no weights yet. Build it first: call it on a batch, "
            "model(x)."
        )
    if tf.distribute.has_strategy() or _internals.strategy_of(model) is not None:
        raise ValueError(
            "find_micro_batch_size tries sizes on one device. Received: a model or a call in the "
            "scope of a strategy. micro_batch_size is that of each replica: make the model outside "
            "of strategy.scope(), and pass the examples of one replica."
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without warnings: sizes are tried that nobody has asked for, and each is traced."""

    def is_wanted(record: logging.LogRecord) -> bool:
        return record.name != LOG.name and "tf.function retracing" not in record.getMessage()

    loggers = LOG, tf.get_logger()
    for logger in loggers:
        logger.addFilter(is_wanted)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_wanted)
