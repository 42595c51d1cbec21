"""Which examples are bad: found in few runs, alone or together; and batches of the others."""

import numpy as np
import pytest
import tensorflow as tf
from test_accumulator_everywhere import mirrored

from macrobatch._keras.skipping import smallest_bad
from macrobatch._tensorflow.examples import Examples


def found(is_bad, count=64, size=8):
    runs = []

    def run(group):
        runs.append(len(group))
        return is_bad(set(group))

    return smallest_bad(run, list(range(count)), size), runs


@pytest.mark.parametrize("size", [0, 1, 7, 8, 64])
@pytest.mark.parametrize("bad", [[0], [63], [5, 6], [0, 31, 32, 63], list(range(64))], ids=str)
def test_bad_examples_are_found_one_by_one(bad, size):
    groups, _ = found(lambda group: bool(group & set(bad)), size=size)
    assert groups == [[example] for example in bad]


def test_few_runs():
    """Each micro-batch once, and then halves of the bad one."""
    _, runs = found(lambda group: 21 in group)
    assert runs.count(8) == 8
    assert sum(runs) <= 64 + 2 * 8
    _, runs = found(lambda group: 63 in group)  # nobody has to look at the last one as a whole
    assert runs.count(8) == 7
    _, runs = found(lambda group: 21 in group, size=0)
    assert len(runs) <= 12


@pytest.mark.parametrize(
    ("together", "group"),
    [({0, 1}, [0, 1]), ({7, 8}, list(range(64))), ({56, 63}, list(range(56, 64)))],
    ids=str,
)
def test_examples_that_are_bad_only_together(together, group):
    """The smallest group that was found, none of whose parts are bad."""
    assert found(lambda some: together <= some)[0] == [group]


def test_a_single_example():
    assert found(lambda group: True, count=1) == ([[0]], [])


# Batches of some examples


def numbers(batch, strategy=None):
    if strategy is None:
        return batch.numpy().tolist()
    return [part.numpy().tolist() for part in strategy.experimental_local_results(batch)]


def test_some_examples_of_each_kind_of_tensor():
    dense = np.arange(10).reshape(5, 2)
    batch = {
        "dense": dense,
        "none": None,
        "ragged": tf.ragged.constant([[0], [], [1, 2], [3], [4]]),
        "sparse": tf.sparse.from_dense(dense),
    }
    examples = Examples(batch, None)
    some = examples.some([0, 2, 4])
    assert examples.count == 5
    assert numbers(some["dense"]) == dense[[0, 2, 4]].tolist()
    assert some["none"] is None
    assert some["ragged"].to_list() == [[0], [1, 2], [4]]
    assert numbers(tf.sparse.to_dense(some["sparse"])) == dense[[0, 2, 4]].tolist()
    assert numbers(tf.sparse.to_dense(examples.some([])["sparse"])) == []
    assert numbers(examples.alone(3)["dense"]) == [[6, 7]]


def test_as_many_examples_as_before():
    """So that XLA need not compile for another size."""
    assert numbers(Examples(np.arange(5), None).some([1, 3], as_many=True)) == [1, 1, 1, 3, 3]
    assert numbers(Examples(np.arange(5), None).some([], as_many=True)) == []


def test_examples_on_replicas():
    """Those of the first replica come first. A replica may be left without any."""
    strategy = mirrored(2)
    parts = [tf.constant([0, 1, 2]), tf.constant([3, 4])]
    batch = strategy.experimental_distribute_values_from_function(
        lambda context: parts[context.replica_id_in_sync_group]
    )
    examples = Examples(batch, strategy)
    assert examples.count == 5
    assert numbers(examples.some([1, 3, 4]), strategy) == [[1], [3, 4]]
    assert numbers(examples.some([3]), strategy) == [[], [3]]
    assert numbers(examples.some([0, 3], as_many=True), strategy) == [[0, 0, 0], [3, 3]]
    assert numbers(examples.alone(4)) == [4]
