"""Batch -> micro-batches."""
