"""Scripts and notebooks that know nothing of macrobatch: each fit() in them is accumulated."""
