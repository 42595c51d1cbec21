"""What a section of the benchmark is made of: contenders, and targets with their limits."""

from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence

import measures

# malloc() gives memory back to the system between steps, and takes it again, or does not: that
# depends on what happens to lie behind it. It may be a tenth of a step. These keep all memory.
KEPT_MEMORY = {"MALLOC_TRIM_THRESHOLD_": "4294967296", "MALLOC_MMAP_THRESHOLD_": "4294967296"}


class Contender(NamedTuple):
    label: str
    way: str
    options: Dict[str, Any]
    environment: str = "own"  # or "own, jax", "own, torch"; of peers, see processes.python_for
    steps: Optional[int] = None  # timed in a turn, if others than those of the section
    library: str = "keras_contenders"  # the file that makes its training

    def description(self):
        """What its process is started with."""
        library = "torch_contenders" if self.environment == "torch" else self.library
        return {"library": library, "way": self.way, "options": self.options}


class Target(NamedTuple):
    """A figure of the results, and its limit; without a limit it is shown."""

    text: str
    value: Callable[[Dict[str, Any]], Any]
    limit: Optional[float] = None
    at_least: bool = False
    form: str = "{:.2f} x"

    def met(self, value):
        return value >= self.limit if self.at_least else value <= self.limit


class Section(NamedTuple):
    name: str
    title: str
    kind: (
        str  # of the table and the picture: "bars", "memory", "line", "first", "least" or "figures"
    )
    contenders: Dict[str, Contender]
    targets: List[Target]
    base: str = ""  # the contender that times are compared with in the table and the picture
    mark: Optional[float] = None  # the target for macrobatch's time over the base's
    steps: int = 1  # timed in a turn, of which the median counts
    warm_up: int = 3  # updates that are not timed
    check_update: bool = False  # compare the weights after two updates
    peaks: Sequence[str] = ()  # contenders whose memory is measured apart, several times
    variables: Optional[Dict[str, str]] = None  # of the environment, for all that are timed
    starts: int = 1  # how often all processes are started anew, for as many rounds each time
    rounds: int = 15  # turns of each contender, unless the command line says otherwise


def time_target(text, name, other, limit=None, **options):
    return Target(text, lambda results: measures.time_ratio(results, name, other), limit, **options)


def peak_target(text, name, other, limit):
    def ratio(results):
        return measures.peak_ratio(results, name, other)

    return Target(text, ratio, limit, form="{:.3f} x")
