import macrobatch


def test_public_names():
    assert sorted(macrobatch.__all__) == [
        "ExactnessWarning",
        "GradientAccumulator",
        "GradientNoiseScale",
        "accumulate",
        "find_micro_batch_size",
        "release",
        "settings_of",
        "value_and_gradients",
        "verify",
        "wait_for_workers",
    ]
    assert all(hasattr(macrobatch, name) for name in macrobatch.__all__)


def test_the_package_shows_what_it_offers_and_nothing_else():
    assert dir(macrobatch) == sorted([*macrobatch.__all__, "__version__"])


def test_the_package_is_typed():
    from importlib.resources import files

    assert files("macrobatch").joinpath("py.typed").is_file()
