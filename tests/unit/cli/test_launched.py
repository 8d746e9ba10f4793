"""`penstock worker` where a launcher has started it: the head, or a worker of it (row I2)."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from penstock.cli.launched import AWAIT_HEAD_S, HEAD_AWAY_S, Launched
from penstock.cli.terminal import Invocation
from penstock.errors import JoinTokenError, UsageError
from penstock.hosts.launchers.places import Launcher
from penstock.trust.cancellation import Cancellation
from penstock.trust.join_token import JoinToken
from penstock.trust.token_prompt import JOIN_TOKEN, AwaitedTokens, EnvironmentToken, GivenTokens

TORCHRUN = {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "MASTER_ADDR": "tower"}
SECOND = TORCHRUN | {"RANK": "1"}
SLURM = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "n[1-2]", "SLURMD_NODENAME": "n2"}
LWS = {"LWS_LEADER_ADDRESS": "llm-0.llm.default", "LWS_GROUP_SIZE": "2", "HOSTNAME": "llm-0-1"}
TOKEN = Path("/shared/token")


def settle() -> None:
    """There is nothing to wait for."""


class Program:
    """Command lines that were run."""

    def __init__(self) -> None:
        self.lines: list[Sequence[str]] = []

    def run(self, words: Sequence[str], invocation: Invocation) -> int:
        assert invocation.origins == {}, "where its settings come from is found anew"
        self.lines.append(words)
        return 3


def serve(launched: Launched, words: Sequence[str], token_file: Path | None = TOKEN) -> Program:
    program = Program()
    invocation = Invocation(
        stdout=io.StringIO(), stderr=io.StringIO(), stdin=io.StringIO(), environ={}, origins={"join": "flag"}
    )
    assert launched.serve(words, token_file, program.run, invocation) == 3
    return program


def test_i2_the_first_process_serves_what_stands_behind_the_dashes() -> None:
    launched = Launched("torchrun", TORCHRUN, "")
    assert launched.is_head
    (line,) = serve(launched, ["demo", "--pp", "3"]).lines
    assert line[:4] == ["serve", "demo", "--pp", "3"]
    assert line[4:] == [
        "--hosts", "3", "--join-token-file", "/shared/token", "--listen-workers", "0.0.0.0:7700"
    ]  # fmt: skip


def test_i2_the_others_join_it_and_wait_for_it() -> None:
    launched = Launched("torchrun", SECOND, "")
    assert not launched.is_head
    assert launched.head == ("tower", 7700)
    assert (launched.patience_s, launched.away_limit_s) == (AWAIT_HEAD_S, HEAD_AWAY_S)
    assert launched.name().endswith("-1"), "several containers may have one name"
    assert isinstance(launched.tokens(TOKEN, settle), AwaitedTokens)
    launched.require_no_words(["demo"])  # the same line was started everywhere


def test_i2_slurm_names_the_hosts() -> None:
    launched = Launched("slurm", SLURM, "")
    assert (launched.head, launched.name()) == (("n1", 7700), "n2")


def test_i2_pods_of_one_group_run_the_same_line() -> None:
    (line,) = serve(Launched("lws", LWS | {"LWS_WORKER_INDEX": "0"}, ""), ["demo"]).lines
    assert line == [
        "serve", "demo", "--hosts", "2", "--join-token-file", "/shared/token",
        "--listen-workers", "0.0.0.0:7700",
    ]  # fmt: skip
    launched = Launched("lws", LWS | {"LWS_WORKER_INDEX": "1"}, "")
    assert (launched.head, launched.name()) == (("llm-0.llm.default", 7700), "llm-0-1")


def test_i2_a_job_of_one_host_serves_there_without_workers() -> None:
    """`penstock serve` refuses an address for workers where no worker can come."""
    alone = LWS | {"LWS_WORKER_INDEX": "0", "LWS_GROUP_SIZE": "1"}
    for token_file in (TOKEN, None):
        (line,) = serve(Launched("lws", alone, ""), ["demo", "--pp", "2"], token_file).lines
        assert line == ["serve", "demo", "--pp", "2"]


def test_i2_an_address_that_is_given_counts() -> None:
    assert Launched("torchrun", SECOND, "10.0.0.1:7799").head == ("10.0.0.1", 7799)
    (line,) = serve(Launched("torchrun", TORCHRUN, "10.0.0.1:7799"), ["demo"]).lines
    assert line[-1] == "0.0.0.0:7799"


def test_without_a_launcher_it_is_a_worker_as_its_user_says() -> None:
    launched = Launched(None, TORCHRUN, "10.0.0.1:7799")
    assert (launched.is_head, launched.head) == (False, ("10.0.0.1", 7799))
    assert (launched.patience_s, launched.away_limit_s) == (0.0, math.inf)
    assert isinstance(launched.tokens(None, settle), GivenTokens)
    with pytest.raises(UsageError, match="no head is given"):
        Launched(None, TORCHRUN, "")
    with pytest.raises(UsageError, match="takes no 'demo'"):
        launched.require_no_words(["demo"])


def test_i2_what_is_missing_is_said() -> None:
    with pytest.raises(UsageError, match="mpi does not name the host of the first process") as caught:
        Launched("mpi", {"PMI_RANK": "1", "PMI_SIZE": "2"}, "")
    assert "penstock worker --mpi --join HOST:7700" in caught.value.remedy
    with pytest.raises(UsageError, match="no model to serve is given"):
        serve(Launched("torchrun", TORCHRUN, ""), [])
    with pytest.raises(UsageError, match="no join token is given"):
        serve(Launched("torchrun", TORCHRUN, ""), ["demo"], None)
    with pytest.raises(UsageError, match="no join token is given"):
        Launched("torchrun", SECOND, "").tokens(None, settle)


@pytest.mark.parametrize(("launcher", "join"), [(None, "10.0.0.1"), ("torchrun", "")])
def test_i2_who_knows_where_the_head_is_does_not_look_for_it(launcher: Launcher | None, join: str) -> None:
    assert Launched(None, {}, "", discover=True).head is None
    with pytest.raises(UsageError, match=r"--discover and .* are both given") as caught:
        Launched(launcher, SECOND, join, discover=True)
    assert caught.value.remedy


def test_i2_a_token_may_come_from_the_environment_and_a_file_goes_before_it() -> None:
    text = JoinToken.new(b"a key").text()
    for launcher in (None, "torchrun"):
        launched = Launched(launcher, SECOND | {JOIN_TOKEN: text}, "10.0.0.1:7700")
        token = launched.tokens(None, settle)
        assert token.at_hand() is not None
        assert token.ask(Cancellation()).text() == text
        assert not isinstance(launched.tokens(TOKEN, settle), EnvironmentToken)
    broken = Launched(None, {JOIN_TOKEN: text[:-1] + "!"}, "10.0.0.1:7700").tokens(None, settle)
    assert broken.at_hand() is None
    with pytest.raises(JoinTokenError, match="mistyped") as caught:
        broken.ask(Cancellation())
    assert text[:-1] not in str(caught.value)
