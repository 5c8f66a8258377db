"""`torchrec.inference`."""

from rayrec.torchrec.inference.quantize import quantize_inference_model
from rayrec.torchrec.inference.sharded import shard_quant_model
from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)

__all__ = ["quantize_inference_model", "shard_quant_model"]
