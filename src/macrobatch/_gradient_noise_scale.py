"""GradientNoiseScale: whether a larger batch is worth it, from what accumulation has anyway."""

from typing import Any

import keras

from macrobatch import _checks
from macrobatch._keras.installed import accumulation_of
from macrobatch._noise.scale import NoiseScale


class GradientNoiseScale(NoiseScale, keras.callbacks.Callback):
    """Measures the gradient noise scale: how large a batch makes good use of its examples.

    Gradients of micro-batches differ from each other. How much they differ, compared with the
    gradient that they have in common, is the noise scale: a number of examples (McCandlish et al.
    2018, <https://arxiv.org/abs/1812.06162>). A batch that is much smaller could be larger: fewer
    updates, from hardly more examples. A batch that is much larger could be smaller: fewer
    examples, in hardly more updates.

    As a callback of `fit`, for a model that `macrobatch.accumulate` has prepared, it adds
    `noise_scale` and `gradient_norm` to the logs of every batch and epoch, so that History and
    TensorBoard have them. At the end it prints the advice in one sentence. With `verbose=0` the
    sentence goes to the logger `macrobatch`, as sizes that are found do.
    In a loop of your own, on TensorFlow, pass it to
    `macrobatch.value_and_gradients(..., noise_scale=)`.

    The update stays as it is. Without the callback nothing is measured, and nothing is paid.

    Args:
        every: how many updates there are for each one that is measured. What an update costs more
            that is measured is one more look at the gradients of each micro-batch.
        decay: what is left of the averages when an update is measured. The noise scale is a ratio
            of two averages over about 1 / (1 - decay) updates that are measured.

    Raises:
        ValueError: at the start of `fit`, if the model is not accumulated, brings its own
            `train_step`, or has `whole_batch_loss=True` or `sequence_axis=`.

    Examples:
        >>> import keras, macrobatch, numpy as np
        >>> model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> model = macrobatch.accumulate(model, micro_batch_size=8)
        >>> x, y = np.random.normal(size=[256, 3]), np.ones([256, 1])
        >>> noise = macrobatch.GradientNoiseScale()
        >>> history = model.fit(x, y, batch_size=64, verbose=0, callbacks=[noise])
        >>> sorted(history.history)
        ['gradient_norm', 'loss', 'noise_scale']
        >>> advice = noise.advice()  # "Gradient noise scale 9.1: a batch of 64 is ..."
    """

    def __init__(self, every: int = 10, decay: float = 0.95):
        keras.callbacks.Callback.__init__(self)
        NoiseScale.__init__(self, every, decay)
        self._accumulation: Any = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Starts to measure. Nothing has been trained yet."""
        accumulation = accumulation_of(self.model)
        if accumulation is None:
            raise ValueError(
                "GradientNoiseScale needs the gradients of micro-batches. Received: the model "
                f"{self.model.name!r}, which is not accumulated. Call "
                "macrobatch.accumulate(model, micro_batch_size=...) before fit()."
            )
        self.restart()
        accumulation.measure(self.meter(accumulation.meter))
        self._accumulation = accumulation

    def on_train_end(self, logs: Any = None) -> None:
        """Measures no more, and says what was found."""
        if self._accumulation is not None:
            self._accumulation.measure(None)
            self._accumulation = None
        if self.params.get("verbose"):
            print(self.advice())
        else:
            _checks.LOG.warning("macrobatch: %s", self.advice())
