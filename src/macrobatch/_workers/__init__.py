"""Several processes that train together."""
