"""LoRA on vLLM's CPU backend, one matrix product per adapter instead of one per token.

vLLM 0.32's torch operators copy the adapter's matrix for every token ([tokens, out, in]) before they multiply, which
makes a forward under an adapter five times slower than one without. Grouped by adapter the same sums are one matrix
product each. Only the CPU uses these operators; CUDA has kernels of its own.
"""

from __future__ import annotations

import logging

from torch import Tensor


def adapter_products(inputs_ni: Tensor, weights: Tensor, adapter_n: Tensor) -> Tensor:
    """Row n times the matrix of its adapter: outputs [N, O] of inputs [N, I] and matrices [A, O, I] (or [A, 1, O, I]).

    A row of adapter -1 has none, and gets zeros.
    """
    weights_aoi = weights.squeeze(1) if weights.dim() == 4 else weights
    used = adapter_n.unique().tolist()
    if len(used) == 1 and used[0] >= 0:
        return inputs_ni @ weights_aoi[used[0]].T
    outputs_no = inputs_ni.new_zeros(len(inputs_ni), weights_aoi.shape[1])
    for adapter in used:
        if adapter >= 0:
            rows = adapter_n == adapter
            outputs_no[rows] = inputs_ni[rows] @ weights_aoi[adapter].T
    return outputs_no


def _bgmv_shrink(
    inputs: Tensor, lora_b_weights: Tensor, output_tensor: Tensor, lora_indices_tensor: Tensor, scaling: float = 1.0
) -> None:
    dtype = output_tensor.dtype
    outputs = adapter_products(inputs.to(dtype), lora_b_weights.to(dtype), lora_indices_tensor)
    output_tensor[:, : outputs.shape[1]] = scaling * outputs


def _bgmv_expand(
    inputs: Tensor, lora_b_weights: Tensor, output_tensor: Tensor, lora_indices_tensor: Tensor, add_inputs: bool = True
) -> None:
    # LoRA and the model may pad the output differently.
    width = min(lora_b_weights.shape[-2], output_tensor.shape[1])
    _bgmv_expand_slice(inputs, lora_b_weights[..., :width, :], output_tensor, lora_indices_tensor, 0, width, add_inputs)


def _bgmv_expand_slice(
    inputs: Tensor,
    lora_b_weights: Tensor,
    output_tensor: Tensor,
    lora_indices_tensor: Tensor,
    slice_offset: int,
    slice_size: int,
    add_inputs: bool = True,
) -> None:
    dtype = output_tensor.dtype
    outputs = adapter_products(inputs.to(dtype), lora_b_weights.to(dtype), lora_indices_tensor)
    target = output_tensor[: len(outputs), slice_offset : slice_offset + slice_size]
    if add_inputs:
        target += outputs
    else:
        target.copy_(outputs)


def install() -> None:
    """Put these operators in the place of vLLM's, in this process; call it before an engine is made.

    A vLLM that has no such operators keeps its own.
    """
    from vllm.lora.ops import torch_ops
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    replacements = {"bgmv_shrink": _bgmv_shrink, "bgmv_expand": _bgmv_expand, "bgmv_expand_slice": _bgmv_expand_slice}
    modules = (lora_ops, torch_ops, punica_cpu)
    if not all(hasattr(module, name) for module in modules for name in replacements):
        logging.getLogger(__name__).warning("this vLLM has other LoRA operators: its own are used")
        return
    for module in modules:
        for name, replacement in replacements.items():
            setattr(module, name, replacement)
