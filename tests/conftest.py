"""One thread in each test process: on busy cores, two threads on one small tensor take ten times as long."""

import torch

torch.set_num_threads(1)
