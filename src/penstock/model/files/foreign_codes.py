"""Weights that other tools have quantised: how to recognise them, what people call them, and what to use instead."""

from __future__ import annotations

from collections.abc import Mapping

# `quant_method` of quantised safetensors that are refused, as people know them
QUANTISED: Mapping[str, str] = {
    "awq": "AWQ",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "fp8": "FP8 with scales",
    "gptq": "GPTQ",
    "mxfp4": "MXFP4",
}
QUANTISED_HINT = "Use a GGUF file of this model, or its original weights: --quant int8, int4 or fp8 rounds them."
CODE_NAMES = ("qweight", "weight_packed", "weight_blocks")  # what quantised safetensors have instead of a weight
