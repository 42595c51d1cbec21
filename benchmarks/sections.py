"""What is measured against what: the sections of the benchmark, their contenders and targets."""

import auto_sizes
import backends
import first_step
import measures
import numpy as np
from records import Contender, Section, Target, peak_target, time_target

K = 8  # micro-batches of a batch


COMPARED = ("macrobatch", "keras")


def peak_targets(text):
    """Peak memory of macrobatch over that of Keras' accumulation."""

    def without_fragments(results):
        return measures.peak_ratio(results, *COMPARED, kind="peak without fragments")

    return [
        peak_target(text, *COMPARED, 1.0),
        Target(f"{text}, in TensorFlow's own allocator", without_fragments, form="{:.3f} x"),
    ]


# Time of an update of K micro-batches


def ours(model, micro, **options):
    """Contenders that run in the environment of this project."""
    common = {"model": model, "batch": K * micro, **options}
    cut = {**common, "micro_batches": K}
    accumulate = {"micro_batch_size": micro}
    if options.get("jit_compile"):
        floors = {"floor": Contender("floor", "floor", cut)}
    else:
        floors = {
            "floor, loop": Contender("floor, in a loop", "floor", cut),
            "floor, unrolled": Contender("floor, unrolled", "floor", {**cut, "unrolled": True}),
        }
    return {
        **floors,
        "macrobatch": Contender("macrobatch", "macrobatch", {**common, "accumulate": accumulate}),
        "keras": Contender("Keras gradient_accumulation_steps", "keras", cut),
        "plain": Contender("plain Keras, whole batch", "plain", common),
    }


def torchs(model, micro, jit_compile=False):
    common = {"model": model, "batch": K * micro, "jit_compile": jit_compile}
    name = "PyTorch, torch.compile" if jit_compile else "PyTorch"
    key = "compiled torch" if jit_compile else "torch"
    cut = {**common, "micro_batches": K}
    return {
        key: Contender(f"{name}, Accelerate", "torch", cut, "torch"),
        f"plain {key}": Contender(f"{name}, whole batch", "torch", common, "torch"),
    }


def peer(model, micro):
    options = {"model": model, "batch": K * micro, "micro_batches": K}
    label = "gradient-accumulator 0.5.2 (TensorFlow 2.12)"
    return {
        "gradient-accumulator": Contender(label, "gradient-accumulator", options, "peers"),
    }


def overheads(torch):
    return [
        time_target("accumulating over its own plain batch: macrobatch", "macrobatch", "plain"),
        time_target("accumulating over its own plain batch: Keras", "keras", "plain"),
        time_target("accumulating over its own plain batch: PyTorch", torch, f"plain {torch}"),
        time_target("macrobatch over PyTorch with Accelerate", "macrobatch", torch),
    ]


def cost(name, title, micro, limit, steps, starts=1):
    contenders = {**ours(name, micro), **peer(name, micro), **torchs(name, micro)}
    if name == "cnn":  # The others have a section with everything compiled.
        contenders.update(torchs(name, micro, jit_compile=True))
    peer_key = "gradient-accumulator"
    targets = [
        time_target("macrobatch over the floor", "macrobatch", "floor", limit),
        time_target("macrobatch over Keras' accumulation", "macrobatch", "keras", 1.0),
        *peak_targets("peak memory over Keras' accumulation"),
        time_target("macrobatch over gradient-accumulator", "macrobatch", peer_key, 1.0),
        *overheads("torch"),
    ]
    text = f"{title}: {K} micro-batches of {micro}"
    more = {"peaks": COMPARED, "starts": starts}
    return Section(name, text, "bars", contenders, targets, "floor", limit, steps, **more)


def compiled_cost(name, title, micro, limit, faster, steps):
    contenders = {**ours(name, micro, jit_compile=True), **torchs(name, micro, jit_compile=True)}
    targets = [
        time_target("macrobatch over the floor", "macrobatch", "floor", limit),
        time_target(
            "speed against Keras' accumulation", "keras", "macrobatch", faster, at_least=True
        ),
        *peak_targets("peak memory over Keras' accumulation"),
        *overheads("compiled torch"),
    ]
    text = f"{title}, jit_compile=True: {K} micro-batches of {micro}"
    name = f"{name}-compiled"
    return Section(name, text, "bars", contenders, targets, "floor", limit, steps, peaks=COMPARED)


# Sequences of different lengths


def lengths():
    # SGD: with Adam, plain Keras' update of repeated embedding rows is not that of its gradient.
    common = {"model": "padded transformer", "batch": 64, "optimizer": "sgd"}

    def accumulated(label, **accumulate):
        return Contender(label, "macrobatch", {**common, "accumulate": accumulate})

    contenders = {
        "plain": Contender("plain Keras, whole batch", "plain", common),
        "as they come": accumulated("macrobatch, as they come", micro_batch_size=8),
        "macrobatch": accumulated(
            "macrobatch, sorted by length", micro_batch_size=8, sequence_axis=1
        ),
        "tokens": accumulated(
            "macrobatch, 512 tokens each", micro_batch_tokens=512, sequence_axis=1
        ),
    }

    def update(name):
        return lambda results: results["contenders"][name]["update difference"]

    twice = {"limit": 2.0, "at_least": True}
    same = {"limit": 1e-5, "form": "{:.0e}"}
    targets = [
        time_target("speed against plain, sorted by length", "plain", "macrobatch", **twice),
        time_target("speed against plain, 512 tokens each", "plain", "tokens", **twice),
        Target("distance from plain's update, as they come", update("as they come"), **same),
        Target("distance from plain's update, sorted by length", update("macrobatch"), **same),
        Target("distance from plain's update, 512 tokens each", update("tokens"), **same),
        time_target("macrobatch over plain, as they come", "as they come", "plain"),
    ]
    text = "transformer, 64 sequences of 11 to 118 tokens (lognormal, mean 37)"
    timing = {"steps": 2, "warm_up": 2, "check_update": True}
    return Section("lengths", text, "bars", contenders, targets, "plain", 1 / 2.0, **timing)


# Memory

MEMORY_MICRO_BATCH = 4
MEMORY_KS = (1, 4, 16, 64, 256)
PLAIN_BATCHES = (4, 16, 64, 256, 512)


def memory():
    micro = MEMORY_MICRO_BATCH
    contenders = {}
    for batch in PLAIN_BATCHES:
        options = {"model": "large transformer", "batch": batch}
        contenders[f"plain {batch}"] = Contender(f"plain Keras, batch {batch}", "plain", options)
    options = {"model": "large transformer", "batch": 256, "micro_batches": 256 // micro}
    contenders["keras 256"] = Contender("Keras' accumulation, batch 256", "keras", options)
    for k in MEMORY_KS:
        options = {
            "model": "large transformer",
            "batch": k * micro,
            "accumulate": {"micro_batch_size": micro},
        }
        label = f"macrobatch, batch {k * micro} (K={k})"
        contenders[f"macrobatch {k * micro}"] = Contender(label, "macrobatch", options)

    def largest(results):
        names = [f"macrobatch {k * micro}" for k in MEMORY_KS]
        return max(measures.peak_ratio(results, name, "plain 4") for name in names)

    targets = [
        peak_target("batch 256 over plain batch 4", "macrobatch 256", "plain 4", 1.08),
        Target("the largest of K=1 to K=256 over plain batch 4", largest, 1.08, form="{:.3f} x"),
    ]
    text = "transformer of 4 layers, width 256: peak memory with micro-batches of 4"
    return Section("memory", text, "memory", contenders, targets)


# A loss of the whole batch

WHOLE_BATCHES = (64, 512)


def with_and_without_whole_batch(model, batch):
    """Contenders that accumulate: plainly, and with a loss of the whole batch."""
    common, cut = {"model": model, "batch": batch}, {"micro_batch_size": 8}
    whole = {**cut, "whole_batch_loss": True}
    return [
        Contender("macrobatch", "macrobatch", {**common, "accumulate": cut}),
        Contender(
            "macrobatch, whole_batch_loss=True", "macrobatch", {**common, "accumulate": whole}
        ),
    ]


def whole_batch():
    accumulated, whole = with_and_without_whole_batch("transformer", 8 * K)
    options = {"model": "transformer", "batch": 8 * K}
    contenders = {
        "accumulated": accumulated,
        "macrobatch": whole,
        "plain": Contender("plain Keras, whole batch", "plain", options),
    }
    over = "whole_batch_loss=True over plain accumulation"
    targets = [time_target(over, "macrobatch", "accumulated", 1.45)]
    text = f"transformer, a loss of the whole batch: {K} micro-batches of 8"
    return Section("whole-batch", text, "bars", contenders, targets, "accumulated", 1.45, steps=2)


def whole_batch_memory():
    """Predictions are small here: a vector for each example."""
    contenders, targets = {}, []
    for batch in WHOLE_BATCHES:
        for name, each in zip(
            ("accumulated", "macrobatch"), with_and_without_whole_batch("encoder", batch)
        ):
            contenders[f"{name} {batch}"] = each._replace(label=f"{each.label}, batch {batch}")
        names = f"macrobatch {batch}", f"accumulated {batch}"
        targets.append(peak_target(f"batch {batch}: over plain accumulation", *names, 1.05))
    small, large = (f"macrobatch {batch}" for batch in WHOLE_BATCHES)
    targets.append(
        peak_target("batch {1} over batch {0}".format(*WHOLE_BATCHES), large, small, 1.05)
    )
    text = "encoder, a loss that compares examples: micro-batches of 8"
    peaks = tuple(contenders)
    return Section("whole-batch-memory", text, "bars", contenders, targets, peaks=peaks, rounds=5)


# The gradient noise scale

NOISE_MODELS = {"small cnn": ("small CNN", 8), "transformer": ("transformer", 4)}


def noise():
    """What the callback costs, over ten updates each."""
    contenders, targets = {}, []
    for model, (title, micro) in NOISE_MODELS.items():
        common = {"model": model, "batch": 4 * micro, "accumulate": {"micro_batch_size": micro}}
        for every, text in ((None, "not measured"), (10, "every=10"), (1, "every=1")):
            contenders[f"{model} {every}"] = Contender(
                f"{title}, {text}", "noise", {**common, "every": every}
            )
        names = f"{model} 10", f"{model} None"
        targets.append(time_target(f"{title}: every=10 over no callback", *names, 1.02))
        names = f"{model} 1", f"{model} None"
        targets.append(time_target(f"{title}: every=1 over no callback", *names))
    text = "GradientNoiseScale: time of ten updates"
    return Section("noise", text, "bars", contenders, targets)


# The line that shows how far an update is

SHOWN_MODELS = {"small cnn": ("small CNN", 8), "transformer": ("transformer", 4)}


def progress():
    """What the line costs, for micro-batches that take little time. A step is a fit."""
    contenders, targets = {}, []
    for model, (title, micro) in SHOWN_MODELS.items():
        accumulate = {"micro_batch_size": micro}
        common = {"model": model, "batch": 16 * micro, "batches": 5, "accumulate": accumulate}
        for name, text in (("macrobatch", "without a line"), ("shown", "with the line")):
            options = {**common, "on_terminal": name == "shown"}
            contenders[f"{model} {name}"] = Contender(f"{title}, {text}", "shown", options)
        names = f"{model} shown", f"{model} macrobatch"
        targets.append(
            time_target(f"{title}: with the line over without", *names, 1.01, form="{:.3f} x")
        )
    text = "progress within an update, 16 micro-batches: a fit of 5 updates"
    return Section("progress", text, "bars", contenders, targets, starts=3)


# A large embedding table


def embedding():
    common = {"model": "embedding", "batch": 4096}
    contenders = {
        "plain": Contender("plain Keras, whole batch", "plain", common),
        "macrobatch": Contender(
            "macrobatch", "macrobatch", {**common, "accumulate": {"micro_batch_size": 512}}
        ),
        "keras": Contender(
            "Keras gradient_accumulation_steps", "keras", {**common, "micro_batches": 8}
        ),
    }

    def extra(results, name):
        return measures.peak(results, name).median - measures.peak(results, "plain").median

    def less(results):
        # Less than nothing is a gain, too: a MiB is where figures of memory end.
        return extra(results, "keras") / max(extra(results, "macrobatch"), 1.0)

    targets = [
        Target("extra memory, Keras' over macrobatch's", less, 10.0, True, "{:.1f} x"),
        time_target("speed against Keras' accumulation", "keras", "macrobatch", 2.0, at_least=True),
        Target("extra memory over plain: macrobatch", lambda r: extra(r, "macrobatch"), form=MIB),
        Target("extra memory over plain: Keras", lambda r: extra(r, "keras"), form=MIB),
    ]
    text = "embedding table 1,000,000 x 64, 8 ids an example, Adam: batch 4096 in 512s"
    return Section("embedding", text, "bars", contenders, targets, "keras", 1 / 2.0)


MIB = "{:.0f} MiB"


# Time against batch size

LINE_MICRO_BATCH = 32
LINE_BATCHES = (32, 64, 128, 256, 512, 1024, 2048, 4096)


def linear():
    contenders = {}
    for batch in LINE_BATCHES:
        options = {
            "model": "small cnn",
            "batch": batch,
            "accumulate": {"micro_batch_size": LINE_MICRO_BATCH},
        }
        contenders[str(batch)] = Contender(
            # Short steps are as noisy as long ones: in a turn they take about as long together.
            f"macrobatch, batch {batch}",
            "macrobatch",
            options,
            steps=max(1, 1024 // batch),
        )

    def residual(results):
        times = [measures.spread(measures.seconds(results, str(b))).median for b in LINE_BATCHES]
        return measures.line(LINE_BATCHES, times)[2]

    targets = [Target("largest distance from a line", residual, 0.05, form="{:.1%}")]
    text = "small CNN: time of an update against batch size, micro-batches of 32"
    return Section("linear", text, "line", contenders, targets, starts=2)


# A tiny model: what a step costs beside its arithmetic

TINY_BATCH, TINY_BATCHES = 64, 100  # batches that are timed together


def tiny():
    contenders, targets = {}, []
    common = {"model": "tiny", "batch": TINY_BATCH, "batches": TINY_BATCHES}
    for steps in (1, 10):
        options = {**common, "steps_per_execution": steps}
        cut = {**options, "accumulate": {"micro_batch_size": TINY_BATCH // 2}}
        text = f"steps_per_execution={steps}"
        names = f"macrobatch {steps}", f"plain {steps}"
        contenders[names[0]] = Contender(f"macrobatch, {text}", "macrobatch", cut)
        contenders[names[1]] = Contender(f"plain Keras, {text}", "plain", options)
        targets.append(time_target(f"macrobatch over plain Keras, {text}", *names))
        targets += [each_batch(contenders[name].label, name) for name in names]
    text = f"Dense 32, batches of {TINY_BATCH} in 2 micro-batches: time of {TINY_BATCHES} batches"
    return Section("tiny", text, "bars", contenders, targets, steps=5)


def each_batch(label, name):
    def milliseconds(results):
        return measures.spread(1e3 * np.divide(measures.seconds(results, name), TINY_BATCHES))

    return Target(f"time of a batch: {label}", milliseconds, form="{:.2f} ms")


def all_sections():
    sections = [
        cost("cnn", "CNN", 16, 1.03, steps=3),
        cost("transformer", "transformer", 8, 1.03, steps=2),
        # It is as fast as memory is, and where in memory a process lies makes 10 % of its time.
        cost("mlp", "wide MLP, 14 M parameters", 32, 1.15, steps=2, starts=3),
        compiled_cost("transformer", "transformer", 8, 1.10, 1.0, steps=2),
        compiled_cost("mlp", "wide MLP, 14 M parameters", 32, 1.25, 1.5, steps=2),
        lengths(),
        memory(),
        whole_batch(),
        whole_batch_memory(),
        noise(),
        progress(),
        embedding(),
        linear(),
        tiny(),
        first_step.section(),
        first_step.whole_section(),
        *auto_sizes.sections(),
        *backends.sections(),
    ]
    return {section.name: section for section in sections}
