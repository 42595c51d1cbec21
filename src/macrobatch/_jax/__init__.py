"""JAX as an engine: the loop inside one compiled step, from the state before to the state after."""
