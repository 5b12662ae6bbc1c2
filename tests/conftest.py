"""One thread per process (tiny tensors, ranks that share the machine); repeatable property tests."""

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
settings.load_profile("repeatable")
