"""`process.torch_import`, each time in a new interpreter: this one has torch already."""

import subprocess
import sys

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
