"""What ranks tell beside results: sums over ranks."""

from __future__ import annotations

from penstock.batch import NO_STORE_USE, BuiltGrammar, EntryAnswers, GrammarsBuilt, OrdersDone, StoreUse
from penstock.executor.rank_reports import RankReports


def test_an_order_is_finished_when_all_ranks_have_answered_and_done_when_all_have_done_it() -> None:
    reports = RankReports(2)
    reports.keep(OrdersDone(done=[1, 2], failed=[]))
    assert reports.finished_orders() == []
    reports.keep(OrdersDone(done=[1], failed=[2]))
    assert reports.finished_orders() == [(1, "done"), (2, "failed")]
    assert not reports.has_answers


def test_g1_answers_about_the_stores_of_hosts_are_kept_until_they_are_taken() -> None:
    reports = RankReports(2)
    told = [EntryAnswers(counts={1: 4}), EntryAnswers(emptied={2: None})]
    for answers in told:
        reports.keep(answers)
    assert reports.has_answers
    assert reports.entry_answers() == told
    assert reports.entry_answers() == []
    assert not reports.has_answers


def test_dr5_a_grammar_is_there_when_all_ranks_of_the_last_stage_have_told() -> None:
    reports = RankReports(5, 2)
    reports.keep(GrammarsBuilt(built=[7, 3, 4], failed={5: "too large"}))
    assert not reports.has_answers
    assert reports.built_grammars() == []
    reports.keep(GrammarsBuilt(built=[7, 5, 3], failed={4: "too late"}))
    assert reports.has_answers
    assert reports.built_grammars() == [
        BuiltGrammar(3),
        BuiltGrammar(4, "too late"),
        BuiltGrammar(5, "too large"),
        BuiltGrammar(7),
    ]
    assert reports.built_grammars() == []
    assert not reports.has_answers


def test_r10_what_one_rank_knows_against_a_grammar_counts_more_than_what_hinders_another() -> None:
    reports = RankReports(3, 2)
    reports.keep(GrammarsBuilt(built=[1], failed={2: "too large"}, unable={3: "late", 4: "late"}))
    reports.keep(GrammarsBuilt(built=[4], failed={3: "too large"}, unable={1: "full", 2: "full"}))
    assert reports.built_grammars() == [
        BuiltGrammar(1, "full", may_be_good=True),
        BuiltGrammar(2, "too large"),
        BuiltGrammar(3, "too large"),
        BuiltGrammar(4, "late", may_be_good=True),
    ]


def test_what_ranks_do_with_the_store_is_added_up_and_taken_once() -> None:
    reports = RankReports(2)
    assert reports.store_use() is NO_STORE_USE
    reports.keep(
        OrdersDone(done=[], failed=[1], use=StoreUse(call_failures=1, switched_off=1, failure="first"))
    )
    reports.keep(OrdersDone(done=[], failed=[1], use=StoreUse(bytes_read=7, bytes_written=2, failure="last")))
    reports.keep(
        OrdersDone(done=[], failed=[2], use=StoreUse(bytes_read=5, verify_failures=1, switched_off=-1))
    )
    assert reports.store_use() == StoreUse(
        bytes_read=12, bytes_written=2, verify_failures=1, call_failures=1, failure="last"
    )
    assert reports.store_use() is NO_STORE_USE
