"""The spec of a model, in numbers: read once from a checkpoint's configuration and never changed.

Owns `ModelSpec` and the sums that follow from it (parameters, KV bytes, bytes on a link). All code that
plans, sizes or builds a model reads it; `families.registry` makes it. Torch-free: the supervisor and the core
use it too. Does not read files and does not check anything: `families.config_fields` and the family modules
do both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from penstock.families.experts_spec import ExpertsSpec
from penstock.families.kinds import Activation, NormKind
from penstock.families.latent_spec import LatentSpec
from penstock.families.quantization_spec import BlockQuantization, QuantizationSpec
from penstock.families.rope_spec import NO_ROTATION, RopeSpec

ITEM_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes of a number


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer: RMSNorm, rotary positions, grouped-query attention, gated MLP.

    With `latent` attention all heads look at one key: `num_kv_heads` is 1, and `head_dim` is the width of a
    query head.

    The defaults describe a plain Llama.

    Attributes:
        architecture: name of the architecture as in `config.json`, such as "LlamaForCausalLM".
        max_position_embeddings: longest sequence in tokens, after rope scaling.
        dtype: number format of the checkpoint: "float32", "bfloat16" or "float16".
        eos_token_ids: all ids that end a text, from `config.json` and `generation_config.json`.
        generation_defaults: the checkpoint's own `temperature`, `top_k`, `top_p`, `min_p` and
            `repetition_penalty`, where it gives them.
        quantization: how the checkpoint's weights are quantised; None: they are numbers of `dtype`.
        is_dequantized: weights that the file has in quantised blocks become numbers of the dtype at load.
        latent: attention that keeps a latent vector in place of keys and values; None: plain attention.
        num_unused_layers: number of layers that the checkpoint has behind the model's last one, for other
            purposes.
        has_mtp: the first of these layers guesses one token further (`models.mtp_layer`).
        experts: the experts in place of the MLP, in all layers but `experts.dense_layers`; None: every layer
            has a plain MLP.
        layer_windows: for each layer, how many tokens a token sees, itself included; 0: all before it. Empty:
            all layers have 0.
        local_rope: rotary embedding of the layers with a window; None: that of the other layers.
        unrotated_layers: the layers whose queries and keys are not rotated at all.
        attention_scale: factor of the scores; 0: 1 / sqrt(head_dim).
        attention_soft_cap, logit_soft_cap: caps of scores and of logits: x becomes cap * tanh(x / cap); 0:
            there is no cap.
        qk_norm: whether queries and keys are normalised, each head on its own or all heads together.
        norm_kind: what all norms do with their weights.
        norm_places: norms stand before attention and MLP, after them, or both.
        norm_names: what the checkpoint calls the norms before and after attention, before and after the MLP;
            None: as most families do (`models.decoder_layer`).
        activation: activation function of the gate of the MLP.
        embedding_multiplier: factor of the vectors that tokens become.
        rounds_embedding_multiplier: this factor is first rounded to the dtype of the computation.
        residual_multiplier: factor of what attention and MLP add to the residual stream.
        logit_multiplier: factor of the logits, before their cap.
        stored_together: the checkpoint has gate and up as one tensor `gate_up_proj` ("mlp"), and query, key
            and value as one `qkv_proj` too ("all").
        gated_mlp: the MLP has a gate. False also where that is not known: the size of the MLP may then be
            estimated too low.
        implementation: whose layers run, ours or transformers'. For transformers' layers the fields with
            defaults say little, and some others are estimates (`families.transformers_fields`).
    """

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeSpec
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    dtype: str
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    generation_defaults: Mapping[str, float] = field(default_factory=dict)
    quantization: QuantizationSpec | BlockQuantization | None = None
    is_dequantized: bool = False
    latent: LatentSpec | None = None
    num_unused_layers: int = 0
    has_mtp: bool = False
    experts: ExpertsSpec | None = None
    layer_windows: tuple[int, ...] = ()
    local_rope: RopeSpec | None = None
    unrotated_layers: frozenset[int] = frozenset()
    attention_scale: float = 0.0
    attention_soft_cap: float = 0.0
    logit_soft_cap: float = 0.0
    qk_norm: Literal["none", "each_head", "all_heads"] = "none"
    norm_kind: NormKind = "plain"
    norm_places: Literal["before", "after", "both"] = "before"
    norm_names: tuple[str, str, str, str] | None = None
    activation: Activation = "silu"
    embedding_multiplier: float = 1.0
    rounds_embedding_multiplier: bool = False
    residual_multiplier: float = 1.0
    logit_multiplier: float = 1.0
    stored_together: Literal["nothing", "mlp", "all"] = "nothing"
    gated_mlp: bool = True
    implementation: Literal["penstock", "transformers"] = "penstock"

    def window(self, layer: int) -> int:
        """Return how many tokens a token of this layer sees, itself included; 0: all before it."""
        return self.layer_windows[layer] if self.layer_windows else 0

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """All rotary embeddings of the layers, each once."""
        local = () if self.local_rope is None else (self.local_rope,)
        return (self.rope, *local, *((NO_ROTATION,) if self.unrotated_layers else ()))

    def rope_index(self, layer: int) -> int:
        """Return which of `ropes` a layer has."""
        if layer in self.unrotated_layers:
            return len(self.ropes) - 1
        return int(self.local_rope is not None and self.window(layer) > 0)

    @property
    def query_size(self) -> int:
        """The width of the queries of all heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """The width of the keys (or of the values) of all KV heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def attended_size(self) -> int:
        """The width of the input of attention's output projection."""
        return self.query_size if self.latent is None else self.num_heads * self.latent.value_dim

    def attention_parameters(self) -> int:
        """Return the parameters of one layer's query, key, value and output projections."""
        if self.latent is not None:
            inputs = self.latent.attention_parameters(self.hidden_size, self.num_heads, bias=self.qkv_bias)
            return inputs + (self.attended_size + self.o_bias) * self.hidden_size
        qkv_width = self.query_size + 2 * self.kv_size
        weights = self.hidden_size * (qkv_width + self.query_size)
        return weights + self.qkv_bias * qkv_width + self.o_bias * self.hidden_size

    def experts_of(self, layer: int) -> ExpertsSpec | None:
        """Return the experts of a layer; None: it has a plain MLP."""
        return None if self.experts is None or layer in self.experts.dense_layers else self.experts

    def norm_parameters(self) -> int:
        """Return the parameters of a layer's norms: of attention, MLP, queries, keys and latent vectors."""
        num_norms = 4 if self.norm_places == "both" else 2
        heads = {"none": 0, "each_head": 2 * self.head_dim, "all_heads": self.query_size + self.kv_size}
        latent = 0 if self.latent is None else self.latent.norm_parameters()
        return num_norms * self.hidden_size + heads[self.qk_norm] + latent

    def mlp_parameters(self) -> int:
        """Return the parameters of a plain MLP: up and down projections, and the gate if it has one."""
        weights = (2 + self.gated_mlp) * self.hidden_size * self.intermediate_size
        return weights + self.mlp_bias * (2 * self.intermediate_size + self.hidden_size)

    def layer_parameters(self, layer: int | None = None) -> int:
        """Return the parameters of a layer, norms included.

        Args:
            layer: number of the layer; None: any layer with experts, or if no layer has experts, any layer.
        """
        experts = self.experts if layer is None else self.experts_of(layer)
        mlp = self.mlp_parameters() if experts is None else experts.parameters(self.hidden_size)
        return self.attention_parameters() + mlp + self.norm_parameters()

    def embedding_parameters(self) -> int:
        """Return the parameters of the token embedding; an untied output head has as many."""
        return self.vocab_size * self.hidden_size

    def parameter_counts(self, start_layer: int, end_layer: int) -> dict[str, int]:
        """Return the parameters of the stage with layers `[start_layer, end_layer)`, by component.

        A tied head counts as an embedding: it is stored once on a rank [A6] [A14].
        """
        ends = self.end_parameter_counts(start_layer, end_layer)
        layers = sum(map(self.layer_parameters, range(start_layer, end_layer)))
        return {"embedding": ends["embedding"], "layers": layers, "norm": ends["norm"], "head": ends["head"]}

    def end_parameter_counts(self, start_layer: int, end_layer: int) -> dict[str, int]:
        """Return `parameter_counts` without the layers."""
        is_first, is_last = start_layer == 0, end_layer == self.num_layers
        holds_embedding = is_first or (is_last and self.tie_word_embeddings)
        return {
            "embedding": holds_embedding * self.embedding_parameters(),
            "norm": is_last * self.hidden_size,
            "head": (is_last and not self.tie_word_embeddings) * self.embedding_parameters(),
        }

    @property
    def mtp_copies(self) -> frozenset[str]:
        """The names of the MTP layer's tensors that are copies of the model's own; they are never read."""
        names = ("embed_tokens.weight", "shared_head.head.weight")
        return frozenset(f"model.layers.{self.num_layers}.{name}" for name in names)

    def mtp_parameters(self, *, with_embedding: bool) -> int:
        """Return the parameters of the MTP layer.

        Args:
            with_embedding: the embedding counts too, since the last stage holds it for this layer alone.
        """
        inputs = self.hidden_size * (2 * self.hidden_size + 3)  # projection and norms
        layer = self.layer_parameters(self.num_layers)
        return inputs + layer + with_embedding * self.embedding_parameters()

    def mtp_share(self) -> float:
        """Return the cost of a guess of the MTP layer, as a share of the cost of a step of one token.

        Costs are reckoned by the weights that are read.
        """
        head = self.embedding_parameters()
        whole = sum(map(self.token_parameters, range(self.num_layers))) + head
        guess = 2 * self.hidden_size**2 + self.token_parameters(self.num_layers) + head
        return guess / whole

    def token_parameters(self, layer: int) -> int:
        """Return the parameters of a layer that one token needs; without norms."""
        experts = self.experts_of(layer)
        mlp = self.mlp_parameters() if experts is None else experts.parameters_of_token(self.hidden_size)
        return self.attention_parameters() + mlp

    def stage_parameters(self, start_layer: int, end_layer: int) -> int:
        """Return all parameters of the stage with layers `[start_layer, end_layer)`."""
        return sum(self.parameter_counts(start_layer, end_layer).values())

    def kv_bytes_per_token(self, num_layers: int, itemsize: int) -> int:
        """Return the bytes of keys and values (or latent vectors) of a token over `num_layers` layers."""
        numbers = 2 * self.kv_size if self.latent is None else self.latent.width
        return num_layers * numbers * itemsize

    def hidden_state_bytes(self, num_tokens: int, itemsize: int) -> int:
        """Return the bytes of hidden states and residual stream of a step [S1] [I8].

        A link carries the sum of both tensors, which has half as many bytes.
        """
        return 2 * num_tokens * self.hidden_size * itemsize
