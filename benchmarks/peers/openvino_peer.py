"""openvino-genai with continuous batching. Started by `cpu_peers.py`; see `peer_protocol`.

optimum-intel exports the checkpoint once for each form of the weights, as OpenVINO's guide does it, into a
folder of the checkpoint's directory: fp16 (the CPU plug-in then computes in bfloat16 where the CPU can), or
compressed to int8 or int4. All other settings are the defaults, but for the prefix cache, which is off.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai
from peer_protocol import Loaded, Settings, serve

CACHE_GB = 1
FORMS = ("fp16", "int8", "int4")
EXPORT = (sys.executable, "-m", "optimum.commands.optimum_cli", "export", "openvino")
TASK = ("--task", "text-generation-with-past")


class OpenVino:
    """The pipeline; it computes in threads of this process."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GB
        scheduler.max_num_seqs = settings.max_batch
        scheduler.enable_prefix_caching = False
        scheduler.dynamic_split_fuse = True
        if settings.chunk:
            scheduler.max_num_batched_tokens = settings.chunk
        properties = {"INFERENCE_NUM_THREADS": settings.threads}
        self._pipeline: Any = openvino_genai.ContinuousBatchingPipeline(
            str(folder), scheduler, "CPU", properties
        )

    def generate(self, prompts: list[list[int]], num_tokens: int) -> None:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = num_tokens
        config.ignore_eos, config.do_sample = True, False
        inputs = [openvino.Tensor(np.array([ids], dtype=np.int64)) for ids in prompts]
        results = self._pipeline.generate(inputs, [config] * len(inputs))
        assert all(len(result.m_generation_ids[0]) == num_tokens for result in results)

    def close(self) -> None:
        del self._pipeline


def exported(model: Path, form: str) -> Path:
    """Return the folder of the model in this form; export it if it is not there."""
    folder = model / "openvino" / form
    if not folder.exists():
        partial = folder.with_name(f"{form}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        command = [*EXPORT, "--model", str(model), "--weight-format", form, *TASK, str(partial)]
        offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
        subprocess.run(command, stdout=sys.stderr, env=offline, check=True)
        partial.rename(folder)
    return folder


def load(settings: Settings) -> Loaded:
    form = settings.weights or FORMS[0]
    if form not in FORMS:
        raise SystemExit(f"weights {form}: none of {', '.join(FORMS)}")
    packages = ("openvino-genai", "openvino", "optimum-intel", "nncf")
    return Loaded(generator=OpenVino(settings, exported(settings.model, form)), packages=packages)


if __name__ == "__main__":
    serve(load)
