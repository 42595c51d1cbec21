"""value_and_gradients with `forward=`: a loss of the outputs of the whole batch, in two passes."""

from typing import Any, Callable, List, Tuple

import tensorflow as tf

from macrobatch._batches import checks as batch_checks
from macrobatch._gradients import functions
from macrobatch._keras import stateless
from macrobatch._keras.sequences import low_precision
from macrobatch._keras.two_stages import TwoStages
from macrobatch._tensorflow import loss_fn as loss_fns
from macrobatch._tensorflow import replicas, sums, trial, two_passes
from macrobatch._tensorflow.engine import ENGINE
from macrobatch._tensorflow.gather import Gathered
from macrobatch._tensorflow.two_passes import Loss, TwoPasses
from macrobatch._types import Batch, Forward, Gradient, How, MicroBatches, Size, Tensor


class WholeBatch:
    """A batch, a forward pass and a loss, and the variables that are trained."""

    def __init__(
        self,
        forward: Callable[[Any], Any],
        loss_fn: Callable[[Any, Any], Any],
        has_aux: bool,
        trained: List[Any],
        micro_batches: MicroBatches,
        jit_compile: bool,
    ):
        """Takes what `value_and_gradients` got.

        Args:
            forward: the user's forward pass.
            loss_fn: the user's loss.
            has_aux: whether `loss_fn` returns a pair.
            trained: the variables.
            micro_batches: the batch, and how it is cut.
            jit_compile: whether XLA compiles `forward` by itself.
        """
        self._forward, self._loss_fn, self._has_aux = forward, loss_fn, has_aux
        self._trained, self._micro_batches, self._jit_compile = trained, micro_batches, jit_compile
        self._weights = [replicas.tf_variable(variable) for variable in trained]
        self._stages = TwoStages([], trained, ENGINE)

    @property
    def shows_size(self) -> bool:
        """Whether the size of micro-batches shows in what the forward pass came to."""
        return functions.shows_size(self._stages.forward)

    def run(self, owner: Any, check: Callable[[], Any]) -> Tuple[Tensor, Any, List[Gradient]]:
        """The loss, `aux` and the gradients; of these, in a replica, its part.

        Args:
            owner: the user's forward pass, which is tried once.
            check: tries whether examples meet in it, and returns what is there after that.
        """
        micro_batches, stages = self._micro_batches, self._stages

        def dry_run(like: Batch) -> None:
            functions.dry_run(self._forward, self._trained, like)

        with batch_checks.explaining(micro_batches, dry_run):
            likes = micro_batches.whole_and_shorter()
            if likes is not None and not tf.executing_eagerly():
                dry_run(likes[1])
            passes = TwoPasses(
                "What forward returns",
                self._pass,
                micro_batches,
                stages.forward.values,
                stages.fits,
                self._jit_compile,
            )
            self._check_padding(owner)
            passes.run(functions.synchronized(stages.forward))
        functions.warn(stages.forward)
        gathered = Gathered(micro_batches.examples)
        batch = gathered.whole(micro_batches.whole)
        values = stages.between(passes.part.written)

        def loss(outputs: Any, _: List[Tensor]) -> Loss:
            return self._loss(outputs, batch, values, gathered.examples)

        found, gradients = passes.loss_and_gradients(loss, gathered, self._weights)
        gradients = [
            sums.cast(sums.merge_rows(gradient), weight.dtype)
            for gradient, weight in zip(gradients, self._weights)
        ]
        aux, result = found.result
        with functions.tried((found.value, gradients, passes.part), check) as waiting:
            stages.write(passes.part.written, passes.part.moments, result)
            gradients = waiting(gradients)
        return found.value, aux, gradients

    def _pass(self, micro_batch: Batch, values: List[Tensor], how: How) -> Forward:
        code = stateless.run(lambda: self._forward(micro_batch), self._stages.forward, values, *how)
        return Forward(code.value, (), code.written, code.moments)

    def _loss(self, outputs: Any, batch: Batch, values: List[Tensor], examples: Size) -> Loss:
        result = self._stages.run_loss(lambda: self._loss_fn(outputs, batch), values)
        value, aux = result.value, ()
        if self._has_aux:
            value, aux = loss_fns.with_aux(value)
        mean = loss_fns.mean_of(value, examples)
        return Loss(tf.math.divide_no_nan(mean.numerator, mean.denominator), (aux, result))

    def _check_padding(self, owner: Any) -> None:
        """Tries, once, whether anything depends on padding that is cut off."""
        stages = self._stages

        def found(cut: Batch, uncut: Batch) -> trial.Found:
            how, values = How(alone=True, drops=False), stages.forward.values()
            of_whole = self._pass(uncut, values, how).outputs
            with tf.GradientTape() as tape:
                outputs = self._pass(cut, values, how).outputs
                outputs = two_passes.at_whole_length(outputs, of_whole)
                loss = self._loss(outputs, uncut, stages.forward.values(), ENGINE.examples(uncut))
            gradients = tape.gradient(loss.value, self._weights)
            return {"loss": [loss.value, *trial.comparable(gradients)]}

        check = trial.Trial(
            [two_passes.outcome(found, self._micro_batches)],
            lambda: stages.forward.drew,
            owner,
            low_precision([]),
            lambda: False,  # The loss may compare examples with each other.
            beside_whole=True,
        )
        trial.check_once(owner, self._weights, self._micro_batches, check)
