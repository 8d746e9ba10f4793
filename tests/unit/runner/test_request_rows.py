"""The row table against a pure-Python oracle: D5-D7, E2, E5, E6, E7."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import msgspec
import pytest

from hand_core import Part, make_plan, new_row
from penstock.batch import GUESSED, RewoundRow, ScheduledBatch
from penstock.errors import ProtocolError
from penstock.runner.request_rows import NoIds, RequestRows, RowSnapshot

BLOCK = 4


def table(num_rows: int = 4, max_model_len: int = 64, max_drafts: int = 3) -> RequestRows:
    return RequestRows(num_rows, max_model_len, BLOCK, max_drafts)


def started(*prompts: list[int]) -> RequestRows:
    """Rows 0, 1, ... whose prompts have been scheduled whole in step 0."""
    rows = table()
    parts = [
        Part(row=r, num_tokens=len(p), start=0, blocks=range(16 * r, 16 * r + 16))
        for r, p in enumerate(prompts)
    ]
    plan = make_plan(0, parts, new_rows=[new_row(r, p) for r, p in enumerate(prompts)])
    schedule(rows, plan)
    return rows


def schedule(rows: RequestRows, plan: object) -> list[int]:
    rows.apply(plan)
    rows.append_blocks(plan)
    starts, ends = rows.span_of(plan)
    rows.advance(plan, ends)
    rows.check_sources(plan)
    rows.check_room(plan, ends)
    return list(starts)


def addressed(rows: RequestRows, *indices: int) -> RowSnapshot:
    return rows.snapshot(indices)


@dataclass
class OracleRow:
    """D6 in plain Python: one request's state on a rank."""

    tokens: list[int]
    computed: int = 0
    rejected: int = 0
    drafts: list[int] = field(default_factory=list)

    def schedule(self, num_tokens: int) -> None:
        self.computed += num_tokens

    def update(self, ids: list[int], rejected: int) -> None:
        self.tokens += [i for i in ids if i >= 0]
        self.computed -= rejected
        self.rejected += rejected


def assert_equal(rows: RequestRows, oracle: dict[int, OracleRow]) -> None:
    for row, state in oracle.items():
        assert rows.token_ids[row, : rows.total_len[row]].tolist() == state.tokens
        assert rows.total_len[row] == len(state.tokens)
        assert rows.num_computed[row] == state.computed
        assert rows.num_rejected[row] == state.rejected


@pytest.mark.parametrize("seed", range(20))
def test_d6_post_update_equals_the_oracle(seed: int) -> None:
    rng = random.Random(seed)
    prompts = [[rng.randrange(90) for _ in range(rng.randint(1, 6))] for _ in range(4)]
    rows = started(*prompts)
    oracle = {r: OracleRow(list(p), computed=len(p)) for r, p in enumerate(prompts)}
    for step in range(8):
        chosen = rng.sample(range(4), rng.randint(1, 4))
        ids, rejected = [], []
        for row in chosen:
            count = rng.randint(1, 4)
            if rng.random() < 0.15:
                ids.append([-1])  # nothing could be sampled: the row stays as it is
                rejected.append(0)
            else:
                ids.append([rng.randrange(90) for _ in range(count)])
                rejected.append(rng.randint(0, 2))
            oracle[row].update(ids[-1], rejected[-1])
        rows.post_update(step, addressed(rows, *chosen), ids, rejected)
        assert_equal(rows, oracle)
        assert [rows.sampled_step[row] for row in chosen] == [step] * len(chosen)


@pytest.mark.parametrize("seed", range(10))
def test_e5_two_phases_equal_one(seed: int) -> None:
    """A fake drafter guesses; one table learns the verdict at once, the other three steps later."""
    rng = random.Random(seed)
    prompt = [rng.randrange(90) for _ in range(5)]
    at_once, deferred = started(prompt), started(prompt)
    oracle = OracleRow(list(prompt), computed=5)
    first = [rng.randrange(90)]
    for rows in (at_once, deferred):
        rows.post_update(0, addressed(rows, 0), [first], [0])
    oracle.update(first, 0)
    optimistic = 5
    for step in range(1, 9):
        drafts = [rng.randrange(90) for _ in range(rng.randint(0, 3))]
        num_accepted = rng.randint(0, len(drafts))
        sampled = [*drafts[:num_accepted], rng.randrange(90)]
        rejected = len(drafts) - num_accepted
        part = Part(row=0, num_tokens=1 + len(drafts), start=optimistic, token_from=step - 1)
        plan = make_plan(step, [part])
        for rows in (at_once, deferred):
            rows.put_drafts(0, rows.total_len[0] + len(drafts), drafts)
            assert schedule(rows, plan) == [oracle.computed]
        oracle.schedule(1 + len(drafts))
        at_once.post_update(step, addressed(at_once, 0), [sampled], [rejected])
        snapshot = addressed(deferred, 0)
        assert deferred.num_computed[0] == oracle.computed  # E6: optimistic until consumed
        deferred.post_update(step, snapshot, [sampled], [rejected])
        oracle.update(sampled, rejected)
        optimistic += 1 + len(drafts)
        assert_equal(at_once, {0: oracle})
        assert_equal(deferred, {0: oracle})


def test_d5_positions_subtract_rejections_and_a_withheld_update_is_refused() -> None:
    rows, withheld = started([1, 2, 3]), started([1, 2, 3])
    for table_ in (rows, withheld):
        table_.post_update(0, addressed(table_, 0), [[7]], [0])
        table_.put_drafts(0, 6, [8, 9])
        assert schedule(table_, make_plan(1, [Part(row=0, num_tokens=3, start=3, token_from=0)])) == [3]
    rows.post_update(1, addressed(rows, 0), [[8, 5]], [1])
    following = make_plan(2, [Part(row=0, start=6, token_from=1)])
    assert schedule(rows, following) == [5]  # one of two drafts was rejected
    complaint = r"step 2.*request-0-0.*sample of a different step.*plan: 1.*table: 0"
    with pytest.raises(ProtocolError, match=complaint):
        schedule(withheld, following)


def test_d7_drafts_lie_behind_the_known_tokens() -> None:
    rows = started([1, 2, 3])
    rows.post_update(0, addressed(rows, 0), [[7]], [0])
    rows.put_drafts(0, rows.total_len[0] + 2, [8, 9])
    assert rows.token_ids[0, 3:6].tolist() == [7, 8, 9]
    assert rows.total_len[0] == 4
    rows.post_update(1, addressed(rows, 0), [[8, 4]], [1])
    assert rows.token_ids[0, : rows.total_len[0]].tolist() == [1, 2, 3, 7, 8, 4]


def test_e2_e7_samples_of_freed_and_of_reused_rows_are_dropped() -> None:
    rows = started([1, 2], [3, 4], [5, 6])
    late = addressed(rows, 0, 1, 2)
    rows.free(0)
    rows.free(1)
    rows.add(new_row(1, [8, 9, 9], generation=1))
    rows.post_update(0, late, [[70], [71], [72]], [0, 0, 1])
    assert rows.total_len.tolist()[:3] == [2, 3, 3]
    assert rows.token_ids[1, :4].tolist() == [8, 9, 9, 0]
    assert rows.token_ids[2, :3].tolist() == [5, 6, 72]
    assert rows.num_rejected.tolist()[:3] == [0, 0, 1]


def test_d10_a_preempted_request_enters_again_with_all_its_tokens() -> None:
    rows = started([1, 2, 3])
    rows.post_update(0, addressed(rows, 0), [[7]], [1])
    again = make_plan(
        1,
        [Part(row=2, num_tokens=4, start=0, blocks=[9])],
        freed_rows=[0],
        new_rows=[new_row(2, [1, 2, 3, 7], generation=0, prompt_len=3)],
    )
    assert schedule(rows, again) == [0]
    assert rows.prompt_len[2] == 3
    assert rows.num_rejected[2] == 0
    assert rows.tables.by_row[2, 0] == 9


def test_a_row_may_enter_with_its_blocks_before_its_first_token_runs() -> None:
    rows = started([1, 2, 3])
    alone = msgspec.structs.replace(new_row(2, [1, 2, 3, 4, 5]), blocks=[9, 8], start=4)
    assert schedule(rows, make_plan(1, new_rows=[alone])) == []
    assert (rows.num_computed[2], rows.tables.num_blocks[2], rows.tables.by_row[2, :2].tolist()) == (
        4,
        2,
        [9, 8],
    )
    assert schedule(rows, make_plan(2, [Part(row=2, start=4)])) == [4]
    with pytest.raises(ProtocolError, match="wrong position"):
        schedule(rows, make_plan(3, [Part(row=2, start=4)]))


REFUSALS = {
    "a free row": (Part(row=3, start=0, blocks=[1]), r"row 3 .* holds no request"),
    "a gap": (Part(row=0, start=4, token_from=0), r"wrong position \(plan: 4, row table: 3\)"),
    "a repetition": (Part(row=0, start=2, token_from=0), r"wrong position \(plan: 2, row table: 3\)"),
    "an unknown token": (Part(row=0, start=3, num_tokens=2), r"are not known yet \(plan: 5, row table: 4\)"),
    "another step's sample": (
        Part(row=0, start=3, token_from=1),
        r"a different step \(plan: 1, row table: 0\)",
    ),
    "a missing block": (Part(row=1, start=2, token_from=0), r"no KV block .* \(plan: 3, row table: 2\)"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_h15_a_plan_that_does_not_fit_the_table_is_refused_by_name(case: str) -> None:
    part, message = REFUSALS[case]
    rows = started([1, 2, 3], [4, 5])
    rows.post_update(0, addressed(rows, 0, 1), [[7], [8]], [0, 0])
    if case == "a missing block":
        rows.tables.num_blocks[1], rows.tables.block_size = 1, 2
    with pytest.raises(ProtocolError, match=message) as caught:
        schedule(rows, make_plan(5, [part]))
    assert "step 5" in caught.value.message


def rewinding(step_id: int, step: int, num_tokens: int, newest_ids: list[int]) -> ScheduledBatch:
    rewound = RewoundRow(row=0, step=step, num_tokens=num_tokens, newest_ids=newest_ids)
    return make_plan(step_id, rewound=[rewound])


def guessed(step_id: int, start: int, draft_ids: list[int]) -> ScheduledBatch:
    part = Part(row=0, num_tokens=len(draft_ids), start=start, token_from=GUESSED, drafts=draft_ids)
    return make_plan(step_id, [part])


def test_a_rewound_row_goes_on_from_the_core_and_drops_late_samples() -> None:
    """Steps 1 to 3 guess ahead; the core has seen step 1, of which this stage has consumed nothing."""
    rows = started([1, 2, 3])
    rows.post_update(0, addressed(rows, 0), [[7]], [0])
    late = []
    plans = [
        make_plan(1, [Part(row=0, num_tokens=2, start=3, token_from=0)]),
        guessed(2, 5, [9, 8]),
        guessed(3, 7, [6]),
    ]
    for plan in plans:
        schedule(rows, plan)
        late.append(addressed(rows, 0))
    rows.apply(rewinding(4, step=1, num_tokens=5, newest_ids=[7, 30]))
    after = addressed(rows, 0)
    oracle = OracleRow([1, 2, 3, 7, 30], computed=4)
    assert_equal(rows, {0: oracle})
    for step, ids, rejected in ((1, [30], 1), (2, [], 2), (3, [], 1)):
        rows.post_update(step, late[step - 1], [ids], [rejected])
        assert_equal(rows, {0: oracle})
    assert schedule(rows, make_plan(4, [Part(row=0, start=4, token_from=1)])) == [4]
    rows.post_update(4, after, [[31]], [0])
    assert_equal(rows, {0: OracleRow([1, 2, 3, 7, 30, 31], computed=5)})


def test_r4_steps_are_counted_anew_after_a_reset() -> None:
    """Another core has taken the place of the one that had rewound the row at its step 900."""
    rows = started([1, 2, 3])
    rows.apply(rewinding(900, step=0, num_tokens=4, newest_ids=[7]))
    rows.reset()
    plan = make_plan(5, [Part(row=0, num_tokens=3, start=0, blocks=[0, 1])], new_rows=[new_row(0, [1, 2, 3])])
    schedule(rows, plan)
    sampled = addressed(rows, 0)
    rows.apply(make_plan(6, new_rows=[new_row(1, [4])]))  # so that holders are compared one by one
    rows.post_update(5, sampled, [[8]], [0])
    assert (rows.total_len[0], rows.sampled_step[0]) == (4, 5)


def test_a_stage_that_keeps_no_ids_drops_late_counts() -> None:
    rows = RequestRows(4, 64, BLOCK, 3, ids=NoIds)
    plan = make_plan(0, [Part(row=0, num_tokens=3, start=0, blocks=[0, 1])], new_rows=[new_row(0, [1, 2, 3])])
    schedule(rows, plan)
    late = addressed(rows, 0)
    rows.apply(rewinding(2, step=0, num_tokens=4, newest_ids=[7]))
    rows.post_counts(1, late, [1], [2])
    assert (rows.total_len[0], rows.num_computed[0], rows.num_rejected[0]) == (4, 3, 0)


def test_a_window_is_void_behind_a_wrong_guess_until_the_row_goes_on() -> None:
    rows = started([1, 2, 3])
    rows.post_update(0, addressed(rows, 0), [[7]], [0])
    right, wrong = guessed(1, 3, [7, 8]), guessed(1, 3, [9, 8])
    assert not rows.is_void(right, [3])
    assert rows.is_void(wrong, [3])
    assert rows.is_void(right, [3]), "what follows a wrong guess is void, whatever it guesses"
    assert not rows.is_void(make_plan(1, [Part(row=0, start=3, token_from=0)]), [3])
    assert not rows.is_void(right, [3])
    rows.post_update(1, addressed(rows, 0), [[8]], [1])  # a draft was rejected
    assert rows.is_void(guessed(2, 4, [8]), [4]), "though its input is what was sampled"
