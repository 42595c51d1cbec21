"""Models with a train step of their own: the step runs once, on gradients of the whole batch."""
