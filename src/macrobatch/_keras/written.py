"""The variables that training may write."""

from typing import Any, List

import keras
from keras import tree

from macrobatch import _internals
from macrobatch._keras import model as models
from macrobatch._types import Variable


def variables_of(model: Any) -> List[Variable]:
    """All variables that training may write: also those of other optimizers that a model has."""
    optimizers = [
        each for each in vars(model).values() if isinstance(each, keras.optimizers.Optimizer)
    ]
    # Metrics that were given to compile count as those of the model once it has trained.
    given = _internals.compile_arguments(model)
    metrics = [
        each
        for name in ("metrics", "weighted_metrics")
        for each in tree.flatten(given[name])
        if isinstance(each, keras.metrics.Metric)
    ]
    others = [variable for each in (*optimizers, *metrics) for variable in each.variables]
    return [*models.variables_of(model), *models.all_variables(model), *others]
