"""vLLM's HTTP server as its CPU guide sets it up, with stages bound to cores. Started by `mixed_load.py`.

python vllm_server.py THREADS STAGES [arguments of vLLM's server]
"""

from __future__ import annotations

import os
import sys

from vllm_peer import environment

SERVER = "vllm.entrypoints.openai.api_server"


if __name__ == "__main__":
    threads, stages, *arguments = sys.argv[1:]
    os.environ.update(environment(int(threads), int(stages)))
    command = [sys.executable, "-m", SERVER, "--pipeline-parallel-size", stages, *arguments]
    os.execv(sys.executable, command)
