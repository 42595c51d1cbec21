"""tf.distribute: variables of which each replica holds a part, and how to get from one context to
the other. Without a strategy all of it is plain. Runs on TensorFlow 1.14 too.
"""

from concurrent import futures
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence

import tensorflow as tf

from macrobatch._tensorflow import checks, graph, sums


def tf_variable(variable: Any) -> Any:
    """The TensorFlow variable that a variable is, or that stands behind it (Keras 3)."""
    value = getattr(variable, "value", None)
    return variable if value is None or callable(value) else value


def strategy_of(variables: Iterable[Any]) -> Any:
    """The strategy in whose scope the variables were made, or None."""
    variables = [tf_variable(variable) for variable in variables]
    strategies = [getattr(variable, "distribute_strategy", None) for variable in variables]
    # Variables of a ParameterServerStrategy do not tell that they are, but where they are.
    alone = [v for v, strategy in zip(variables, strategies) if strategy is None]
    checks.parameter_servers(any("/job:ps" in (v.device or "") for v in alone))
    checks.one_strategy(strategies, variables)
    return strategies[0] if strategies else None


def check_scope(strategy: Any) -> None:
    """Raises in a replica if variables of this strategy, or of none, are not its own."""
    checks.made_in_scope(strategy, tf.distribute.get_strategy(), in_several())


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


def only_if(condition: Any, function: Callable[[], Any]) -> None:
    """Calls a function, now or when the graph runs, if a condition holds on all replicas alike."""
    if tf.executing_eagerly() or not in_several():
        graph.when(condition, function)
        return

    def call(function: Callable[[], Any]) -> None:
        function()

    def merged(strategy: Any, conditions: Any, functions: Any) -> None:
        # Replicas cannot meet in a branch of their own, but they can in a branch around them all.
        agreed = strategy.experimental_local_results(conditions)[0]
        keep = tf.autograph.experimental.do_not_convert
        graph.when(agreed, lambda: strategy.run(keep(call), args=(functions,)))

    tf.distribute.get_replica_context().merge_call(merged, args=(condition, function))


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


def sum_over_replicas(values: List[Any]) -> List[Any]:
    """The sums of values over all replicas."""
    if not in_several():
        return values
    context = tf.distribute.get_replica_context()
    found: Dict[int, Any] = {}
    # A strategy packs what it is given at one time into few large messages, of one dtype each.
    for dtype in sorted({value.dtype.name for value in values}):
        indices = [i for i, value in enumerate(values) if value.dtype.name == dtype]
        same = [_with_a_row(values[i]) for i in indices]
        found.update(zip(indices, context.all_reduce(tf.distribute.ReduceOp.SUM, same)))
    return [_without_it(found[i]) for i in range(len(values))]


def _with_a_row(value: Any) -> Any:
    """Rows of a table, and one that is none: TensorFlow 2.21 crashes where nobody has any."""
    if not isinstance(value, tf.IndexedSlices):
        # What comes out of a loop has no device, of which TensorFlow makes an error on workers.
        return tf.identity(value)
    none = tf.zeros(tf.concat([[1], tf.shape(value.values)[1:]], 0), value.dtype)
    indices = tf.concat([value.indices, tf.constant([-1], value.indices.dtype)], 0)
    return tf.IndexedSlices(tf.concat([value.values, none], 0), indices, value.dense_shape)


def _without_it(value: Any) -> Any:
    if not isinstance(value, tf.IndexedSlices):
        return value
    there = value.indices >= 0
    values, indices = tf.boolean_mask(value.values, there), tf.boolean_mask(value.indices, there)
    return tf.IndexedSlices(values, indices, value.dense_shape)


def total_counts(counts: Sequence[Any]) -> List[Any]:
    """The sums of numbers over all replicas. None stays None, as do all where there is one."""
    if not in_several():
        return list(counts)
    there = [count for count in counts if count is not None]
    is_double = any(getattr(count, "dtype", None) == tf.float64 for count in there)
    dtype = tf.float64 if is_double else tf.float32
    totals = iter(sum_over_replicas([tf.cast(count, dtype) for count in there]))
    return [count if count is None else next(totals) for count in counts]


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
    return graph.specs_of(first_part(strategy, next(iter(dataset))))


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
        graph.to_tensors(batch),
    )


def first_part(strategy: Any, batch: Any) -> Any:
    """The part of a batch that the first of this machine's replicas gets."""
    return tf.nest.map_structure(
        lambda leaf: leaf if leaf is None else strategy.experimental_local_results(leaf)[0], batch
    )


def parts_of_batch(strategy: Any, batch: Any) -> List[Any]:
    """The parts of a batch that the replicas of this process have."""
    if strategy is None:
        return [batch]
    parts = [
        [leaf] if leaf is None else strategy.experimental_local_results(leaf)
        for leaf in tf.nest.flatten(batch)
    ]
    count = max(map(len, parts))
    return [
        tf.nest.pack_sequence_as(batch, [of_leaf[i % len(of_leaf)] for of_leaf in parts])
        for i in range(count)
    ]


def from_first_replica(values: List[Any]) -> List[Any]:
    """The values that the first replica has."""
    if not in_several() or not values:
        return values
    masked = [on_first_replica(value) for value in values]
    totals = sum_over_replicas([sums.widened(value) for value in masked])
    return [tf.cast(each, value.dtype) for each, value in zip(totals, values)]


def on_first_replica(value: Any) -> Any:
    """The value on the first replica, and zeros on the others."""
    if not in_several():
        return value
    replica = tf.distribute.get_replica_context().replica_id_in_sync_group
    return tf.where(tf.equal(replica, 0), value, tf.zeros_like(value))


def max_over_replicas(values: List[Any]) -> List[Any]:
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
    found = [tf.reduce_max(each, 0) for each in sum_over_replicas(rows)]
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


def own_part(variable: Any) -> Any:
    """A variable, or outside of replicas the part of one that this process has.

    To read the sum of all parts, workers would wait for each other.
    """
    strategy: Any = getattr(variable, "distribute_strategy", None)
    if in_replica() or not has_several_workers(strategy):
        return variable
    return strategy.experimental_local_results(variable)[0]


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
