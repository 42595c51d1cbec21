"""What a long run shows: how far an update is, in the terminal and in TensorBoard."""
