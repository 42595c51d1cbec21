"""find_micro_batch_size and `macrobatch plan`: which size fits, and which is fastest."""
