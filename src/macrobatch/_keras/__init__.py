"""Keras' arithmetic, from values to values."""
