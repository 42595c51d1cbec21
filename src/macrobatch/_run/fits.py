"""What is done at each `fit` of a script that knows nothing of macrobatch."""

import sys
import types
import weakref
from typing import Any, Callable, Dict, List

import keras

import macrobatch
from macrobatch import _backends, _checks, _internals
from macrobatch._accumulate import accumulate, release
from macrobatch._keras import model_checks
from macrobatch._keras.fit_call import FitCall
from macrobatch._keras.installed import accumulation_of, going_on_with
from macrobatch._keras.size_logged import left_out
from macrobatch._run.hook import is_raised_here
from macrobatch._sizes import limit, peaks


class Fits:
    """All fits of a script."""

    def __init__(self, settings: Dict[str, Any]):
        self._settings = {k: v for k, v in settings.items() if k != "verify"}
        self._verify = settings.get("verify")
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()
        self._models = 0  # that are accumulated
        self._refused: List[str] = []  # the names of models that cannot be
        self._ran: List[Any] = []  # counts, on backends that have them
        self._is_verifying = False

    def fit(self, plain: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs a fit, accumulated if the model can be and the script has not seen to it itself.

        Args:
            plain: Keras' own.
            model: the model.
            *args: as `fit` has them.
            **kwargs: as `fit` has them.
        """
        # What is verified is copies, each made to be trained in its own way.
        if model in self._seen or self._is_verifying:
            return plain(model, *args, **kwargs)
        self._seen.add(model)
        is_own = accumulation_of(model) is not None
        if not is_own:
            try:
                model_checks.splittable_layers(_internals.layers_of(model))
                model_checks.no_overwriting_variables(model.trainable_weights)
                accumulate(model, **self._settings)
            except ValueError as error:
                self._say_plain(model, error)
                return plain(model, *args, **kwargs)
        if self._verify is not None:
            args, kwargs = self._verified(plain, model, args, kwargs)
        self._count(model)
        if is_own:
            return plain(model, *args, **kwargs)
        before = _updates(model)
        try:
            # An accumulated model has a `fit` of its own, with what goes with sizes and workers.
            fit = vars(model).get("fit")
            if fit is None:
                return plain(model, *args, **kwargs)
            with going_on_with(model, plain), left_out():
                return fit(*args, **kwargs)
        except ValueError as error:
            if not _is_refusal(error) or self._trained(model, before) or _runs_out(args, kwargs):
                raise
            release(model)
            self._say_plain(model, error)
        return plain(model, *args, **kwargs)

    def _say_plain(self, model: Any, error: ValueError) -> None:
        self._refused.append(model.name)
        reason = _checks.one_line(error, 2000)[len(type(error).__name__) + 2 :]
        _checks.warn(
            f"The model {model.name!r} trains as without macrobatch, because it cannot be "
            f"accumulated with these options. {reason}"
        )

    def summary(self) -> str:
        """What was run, in one line."""
        found = [ran.totals() for ran in self._ran]
        totals = [sum(each[i] for each in found) for i in range(2)]
        names = ("batch", "micro-batch")
        parts = [f"{n} {name}{'es' * (n != 1)}" for n, name in zip(totals, names)]
        if self._models > len(self._ran):
            parts = [f"{self._models} accumulated model" + "s" * (self._models > 1)]
        elif not totals[0]:
            parts = ["no batch was accumulated"]
        return ", ".join([*parts, *_peak()]) + self._why_nothing(*totals)

    def _why_nothing(self, batches: int, micro_batches: int) -> str:
        if batches and batches == micro_batches:
            return ". Nothing was accumulated: each batch was one micro-batch"
        if self._refused and not batches:
            return f". Cannot be accumulated, as a warning says: {_checks.some(self._refused)}"
        return ""

    def _count(self, model: Any) -> None:
        self._models += 1
        accumulation = accumulation_of(model)
        if hasattr(accumulation, "count"):
            self._ran.append(accumulation.count())

    def _trained(self, model: Any, before: int) -> bool:
        """Whether the model has been trained with any batch, so that it is not as it was."""
        accumulation = accumulation_of(model)
        if hasattr(accumulation, "has_written"):
            return bool(accumulation.has_written())
        return accumulation is None or _updates(model) > before

    def _verified(self, plain: Any, model: Any, args: Any, kwargs: Any) -> Any:
        """The arguments of a fit, once its first batch has been looked at."""
        verify = macrobatch.verify  # or what says that this backend has none
        call = FitCall(plain, model, args, kwargs)
        x = call.get("x")
        if isinstance(x, types.GeneratorType):
            first = next(x)
            call.set("x", _again(first, x))
            batch: Any = (first,) if not isinstance(first, tuple) else first
        else:
            from macrobatch._no_trace import data

            batch = data.first_batch(
                x,
                call.get("y"),
                call.get("sample_weight"),
                batch_size=call.get("batch_size") or 32,
                class_weight=call.get("class_weight"),
            )
        self._is_verifying = True
        try:
            report = verify(model, *batch)
        except ValueError as error:  # A model that cannot be copied, and has no weights yet.
            why = _checks.one_line(error, 2000)
            _checks.warn(f"The model {model.name!r} cannot be verified, and is trained. {why}")
            return call.arguments()
        finally:
            self._is_verifying = False
        if report.exact is not True:
            print(f"macrobatch: {report}", file=sys.stderr, flush=True)
        if report.exact is False and self._verify == "stop":
            raise SystemExit(1)
        return call.arguments()


def _updates(model: Any) -> int:
    """How many updates a model's optimizer has made."""
    optimizer = getattr(model, "optimizer", None)  # A model that is not compiled has none.
    return 0 if optimizer is None else int(optimizer.iterations.numpy())  # also of replicas


def _again(first: Any, rest: Any) -> Any:
    yield first
    yield from rest


def _runs_out(args: Any, kwargs: Any) -> bool:
    """Whether the data of a fit is there only once, so that a second fit would lack batches."""
    x = args[0] if args else kwargs.get("x")
    return hasattr(x, "__next__")


def _is_refusal(error: ValueError) -> bool:
    """Whether macrobatch itself has raised an error, and neither Keras nor the script."""
    if isinstance(error, _checks.Refused):
        return True
    return is_raised_here(error.__traceback__)


def _peak() -> List[str]:
    """The most memory that was in use, where it is known."""
    try:
        if keras.backend.backend() == _backends.TENSORFLOW:
            from macrobatch._tensorflow import device_memory

            if device_memory.gpus():
                return [f"peak memory of the GPU {limit.shown(device_memory.GpuCounter().read())}"]
        return [f"peak memory {limit.shown(peaks.highest_ever())}"]
    except ValueError:  # Windows
        return []
