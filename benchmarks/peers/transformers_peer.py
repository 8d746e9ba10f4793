"""`transformers`' own `generate`: bfloat16, SDPA. Started by `cpu_peers.py`; see `peer_protocol`."""

from __future__ import annotations

from typing import Any

import torch
from peer_protocol import Loaded, Settings, serve
from transformers import AutoModelForCausalLM


class Transformers:
    """The model in this process."""

    def __init__(self, settings: Settings) -> None:
        assert settings.stages == 1, "there is no pipeline here"
        torch.set_num_threads(settings.threads)
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            settings.model, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
        # Without an end there is nothing to forbid: no logits processor runs.
        self._model.generation_config.eos_token_id = None
        self._model.generation_config.pad_token_id = 0

    def generate(self, prompts: list[list[int]], num_tokens: int) -> None:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            output = self._model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False
            )
        assert output.shape == (len(prompts), ids.shape[1] + num_tokens)

    def close(self) -> None:
        pass


def load(settings: Settings) -> Loaded:
    return Loaded(generator=Transformers(settings), packages=("transformers", "torch"))


if __name__ == "__main__":
    serve(load)
