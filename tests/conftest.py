"""What every test runs under.

One thread per process (tiny tensors, ranks that share the machine), repeatable property tests, and
without a GPU verl's CPU platform, which has to be chosen before anything imports verl.
"""

import os

import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ.setdefault("VERL_PLATFORM", "cpu")
torch.set_num_threads(1)
settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
settings.load_profile("repeatable")
