"""The sizes of multi-head latent attention (arXiv 2405.04434, section 2.1).

Part of `families.spec.ModelSpec`; read by `models.latent_attention` and `attention.latent_paged`. Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """The sizes of attention whose keys and values are projected from one latent vector of a token.

    The KV cache has this vector and the rotated part of the key, which is the same for all heads.

    Attributes:
        rank: width of the latent vector.
        query_rank: width of the vector from which queries are projected; 0: they are projected from the
            hidden states.
        plain_dim, rotary_dim: numbers of a head of queries or keys that are not rotated, and that are.
        value_dim: width of a head of values.
        eps: the epsilon in the norms of latent vectors.
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
            bias: whether the projections from the hidden states to latent vectors have a bias.
        """
        queries = (self.query_rank or hidden_size) * num_heads * self.head_dim
        expansion = self.rank * num_heads * (self.plain_dim + self.value_dim)
        return queries + expansion + (hidden_size + bias) * (self.query_rank + self.width)

    def norm_parameters(self) -> int:
        """Return the parameters of one layer's norms of latent vectors."""
        return self.query_rank + self.rank
