"""The gradient noise scale, from squared norms of gradients. From values to values.

A batch of B examples is cut into K micro-batches, over all replicas. The micro-batch with b_i
examples has the gradient g_i, and adds c_i = (b_i / B) g_i to the gradient of the batch. With G the
gradient that batches have on average, and tr(S) the variance of the gradient of one example,

    Q = sum_i (b_i / B) |g_i|^2 = sum_i (B / b_i) |c_i|^2    has the mean  |G|^2 + tr(S) K / B
    |sum_i c_i|^2                                            has the mean  |G|^2 + tr(S) / B

So both are known without bias, also if micro-batches are of different sizes:

    noise  = (Q - |sum_i c_i|^2) B / (K - 1)      tr(S)
    signal = |sum_i c_i + p|^2 - noise / B        |G + p|^2

with p the gradient of weight regularisers, which has no noise. The noise scale is noise / signal,
each of them averaged over updates first: a mean of such ratios would be biased. This is the pair of
McCandlish et al. 2018, An Empirical Model of Large-Batch Training, appendix A.1, for K sizes.
"""

from typing import NamedTuple, Tuple

import keras
from keras import ops

from macrobatch._types import Logs, Tensor

# What is known after some updates, in one vector: how many there were, the latest norm of the
# gradient, the most examples of a batch, and exponential averages of 1, noise and signal, which
# start with 0. The average of 1 tells how much of the averages there is.
SIZE = 6


class Squares(NamedTuple):
    """What is measured of an update, over all replicas.

    Attributes:
        micro_batches: the number of micro-batches, K.
        examples: the number of examples, B.
        apart: the squared norms of the micro-batches, Q.
        together: the squared norm of their sum.
        whole: the squared norm of their sum and the gradient of weight regularisers.
    """

    micro_batches: Tensor
    examples: Tensor
    apart: Tensor
    together: Tensor
    whole: Tensor


def pair(found: Squares) -> Tuple[Tensor, Tensor]:
    """Noise and signal, each without bias. Of a batch that is not cut they are not finite."""
    noise = (found.apart - found.together) * found.examples / (found.micro_batches - 1)
    return noise, found.whole - noise / found.examples


def advanced(state: Tensor, is_measured: Tensor, found: Squares, decay: float) -> Tensor:
    """The state after one more update.

    Args:
        state: the state before it.
        is_measured: whether the update was measured.
        found: what was measured, if it was.
        decay: what of an average is left when something is measured.
    """
    updates, norm, examples, averages = state[0], state[1], state[2], state[3:]
    noise, signal = pair(found)
    new = ops.stack([ops.ones_like(noise), noise, signal])
    # Nor do gradients count that are not finite, as a loss scale that is too large gives them.
    counts = ops.logical_and(is_measured, ops.isfinite(signal))
    averages = ops.where(counts, decay * averages + (1 - decay) * new, averages)
    norm = ops.where(is_measured, ops.sqrt(found.whole), norm)
    examples = ops.maximum(examples, found.examples)
    return ops.concatenate([ops.stack([updates + 1, norm, examples]), averages])


def counted(state: Tensor, examples: Tensor, updates: int = 1) -> Tensor:
    """The state after more updates, of so many examples at most, that were not measured."""
    most = ops.maximum(state[2], examples)
    return ops.concatenate([ops.stack([state[0] + updates, state[1], most]), state[3:]])


def updates_of(state: Tensor) -> Tensor:
    """How many updates there were."""
    return state[0]


def logs_of(state: Tensor) -> Logs:
    """What is logged: nan if nothing is known yet, infinity if noise is all that there is."""
    _, norm, _, weight, noise, signal = (state[i] for i in range(SIZE))
    nan, infinity = (ops.full_like(noise, value) for value in (float("nan"), float("inf")))
    ratio = noise / ops.where(signal > 0, signal, ops.ones_like(signal))
    scale = ops.where(weight > 0, ops.where(signal > 0, ratio, infinity), nan)
    dtype = keras.config.floatx()
    return {"noise_scale": ops.cast(scale, dtype), "gradient_norm": ops.cast(norm, dtype)}


def examples_of(state: Tensor) -> Tensor:
    """The most examples that a batch had: at the end of an epoch there may be a smaller one."""
    return state[2]
