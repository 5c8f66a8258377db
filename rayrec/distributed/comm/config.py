"""The section `sharding.wire` of a train config."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rayrec._runtime.strict import Section


class WireConfig(Section):
    """Communication formats of embedding vectors and their gradients. Everything else is exchanged as float32."""

    vectors: Literal["fp32", "fp16", "bf16", "fp8", "int8"] = "fp32"
    """format of embedding vectors; `fp8` and `int8` use one scale per 32 values"""
    gradients: Literal["fp32", "fp16", "bf16", "fp8", "int8"] = Field(default="fp32", description="format of gradients")
    gradient_scale: float = Field(default=1.0, gt=0)
    """multiplies gradients sent as `fp16` or `bf16`, because `fp16` underflows below 6e-8; a power of two is exact"""
