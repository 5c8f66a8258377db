"""`torchrec.inference`."""

from rayrec.inference import quantize_inference_model, shard_quant_model

__all__ = ["quantize_inference_model", "shard_quant_model"]
