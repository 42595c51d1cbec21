"""value_and_gradients: how functions of the user's run, in one pass or two."""
