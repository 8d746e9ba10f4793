"""The sizes of multi-head latent attention (arXiv 2405.04434, section 2.1).

Part of `families.spec.ModelSpec`; read by `models.latent_attention` and `attention.latent_paged`. Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """Keys and values of all heads are projected from one latent vector of a token, which is what is kept.

    Attributes:
        rank: width of the latent vector.
        query_rank: width of the vector from which queries are projected; 0: from the hidden states.
        plain_dim, rotary_dim: of a head of queries and keys, dimensions without and with rotation; the latter
            of the keys are the same for all heads.
        value_dim: of a head of values.
        eps: of the norms of latent vectors.
    """

    rank: int
    query_rank: int
    plain_dim: int
    rotary_dim: int
    value_dim: int
    eps: float = 1e-6

    @property
    def head_dim(self) -> int:
        """The width of a head of queries."""
        return self.plain_dim + self.rotary_dim

    @property
    def width(self) -> int:
        """The number of values that are kept of a token: latent vector and rotated part of the key."""
        return self.rank + self.rotary_dim

    def attention_parameters(self, hidden_size: int, num_heads: int, *, bias: bool) -> int:
        """Return the parameters of one layer, all but output projection and norms.

        Args:
            bias: bias of the projections from the hidden states to latent vectors.
        """
        queries = (self.query_rank or hidden_size) * num_heads * self.head_dim
        expansion = self.rank * num_heads * (self.plain_dim + self.value_dim)
        return queries + expansion + (hidden_size + bias) * (self.query_rank + self.width)

    def norm_parameters(self) -> int:
        """Return the parameters of one layer's norms of latent vectors."""
        return self.query_rank + self.rank
