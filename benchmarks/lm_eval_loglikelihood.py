"""lm-evaluation-harness against a running server: its log-likelihoods of a local task, beside plain torch's.

    pip install lm-eval[api]                                          # into an environment with torch as well
    penstock serve demo --pp 2 --dtype float32 --port 8000
    python benchmarks/lm_eval_loglikelihood.py MODEL --text FILE [--url http://127.0.0.1:8000] [--items 40]

Makes two tasks of a text: choose the line that follows (multiple choice among four), and the log-likelihood
of whole passages (rolling). Runs them with the harness's `local-completions`, which sends token ids of
context and continuation with `echo` and `logprobs`, and works out the same from the checkpoint with
`transformers` in float32. Ends with code 1 if any log-likelihood differs by more than `--tolerance`. Needs no
network.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}

CHOICES = 4
PASSAGE_LINES = 12


def documents(text: str, items: int, seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Items of the two tasks."""
    chance = random.Random(seed)
    lines = [line for line in text.splitlines() if len(line) > 20]
    choices = []
    for _ in range(items):
        place = chance.randrange(4, len(lines))
        wrong = [lines[chance.randrange(len(lines))] for _ in range(CHOICES - 1)]
        gold = chance.randrange(CHOICES)
        wrong.insert(gold, lines[place])
        before = "\n".join(lines[place - 4 : place])
        choices.append({"query": before + "\n", "choices": wrong, "gold": gold})
    starts = [chance.randrange(len(lines) - PASSAGE_LINES) for _ in range(max(1, items // 4))]
    passages = [{"page": "\n".join(lines[start : start + PASSAGE_LINES])} for start in starts]
    return choices, passages


def write_task(
    directory: Path, name: str, found: list[dict[str, Any]], fields: dict[str, Any]
) -> dict[str, Any]:
    """The task's configuration, over a file of its items."""
    path = directory / f"{name}.jsonl"
    path.write_text("".join(json.dumps(item) + "\n" for item in found))
    return {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(path)}},
        "test_split": "test",
        **fields,
    }


def tasks(directory: Path, text: str, items: int, seed: int) -> list[dict[str, Any]]:
    choices, passages = documents(text, items, seed)
    follow = {
        "output_type": "multiple_choice",
        "doc_to_text": "{{query}}",
        "doc_to_choice": "choices",
        "doc_to_target": "gold",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    rolling = {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{page}}",
        "metric_list": [{"metric": "word_perplexity"}],
    }
    return [
        write_task(directory, "next_line", choices, follow),
        write_task(directory, "passages", passages, rolling),
    ]


class Reference:
    """The same numbers from the checkpoint."""

    def __init__(self, model: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def of(self, ids: list[int], begin: int) -> tuple[float, bool]:
        """Log-likelihood of the ids from `begin` on, and whether each is the likeliest."""
        torch = self._torch
        with torch.no_grad():
            rows = self._model(torch.tensor([ids])).logits[0].log_softmax(-1)[begin - 1 : -1]
        wanted = torch.tensor(ids[begin:])
        return rows.gather(1, wanted[:, None]).sum().item(), bool((rows.argmax(-1) == wanted).all())


def expected(reference: Reference, client: Any, kind: str, arguments: tuple[str, ...]) -> tuple[float, bool]:
    """What the harness should get for these arguments, by its own rules for cutting text into tokens."""
    if kind == "multiple_choice":
        context, continuation = client._encode_pair(*arguments)
        ids = (context + continuation)[-client.max_length :]
        return reference.of(ids, len(ids) - len(continuation))
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    windows = get_rolling_token_windows(
        token_list=client.tok_encode(arguments[0]),
        prefix_token=client.prefix_token_id,
        max_seq_len=client.max_length - 1,
        context_len=1,
    )
    pairs = [make_disjoint_window(window) for window in windows]
    return sum(reference.of(context + tail, len(context))[0] for context, tail in pairs), True


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", help="directory of the checkpoint that the server has")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--name", default="demo", help="of the model at the server")
    parser.add_argument("--items", type=int, default=40)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--concurrent", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tolerance", type=float, default=1e-4)
    given = parser.parse_args()

    import lm_eval
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    client = LocalCompletionsAPI(
        model=given.name,
        base_url=given.url + "/v1/completions",
        tokenizer_backend="huggingface",
        tokenizer=given.model,
        tokenized_requests=True,
        batch_size=given.batch,
        num_concurrent=given.concurrent,
        max_length=1024,
    )
    with tempfile.TemporaryDirectory() as directory:
        found = lm_eval.simple_evaluate(
            model=client,
            tasks=tasks(Path(directory), given.text.read_text(), given.items, given.seed),
            log_samples=True,
            bootstrap_iters=0,
        )
    return report(found, Reference(given.model), client, given.tolerance)


def report(found: dict[str, Any], reference: Reference, client: Any, tolerance: float) -> int:
    """Print how far apart the two are; 1 if they are too far."""
    worst = 0.0
    for task, samples in found["samples"].items():
        kind = found["configs"][task]["output_type"]
        differences, wrong = [], 0
        for sample in samples:
            for arguments, answer in zip(sample["arguments"], sample["filtered_resps"], strict=False):
                value, is_greedy = expected(reference, client, kind, tuple(arguments))
                got = answer if kind == "multiple_choice" else (answer, True)
                differences.append(abs(got[0] - value))
                wrong += got[1] != is_greedy
        worst = max(worst, *differences)
        scores = {name: value for name, value in found["results"][task].items() if isinstance(value, float)}
        print(f"{task}: {len(differences)} log-likelihoods, largest difference {max(differences):.2e}, ")
        print(f"    {wrong} with another answer to whether it is the likeliest; {scores}")
        if wrong:
            return 1
    return int(worst > tolerance)


if __name__ == "__main__":
    sys.exit(main())
