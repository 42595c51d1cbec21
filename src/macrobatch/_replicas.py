"""tf.distribute: variables of which each replica holds a part, and how to get from one context to
the other. Without a strategy all of it is plain. Runs on TensorFlow 1.14 too.
"""

import collections
import functools
import inspect
import threading
from concurrent import futures
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence

import tensorflow as tf

from macrobatch import _checks, _replica_checks, _split, _sums


def tf_variable(variable: Any) -> Any:
    """The TensorFlow variable that a variable is, or that stands behind it (Keras 3)."""
    value = getattr(variable, "value", None)
    return variable if value is None or callable(value) else value


def is_of_keras_3(optimizer: Any) -> bool:
    """Whether an optimizer is one of Keras 3, known by what it sums over replicas with."""
    return hasattr(optimizer, "_all_reduce_sum_gradients")


def strategy_of(variables: Iterable[Any]) -> Any:
    """The strategy in whose scope the variables were made, or None."""
    variables = [tf_variable(variable) for variable in variables]
    strategies = [getattr(variable, "distribute_strategy", None) for variable in variables]
    # Variables of a ParameterServerStrategy do not tell that they are, but where they are.
    alone = [v for v, strategy in zip(variables, strategies) if strategy is None]
    _replica_checks.parameter_servers(any("/job:ps" in (v.device or "") for v in alone))
    _replica_checks.one_strategy(strategies, variables)
    return strategies[0] if strategies else None


def check_scope(strategy: Any) -> None:
    """Raises in a replica if variables of this strategy, or of none, are not its own."""
    _replica_checks.made_in_scope(strategy, tf.distribute.get_strategy(), in_several())


def in_replica() -> bool:
    """Whether this is called by `strategy.run`."""
    context = tf.distribute.get_replica_context()
    return context is not None and tf.distribute.has_strategy()


def in_several() -> bool:
    """Whether this is called by `strategy.run` for several replicas."""
    return in_replica() and count() > 1


def count() -> int:
    """The number of replicas of the strategy that is current here."""
    return tf.distribute.get_strategy().num_replicas_in_sync


def run(strategy: Any, function: Callable[[], Any]) -> Any:
    """Calls a function on each replica."""
    if strategy is None or in_replica():
        return function()
    if hasattr(strategy, "run"):
        return strategy.run(function)
    return strategy.experimental_run_v2(function)  # TensorFlow 1.14


def once(function: Callable[[], Any]) -> None:
    """Calls a function once, even where each replica is about to."""
    if in_replica():
        tf.distribute.get_replica_context().merge_call(lambda _: function())
    else:
        function()


def compare(value: Any, check: Callable[[Sequence[Any]], None]) -> None:
    """Calls a function with what a value is on each replica of this machine, while tracing."""

    def merged(strategy: Any, values: Any) -> None:
        check(strategy.experimental_local_results(values))

    tf.distribute.get_replica_context().merge_call(merged, args=(value,))


def total(values: List[Any]) -> List[Any]:
    """The sums of values over all replicas."""
    if not in_several():
        return values
    context = tf.distribute.get_replica_context()
    sums: Dict[int, Any] = {}
    # A strategy packs what it is given at one time into few large messages, of one dtype each.
    for dtype in sorted({value.dtype.name for value in values}):
        indices = [i for i, value in enumerate(values) if value.dtype.name == dtype]
        same = [_with_a_row(values[i]) for i in indices]
        sums.update(zip(indices, context.all_reduce(tf.distribute.ReduceOp.SUM, same)))
    return [_without_it(sums[i]) for i in range(len(values))]


def _with_a_row(value: Any) -> Any:
    """Rows of a table, and one that is none: TensorFlow 2.21 crashes where nobody has any."""
    if not isinstance(value, tf.IndexedSlices):
        return value
    none = tf.zeros(tf.concat([[1], tf.shape(value.values)[1:]], 0), value.dtype)
    indices = tf.concat([value.indices, tf.constant([-1], value.indices.dtype)], 0)
    return tf.IndexedSlices(tf.concat([value.values, none], 0), indices, value.dense_shape)


def _without_it(value: Any) -> Any:
    if not isinstance(value, tf.IndexedSlices):
        return value
    there = value.indices >= 0
    values, indices = tf.boolean_mask(value.values, there), tf.boolean_mask(value.indices, there)
    return tf.IndexedSlices(values, indices, value.dense_shape)


def total_counts(counts: List[Any]) -> List[Any]:
    """The sums of numbers over all replicas. None stays None, as do all where there is one."""
    if not in_several():
        return counts
    there = [count for count in counts if count is not None]
    is_double = any(getattr(count, "dtype", None) == tf.float64 for count in there)
    dtype = tf.float64 if is_double else tf.float32
    sums = iter(total([tf.cast(count, dtype) for count in there]))
    return [count if count is None else next(sums) for count in counts]


def for_reduction(logs: Any) -> Any:
    """Logs, equal on all replicas, so that Keras' mean over replicas leaves them as they are."""
    if not has_several_workers(tf.distribute.get_strategy()):
        return logs
    # Then Keras takes the mean over the first axis, as if logs were batches.
    return tf.nest.map_structure(lambda log: log[None], logs)


def has_several_workers(strategy: Any) -> bool:
    """Whether a strategy has replicas on other machines, or in other processes."""
    if strategy is None or strategy.num_replicas_in_sync == 1:
        return False
    return bool(strategy.num_replicas_in_sync > len(strategy.extended.worker_devices))


def element_spec(strategy: Any, dataset: Any) -> Any:
    """The types and shapes of a dataset's batches, or of one replica's part of them."""
    if not isinstance(dataset, tf.distribute.DistributedDataset):
        return dataset.element_spec
    return _split.specs_of(first_part(strategy, next(iter(dataset))))


def shared_out(strategy: Any, batch: Any) -> Any:
    """A batch that is whole in each process, of which each replica gets a part."""
    replicas = strategy.num_replicas_in_sync

    def part(context: Any, leaf: Any) -> Any:
        size = int(leaf.shape[0])
        start, end = (size * (context.replica_id_in_sync_group + i) // replicas for i in (0, 1))
        return leaf[start:end]

    return tf.nest.map_structure(
        lambda leaf: (
            leaf
            if leaf is None
            else strategy.experimental_distribute_values_from_function(lambda c: part(c, leaf))
        ),
        _split.to_tensors(batch),
    )


def first_part(strategy: Any, batch: Any) -> Any:
    """The part of a batch that the first of this machine's replicas gets."""
    return tf.nest.map_structure(
        lambda leaf: leaf if leaf is None else strategy.experimental_local_results(leaf)[0], batch
    )


def of_first(values: List[Any]) -> List[Any]:
    """The values that the first replica has."""
    if not in_several() or not values:
        return values
    context = tf.distribute.get_replica_context()
    is_first = tf.equal(context.replica_id_in_sync_group, 0)
    masked = [tf.where(is_first, value, tf.zeros_like(value)) for value in values]
    sums = total([_sums.widened(value) for value in masked])
    return [tf.cast(each, value.dtype) for each, value in zip(sums, values)]


def largest(values: List[Any]) -> List[Any]:
    """The largest of the values, element by element, that any replica has."""
    if not in_several() or not values:
        return values
    replica = tf.distribute.get_replica_context().replica_id_in_sync_group
    # Collectives know few dtypes, of which seeds' unsigned integers are none, and only sums.
    rows = [
        tf.one_hot(replica, count(), dtype=tf.int64)[:, None]
        * tf.reshape(tf.cast(value, tf.int64), [1, -1])
        for value in values
    ]
    found = [tf.reduce_max(each, 0) for each in total(rows)]
    return [tf.cast(tf.reshape(f, tf.shape(v)), v.dtype) for f, v in zip(found, values)]


def variable(
    strategy: Any, shape: Sequence[Optional[int]], dtype: Any, name: str, summed: bool = True
) -> Any:
    """A variable of zeros, empty where the shape is unknown; each replica holds a part of it.

    Read outside of replicas it is the sum of the parts, if it is `summed`, and otherwise that of
    the first. That is also what a checkpoint saves, so that it restores on any number of replicas.
    """
    aggregation = tf.VariableAggregation.SUM
    if not summed:
        aggregation = tf.VariableAggregation.ONLY_FIRST_REPLICA
    options = {"trainable": False, "name": name, "shape": tf.TensorShape(shape)}

    def make() -> Any:
        zeros = tf.zeros([size or 0 for size in shape], dtype)
        if strategy is None:
            return tf.Variable(zeros, **options)
        with strategy.scope():
            return tf.Variable(
                zeros,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=aggregation,
                **options,
            )

    return _outside_of_functions(make)


def _outside_of_functions(function: Callable[[], Any]) -> Any:
    """Calls a function in eager mode, whatever is being traced."""
    if tf.executing_eagerly():
        return function()
    # tf.init_scope is not enough: a tf.function that is being traced would take a variable made in
    # it for its own, trace once more, and refuse to make another one later. A thread has a context
    # of its own.
    with futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(function).result()


def read(variable: Any) -> Any:
    """The value of a variable: in a replica, its part."""
    return local(variable) if in_replica() else variable.read_value()


def local(variable: Any) -> Any:
    """The part that this replica holds."""
    if hasattr(variable, "get") and tf.distribute.has_strategy():  # TensorFlow 1.14
        variable = variable.get()
    return variable.read_value()


def parts(strategy: Any, variable: Any) -> Sequence[Any]:
    """The parts of a variable that are on this machine, each a variable."""
    return [variable] if strategy is None else strategy.experimental_local_results(variable)


def gathered(strategy: Any, variable: Any) -> Any:
    """The indices that are in a variable on all machines. Outside of functions."""
    if not has_several_workers(strategy):
        return tf.concat([part.read_value() for part in parts(strategy, variable)], 0)

    def gather() -> Any:
        # TensorFlow 2.21 crashes where it gathers from many who all have nothing.
        own = run(strategy, lambda: tf.concat([[-1], local(variable)], 0))
        return strategy.gather(own, axis=0)

    indices = tf.function(gather, autograph=False)()
    return tf.boolean_mask(indices, indices >= 0)


def apply_gradients(optimizer: Any, gradients: List[Any], variables: List[Any]) -> None:
    """Calls an optimizer with gradients; in a replica, with their sums over all replicas.

    Left to itself an optimizer would clip the part of each replica, and Keras 3 take a row that
    several replicas bring for different rows. So they are summed before it sees them.
    """
    if in_several():
        _replica_checks.optimizer_on_replicas(optimizer)
    arguments = _no_reduction_of_its_own(optimizer) if in_several() else None
    if arguments is not None:
        gradients = _agreed(gradients, variables)
        there = [gradient for gradient in gradients if gradient is not None]
        sums = iter(total(there))
        gradients = [g if g is None else _sums.merge_rows(next(sums)) for g in gradients]
    # Sums are float32 or wider, also those over replicas; variables may be narrower.
    dtypes = [tf.as_dtype(variable.dtype).base_dtype for variable in variables]
    gradients = [_sums.cast(gradient, dtype) for gradient, dtype in zip(gradients, dtypes)]
    summed = [] if arguments is None else [id(each) for each in _with_inner_ones(optimizer)]
    with _counting:
        _reduced.update(summed)
    try:
        optimizer.apply_gradients(list(zip(gradients, variables)), **(arguments or {}))
    finally:
        with _counting:
            _reduced.subtract(summed)


def _agreed(gradients: List[Any], variables: List[Any]) -> List[Any]:
    """The gradients, of the same kinds on all replicas: zeros where only others have one."""
    if not tf.executing_eagerly():  # In a graph all replicas have the same.
        return gradients
    sparse = [isinstance(gradient, tf.IndexedSlices) for gradient in gradients]
    dense = [g is not None and not rows for g, rows in zip(gradients, sparse)]
    (counts,) = total([tf.constant([sparse, dense], tf.float32)])
    agreed = []
    for gradient, variable, some_rows, some_dense in zip(gradients, variables, *counts.numpy()):
        shape, dtype = tf.TensorShape(variable.shape), _sums.wide(tf.as_dtype(variable.dtype))
        if gradient is None and some_dense:
            gradient = tf.zeros(shape, dtype)
        elif gradient is None and some_rows:
            none = tf.zeros([0, *shape[1:]], dtype)
            gradient = tf.IndexedSlices(none, tf.zeros([0], tf.int64), tf.constant(shape, tf.int64))
        agreed.append(_sums.dense(gradient) if some_dense else gradient)
    return agreed


# How many replicas are in a call with gradients that are summed already, for each optimizer. It
# counts for all threads, since an optimizer may go on in another one (LossScaleOptimizer does).
_reduced: "collections.Counter[int]" = collections.Counter()
_counting = threading.Lock()


def _with_inner_ones(optimizer: Any) -> List[Any]:
    inner = _checks.inner_optimizers(optimizer)
    return [optimizer, *(one for each in inner for one in _with_inner_ones(each))]


def _no_reduction_of_its_own(optimizer: Any) -> Any:
    """The arguments with which an optimizer takes gradients as they are; None if it does not."""
    if not is_of_keras_3(optimizer):
        names = inspect.signature(optimizer.apply_gradients).parameters
        for name, value in _NO_REDUCTION.items():
            if name in names:
                return {name: value}
        return None  # tf.compat.v1.train, which takes the sum itself, also of rows
    # Keras 3 has no public way. The class stays as it is for all other calls.
    owner: Any = next(c for c in type(optimizer).__mro__ if "_all_reduce_sum_gradients" in vars(c))
    reduce = vars(owner)["_all_reduce_sum_gradients"]
    if not hasattr(reduce, "__wrapped__"):

        @functools.wraps(reduce)
        def reduce_once(self: Any, pairs: Any) -> Any:
            return list(pairs) if _reduced[id(self)] > 0 else reduce(self, pairs)

        owner._all_reduce_sum_gradients = reduce_once
    return {}


# In tf_keras: its optimizers, and the legacy ones.
_NO_REDUCTION = {"skip_gradients_aggregation": True, "experimental_aggregate_gradients": False}
