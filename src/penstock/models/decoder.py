"""The layers of one stage, one after the other; the first stage embeds, the last has the output head.

Built by `rank.loading` from a `ModelSpec` and a layer range, filled by `weights.loader`. Parts outside
the range are `MissingLayer`s, so that names of parameters are those of the checkpoint on every stage. The
model knows no links and no requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import islice
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from penstock.attention.backend import AttentionBackend
from penstock.attention.cpu_latent import CpuLatentAttention
from penstock.attention.cpu_paged import CpuPagedAttention
from penstock.attention.latent_paged import LatentPagedAttention
from penstock.attention.metadata import AnyKV, AttentionMetadata
from penstock.attention.torch_paged import TorchPagedAttention
from penstock.distributed.group import SOLO, TensorGroup
from penstock.distributed.share import Share, vocab_share
from penstock.families.quantization_spec import BlockQuantization
from penstock.families.sharding import HeadShares
from penstock.families.spec import ModelSpec
from penstock.kernels.candidates import HeadOutput, HeadRequest, LogitCurve
from penstock.kernels.cpu.ops import CpuKernels, HeadShape, Turning
from penstock.layers.compute import Compute, FormatOf, never_quantized
from penstock.layers.embedding import OutputHead, VocabEmbedding, Vocabulary
from penstock.layers.experts import RoutedExperts
from penstock.layers.missing import MissingLayer
from penstock.layers.norm import Add, AddRMSNorm
from penstock.models.attention import Angles, LayerSite, Rotation
from penstock.models.decoder_layer import DecoderLayer
from penstock.models.interfaces import BeforeLayer
from penstock.models.intermediate import (
    IntermediateTensors,
    StreamStart,
    make_empty_intermediate_tensors_factory,
)
from penstock.models.mtp_layer import MTPLayer
from penstock.models.recorded import RecordedForward, StageParts

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"


class Backbone(nn.Module):
    """Everything but the output head; its name in checkpoints is `model`."""

    def __init__(
        self,
        spec: ModelSpec,
        start_layer: int,
        end_layer: int,
        backend: AttentionBackend,
        compute: Compute,
        *,
        has_mtp: bool,
    ) -> None:
        super().__init__()
        is_first, is_last = start_layer == 0, end_layer == spec.num_layers
        is_head = is_last and spec.tie_word_embeddings
        self.embed_tokens: VocabEmbedding | MissingLayer = MissingLayer()
        if is_first or is_head or has_mtp:
            # Unless it is the head too, the embedding is not quantised at load: a step looks up a few rows,
            # and does not read all of them.
            is_stored_quantized = isinstance(spec.quantization, BlockQuantization)
            own = (EMBEDDING,) if is_stored_quantized else ()
            names = (EMBEDDING, HEAD) if spec.tie_word_embeddings else own
            parts = dict.fromkeys(names, spec.vocab_size)
            self.embed_tokens = VocabEmbedding(
                _ids(spec, compute),
                spec.hidden_size,
                compute=compute,
                parts=parts,
                is_head=is_head,
                multiplier=_embedding_multiplier(spec, compute.dtype),
                curve=_curve(spec),
            )
        self.layers = nn.ModuleList(
            DecoderLayer(spec, backend, compute, LayerSite(index, f"model.layers.{index}"))
            if start_layer <= index < end_layer
            else MissingLayer()
            for index in range(spec.num_layers)
        )
        if has_mtp:
            site = LayerSite(spec.num_layers, f"model.layers.{spec.num_layers}")
            self.layers.append(MTPLayer(spec, backend, compute, site))
        self.norm: AddRMSNorm | MissingLayer = MissingLayer()
        if is_last:
            self.norm = AddRMSNorm(spec.hidden_size, spec.rms_norm_eps, compute=compute, kind=spec.norm_kind)


class Decoder(nn.Module):
    """The layers `[start, end)` of a model, with the embedding and the head where they belong [A4] [A6].

    A stage calls `embed` (first stage only), `forward`, and `compute_candidates` (last stage only).

    Args:
        layer_range: `(start, end)` or a `range`.
        dtype, device: those of weights and computation.
        kernels: our kernels for the CPU; None: torch computes.
        format_of: how projections are quantised (`layers.compute.Compute`).
        block_size: tokens of a block of the KV cache.
        group: the ranks that have shares of these layers; the model must be one that so many ranks can share
            (`families.sharding`).
        expert_parallel: a rank has whole experts (`layers.compute.Compute`).
        with_mtp: the last stage has the MTP layer too, which the spec must have (`models.mtp_layer`).

    Attributes:
        attention: the attention backend of all layers; knows how their keys and values lie in memory.
        unused_layers: layers that the checkpoint has behind those of the model, and that are not loaded.
        unused_tensors: tensors of the MTP layer that are copies of the model's, and that are not loaded.
    """

    supports_pp: ClassVar[Literal[True]] = True

    def __init__(
        self,
        spec: ModelSpec,
        layer_range: range | tuple[int, int],
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        kernels: CpuKernels | None = None,
        format_of: FormatOf = never_quantized,
        block_size: int = 16,
        group: TensorGroup = SOLO,
        expert_parallel: bool = False,
        with_mtp: bool = False,
    ) -> None:
        super().__init__()
        compute = Compute(
            dtype=dtype,
            device=torch.device(device),
            kernels=kernels,
            format_of=format_of,
            group=group,
            expert_parallel=expert_parallel,
        )
        self.start_layer, self.end_layer = _bounds(layer_range)
        assert 0 <= self.start_layer < self.end_layer <= spec.num_layers, layer_range
        self._is_last = self.end_layer == spec.num_layers
        has_mtp = with_mtp and self._is_last
        self.unused_layers = range(spec.num_layers + has_mtp, spec.num_layers + spec.num_unused_layers)
        self.unused_tensors = spec.mtp_copies if has_mtp else frozenset()
        self.attention = _attention(spec, compute, block_size)
        self.model = Backbone(
            spec, self.start_layer, self.end_layer, self.attention, compute, has_mtp=has_mtp
        )
        self.lm_head: OutputHead | MissingLayer = MissingLayer()
        if self._is_last and not spec.tie_word_embeddings:
            parts = {HEAD: spec.vocab_size}
            self.lm_head = OutputHead(
                _ids(spec, compute), spec.hidden_size, compute=compute, parts=parts, curve=_curve(spec)
            )
        self.rotation = Rotation(spec, compute)
        self.make_empty_intermediate_tensors = make_empty_intermediate_tensors_factory(
            spec.hidden_size, dtype=dtype, device=compute.device
        )
        self._add = Add(compute=compute)
        self._stream_start = StreamStart(spec.hidden_size, dtype=dtype, device=compute.device)
        self._compute = compute
        self._hidden_size = spec.hidden_size
        self._recorded: RecordedForward | None = None

    @property
    def layers(self) -> nn.ModuleList:
        """All layers of the model, placeholders outside the own range; then the MTP layer, if it is here."""
        return self.model.layers

    def embed(self, input_ids: Tensor) -> IntermediateTensors:
        """Return the input of the first layer for [num_tokens] int64; the residual stream starts at zero."""
        if self._recorded is not None and self._recorded.has_embedding:
            return _intermediate(*self._recorded.embed(input_ids))
        vectors = self.model.embed_tokens(input_ids)
        return _intermediate(vectors, torch.zeros_like(vectors))

    def record(self, kv: Sequence[AnyKV], max_num_tokens: int) -> None:
        """Record the kernel calls of a step over this KV storage; later steps then replay them.

        Nothing is recorded unless our kernels compute every part of the layers.

        Args:
            max_num_tokens: most tokens of any later step.
        """
        kernels = self._compute.kernels
        if kernels is None or not all(map(self._compute.kernels_for, RecordedForward.NEEDED)):
            return
        if not isinstance(self.attention, CpuPagedAttention):
            return
        if not all(block.can_be_recorded for block in self.modules() if isinstance(block, RoutedExperts)):
            return
        embedding, norm = self.model.embed_tokens, self.model.norm
        is_first = self.start_layer == 0 and isinstance(embedding, VocabEmbedding)
        parts = StageParts(
            embed=embedding if is_first and embedding.can_be_recorded else None,
            angles=self.rotation.angles,
            run_layers=self._run_layers,
            final_norm=None if isinstance(norm, MissingLayer) else lambda *rows: norm(*rows)[0],
        )
        self._recorded = RecordedForward(
            parts,
            kernels,
            kv,
            max_num_tokens=max_num_tokens,
            width=self._hidden_size,
            dtype=self._compute.dtype,
        )

    def forward(
        self,
        tensors: IntermediateTensors,
        positions: Tensor,
        kv: Sequence[AnyKV],
        metadata: AttentionMetadata,
        before_layer: BeforeLayer | None = None,
    ) -> IntermediateTensors:
        """Run the own layers.

        Args:
            tensors: from `embed` or from the stage before. They are not changed, with one exception: after
                `record`, those of `embed` are written over.
            positions: [num_tokens] int64.
            kv: storage of the own layers, in order; after `record` the same that was given there.
            before_layer: called before each own layer, with its number among them.

        Returns:
            On the last stage hidden states and residual stream, for the head. On others their sum, with a
            residual stream that starts anew. After `record`, the next call writes over these tensors.
        """
        hidden_states, residual = tensors["hidden_states"], tensors["residual"]
        if self._recorded is not None:
            replayed = self._recorded.forward(hidden_states, residual, positions, metadata, before_layer)
            self._compute.group.check()
            return self._handed_on(*replayed)
        angles = self.rotation.angles(positions)
        hidden_states, residual = self._run_layers(
            hidden_states, residual.clone(), angles, kv, metadata, before_layer or (lambda layer: None)
        )
        return self._handed_on(hidden_states, residual)

    def _handed_on(self, hidden_states: Tensor, residual: Tensor) -> IntermediateTensors:
        """Return the output of the layers, for the head or for the next stage."""
        if not self._is_last:
            residual = self._stream_start.of(len(hidden_states))
        return _intermediate(hidden_states, residual)

    def _run_layers(
        self,
        hidden_states: Tensor,
        residual: Tensor,
        angles: Angles,
        kv: Sequence[AnyKV],
        metadata: AttentionMetadata,
        before_layer: BeforeLayer,
    ) -> tuple[Tensor, Tensor]:
        own_layers = islice(self.layers, self.start_layer, self.end_layer)
        for index, (layer, layer_kv) in enumerate(zip(own_layers, kv, strict=True)):
            before_layer(index)
            hidden_states, residual = layer(hidden_states, residual, angles, layer_kv, metadata)
        return (hidden_states, residual) if self._is_last else self._add(hidden_states, residual)

    def compute_logits(self, tensors: IntermediateTensors, indices: Tensor) -> Tensor:
        """Return logits [num_rows, vocab] float32 after the tokens `indices` ([num_rows] int64).

        Args:
            tensors: the result of `forward` for the newest step, which has these tokens.
        """
        return self._head.logits(self.final_states(tensors, indices))

    def compute_candidates(
        self, tensors: IntermediateTensors, indices: Tensor, request: HeadRequest
    ) -> HeadOutput:
        """Return what `request` asks for of the logits after the tokens `indices` ([num_rows] int64)."""
        return self.candidates(self.final_states(tensors, indices), request)

    def candidates(self, states: Tensor, request: HeadRequest) -> HeadOutput:
        """Return what `request` asks for of the logits of normed states ([num_rows, hidden])."""
        return self._head.candidates(states, request)

    def guess(
        self, states: Tensor, next_ids: Tensor, positions: Tensor, kv: AnyKV, metadata: AttentionMetadata
    ) -> Tensor:
        """Run the MTP layer as `MTPLayer.guess` does, over ids in place of embedded tokens.

        Args:
            next_ids: [num_tokens] int64, the token that follows each.
            positions: [num_tokens] int64.
        """
        layer = self.layers[-1]
        assert isinstance(layer, MTPLayer), "the model was built without it"
        vectors, angles = self.model.embed_tokens(next_ids), self.rotation.angles(positions)
        return layer.guess(states, vectors, angles, kv, metadata)

    def final_states(self, tensors: IntermediateTensors, indices: Tensor) -> Tensor:
        """Return the final norm of some tokens of the newest step, by their indices.

        The states of these tokens in `tensors` may be written over, so that no token may be asked for twice.

        Args:
            tensors: the result of `forward` for that step.
            indices: [num_selected] int64, rising.
        """
        hidden_states, residual = tensors["hidden_states"], tensors["residual"]
        if self._recorded is not None:
            assert self._recorded.is_newest(hidden_states), "only of what forward has returned last"
            return self._recorded.normed(indices)
        normed: Tensor = self.model.norm(hidden_states, residual, indices)[0]
        return normed

    @cached_property
    def _head(self) -> Vocabulary:
        head = self.model.embed_tokens if isinstance(self.lm_head, MissingLayer) else self.lm_head
        assert not isinstance(head, MissingLayer), "only the last stage computes logits"
        return head


def _attention(spec: ModelSpec, compute: Compute, block_size: int) -> AttentionBackend:
    heads = HeadShares.of(spec, compute.group)
    kernels = compute.kernels_for("attention")
    if spec.latent is not None and kernels is not None:
        return CpuLatentAttention(heads.queries.size, spec.latent, compute.dtype, kernels)
    if spec.latent is not None:
        return LatentPagedAttention(heads.queries.size, spec.latent, compute.dtype)
    shape = HeadShape(num_heads=heads.queries.size, num_kv_heads=heads.keys.size, head_dim=spec.head_dim)
    if kernels is not None:
        assert not spec.rope.query_growth or len(spec.ropes) == 1, "no family has both"
        turning = Turning(interleaved=spec.rope.interleaved, grows=spec.rope.query_growth != 0)
        return CpuPagedAttention(shape, compute.dtype, block_size, kernels, turning)
    return TorchPagedAttention(shape, compute.dtype)


def _embedding_multiplier(spec: ModelSpec, dtype: torch.dtype) -> float:
    multiplier = spec.embedding_multiplier
    return torch.tensor(multiplier, dtype=dtype).item() if spec.rounds_embedding_multiplier else multiplier


def _curve(spec: ModelSpec) -> LogitCurve:
    return LogitCurve(multiplier=spec.logit_multiplier, soft_cap=spec.logit_soft_cap)


def _ids(spec: ModelSpec, compute: Compute) -> Share:
    return vocab_share(spec.vocab_size, compute.group.rank, compute.group.size)


def _intermediate(hidden_states: Tensor, residual: Tensor) -> IntermediateTensors:
    return IntermediateTensors({"hidden_states": hidden_states, "residual": residual})


def _bounds(layer_range: range | tuple[int, int]) -> tuple[int, int]:
    if isinstance(layer_range, range):
        assert layer_range.step == 1, layer_range
        return layer_range.start, layer_range.stop
    return layer_range
