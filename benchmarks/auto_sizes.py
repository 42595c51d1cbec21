"""The sections of sizes that are found: how good they are, what looking for them costs, and whether
memory stays within limits.
"""

import random

import measures
from records import KEPT_MEMORY, Contender, Section, Target

MODELS = {"mlp": ("wide MLP", 256), "cnn": ("CNN", 128), "transformer": ("transformer", 64)}
SMALLEST = 4  # of the fixed sizes
LIBRARY = "auto_contenders"
LIMITS = 10
LOOKING = ("updates", "seconds", "lost")


def sizes_of(batch):
    """The sizes that are looked at: powers of two, and the whole batch."""
    powers = [2**power for power in range(batch.bit_length()) if SMALLEST <= 2**power < batch]
    return [*powers, batch]


def against_fixed(name):
    """Auto, once it has settled, against the best of all fixed sizes."""
    title, batch = MODELS[name]
    common = {"model": name, "batch": batch}
    fixed = {
        str(size): Contender(
            f"micro_batch_size={size}",
            "macrobatch",
            {**common, "accumulate": {"micro_batch_size": size}},
        )
        for size in sizes_of(batch)
    }
    auto = Contender('micro_batch_size="auto"', "settled", common, library=LIBRARY)

    def over_best(results):
        def median(each):
            return measures.spread(measures.seconds(results, each)).median

        return measures.time_ratio(results, "auto", min(fixed, key=median))

    targets = [Target("settled auto over the best fixed size", over_best, 1.02)]
    text = f"{title}, batch {batch}: a size that was found, and fixed sizes"
    contenders = {"auto": auto, **fixed}
    return Section(
        *(f"auto-{name}", text, "bars", contenders, targets),
        steps=3,
        warm_up=2,
        variables=KEPT_MEMORY,
    )


def looking():
    """What it takes until a size is found."""
    contenders = {
        name: Contender(title, "looking", {"model": name, "batch": batch}, library=LIBRARY)
        for name, (title, batch) in MODELS.items()
    }

    def median(name, what):
        return lambda results: measures.spread(results["contenders"][name][what]).median

    targets = []
    for name, (title, _) in MODELS.items():
        targets += [
            Target(f"{title}: updates until settled", median(name, "updates"), form="{:.0f}"),
            Target(f"{title}: seconds lost", median(name, "lost"), form="{:.1f} s"),
        ]
    text = "looking for a size: updates until it has settled, and time lost in them"
    return Section("auto-looking", text, "figures", contenders, targets, rounds=3)


def within_limits():
    """Ten limits, drawn once and for all: how much more than at the start."""
    draws = random.Random(0)
    contenders = {}
    for index in range(LIMITS):
        name = list(MODELS)[index % len(MODELS)]
        title, batch = MODELS[name]
        more = draws.randrange(500, 2000, 10)
        options = {"model": name, "batch": batch, "more": more}
        label = f"{title}, {more} MiB more than at the start"
        contenders[f"limit {index}"] = Contender(label, "limited", options, library=LIBRARY)

    def highest(results):
        return max(max(measures.figure(results, name, "share")) for name in contenders)

    targets = [Target("peak over the limit, the highest of ten", highest, 1.0, form="{:.3f} x")]
    text = "ten drawn limits of memory: the peak over the limit"
    return Section("auto-limits", text, "figures", contenders, targets, rounds=1)


def sections():
    return [*(against_fixed(name) for name in MODELS), looking(), within_limits()]
