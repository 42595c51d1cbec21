"""The sections of Keras on JAX and on torch: time, memory and the first step of each."""

import measures
from records import KEPT_MEMORY, Contender, Section, Target, peak_target, time_target

K = 8  # micro-batches of a batch
MODELS = {"transformer": ("transformer", 8), "cnn": ("CNN", 16)}
LIBRARY = "backend_contenders"
PEERS = {"jax": "optax.MultiSteps", "torch": "Accelerate"}
TITLES = {"jax": "JAX", "torch": "torch"}

MEMORY_MICRO_BATCH, MEMORY_KS = 4, (2, 16, 64)
FIRST_MODELS = {
    "mobilenet": "MobileNetV3Small at 32x32",
    "small transformer": "transformer of 6 layers",
}
FIRST_BATCH, FIRST_MICRO_BATCH, WITH_TAIL = 32, 8, 30


def contender(backend, label, way, options, peers=False):
    environment = f"peers of {backend}" if peers else f"own, {backend}"
    return Contender(label, way, options, environment, library=LIBRARY)


def cost(backend, model):
    """Time of an update of K micro-batches."""
    title, micro = MODELS[model]
    plain = {"model": model, "batch": K * micro}
    cut = {**plain, "micro_batches": K}
    peer = PEERS[backend]
    contenders = {
        "floor": contender(backend, "floor", "floor", cut),
        "macrobatch": contender(backend, "macrobatch", "macrobatch", cut),
        "keras": contender(backend, "Keras gradient_accumulation_steps", "keras", cut),
        "plain": contender(backend, "plain Keras, whole batch", "plain", plain),
        "peer": contender(backend, f"the same Keras model with {peer}", "peer", cut, peers=True),
    }
    over_peer = f"macrobatch over {peer}"
    targets = [
        time_target("macrobatch over the floor", "macrobatch", "floor", 1.05),
        time_target("macrobatch over Keras' accumulation", "macrobatch", "keras", 1.0),
        time_target(over_peer, "macrobatch", "peer", 1.02 if backend == "torch" else None),
        time_target("accumulating over the plain batch: macrobatch", "macrobatch", "plain"),
    ]
    text = f"{TITLES[backend]}, {title}: {K} micro-batches of {micro}"
    name = f"{backend}-{model}"
    return Section(
        name, text, "bars", contenders, targets, "floor", 1.05, steps=2, variables=KEPT_MEMORY
    )


def memory(backend):
    """Peak memory, the first batch and its trials included."""
    micro = MEMORY_MICRO_BATCH
    common = {"model": "large transformer"}
    plain = {**common, "batch": micro}
    contenders = {"plain 4": contender(backend, "plain Keras, batch 4", "plain", plain)}
    for k in MEMORY_KS:
        options = {**common, "batch": k * micro, "micro_batches": k}
        label = f"macrobatch, batch {k * micro} (K={k})"
        contenders[f"macrobatch {k * micro}"] = contender(backend, label, "macrobatch", options)
    ours = [name for name in contenders if name != "plain 4"]

    def largest(results):
        return max(measures.peak_ratio(results, name, "plain 4") for name in ours)

    targets = [
        Target("the largest over plain batch 4", largest, 1.08, form="{:.3f} x"),
        peak_target("batch 256 over batch 8", ours[-1], ours[0], 1.02),
    ]
    text = f"{TITLES[backend]}, transformer of 4 layers: peak memory with micro-batches of 4"
    return Section(f"{backend}-memory", text, "memory", contenders, targets)


def first_step(backend):
    """Processor time from the call of fit() to the end of its first batch."""
    contenders, targets = {}, []
    for model, title in FIRST_MODELS.items():
        for batch in (FIRST_BATCH, WITH_TAIL):
            common = {"model": model, "batch": batch}
            names = f"{model} {batch}: plain", f"{model} {batch}: macrobatch"
            label = f"{title}, batch {batch}"
            cut = {**common, "accumulate": FIRST_MICRO_BATCH}
            contenders[names[0]] = contender(backend, f"{label}: plain Keras", "first", common)
            contenders[names[1]] = contender(backend, f"{label}: macrobatch", "first", cut)
            # A tail is compiled for itself.
            limit = 2.0 if batch == WITH_TAIL and backend == "jax" else 1.25
            targets.append(time_target(f"{label}: over plain Keras", *reversed(names), limit))
    text = f"{TITLES[backend]}, first step: processor time, micro-batches of {FIRST_MICRO_BATCH}"
    return Section(f"{backend}-first-step", text, "figures", contenders, targets, rounds=5)


def sections():
    return [
        section
        for backend in TITLES
        for section in (
            *(cost(backend, model) for model in MODELS),
            memory(backend),
            first_step(backend),
        )
    ]
