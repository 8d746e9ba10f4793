"""`process.torch_import`, each time in a new interpreter: this one has torch already."""

import subprocess
import sys
from pathlib import Path

import pytest

_LIGHT = "from penstock.process.torch_import import cheap_torch_import, load_meta_functions\n"
_IMPORT = f"{_LIGHT}with cheap_torch_import():\n    import penstock.rank.rank\nimport gc, sys, torch\n"
_EMBED = "torch.nn.functional.embedding(torch.zeros(2, dtype=torch.int64, device='meta'), rows)"


def _printed(program: str) -> list[str]:
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return result.stdout.split()


def test_a_rank_imports_torch_without_its_functions_for_meta_tensors_and_computes() -> None:
    program = f"""{_IMPORT}
print("torch._meta_registrations" in sys.modules, hasattr(torch, "_meta_registrations"))
print(gc.isenabled(), gc.get_freeze_count() > 100_000)
rows = torch.arange(12.0).reshape(4, 3)
print(*torch.nn.functional.embedding(torch.tensor([3]), rows)[0].tolist())
"""

    assert _printed(program) == ["False", "False", "True", "True", "9.0", "10.0", "11.0"]


def test_the_functions_for_meta_tensors_come_when_they_are_asked_for() -> None:
    program = f"""{_IMPORT}
rows = torch.zeros(4, 3, device="meta")
try:
    {_EMBED}
    print("there")
except NotImplementedError:
    print("missing")
load_meta_functions()
print(*{_EMBED}.shape)
"""

    assert _printed(program) == ["missing", "2", "3"]


@pytest.mark.parametrize("was_enabled", [True, False])
def test_a_process_that_has_torch_is_left_as_it_is(was_enabled: bool) -> None:
    program = f"""import gc, torch
{_LIGHT}
{"" if was_enabled else "gc.disable()"}
with cheap_torch_import():
    print(gc.isenabled())
load_meta_functions()
print(gc.isenabled(), gc.get_freeze_count(), torch._meta_registrations.__name__)
"""

    assert _printed(program) == [str(was_enabled), str(was_enabled), "0", "torch._meta_registrations"]


def test_an_import_that_fails_leaves_the_collector_on_and_no_empty_module() -> None:
    program = f"""import gc, sys
{_LIGHT}
try:
    with cheap_torch_import():
        raise ImportError
except ImportError:
    print(gc.isenabled(), "torch._meta_registrations" in sys.modules)
import torch
print(torch._meta_registrations.__name__)
"""

    assert _printed(program) == ["True", "False", "torch._meta_registrations"]


# Each program runs a process until its imports are over.
_PROCESSES = {
    "rank": """
from penstock.rank.process import live
live(Rank(), None, control)
""",
    "spare": """
from penstock.rank.spare import _import_rank
_import_rank(0)
""",
    "drafter": """
from penstock.drafting import drafter_process
drafter_process.enter_child = lambda *given: None
try:
    drafter_process._serve(SimpleNamespace(drafter=SimpleNamespace(rank=Rank())), None, None)
except Over:
    pass
""",
    "measure": """
from penstock.planner import measure
measure.enter_child = lambda *given: None
measure.ControlReader.inherited = lambda options: control
measure._measure(SimpleNamespace(measure=SimpleNamespace(rank=Rank())), None, None)
""",
}


@pytest.mark.parametrize("process", _PROCESSES.values(), ids=_PROCESSES)
def test_each_process_that_only_runs_a_model_imports_torch_so(process: str) -> None:
    program = f"""import sys
from types import SimpleNamespace

class Over(Exception): ...

class Rank:
    name, threads = "rank 0", 1

    def __getattr__(self, name):
        raise Over

control = SimpleNamespace(await_model=lambda rank: None)
{process}
print("torch" in sys.modules, "torch._meta_registrations" in sys.modules)
"""

    assert _printed(program) == ["True", "False"]


def test_such_a_process_surveys_a_model_of_transformers(tmp_path: Path) -> None:
    program = f"""{_IMPORT}
from pathlib import Path
from transformers import GPT2Config
from penstock.families.registry import load_spec
from penstock.models.transformers_survey import survey
directory = Path({str(tmp_path)!r})
sizes = dict(n_layer=1, n_embd=8, n_head=2, vocab_size=16, bos_token_id=0, eos_token_id=0)
GPT2Config(**sizes, architectures=["GPT2LMHeadModel"]).save_pretrained(directory)
print("torch._meta_registrations" in sys.modules)
print(survey(directory, load_spec(directory, "transformers"), torch.float32, 32).layers_path)
"""

    assert _printed(program) == ["False", "transformer.h"]
