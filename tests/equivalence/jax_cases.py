"""Equivalence cases of what JAX alone has: its sparse arrays."""

from builders import batches, sparse
from case import case
from jax.experimental.sparse import BCOO


def sparse_batches():
    for x, y in batches():
        yield BCOO.fromdense(x), y


CASES = {
    "sparse": case(sparse, lambda: sparse_batches(), fit={"steps_per_epoch": 3}, quick="graph")
}
