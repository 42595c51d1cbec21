"""Is the accumulated update that of the whole batch, for this model and this batch? If not, why?"""
