"""Names for where a table lies and which kernel reads it."""

from __future__ import annotations

from enum import Enum


class EmbeddingComputeKernel(str, Enum):
    """The kernel that looks up and updates a shard.

    DENSE leaves gradients to a torch optimizer; the FUSED family updates inside backward, with weights in device
    memory (FUSED), in host memory read by the device (FUSED_UVM), or there behind a device cache (FUSED_UVM_CACHING).
    `BATCHED_FUSED` and its relatives are the tutorials' older names for the same kernels.
    """

    DENSE = "dense"
    FUSED = "fused"
    FUSED_UVM = "fused_uvm"
    FUSED_UVM_CACHING = "fused_uvm_caching"

    BATCHED_DENSE = "dense"
    BATCHED_FUSED = "fused"
    BATCHED_FUSED_UVM = "fused_uvm"
    BATCHED_FUSED_UVM_CACHING = "fused_uvm_caching"

    @classmethod
    def _missing_(cls, value: object) -> EmbeddingComputeKernel | None:
        if isinstance(value, str) and value.startswith("batched_"):
            return cls(value.removeprefix("batched_"))
        return None
