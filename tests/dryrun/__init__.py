"""The CUDA path without a GPU: tensors that say they are on cuda:0, around CPU tensors that hold the numbers.

Every operator on them is computed on the CPU, so that values, sizes and branches are real, and is booked: mixed
devices, host synchronisations with their place, operators by stage, collectives with their bytes. Two ways of use:

- `python -m tests.dryrun.measure`: one process is one rank of a fake group of any size, in which every rank is taken to
  have the very same batch. `tests/distributed/test_dryrun.py` holds the limits.
- `RAYREC_PRETEND_GPUS=1 python -m pytest tests/distributed/test_equality.py`: the package's own tests, with real gloo
  ranks, computed exactly; mixed devices and host synchronisations of a kind that CUDA refuses are errors.

Stubs, and so not tested: fbgemm's CUDA lookup (zeros, or its CPU kernel with real ranks),
torch.cuda itself, NCCL, streams and their races, memory, limits and alignment of CUDA kernels, times, UVM.
"""
