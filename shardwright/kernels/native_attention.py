"""The native kernels of attention within short sequences, csrc/attention.cpp: float32 on the CPU.

Shape legend: N positions of all sequences, H heads, K columns of queries and keys, V columns of values, B sequences,
D distances.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwright.kernels.native import lengths_to_offsets
from shardwright.library import native_library

COLUMNS = 16  # the widths of keys and values are multiples of it


def fits(*tensors_NHK: Tensor) -> bool:
    """Whether the kernels take such queries, keys and values."""
    return all(
        x.device.type in ("cpu", "meta") and x.dtype == torch.float32 and x.shape[-1] > 0 and x.shape[-1] % COLUMNS == 0
        for x in tensors_NHK
    )


def supports(*tensors_NHK: Tensor) -> bool:
    """Whether this installation has the kernels, and they take these queries, keys and values."""
    return fits(*tensors_NHK) and native_library() is not None


def silu(q_NHK: Tensor, k_NHK: Tensor, v_NHV: Tensor, bias_DH: Tensor, lengths_B: Tensor, out_NHV: Tensor) -> None:
    """Attention with weights SiLU(q . k + bias) / length into `out_NHV`."""
    call = _Call((q_NHK, k_NHK, v_NHV), lengths_to_offsets(lengths_B), 0, len(lengths_B))
    bias_HD = bias_DH.detach().float().T.contiguous()
    _library().shardwright_silu_attention(call.address, bias_HD.data_ptr(), len(bias_DH), out_NHV.data_ptr())


def silu_gradients(
    q_NHK: Tensor, k_NHK: Tensor, v_NHV: Tensor, bias_DH: Tensor, lengths_B: Tensor, grad_NHV: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of queries, keys, values and biases."""
    call = _Call((q_NHK, k_NHK, v_NHV), lengths_to_offsets(lengths_B), 0, len(lengths_B))
    bias_HD, grad_NHV = bias_DH.detach().float().T.contiguous(), grad_NHV.float().contiguous()
    q, k, v = (torch.empty(x.shape) for x in call.tensors)
    to, bias_grads_BHD = _addresses(q, k, v), torch.zeros(len(lengths_B), *bias_HD.shape)
    _library().shardwright_silu_attention_gradients(
        call.address,
        bias_HD.data_ptr(),
        len(bias_DH),
        grad_NHV.data_ptr(),
        to.ctypes.data,
        bias_grads_BHD.data_ptr(),
    )
    return q, k, v, bias_grads_BHD.sum(0).T.to(bias_DH.dtype)


def softmax(qkv_NHK: Sequence[Tensor], length: int, scale: float, out_NHV: Tensor) -> None:
    """Attention with softmax weights of scale * q . k in sequences of `length` positions, into `out_NHV`."""
    call = _Call(qkv_NHK, None, length, len(out_NHV) // max(1, length))
    _library().shardwright_softmax_attention(call.address, scale, out_NHV.data_ptr())


def softmax_gradients(
    qkv_NHK: Sequence[Tensor], length: int, scale: float, grad_NHV: Tensor, to_NHK: Sequence[Tensor]
) -> None:
    """Gradients of queries, keys and values into `to_NHK`, whose rows have one stride."""
    call, stride = _Call(qkv_NHK, None, length, len(grad_NHV) // max(1, length)), to_NHK[0].stride(0)
    to = _addresses(*to_NHK)
    _library().shardwright_softmax_attention_gradients(call.address, scale, grad_NHV.data_ptr(), to.ctypes.data, stride)


def _library() -> Any:
    native = native_library()
    assert native is not None, "callers ask `supports` first"
    return native


def _addresses(*tensors: Tensor) -> np.ndarray:
    return np.array([x.data_ptr() for x in tensors], np.int64)


class _Call:
    """`Call` of csrc/attention.cpp; keep the object alive during the call."""

    def __init__(self, qkv_NHK: Sequence[Tensor], starts: Tensor | None, length: int, sequences: int) -> None:
        self.tensors = [x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous() for x in qkv_NHK]
        query, _, value = self.tensors
        strides = [x.stride(0) for x in self.tensors]
        start = 0 if starts is None else starts.data_ptr()
        shape = sequences, query.shape[1], query.shape[2], value.shape[2]
        self._numbers = np.array([*_addresses(*self.tensors), *strides, start, length, *shape], np.int64)
        self.address, self._starts = self._numbers.ctypes.data, starts
