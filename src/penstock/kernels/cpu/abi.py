"""The structs of `csrc/abi.h` for ctypes, with the same fields in the same order. Torch-free.

The caller that fills a struct keeps alive what its pointers point to.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p

FLOAT32 = 0
BFLOAT16 = 1
FLOAT16 = 2  # only scales can have it
BLOCKS = 0  # in place of a number of bits, for block formats

SILU, GELU_TANH = 1, 2  # gates; 0: none
PLAIN_NORM, WIDE_NORM, ONE_PLUS_NORM = 0, 1, 2


class Step(ctypes.Structure):
    """The values that change from step to step."""

    _fields_ = [
        ("num_tokens", c_int64),
        ("input_ids", c_void_p),
        ("positions", c_void_p),
        ("slot_mapping", c_void_p),
        ("block_tables", c_void_p),
        ("block_table_stride", c_int64),
        ("query_starts", c_void_p),
        ("seq_lens", c_void_p),
        ("num_rows", c_int64),
        ("selected", c_void_p),
    ]


class Call(ctypes.Structure):
    """A recorded call."""

    _fields_ = [("kernel", c_void_p), ("args", c_void_p)]


class LinearArgs(ctypes.Structure):
    _fields_ = [
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("y", c_void_p),
        ("y_stride", c_int64),
        ("in_size", c_int64),
        ("out_size", c_int64),
        ("dtype", c_int32),
        ("gated", c_int32),
    ]


class HeadLinearArgs(ctypes.Structure):
    _fields_ = [
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("x_head_stride", c_int64),
        ("weight", c_void_p),
        ("y", c_void_p),
        ("y_stride", c_int64),
        ("y_head_stride", c_int64),
        ("num_heads", c_int64),
        ("in_size", c_int64),
        ("out_size", c_int64),
        ("dtype", c_int32),
        ("reserved", c_int32),
    ]


class QuantizedLinearArgs(ctypes.Structure):
    _fields_ = [
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("weight", c_void_p),
        ("scales", c_void_p),
        ("zeros", c_void_p),
        ("bias", c_void_p),
        ("y", c_void_p),
        ("y_stride", c_int64),
        ("in_size", c_int64),
        ("out_size", c_int64),
        ("group_size", c_int64),
        ("scratch", c_void_p),
        ("bits", c_int32),
        ("dtype", c_int32),
        ("gated", c_int32),
        ("scale_dtype", c_int32),
    ]


class QuantizedSizes(ctypes.Structure):
    _fields_ = [
        ("weight_bytes", c_int64),
        ("scale_bytes", c_int64),
        ("zero_bytes", c_int64),
        ("token_bytes", c_int64),
    ]


class QuantizedPackArgs(ctypes.Structure):
    _fields_ = [
        ("q", c_void_p),
        ("scales", c_void_p),
        ("zeros", c_void_p),
        ("weight", c_void_p),
        ("packed_scales", c_void_p),
        ("packed_zeros", c_void_p),
        ("first_row", c_int64),
        ("num_rows", c_int64),
        ("in_size", c_int64),
        ("group_size", c_int64),
        ("bits", c_int32),
        ("role", c_int32),
        ("scale_dtype", c_int32),
        ("reserved", c_int32),
    ]


class BlockPanel(ctypes.Structure):
    """The place of a panel's records, and their format (csrc/blocks.h)."""

    _fields_ = [("records", c_void_p), ("type", c_int64)]


class BlockPackArgs(ctypes.Structure):
    _fields_ = [
        ("q", c_void_p),
        ("d", c_void_p),
        ("m", c_void_p),
        ("scales", c_void_p),
        ("offsets", c_void_p),
        ("panels", c_void_p),
        ("first_row", c_int64),
        ("num_rows", c_int64),
        ("in_size", c_int64),
        ("role", c_int32),
        ("reserved", c_int32),
    ]


class QuantizedGatherArgs(ctypes.Structure):
    _fields_ = [
        ("weight", c_void_p),
        ("scales", c_void_p),
        ("zeros", c_void_p),
        ("y", c_void_p),
        ("in_size", c_int64),
        ("group_size", c_int64),
        ("bits", c_int32),
        ("dtype", c_int32),
        ("scale_dtype", c_int32),
        ("out_size", c_int32),
    ]


class NormArgs(ctypes.Structure):
    _fields_ = [
        ("x", c_void_p),
        ("residual", c_void_p),
        ("weight", c_void_p),
        ("y", c_void_p),
        ("size", c_int64),
        ("eps", c_float),
        ("dtype", c_int32),
        ("kind", c_int32),
        ("reserved", c_int32),
    ]


class GroupNormArgs(ctypes.Structure):
    _fields_ = [
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("weight", c_void_p),
        ("squares", c_void_p),
        ("squares_stride", c_int64),
        ("squared_size", c_int64),
        ("num_groups", c_int64),
        ("size", c_int64),
        ("eps", c_float),
        ("dtype", c_int32),
        ("kind", c_int32),
        ("reserved", c_int32),
    ]


class SquaresArgs(ctypes.Structure):
    _fields_ = [
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("squares", c_void_p),
        ("squares_stride", c_int64),
        ("size", c_int64),
        ("dtype", c_int32),
        ("reserved", c_int32),
    ]


class AddArgs(ctypes.Structure):
    _fields_ = [
        ("x", c_void_p),
        ("residual", c_void_p),
        ("size", c_int64),
        ("dtype", c_int32),
        ("reserved", c_int32),
    ]


class ScaleArgs(ctypes.Structure):
    _fields_ = [("x", c_void_p), ("size", c_int64), ("factor", c_float), ("dtype", c_int32)]


class RopeAnglesArgs(ctypes.Structure):
    _fields_ = [
        ("frequencies", c_void_p),
        ("angles", c_void_p),
        ("rotary_dim", c_int64),
        ("factor", c_float),
        ("dtype", c_int32),
        ("growth", c_float),
        ("reserved", c_int32),
        ("growth_start", c_int64),
    ]


class RopeStoreArgs(ctypes.Structure):
    _fields_ = [
        ("qkv", c_void_p),
        ("angles", c_void_p),
        ("kv", c_void_p),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("block_size", c_int64),
        ("dtype", c_int32),
        ("rotary_dim", c_int32),
        ("interleaved", c_int32),
        ("grows", c_int32),
    ]


SEGMENT_TOKENS = 1024


class AttentionParts(ctypes.Structure):
    """The unfinished results of attention, segment by segment."""

    _fields_ = [
        ("values", c_void_p),
        ("largest", c_void_p),
        ("total", c_void_p),
        ("first_segment", c_int64),
        ("end_segment", c_int64),
    ]


class AttentionArgs(ctypes.Structure):
    _fields_ = [
        ("qkv", c_void_p),
        ("kv", c_void_p),
        ("y", c_void_p),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("block_size", c_int64),
        ("value_dim", c_int64),
        ("window", c_int64),
        ("scale", c_float),
        ("soft_cap", c_float),
        ("dtype", c_int32),
        ("reserved", c_int32),
        ("sinks", c_void_p),
        ("parts", c_void_p),
    ]


class MergePartsArgs(ctypes.Structure):
    _fields_ = [
        ("parts", c_void_p),
        ("sinks", c_void_p),
        ("y", c_void_p),
        ("num_heads", c_int64),
        ("value_dim", c_int64),
        ("dtype", c_int32),
        ("reserved", c_int32),
    ]


class GatherArgs(ctypes.Structure):
    _fields_ = [
        ("weight", c_void_p),
        ("y", c_void_p),
        ("in_size", c_int64),
        ("out_size", c_int64),
        ("dtype", c_int32),
        ("reserved", c_int32),
    ]


class ZeroArgs(ctypes.Structure):
    _fields_ = [("y", c_void_p), ("row_bytes", c_int64)]


class HeadArgs(ctypes.Structure):
    _fields_ = [
        ("dense", c_void_p),
        ("quantized", c_void_p),
        ("num_rows", c_int64),
        ("num_candidates", c_void_p),
        ("logits", c_void_p),
        ("bias_starts", c_void_p),
        ("bias_ids", c_void_p),
        ("bias_values", c_void_p),
        ("bias_scales", c_void_p),
        ("allowed", c_void_p),
        ("allowed_stride", c_int64),
        ("values", c_void_p),
        ("ids", c_void_p),
        ("width", c_int64),
        ("is_finite", c_void_p),
        ("multiplier", c_float),
        ("soft_cap", c_float),
    ]


PAGE = 4096
MAX_GROUP = 64
RANK_ABSENT, GROUP_OVER = 1, 2


class GroupState(ctypes.Structure):
    """A rank's place in its group."""

    _fields_ = [
        ("memory", c_void_p),
        ("rank", c_int64),
        ("size", c_int64),
        ("buffer_bytes", c_int64),
        ("timeout_ns", c_int64),
        ("spin_ns", c_int64),
        ("num_meetings", c_int64),
        ("outcome", c_int64),
        ("absent", c_int64),
        ("num_calls", c_int64),
        ("spent_ns", c_int64),
        ("waited_ns", c_int64),
    ]


class AllReduceArgs(ctypes.Structure):
    _fields_ = [
        ("group", c_void_p),
        ("x", c_void_p),
        ("width", c_int64),
        ("dtype", c_int32),
        ("reserved", c_int32),
    ]


class AllGatherArgs(ctypes.Structure):
    _fields_ = [("group", c_void_p), ("x", c_void_p), ("y", c_void_p), ("num_bytes", c_int64)]


class ExpertsArgs(ctypes.Structure):
    _fields_ = [
        ("x", c_void_p),
        ("logits", c_void_p),
        ("chosen", c_void_p),
        ("chosen_weights", c_void_p),
        ("y", c_void_p),
        ("gate_up", c_void_p),
        ("down", c_void_p),
        ("quantized_gate_up", c_void_p),
        ("quantized_down", c_void_p),
        ("scratch", c_void_p),
        ("hidden_size", c_int64),
        ("num_experts", c_int64),
        ("num_chosen", c_int64),
        ("first_own", c_int64),
        ("num_own", c_int64),
        ("has_shared", c_int32),
        ("normalized", c_int32),
        ("dtype", c_int32),
        ("is_shared_gated", c_int32),
    ]
