"""A case: a model, its data and how it is trained. It runs in all modes unless it says otherwise.

The reference of a case, plain Keras on whole batches, is trained once and kept for all modes.
"""

import contextlib
import functools
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, List, Optional

import pytest
import support
from support import BACKEND, MODES, assert_ended, assert_same_history, ended, train

from macrobatch import ExactnessWarning

EVERYWHERE = "graph eager compiled replicas"
BACKENDS = "tensorflow jax torch"
# torch.compile warns of itself. What it may lose of a model runs as it is, which is said.
OF_COMPILER = [
    "ignore:.*torch.jit:DeprecationWarning",
    "ignore:Dynamo detected a call",
    "ignore:jit_compile=True has no effect",
    "ignore:The .grad attribute of a Tensor that is not a leaf",
    "ignore:If `run_eagerly` is True",
]
# Half of a batch may be less than a micro-batch.
OF_REPLICAS = ["ignore:Nothing is being accumulated"]


@dataclass(eq=False)
class Case:
    """A record; what `support.train` takes besides is in `options`.

    Attributes:
        modes: what the case can run in on TensorFlow. The reference runs eagerly, if it can: a
            few steps take less time than a trace.
        quick: in which of these `make test` runs it. The others are left to `make test-all`.
        backends: on which backends of Keras the case can run.
        elsewhere: where `make test-backends` runs it: "jax" and "torch" are what these backends do
            unless told otherwise, "jax-eager" is another mode. By default on torch, and on JAX,
            which takes seconds to compile a model, if `make test` makes a graph of it.
        other_modes: whether other backends run it also as they do if told so.
        wrong_metrics: on which backends plain Keras reports wrong metrics of it: masks do not count
            in training on JAX, and they are multiplied into the user's weights on torch. There,
            weights and losses are compared.
        filters: of warnings that are no matter of the case.
        warns: what the `ExactnessWarning` says that there must be.
        cut: arguments of `accumulate` besides the size.
        reference: what builds the plain model, if not `build`.
        per_mode: whether plain Keras reports other losses in other modes. It weighs the losses of
            several outputs by the size of a batch where the size is static.
    """

    build: Callable[[], Any]
    x: Any
    y: Any = None
    modes: str = EVERYWHERE
    quick: str = EVERYWHERE
    backends: str = BACKENDS
    elsewhere: Optional[str] = None
    other_modes: bool = True
    wrong_metrics: str = ""
    filters: List[str] = field(default_factory=list)
    warns: str = ""
    cut: Dict[str, Any] = field(default_factory=dict)
    micro_batch_size: int = 3
    reference: Optional[Callable[[], Any]] = None
    per_mode: bool = False
    options: Dict[str, Any] = field(default_factory=dict)

    def expected(self, mode):
        modes = list(MODES)
        if BACKEND == "tensorflow":
            modes = [each for each in self.modes.split() if each in MODES] or modes
        if self.per_mode:
            return self._trained(mode if mode in MODES else modes[0])
        # Eagerly, JAX compiles each operation by itself.
        best = next(iter(MODES)) if BACKEND == "jax" else "eager"
        return self._trained(best if best in modes else modes[0])

    @functools.lru_cache(maxsize=None)  # noqa: B019 - cases live as long as the process
    def _trained(self, mode):
        build = self.reference or self.build
        return ended(*train(build, self.x, self.y, **{**self.options, **MODES[mode]}))

    def is_quick(self, mode):
        """Whether `make test`, or `make test-backends`, runs the case in a mode."""
        if BACKEND == "tensorflow":
            return mode in self.quick.split()
        has_graph = not {"graph", "compiled"}.isdisjoint(self.quick.split())
        default = "torch jax" if has_graph else "torch"
        chosen = default if self.elsewhere is None else self.elsewhere
        is_usual = mode == next(iter(MODES))
        return (BACKEND if is_usual else f"{BACKEND}-{mode}") in chosen.split()

    def parameters(self, name):
        """The case in each mode of this backend, marked thorough where it says so."""
        if BACKEND not in self.backends.split():
            return
        modes = list(MODES) if self.other_modes else list(MODES)[:1]
        for mode in self.modes.split() if BACKEND == "tensorflow" else modes:
            filters = [*self.filters, *(OF_REPLICAS if mode == "replicas" else [])]
            filters += OF_COMPILER if BACKEND == "torch" and mode == "compiled" else []
            marks = [pytest.mark.filterwarnings(each) for each in filters]
            marks += [] if self.is_quick(mode) else [support.thorough]
            yield pytest.param(self, mode, id=f"{name}-{mode}", marks=marks)

    def check(self, mode, monkeypatch):
        """Trains the model accumulated; it ends where plain Keras ends."""
        if mode == "replicas":
            monkeypatch.setattr(support, "strategy", support.mirrored(2))
        warned = contextlib.nullcontext()
        if self.warns:
            warned = pytest.warns(ExactnessWarning, match=self.warns)
        with warned:
            model, history = train(
                self.build,
                self.x,
                self.y,
                cut={"micro_batch_size": self.micro_batch_size, **self.cut},
                scope=support.strategy.scope(),
                **{**self.options, **MODES.get(mode, {})},
            )
        expected = self.expected(mode)
        assert_ended(expected, model)
        expected, found = expected.history, history
        if BACKEND in self.wrong_metrics.split():
            expected, found = ({"loss": each["loss"]} for each in (expected, found))
        assert_same_history(expected, found)


def case(build, x, y=None, **options):
    """A `Case`, written as a call of `support.check` is."""
    known = {name: options.pop(name) for name in list(options) if name in Case.__annotations__}
    return Case(build, x, y, options=options, **known)


def parameters(*tables):
    """Each case of some tables in each of its modes."""
    pairs = [pair for cases in tables for pair in cases.items()]
    return [each for name, case in pairs for each in case.parameters(name)]
