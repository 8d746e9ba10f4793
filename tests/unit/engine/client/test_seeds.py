"""Seeds that the front draws for sequences without one (rows D6, R4)."""

from __future__ import annotations

from penstock.engine.client.seeds import Seeds
from penstock.engine.client.siblings import sibling_seed, with_siblings
from penstock.engine.ipc import Welcome
from penstock.engine.supervisor.launch import replica_seed
from penstock.request import GenerationRequest, SamplingParams
from penstock.scheduler.admission import derive_seed


def seeds(*, num_sequences: int = 0, seed: int = 7) -> Seeds:
    return Seeds(
        Welcome(
            num_blocks=1, block_size=1, max_model_len=9, stages=[], seed=seed, num_sequences=num_sequences
        )
    )


def given(drawer: Seeds, **sampling: int) -> list[int | None]:
    request = drawer.given(with_siblings("r", [1], SamplingParams(**sampling)))
    return [one.sampling.seed for one in request.alone()]


def test_each_sequence_gets_the_seed_of_its_place_as_a_core_would_give_it() -> None:
    drawer = seeds()
    assert given(drawer) == [derive_seed(7, 0)]
    assert given(drawer, n=3) == [derive_seed(7, place) for place in (1, 2, 3)]
    assert given(drawer) == [derive_seed(7, 4)]


def test_a_seed_of_the_client_stays_and_takes_its_place() -> None:
    drawer = seeds()
    assert given(drawer, seed=5, n=2) == [5, sibling_seed(5, 1)]
    assert given(drawer) == [derive_seed(7, 2)]


def test_another_front_goes_on_where_the_core_stands() -> None:
    assert given(seeds(num_sequences=6)) == [derive_seed(7, 6)]


def test_a_vector_needs_no_seed() -> None:
    request = GenerationRequest(request_id="r", prompt_token_ids=[1], pooling="last")
    assert seeds().given(request) is request


def test_sequences_of_one_place_have_another_seed_in_each_replica() -> None:
    drawers = [seeds(seed=replica_seed(7, replica)) for replica in range(3)]
    drawn = [seed for drawer in drawers for seed in given(drawer, n=50)]
    assert len(set(drawn)) == 150
    assert drawn[:50] == given(seeds(), n=50), "the first replica is as an engine alone"
    assert [given(drawer, seed=5) for drawer in drawers] == [[5]] * 3
