"""settings_of: what a model was asked to accumulate with, and what is in force."""

from typing import Any, Callable, Dict, Literal, NamedTuple, Optional, Union

from macrobatch._keras.installed import accumulation_of


class Settings(NamedTuple):
    """The settings of an accumulated model. All but the last two are arguments of `accumulate`.

    Attributes:
        micro_batch_size: the number of examples in a micro-batch, or "auto".
        micro_batch_tokens: examples times the longest of them, or "auto".
        sequence_axis: the axis along which sequences are padded.
        lengths: the function that returns the length of each example.
        micro_batch_weight: the function that returns the weight of a micro-batch.
        whole_batch_loss: whether the loss sees the predictions of the full batch.
        memory_limit: how much memory the process may take, as it was given.
        nonfinite: what to do with examples that are not finite.
        size_in_use: the number of examples, or of tokens, in a micro-batch on each device. Under
            "auto" it is the size of now, and None before the first batch.
        devices: the number of devices that share each batch.
    """

    micro_batch_size: Union[int, Literal["auto"], None] = None
    micro_batch_tokens: Union[int, Literal["auto"], None] = None
    sequence_axis: Optional[int] = None
    lengths: Optional[Callable[[Any, Any, Any], Any]] = None
    micro_batch_weight: Optional[Callable[[Any, Any, Any], Any]] = None
    whole_batch_loss: bool = False
    memory_limit: Union[int, float, str, None] = None
    nonfinite: Literal["propagate", "skip", "raise"] = "propagate"
    size_in_use: Optional[int] = None
    devices: int = 1

    def arguments(self) -> Dict[str, Any]:
        """The arguments of `accumulate` that differ from their defaults, by name."""
        asked = zip(self._fields[:-2], self, Settings())
        return {name: value for name, value, default in asked if value != default}


def settings_of(model: Any) -> Optional[Settings]:
    """The settings of a model: what `accumulate` was asked for, and what is in force.

    Args:
        model: a Keras model.

    Returns:
        A `Settings`, which is a NamedTuple, or None for a model that is not accumulated.

    Examples:
        >>> import keras, macrobatch
        >>> model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
        >>> model = macrobatch.accumulate(model, micro_batch_size=8)
        >>> macrobatch.settings_of(model).size_in_use
        8
    """
    accumulation = accumulation_of(model)
    if accumulation is None:
        return None
    settings: Settings = accumulation.settings
    size = accumulation.cut.named()[1]
    if accumulation.auto is not None and not accumulation.auto.has_size:
        size = None
    return settings._replace(size_in_use=size, devices=accumulation.devices)
