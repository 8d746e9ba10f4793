"""What the tests of the pages know of single blocks: which test proves one, how a reader types another.

`tests/doors/test_documented_commands.py` reads the tables, and checks that each row is about one block.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from page_blocks import Block
from page_models import GGUF_MODEL, TEXT_MODELS

Key = tuple[str, str]  # a page, and words that only one of its blocks has

HERE = "doors/test_documented_commands.py"
CLONE = f"{HERE}::test_a_clone_starts_with_run"
FIELDS = f"{HERE}::test_fields_of_the_feed_are_those_of_the_page"
PATHS = f"{HERE}::test_paths_of_tests_exist"
QUOTED = f"{HERE}::test_code_that_a_page_quotes_is_in_the_tree"
TWO_HOSTS = (
    "doors/test_several_machines_page.py::test_g1_the_commands_of_the_page_serve_one_model_over_two_hosts"
)
LAUNCHED = "doors/test_clusters_page.py::test_i2_one_line_on_all_hosts_serves_one_model"
DEPLOYED = "doors/test_deploy.py::test_the_page_names_what_there_is"  # without Docker and systemd

# Blocks that other tests prove: here, or between hosts, or with programs that they bring.
PROVED: dict[Key, str] = {
    ("README", "git clone"): CLONE,
    ("README", "[1/4] python"): CLONE,
    ("docs/adding-a-carrier", "bin/pytest"): PATHS,
    ("docs/adding-a-drafter", "bin/pytest"): PATHS,
    ("docs/adding-a-format", "bin/pytest"): PATHS,
    ("docs/adding-a-model", "bin/pytest"): PATHS,
    ("docs/adding-a-model", "def olmo3_spec"): QUOTED,
    ("docs/adding-a-model", '"olmo3": Family('): QUOTED,
    ("docs/clusters", "torchrun --no-python"): LAUNCHED,
    ("docs/clusters", "srun"): (
        "doors/test_slurm.py::test_i2_a_job_of_slurm_serves_one_model_over_its_nodes_and_ends_with_it"
    ),
    ("docs/clusters", "mpirun"): LAUNCHED,
    ("docs/clusters", "backend ray"): (
        "doors/test_ray.py::test_i2_ray_starts_the_pages_pipeline_and_a_killed_actor_costs_no_token"
    ),
    ("docs/clusters", "serve run"): (
        "doors/test_ray_serve.py"
        "::test_i2_pipelines_come_and_go_under_a_trace_and_no_request_is_lost_or_doubled"
    ),
    ("docs/clusters", "new-token"): (
        "doors/test_deploy.py::test_r15_the_secret_of_the_page_is_taken_with_all_checks"
    ),
    ("docs/clusters", "docker build"): DEPLOYED,
    ("docs/clusters", "--detach head"): DEPLOYED,
    ("docs/clusters", "--detach worker"): DEPLOYED,
    ("docs/clusters", "penstock.service"): DEPLOYED,
    ("docs/clusters", "penstock-worker.service"): DEPLOYED,
    ("docs/clusters", "ssh_hosts:SshHosts"): (
        "doors/test_own_backend.py::test_i2_a_backend_of_ones_own_starts_workers_over_ssh"
    ),
    ("docs/endpoints", '{"feed_version"'): FIELDS,
    ("docs/index", "git clone"): CLONE,
    ("docs/installing", "python3 -m venv"): (
        "doors/test_wheel.py::test_the_demo_model_is_served_from_an_empty_environment"
    ),
    ("docs/live-page", "event: lanes"): FIELDS,
    ("docs/several-machines-security", "A-7PVS"): f"{HERE}::test_the_token_of_the_page_is_one",
    ("docs/several-machines", "--listen-workers"): TWO_HOSTS,
    ("docs/several-machines", "scp token"): TWO_HOSTS,
    ("docs/several-machines", "penstock worker"): TWO_HOSTS,
    ("docs/several-machines", "fetching"): (
        "unit/hosts/weights/test_model_supply.py"
        "::test_g1_progress_is_told_by_the_percent_and_to_the_user_now_and_then"
    ),
    ("docs/several-machines", "links between"): (
        "unit/hosts/network/test_path_finding.py::test_g1_the_fastest_way_is_used_and_one_line_says_which"
    ),
    ("docs/several-machines", "penstock doctor --join"): TWO_HOSTS,
    ("docs/several-machines", "warn  own ports"): (
        "unit/cli/test_doctor_join.py::test_g1_all_is_well_and_each_check_has_a_line"
    ),
    ("docs/several-machines", "most recent call"): (
        "doors/test_lost_hosts.py::test_r15_a_head_that_is_killed_and_started_again_is_joined_by_its_workers"
    ),
}
# Blocks that are neither typed nor drawn.
TEXTS: dict[Key, str] = {
    ("docs/adding-a-drafter", "a result comes"): "the calls of a drafter, in their order",
    ("docs/architecture", "for plan in plans"): "the loop of a stage in words",
    ("docs/architecture", "cli | server"): "the layers, which `lint-imports` reads in pyproject.toml",
    ("docs/architecture", "stats       the three"): "walls, which `lint-imports` reads in pyproject.toml",
    ("docs/layouts", "--tp 2 --ep"): "what two ranks hold",
    ("docs/memory", "weights   |"): "the parts of a memory",
    ("docs/perf-log", "YYYY-MM-DD"): "the form of an entry",
    ("docs/pipeline", "seconds = overhead"): "a formula",
    ("docs/pipeline", "plans = (sum"): "a formula",
    ("docs/sampling", "l'  ="): "a formula",
    ("docs/scoring", "lm_eval"): "needs lm_eval and a task: benchmarks/lm_eval_loglikelihood.py runs both",
    ("docs/scoring", "hidden states after"): "tokens and states",
    ("docs/simulate", "starts at stage"): "a formula",
    ("docs/speculative-decoding", "row 3: known token"): "a row of a plan",
    ("docs/speculative-decoding", "w0   known token"): "windows on their way",
}
# Files that a page shows, and the line that uses them.
FILES: dict[Key, tuple[str, str]] = {
    ("docs/clients", "model_provider ="): (".codex/config.toml", "codex"),
    ("docs/layouts", "[[stage]]"): ("unlike.toml", "penstock serve MODEL --topology unlike.toml"),
    ("docs/monitoring", "scrape_configs"): ("prometheus.yml", "prometheus prometheus.yml"),
    ("docs/plan", "[[host]]"): ("hosts.toml", "penstock plan ./Qwen2.5-0.5B --devices hosts.toml"),
}
# What stands on a page, and what is typed here in its place: small numbers, CPUs, what a reader fills in.
WRITTEN: dict[str, dict[str, str]] = {
    "docs/bench": {
        "--num-prompts 200": "--num-prompts 8 --random-output-len 8",
        "sweep demo": "sweep demo --input-len 8 --output-len 4 --requests-per-client 1",
        "--depth 0,1,2": "--depth 1",
        "1,8,32": "1,2",
    },
    "docs/coming-from": {
        "ORG/NAME:": f"{GGUF_MODEL}:",
        "ORG/NAME": TEXT_MODELS[0],
        "rm NAME": f"rm {TEXT_MODELS[0]}",
        "MODEL": "demo",
        "bench serve": "bench serve --num-prompts 4 --random-output-len 8",
        "bench throughput": "bench throughput demo --num-prompts 4 --output-len 8",
        "bench latency": "bench latency demo --num-iters-warmup 0 --num-iters 1 --output-len 8",
    },
    "docs/formats": {"pip install 'penstock[gguf]'": "python -c 'import gguf'"},
    "docs/layouts": {
        "MODEL": "demo",
        '["cuda:0", "cuda:1"]': '["cpu", "cpu"]',
        "layers = 20": "layers = 4",
        "layers = 8": "layers = 2",
        "threads = 12": "threads = 1",
    },
    "docs/operating": {
        "81f0…": "81f0",
        "[…]": '[{"role": "user", "content": "hello"}]',
        "3f2a": "$(penstock cache ls ~/kv | sed -n '2s/\\(....\\).*/\\1/p')",
    },
    "docs/replay": {"--explain 4711": "--explain 2"},
    "docs/speculative-decoding": {"--pp 8": "--pp 2"},
}
# What readers have done when they come to a block.
BEFORE: dict[Key, list[str]] = {
    ("docs/operating", "/pause"): [
        "penstock serve demo --kv-store ~/kv",
        "penstock complete --max-tokens 100",
    ],
    ("docs/operating", "/abort"): [
        'curl -X POST -H "Authorization: Bearer $ADMIN_KEY" localhost:8000/resume'
    ],
    ("docs/speculative-decoding", "--speculative-model"): [f"penstock pull {name}" for name in TEXT_MODELS],
}
CLIENT = 'from openai import OpenAI\n\nclient = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")\n'
BULK = """
import atexit
from contextlib import ExitStack

from carriers import BULK_CHANNELS
from penstock.pipeline.bulk import bulk_channel
from penstock.pipeline.bulk.bulk_channel import BulkReceiver, BulkSender
from penstock.pipeline.bulk.turns import ByteRate, Turns

closing = ExitStack()
atexit.register(closing.close)
ends = iter(BULK_CHANNELS["ring"](closing))
endpoint, name, links, data = None, "stage 0 -> stage 2", [], bytes(range(256)) * 99


def open_bulk(endpoint, name):  # each of two ranks has an endpoint of its own
    end = bulk_channel.open_bulk(next(ends), name)
    closing.callback(end.close)
    return end
"""
HOSTS = """
import sys
import time
from pathlib import Path

from host_faults import kill_worker
from network import Host, shaped_network
from served_hosts import PairServer

directory = Path("pair")
Path("server.py").write_text(
    "import socket, sys\\n"
    "with socket.create_server((sys.argv[1], 7701)) as server:\\n"
    "    while True:\\n"
    "        server.accept()\\n"
)
popen = Host.popen


def popen_and_wait(host, command, **options):
    child = popen(host, command, **options)
    while "server.py" in command:
        try:
            with host.socket() as client:
                client.connect((host.address, 7701))
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
    return child


Host.popen = popen_and_wait
"""
DRAFTER = """
from collections.abc import Sequence
from itertools import pairwise

from penstock.speculation.drafter import NO_DRAFT, Draft, LocalDrafter, Question
"""
ASKED = """
from penstock.batch import RowSampling

sampling = RowSampling(0.0, 0, 1.0, 0.0, seed=1, min_tokens=0, suppressed_ids=[], num_logprobs=-1)
question = Question(1, [1, 2, 3] * 4, most=4, least_chance=0.1, prompt_len=3, sampling=sampling)
assert list(BigramDrafter().propose(question).token_ids) == [1, 2, 3, 1]
"""
# What stands before and behind the programs of a page.
PROGRAMS: dict[str, tuple[str, str]] = {
    "docs/adding-a-carrier": (BULK, "assert bytes(payload.data) == data"),
    "docs/adding-a-drafter": (DRAFTER, ASKED),
    "docs/python": ("", "assert mean.shape == (len(one),)"),
    "docs/structured-output": (
        CLIENT,
        'assert answer.choices[0].message.content.startswith(\'{"country":"\')',
    ),
    "docs/test-bed": (HOSTS, "assert [len(each) for each in ids] == [16]"),
}
# What some commands and programs print.
PRINTED: dict[Key, str] = {
    ("README", '"stream": true'): r'"object":"chat\.completion\.chunk"(.|\n)*data: \[DONE\]',
    ("README", "from penstock import LLM"): r"(?m)^(length|stop) ",
    ("docs/clients", "curl"): r'"stop_reason":"(max_tokens|end_turn)"',
    ("docs/embeddings", "curl"): r'"embedding":\[',
    ("docs/index", "curl"): r'"object":"chat\.completion"',
    ("docs/python", "greedy = "): r"prompts\[1\]: prompt token ids must be between",
    ("docs/scoring", "curl"): r'"token_logprobs":\[null,-',
}
# Words of what a page shows that are not printed here.
NOT_PRINTED: dict[str, set[str]] = {"docs/operating": {"wait_token"}}


def key_of(block: Block, table: Mapping[Key, Any]) -> Key | None:
    """Return the key of a block in a table; None if the table does not have the block."""
    return next((key for key in table if key[0] == block.page and key[1] in block.text), None)


def is_told(block: Block) -> bool:
    return key_of(block, PROVED) is not None or key_of(block, TEXTS) is not None


def is_run(block: Block) -> bool:
    if is_told(block):
        return False
    is_program = block.language == "python"
    return is_program or key_of(block, FILES) is not None or bool(block.commands)
