"""The tests. Imported before anything of the library."""

import os

import torch

if not torch.cuda.is_available():
    # tests/kernels run the kernels in Triton's interpreter, to be chosen before Triton is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")
