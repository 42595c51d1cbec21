"""A case: a model, its data and how it is trained. It runs in all modes unless it says otherwise.

The reference of a case, plain Keras on whole batches, is trained once and kept for all modes.
"""

import functools
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, List, Optional

import pytest
import support
from support import MODES, assert_ended, assert_same_history, ended, train

EVERYWHERE = "graph eager compiled replicas"
BACKENDS = "tensorflow jax torch"


@dataclass(eq=False)
class Case:
    """A record; what `support.train` takes besides is in `options`.

    Attributes:
        modes: what the case can run in. The reference runs eagerly, if it can: a few steps take
            less time than a trace.
        quick: in which of these `make test` runs it. The others are left to `make test-all`.
        backends: on which backends of Keras the case can run.
        elsewhere: where `make test-backends` runs it: "jax" and "torch" are what these backends do
            unless told otherwise, "jax-eager" is another mode. By default on torch, and on JAX,
            which takes seconds to compile a model, if `make test` makes a graph of it.
        wrong_metrics: on which backends plain Keras reports wrong metrics of it: masks do not count
            in training on JAX, and they are multiplied into the user's weights on torch. There,
            weights and losses are compared.
        filters: of warnings that are no matter of the case.
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
    wrong_metrics: str = ""
    filters: List[str] = field(default_factory=list)
    micro_batch_size: int = 3
    reference: Optional[Callable[[], Any]] = None
    per_mode: bool = False
    options: Dict[str, Any] = field(default_factory=dict)

    def expected(self, mode):
        modes = [each for each in self.modes.split() if each in MODES] or list(MODES)
        if self.per_mode:
            return self._trained(mode if mode in MODES else modes[0])
        # Eagerly, JAX compiles each operation by itself.
        best = next(iter(MODES)) if support.BACKEND == "jax" else "eager"
        return self._trained(best if best in modes else modes[0])

    @functools.lru_cache(maxsize=None)  # noqa: B019 - cases live as long as the process
    def _trained(self, mode):
        build = self.reference or self.build
        return ended(*train(build, self.x, self.y, **{**self.options, **MODES[mode]}))

    def is_quick_elsewhere(self, mode):
        """Whether `make test-backends` runs the case in a mode of this backend."""
        has_graph = not {"graph", "compiled"}.isdisjoint(self.quick.split())
        default = "torch jax" if has_graph else "torch"
        chosen = default if self.elsewhere is None else self.elsewhere
        is_usual = mode == next(iter(MODES))
        return (support.BACKEND if is_usual else f"{support.BACKEND}-{mode}") in chosen.split()

    def check(self, mode, monkeypatch):
        """Trains the model accumulated; it ends where plain Keras ends."""
        if mode == "replicas":
            monkeypatch.setattr(support, "strategy", support.mirrored(2))
        model, history = train(
            self.build,
            self.x,
            self.y,
            cut={"micro_batch_size": self.micro_batch_size},
            scope=support.strategy.scope(),
            **{**self.options, **MODES.get(mode, {})},
        )
        expected = self.expected(mode)
        assert_ended(expected, model)
        expected, found = expected.history, history
        if support.BACKEND in self.wrong_metrics.split():
            expected, found = ({"loss": each["loss"]} for each in (expected, found))
        assert_same_history(expected, found)


def case(build, x, y=None, **options):
    """A `Case`, written as a call of `support.check` is."""
    known = {name: options.pop(name) for name in list(options) if name in Case.__annotations__}
    return Case(build, x, y, options=options, **known)


def parameters(cases):
    """Each case in each of its modes, marked thorough where it says so."""
    return [
        pytest.param(case, mode, id=f"{name}-{mode}", marks=marks(case, mode))
        for name, case in cases.items()
        for mode in case.modes.split()
    ]


def marks(case, mode):
    # Half of a batch may be less than a micro-batch.
    of_mode = ["ignore:Nothing is being accumulated"] if mode == "replicas" else []
    found = [pytest.mark.filterwarnings(each) for each in [*case.filters, *of_mode]]
    return found if mode in case.quick.split() else [*found, support.thorough]
