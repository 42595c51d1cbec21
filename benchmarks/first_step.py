"""What a user waits for, over plain Keras: the first update, and a whole first fit."""

import measures
from records import Contender, Section, Target, time_target

MODELS = {
    "mobilenet": "MobileNetV3Small at 32x32",
    "resnet": "ResNet50 at 32x32",
    "transformer": "transformer of 6 layers",
    "masked transformer": "masked transformer of 6 layers",
}
CALLS = ("fit", "evaluate")
BATCH, MICRO_BATCH = 32, 8
PLAIN, OURS, BY_LENGTH = "plain Keras", "macrobatch", "macrobatch, sequence_axis=1"
LIMITS = {OURS: 1.25, BY_LENGTH: 2.0}
TRIAL_LIMIT = 0.1
PROCESSES = 5  # of each contender


def ways(model):
    """What accumulate() is called with in each way; plain Keras without it."""
    cut = {"micro_batch_size": MICRO_BATCH}
    found = {PLAIN: None, OURS: cut}
    if model == "masked transformer":
        found[BY_LENGTH] = {**cut, "sequence_axis": 1}
    return found


def name(call, model, way):
    return f"{call}, {model}: {way}"


def plain(contender):
    """The name of the plain contender that makes the same call of the same model."""
    return f"{contender.split(': ')[0]}: {PLAIN}"


def limits():
    """The limit of each accumulated contender, by its name."""
    cases = [(call, model, way) for call in CALLS for model in MODELS for way in ways(model)]
    return {name(*case): LIMITS[case[-1]] for case in cases if case[-1] != PLAIN}


def contenders():
    made = {}
    for call in CALLS:
        for model, title in MODELS.items():
            for way, accumulate in ways(model).items():
                options = {"call": call, "model": model, "batch": BATCH, "accumulate": accumulate}
                label = f"{call}, {title}: {way}"
                made[name(call, model, way)] = Contender(
                    label, "first", options, library="first_step_contenders"
                )
    return made


def graphs_again(results):
    """Of all accumulated contenders, the most graphs that a second call has made."""
    return max(measures.count(results, each, "graphs again") for each in limits())


def trial_target(each, label):
    """The share of the first step that goes into the trial whether examples meet."""

    def share(results):
        return measures.spread(measures.figure(results, each, "share of the trial"))

    text = f"{label}: the trial whether examples meet, of all processor time"
    return Target(text, share, TRIAL_LIMIT, form="{:.3f}")


def section():
    every = contenders()
    targets = [
        time_target(every[each].label, each, plain(each), limit) for each, limit in limits().items()
    ]
    fits = [each for each in limits() if each.startswith("fit")]
    targets += [trial_target(each, every[each].label) for each in fits]
    text = "graphs made by a second call with the same shapes, the most of all"
    targets.append(Target(text, graphs_again, 0, form="{:.0f}"))
    title = "first step: processor time from the call to the end of the first batch"
    return Section("first-step", title, "first", every, targets, rounds=PROCESSES)


# The whole first fit, and the first evaluate after it

WHOLE_BATCH, WHOLE_MICRO_BATCH = 16, 4


def whole_section():
    """Processes that do the same differ by what else the machine does: so the least counts."""
    contenders, targets = {}, []
    for model in ("mobilenet", "transformer"):
        for way, accumulate in ((PLAIN, None), (OURS, {"micro_batch_size": WHOLE_MICRO_BATCH})):
            options = {"model": model, "batch": WHOLE_BATCH, "accumulate": accumulate}
            contenders[f"{model}: {way}"] = Contender(
                f"{MODELS[model]}: {way}", "whole", options, library="first_step_contenders"
            )
        targets += [whole_target(f"{model}: {OURS}", model, call) for call in CALLS]
    title = "first fit and evaluate, each from its call to its return: processor time"
    return Section("first-fit", title, "least", contenders, targets, rounds=PROCESSES)


def whole_target(each, model, call):
    def ratio(results):
        return measures.least_ratio(results, each, plain(each), call)

    return Target(f"{call}, {MODELS[model]}: macrobatch over plain Keras", ratio)
