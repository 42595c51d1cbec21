"""Sizes of micro-batches: how much memory there may be, and what each size takes."""
