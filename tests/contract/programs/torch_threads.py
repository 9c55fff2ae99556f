# ruff: noqa: T201
"""Sets what torch reads when it is imported, and only then imports it."""

import os
import sys
import traceback

print("torch" in sys.modules)
os.environ["OMP_NUM_THREADS"] = "2"
os.environ["TORCHINDUCTOR_CACHE_DIR"] = "/somewhere"

import torch  # noqa: E402

print(torch.get_num_threads(), torch.initial_seed() != 0, torch.get_rng_state().shape)
torch.manual_seed(3)
print(torch.rand(2).tolist(), torch.get_default_dtype(), torch.is_grad_enabled())
print(torch.get_float32_matmul_precision(), type(torch.__loader__).__name__, torch.__spec__.name)
print([type(finder) for finder in sys.meta_path])
print(*traceback.format_stack(), len(traceback.StackSummary.extract(traceback.walk_stack(None))))
