"""TensorFlow's graph, sums, loop and replicas."""
