"""The layer of a checkpoint that guesses one token further (multi-token prediction, MTP).

Checkpoints of DeepSeek-V3 have it behind their last layer (arXiv 2412.19437, section 2.2). It reads the
model's final state of a token, and the token that follows. Its output goes through the model's own head,
which guesses the token after that.

    token            t0        t1        t2
    model            h0        h1        h2        states behind the final norm
    MTP layer        h0, t1    h1, t2    h2, t3    t3 was sampled behind t2
    head             guess 2   guess 3   guess 4   guess 5 from (the layer's output for h2 and t3, guess 4)

The layer is on the last stage. It has keys and values of its own, and shares embedding and head with the
model; the checkpoint's copies of these two are not read. Built by `models.decoder`, run by
`runner.mtp_guesser`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from penstock.attention.backend import AttentionBackend
from penstock.attention.metadata import AnyKV, AttentionMetadata
from penstock.distributed.share import Share
from penstock.families.spec import ModelSpec
from penstock.layers.compute import Compute
from penstock.layers.linear import Linear
from penstock.layers.norm import AddRMSNorm, RMSNorm
from penstock.models.attention import Angles, LayerSite
from penstock.models.decoder_layer import DecoderLayer


class MTPLayer(DecoderLayer):
    """A layer like the model's others, with a projection of two vectors to one in front of it."""

    def __init__(self, spec: ModelSpec, backend: AttentionBackend, compute: Compute, site: LayerSite) -> None:
        super().__init__(spec, backend, compute, site)
        size = spec.hidden_size
        everything = Share.all(size)
        self.enorm = RMSNorm(everything, spec.rms_norm_eps, compute=compute, kind=spec.norm_kind)
        self.hnorm = RMSNorm(everything, spec.rms_norm_eps, compute=compute, kind=spec.norm_kind)
        self.eh_proj = Linear(
            Share.all(2 * size), size, bias=False, compute=compute, parts={f"{site.name}.eh_proj": size}
        )
        self.shared_head = _HeadNorm(spec, compute)

    def guess(
        self, states: Tensor, vectors: Tensor, angles: Angles, kv: AnyKV, metadata: AttentionMetadata
    ) -> Tensor:
        """Return states from which the head guesses the token behind the next one: [num_tokens, hidden].

        Args:
            states: [num_tokens, hidden], the model's states behind its final norm, or the result of an
                earlier call; written over.
            vectors: [num_tokens, hidden], the embedding of the token that follows each; written over.
            angles: angles of the tokens' positions.
            kv: the storage of this layer.
            metadata: the attention metadata of these tokens.
        """
        both = torch.cat((self.enorm(vectors), self.hnorm(states)), dim=-1)
        hidden_states = self.eh_proj(both)
        residual = torch.zeros_like(hidden_states)
        output: Tensor = self.shared_head.norm(*self(hidden_states, residual, angles, kv, metadata))[0]
        return output


class _HeadNorm(nn.Module):
    """The norm before the head, under its name in checkpoints."""

    def __init__(self, spec: ModelSpec, compute: Compute) -> None:
        super().__init__()
        self.norm = AddRMSNorm(spec.hidden_size, spec.rms_norm_eps, compute=compute, kind=spec.norm_kind)
