"""Which numbers of a batch must be finite, and whether a step may write what came of the batch."""

from typing import Any, List, Sequence

from macrobatch import _optimizer_checks
from macrobatch._types import Gradient


class Guard:
    """What is kept from being written.

    Attributes:
        policy: "propagate" lets everything through. "skip" and "raise" keep a batch out that has
            numbers that are not finite.
        looks: whether steps run only to see whether their numbers are finite.
    """

    def __init__(self, policy: str = "propagate"):
        self.policy = policy
        self.looks = False
        self._scales = False

    @property
    def is_wanted(self) -> bool:
        """Whether there is anything to keep out."""
        return self.policy != "propagate"

    def start(self, optimizer: Any) -> None:
        """Looks at the optimizer of a step that is about to be made."""
        _optimizer_checks.sees_overflows(optimizer, self.policy, "update")
        self._scales = _optimizer_checks.has_dynamic_scale(optimizer)

    def look(self, looks: bool) -> None:
        """Lets steps only look whether their numbers are finite, or lets them write."""
        self.looks = looks

    def numbers(self, gradients: Sequence[Gradient], losses: Sequence[Any]) -> List[Any]:
        """What must be finite.

        Args:
            gradients: of the whole batch.
            losses: the reported values.
        """
        # A gradient may overflow because of a dynamic loss scale, which the optimizer then lowers.
        return [*([] if self._scales else gradients), *losses]
