"""Draft models as users have them: processes of their own, which may fail at any time and harm nobody."""

from __future__ import annotations

import logging
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from checkpoints import write_raw_safetensors
from drafters import wait_for_guesses
from paths import shared_data
from penstock import LLM, SamplingParams
from penstock.drafting import drafter_child
from penstock.drafting.drafter_child import DrafterChild
from penstock.errors import PenstockError, StageLostError

PROMPTS = [{"prompt_token_ids": [1, 403 + 7 * index, 407]} for index in range(3)]
SAMPLING = [
    SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=4, max_tokens=60, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=0.8, seed=5, top_p=0.9, presence_penalty=0.4, max_tokens=70, ignore_eos=True),
]


def model() -> str:
    return str(shared_data("models", "stories260K"))


def draft_model() -> dict[str, Any]:
    return {"model": model(), "quantization": "int4", "num_speculative_tokens": 4}


def engine(**given: Any) -> LLM:
    options = {
        "dtype": "float32",
        "num_blocks": 200,
        "threads_per_rank": 1,
        "distributed_executor_backend": "inprocess",
    }
    return LLM(model(), **(options | given))


def texts(llm: LLM) -> list[Sequence[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, SAMPLING, use_tqdm=False)]


@pytest.fixture(scope="module")
def expected() -> list[Sequence[int]]:
    with engine() as llm:
        return texts(llm)


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[DrafterChild]:
    """The processes that a test has started."""
    started: list[DrafterChild] = []
    start = DrafterChild.__init__

    def begin(self: DrafterChild, *given: Any) -> None:
        start(self, *given)
        started.append(self)

    monkeypatch.setattr(DrafterChild, "__init__", begin)
    return started


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for_guesses(monkeypatch)


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.mark.usefixtures("waiting")
@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_a_draft_model_changes_no_token(num_stages: int, expected: list[Sequence[int]]) -> None:
    with engine(pipeline_parallel_size=num_stages, speculative_config=draft_model()) as llm:
        assert texts(llm) == expected
        assert texts(llm) == expected
        stats = llm.stats()
    assert stats is not None
    told = stats.scheduler.speculation
    assert told.drafter == "draft_model"
    assert told.num_drafted > 20
    assert told.num_accepted > 0.5 * told.num_drafted


@pytest.mark.usefixtures("waiting")
def test_the_same_model_is_always_right(expected: list[Sequence[int]]) -> None:
    """Sampled texts too: it throws the same dice."""
    with engine(speculative_config={"model": model(), "num_speculative_tokens": 4}) as llm:
        assert texts(llm) == expected
        stats = llm.stats()
    assert stats is not None
    told = stats.scheduler.speculation
    assert told.num_accepted == told.num_drafted > 20


def test_processes_of_stages_and_a_draft_model(expected: list[Sequence[int]]) -> None:
    with engine(
        pipeline_parallel_size=2, speculative_config=draft_model(), distributed_executor_backend="mp"
    ) as llm:
        for _ in range(40):  # whether guesses are worth a wait depends on what steps take here
            assert texts(llm) == expected
            stats = llm.stats()
            assert stats is not None
            if stats.scheduler.speculation.num_accepted > 0:
                return
    raise AssertionError("nobody guessed")


def test_nothing_is_left_of_the_process(children: list[DrafterChild]) -> None:
    with engine(speculative_config=draft_model()):
        (pid,) = [child._member.pid for child in children]
        assert is_there(pid)
    assert not is_there(pid)


@pytest.mark.usefixtures("waiting")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_r1_a_process_that_is_killed_costs_no_request(
    number: signal.Signals,
    expected: list[Sequence[int]],
    children: list[DrafterChild],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with engine(speculative_config=draft_model()) as llm, caplog.at_level(logging.WARNING):
        assert texts(llm) == expected
        os.kill(children[0]._member.pid, number)
        assert texts(llm) == expected
        assert texts(llm) == expected
    lines = [record.message for record in caplog.records if "switched off" in record.message]
    assert len(lines) == 1
    assert "its process has ended: " in lines[0]


@pytest.mark.usefixtures("waiting")
def test_r1_a_process_that_is_killed_while_it_is_waited_for(
    expected: list[Sequence[int]], children: list[DrafterChild], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the midst of texts, when the core has asked for more."""
    sent = 0

    def counted(send: Callable[..., None]) -> Callable[..., None]:
        def counting(message: Any) -> None:
            nonlocal sent
            sent += 1
            if sent == 12:
                os.kill(children[0]._member.pid, signal.SIGKILL)
            send(message)

        return counting

    with engine(pipeline_parallel_size=2, speculative_config=draft_model()) as llm:
        socket = children[0].socket
        monkeypatch.setattr(socket, "send", counted(socket.send))
        assert texts(llm) == expected
    assert sent >= 12


def test_a_process_that_is_stopped_delays_requests_by_little(
    expected: list[Sequence[int]], children: list[DrafterChild]
) -> None:
    with engine(speculative_config=draft_model()) as llm:
        assert texts(llm) == expected
        pid = children[0]._member.pid
        os.kill(pid, signal.SIGSTOP)
        assert texts(llm) == expected
    assert not is_there(pid)  # it is ended though it does not answer


def test_a_model_that_cannot_be_loaded_is_refused_at_the_start(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(model(), broken)
    (broken / "model.safetensors").chmod(0o600)
    write_raw_safetensors(broken / "model.safetensors", {}, b"")
    with pytest.raises(PenstockError, match="the draft model"):
        engine(speculative_config={"model": str(broken)})


def test_a_process_that_ends_before_it_is_ready_is_an_error(
    monkeypatch: pytest.MonkeyPatch, children: list[DrafterChild]
) -> None:
    monkeypatch.setattr(drafter_child.entry_points, "DRAFTER", "penstock.no_such_module")
    with pytest.raises(StageLostError, match=r"the draft model: .* ended with code 1"):
        engine(speculative_config=draft_model())
    assert not is_there(children[0]._member.pid)
