"""Into Keras' fit()."""
