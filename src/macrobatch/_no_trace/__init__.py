"""What `verify` and `find_micro_batch_size` share: work on a user's model that leaves no trace."""
