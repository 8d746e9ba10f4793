"""What a worker says has bounds: a value beyond them is refused where it is decoded."""

from __future__ import annotations

import msgspec
import pytest

from penstock.errors import ErrorInfo
from penstock.hosts.agent_messages import (
    Accepted,
    AgentHello,
    Ended,
    Heartbeat,
    LogLines,
    Resources,
    Said,
    SpareKept,
    ToHead,
    ToldClock,
)
from penstock.hosts.network.interfaces import AddressPair, HostAddress, Medium
from penstock.hosts.network.link_choice import MeasuredPair
from penstock.hosts.network.link_measuring import StreamSpeed
from penstock.hosts.network.measuring_door import ListeningPlace
from penstock.hosts.network.scout import Listening, Survey
from penstock.hosts.network.scout_messages import ListensForHost, Surveyed
from penstock.hosts.resources import HostResources
from penstock.hosts.stream_ends import StreamInvitation
from penstock.planner.stage_costs import StageCosts, StepCosts
from penstock.process.child import Abandoned, LinkExchanged, LinkJudged, LoadProgressed, Ready, WeightsLoaded
from stand_in_hosts import LOADED

GIVEN = HostResources(num_cpus=2, free_bytes=1, num_gpus=0)
PLACE = ListeningPlace(
    HostAddress(address="10.0.0.2", prefix=24, interface="eth0", medium=Medium.WIRED, mtu=1500), 7701
)
LOST = ErrorInfo(kind="PenstockError", message="lost")
HUGE = 10**9  # a place for far more digits
DIGITS = b"9" * 400


@pytest.mark.parametrize(
    "message",
    [
        Resources(resources=msgspec.structs.replace(GIVEN, free_bytes=HUGE)),
        Resources(resources=msgspec.structs.replace(GIVEN, num_cpus=HUGE)),
        Resources(resources=msgspec.structs.replace(GIVEN, num_gpus=HUGE)),
        Resources(resources=msgspec.structs.replace(GIVEN, cpus=(HUGE,))),
        AgentHello(resources=GIVEN, kinds=[], num_received=HUGE),
        Heartbeat(num_received=HUGE),
        ToldClock(asked_ns=HUGE, heard_ns=1, replied_ns=1),
        ToldClock(asked_ns=1, heard_ns=1, replied_ns=HUGE),
        Ended(number=1, exit_code=HUGE),
        Ended(number=HUGE, exit_code=1),
        SpareKept(own_bytes=HUGE),
        LogLines(lines=[], num_dropped=HUGE),
        Accepted(number=1, invitation=StreamInvitation(host="a", port=HUGE)),
        ListensForHost(number=1, listening=Listening(places=[msgspec.structs.replace(PLACE, port=HUGE)])),
        Said(number=1, event=LoadProgressed(done=HUGE, total=1)),
        Said(number=1, event=LoadProgressed(done=1, total=HUGE)),
        Said(number=1, event=WeightsLoaded(bytes_read=HUGE, seconds=1.0)),
        Said(number=1, event=WeightsLoaded(bytes_read=1, seconds=float(HUGE))),
        Said(number=1, event=Ready(epoch=HUGE, rank=LOADED)),
        Said(number=1, event=LinkExchanged(epoch=1, number=HUGE)),
        *(
            Said(number=1, event=Ready(rank=msgspec.structs.replace(LOADED, **{field: HUGE})))
            for field in ("stage", "max_blocks", "block_bytes", "tensor_bytes", "bytes_read", "end_layer")
        ),
    ],
    ids=repr,
)
def test_r15_a_number_that_no_machine_has_is_refused(message: msgspec.Struct) -> None:
    encoded = msgspec.json.encode(message)
    digits = b"1000000000.0" if b"1000000000.0" in encoded else b"1000000000"
    for beyond in (DIGITS, b"-" + DIGITS, b"-1000"):
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(encoded.replace(digits, beyond), type=ToHead)


@pytest.mark.parametrize(
    "message",
    [
        Resources(resources=msgspec.structs.replace(GIVEN, num_cpus=0)),
        Ended(number=1, exit_code=-1000),
        AgentHello(resources=GIVEN, kinds=["tls"] * 1000),
        AgentHello(resources=GIVEN, kinds=["t" * 1000]),
        AgentHello(resources=GIVEN, kinds=[], talk="t" * 1000),
        ListensForHost(number=1, listening=Listening(places=[PLACE] * 300)),
        Surveyed(
            number=1,
            survey=Survey(
                open=[
                    MeasuredPair(
                        pair=AddressPair(own=PLACE.address, other=PLACE.address),
                        speed=StreamSpeed(round_trip_s=1.0, bytes_per_s_out=-1.0, bytes_per_s_in=1.0),
                    )
                ],
                dead=[],
            ),
        ),
        LogLines(lines=[("", "")] * 20_000),
        Said(
            number=1,
            event=LinkJudged(
                sender="a", receiver="b", is_slow=True, bytes_per_s=1e30, measured_bytes_per_s=1.0
            ),
        ),
        Said(number=1, event=Abandoned(epoch=-1, error=LOST)),
        Said(number=1, event=Abandoned(epoch=1, error=msgspec.structs.replace(LOST, stage=1 << 70))),
    ],
    ids=lambda message: type(message).__name__,
)
def test_r15_a_message_beyond_its_bounds_is_refused(message: msgspec.Struct) -> None:
    with pytest.raises((msgspec.ValidationError, OverflowError)):
        msgspec.json.decode(msgspec.json.encode(message), type=ToHead)


def test_r15_measured_costs_have_values_with_which_one_can_compute() -> None:
    step = StepCosts(num_tokens=1, layer_s=0.1, fixed_s=0.0, embed_s=0.0, head_s=0.0, link_s=0.0)
    costs = StageCosts(
        decode=[step],
        prefill=step,
        layer_bytes=1,
        end_bytes=1,
        kv_block_bytes=1,
        block_size=16,
        available_bytes=1,
        num_sharers=1,
        has_kernels=True,
    )
    assert msgspec.json.decode(msgspec.json.encode(costs), type=StageCosts) == costs
    for changed in ({"decode": []}, {"block_size": 0}, {"num_ranks": 0}, {"end_bytes": 1 << 60}):
        encoded = msgspec.json.encode(msgspec.structs.asdict(costs) | changed)
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(encoded, type=StageCosts)
    twice = msgspec.structs.replace(costs, decode=[step, step])  # a worker may say so
    assert twice.decode_step_s(2, 5) == step.step_s(2)
