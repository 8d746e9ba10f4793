"""What the MTP layer of a checkpoint guesses, by transformers' own layers and from the whole text at once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM


class MTPReference:
    """The model of a directory (`deepseek_models.make_with_mtp`)."""

    def __init__(self, directory: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        config = self._model.config
        number = json.loads((directory / "config.json").read_text())["num_hidden_layers"]
        prefix, tensors = f"model.layers.{number}.", load_file(directory / "model.safetensors")
        own = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        self._projection = own.pop("eh_proj.weight")
        self._norms = {
            name: self._norm(own.pop(f"{name}.weight")) for name in ("enorm", "hnorm", "shared_head.norm")
        }
        for copied in ("embed_tokens.weight", "shared_head.head.weight"):
            del own[copied]
        self._layer = type(self._model.model.layers[-1])(config, number)
        experts = {key: own.pop(key) for key in list(own) if ".experts." in key}
        own |= _stacked(experts)
        self._layer.load_state_dict(own)
        self._layer.eval()
        self._known: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def _norm(self, weight: Tensor) -> nn.Module:
        norm: nn.Module = type(self._model.model.norm)(len(weight), self._model.config.rms_norm_eps)
        norm.weight.data = weight
        return norm

    @torch.inference_mode()
    def states(self, states: Tensor, next_ids: Sequence[int]) -> Tensor:
        """[num_tokens, hidden] behind the final norm, and the token that follows each -> what the head takes:
        [num_tokens, hidden]."""
        vectors = self._model.model.embed_tokens(torch.tensor(next_ids))
        both = torch.cat((self._norms["enorm"](vectors), self._norms["hnorm"](states)), dim=-1)
        hidden, size = (both @ self._projection.T)[None], len(next_ids)
        angles = self._model.model.rotary_emb(hidden, torch.arange(size)[None])
        mask = torch.full((size, size), float("-inf")).triu(1)[None, None]
        output = self._layer(hidden, attention_mask=mask, position_embeddings=angles)
        output = output[0] if isinstance(output, tuple) else output
        normed: Tensor = self._norms["shared_head.norm"](output)[0]
        return normed

    @torch.inference_mode()
    def model_states(self, token_ids: Sequence[int]) -> Tensor:
        """[num_tokens, hidden] of the model, behind its final norm."""
        states: Tensor = self._model.model(torch.tensor([token_ids])).last_hidden_state[0]
        return states

    def guesses(self, token_ids: Sequence[int], count: int) -> list[int]:
        """The likeliest tokens behind these, each guessed from the ones before. What was asked is kept."""
        asked = (tuple(token_ids), count)
        if asked not in self._known:
            self._known[asked] = self._guess(token_ids, count)
        return self._known[asked]

    @torch.inference_mode()
    def _guess(self, token_ids: Sequence[int], count: int) -> list[int]:
        states, following = self.model_states(token_ids)[:-1], list(token_ids[1:])
        guessed: list[int] = []
        while len(guessed) < count:
            made = self.states(states, following)
            guessed.append(int(self._model.lm_head(made[-1]).argmax()))
            states, following = torch.cat((states, made[-1:])), [*following, guessed[-1]]
        return guessed


def _stacked(experts: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts as transformers keeps them: gate and up of all in one tensor, down of all in another."""
    if not experts:
        return {}
    count = 1 + max(int(key.split(".experts.")[1].split(".")[0]) for key in experts)

    def of(name: str) -> list[Tensor]:
        return [experts[f"mlp.experts.{index}.{name}.weight"] for index in range(count)]

    gate_up = [torch.cat(pair) for pair in zip(of("gate_proj"), of("up_proj"), strict=True)]
    return {
        "mlp.experts.gate_up_proj": torch.stack(gate_up),
        "mlp.experts.down_proj": torch.stack(of("down_proj")),
    }
