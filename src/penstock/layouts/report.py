"""The report of `penstock plan --devices`, as text for people, 100 columns wide, and in JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.layouts.devices import GIB, DeviceSet
from penstock.layouts.estimate import Estimate, RankEstimate
from penstock.layouts.model_sizes import ModelSizes
from penstock.layouts.prediction import Load
from penstock.layouts.recommend import Recommendation
from penstock.layouts.recurrence import bubble_of_one_pass
from penstock.layouts.sensitivity import Improvement

WIDTH = 100
_MIB = 1 << 20
_HEADINGS = (
    *("stage", "rank", "device", "layers", "params", "weights", "KV/token", "KV tokens", "activations"),
    "stranded",
)
_MOST_ALTERNATIVES = 6  # alternatives that the text shows; the JSON has all
_MICRO_BATCHES = (1, 4, 8, 16)  # numbers of micro-batches for which the bubble of equal stages is shown


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutReport:
    """Everything that the report says about a model and devices.

    Attributes:
        load: the requests and settings for which layouts were judged.
        shown: the layout whose ranks are listed: the best that the user's flags allow, or the recommended one
            if they fix nothing.
        would_help: changes of the devices that would bring most, the best first.
        basis: a sentence that says where the times come from.
        serve_flags: flags that `serve` needs besides those of a layout.
    """

    sizes: ModelSizes
    devices: DeviceSet
    load: Load
    shown: Estimate
    recommendation: Recommendation
    would_help: Sequence[Improvement]
    basis: str
    serve_flags: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the report as values for JSON."""
        spec = self.sizes.spec
        return {
            "model": {
                "name": self.sizes.name,
                "architecture": spec.architecture,
                "layers": spec.num_layers,
                "parameters": self.sizes.parameters,
                "weight_bytes": self.sizes.weight_bytes,
                "weights": self.sizes.form,
                "kv_bytes_per_token": spec.kv_bytes_per_token(spec.num_layers, self.sizes.item_bytes),
            },
            "devices": [
                {
                    "host": host.name,
                    "devices": [device.kind for device in host.devices],
                    "link": host.link.kind,
                }
                for host in self.devices.hosts
            ],
            "concurrency": self.load.concurrency,
            "prompt_tokens": self.load.mix.prompt,
            "output_tokens": self.load.mix.output,
            "max_model_len": self.load.max_model_len,
            "basis": self.basis,
            "layout": self._layout(self.shown),
            "per_rank": [_fields(rank) for rank in self.shown.ranks],
            "hops": [_fields(hop) for hop in self.shown.hops],
            "predicted": {**_fields(self.shown.predicted), "stage_s": list(self.shown.predicted.stage_s)},
            "bubble_of_equal_stages": {
                str(number): bubble_of_one_pass(self.shown.layout.pp, number) for number in _MICRO_BATCHES
            },
            "recommended": {
                **self._layout(self.recommendation.best),
                "reasons": list(self.recommendation.reasons),
                **_summary(self.recommendation.best),
            },
            "alternatives": [
                {**self._layout(each), **_summary(each)} for each in self.recommendation.alternatives
            ],
            "would_help": [_fields(each) for each in self.would_help],
        }

    def _layout(self, own: Estimate) -> dict[str, Any]:
        layout = own.layout
        tp: int | list[int] = layout.tp if len(set(layout.tp_sizes)) == 1 else list(layout.tp_sizes)
        flags = f"{own.flags} {self.serve_flags}".strip()
        return {
            "pp": layout.pp,
            "tp": tp,
            "dp": layout.dp,
            "ep": layout.ep,
            "layers": list(own.layers),
            "num_devices": layout.num_devices,
            "flags": flags,
        }

    def lines(self) -> list[str]:
        """Return the report as lines of text."""
        return [
            *self._head(),
            "",
            *self._ranks(),
            *self._hops(),
            "",
            *self._predicted(),
            "",
            *self._recommended(),
            *self._alternatives(),
            *self._would_help(),
        ]

    def _head(self) -> list[str]:
        spec, sizes, load = self.sizes.spec, self.sizes, self.load
        kv_bytes = spec.kv_bytes_per_token(spec.num_layers, sizes.item_bytes)
        return [
            *_wrapped(
                f"{sizes.name}: {_count(sizes.parameters)} parameters in {spec.num_layers} layers, "
                f"{_size(sizes.weight_bytes)} of weights ({sizes.form}), "
                f"{kv_bytes / 1024:.4g} KiB of KV cache a token"
            ),
            *_wrapped(
                f"{_devices(self.devices)}; {load.concurrency} requests at once, of {load.mix.prompt} + "
                f"{load.mix.output} tokens, at most {load.max_model_len}"
            ),
            *_wrapped(self.basis),
        ]

    def _ranks(self) -> list[str]:
        shown = self.shown
        rows: list[tuple[str, ...]] = [_HEADINGS]
        rows += [_rank_row(rank) for rank in _first_of_alike(shown.ranks)]
        lines = [f"layout {shown.layout.name}, {_split(shown.layers)}", *table(rows)]
        alike = len(shown.ranks) - (len(rows) - 1)
        if alike:
            lines.append(f"{alike} more ranks hold as much as the one of their stage that is shown")
        if shown.layout.dp > 1:
            lines.append(f"{shown.layout.dp} replicas, of which one is shown")
        summing = [rank for rank in _first_of_alike(shown.ranks) if rank.all_reduce_bytes_per_step]
        return [*lines, *map(_sums_line, summing)]

    def _hops(self) -> list[str]:
        return [
            f"stage {hop.from_stage} to {hop.to_stage} over {hop.link}: {_size(hop.bytes_per_step)} a step, "
            f"{1e3 * hop.seconds:.3g} ms for a micro-batch"
            for hop in self.shown.hops
        ]

    def _predicted(self) -> list[str]:
        own, load = self.shown.predicted, self.load
        lines = [
            f"first token      {_ms(own.ttft_s)} ({_ms(own.prefill_s)} on an idle pipe)",
            f"time per token   {_ms(own.time_per_token_s)}, with {own.running} requests at once",
            f"throughput       {own.tokens_per_s:.4g} tokens/s, {own.requests_per_s:.3g} requests/s",
            f"bubble           {100 * own.bubble:.1f} % of the stages' time, in {own.micro_batches} "
            f"micro-batches",
            f"margin           {_size(max(rank.margin_bytes for rank in self.shown.ranks))} a rank at most",
            f"stranded memory  {_size(self.shown.stranded_bytes)}",
        ]
        if self.shown.layout.pp > 1:
            bubbles = [100 * bubble_of_one_pass(self.shown.layout.pp, number) for number in _MICRO_BATCHES]
            lines.append(
                f"{self.shown.layout.pp} equal stages idle for "
                f"{', '.join(f'{bubble:.2f}' for bubble in bubbles)} % of one pass of "
                f"{', '.join(map(str, _MICRO_BATCHES))} micro-batches"
            )
        if own.running < load.concurrency:
            lines.append(
                f"KV cache or --max-num-seqs is short: {load.concurrency - own.running} requests wait"
            )
        return lines

    def _recommended(self) -> list[str]:
        best = self.recommendation.best
        flags = f"{best.flags} {self.serve_flags}".strip()
        command = f"  penstock serve {self.sizes.name} {flags}"
        lines = [f"recommended: {best.layout.name}"]
        lines += (
            [command] if len(command) <= WIDTH else [f"  penstock serve {self.sizes.name} \\", f"    {flags}"]
        )
        for reason in self.recommendation.reasons:
            lines += _wrapped(reason, "  ")
        return lines

    def _alternatives(self) -> list[str]:
        others = self.recommendation.alternatives
        if not others:
            return []
        rows = [("alternative", "devices", "first token", "per token", "tokens/s", "bubble", "KV tokens")]
        rows += [
            (
                each.layout.name,
                str(each.layout.num_devices),
                _ms(each.predicted.ttft_s),
                _ms(each.predicted.time_per_token_s),
                f"{each.predicted.tokens_per_s:.4g}",
                f"{100 * each.predicted.bubble:.1f} %",
                str(each.kv_tokens),
            )
            for each in others[:_MOST_ALTERNATIVES]
        ]
        more = len(others) - _MOST_ALTERNATIVES
        return ["", *table(rows), *([f"and {more} more, see --json"] if more > 0 else [])]

    def _would_help(self) -> list[str]:
        if not self.would_help:
            return []
        lines = ["", "largest gains:"]
        for each in self.would_help:
            parts = [
                f"{100 * gain:+.0f} % {what}"
                for gain, what in ((each.gain, "tokens/s"), (each.kv_gain, "KV cache"))
                if abs(gain) >= 0.005
            ]
            lines += _wrapped(f"{each.change}: {', '.join(parts)} ({each.layout})", "  ")
        return lines


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines of text with aligned columns: the first column to the left, all others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            f"{cell:<{width}}" if index == 0 else f"{cell:>{width}}"
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _fields(own: Any) -> dict[str, Any]:
    return {name: getattr(own, name) for name in own.__dataclass_fields__}


def _summary(own: Estimate) -> dict[str, Any]:
    predicted = own.predicted
    return {
        "ttft_s": predicted.ttft_s,
        "time_per_token_s": predicted.time_per_token_s,
        "tokens_per_s": predicted.tokens_per_s,
        "bubble": predicted.bubble,
        "kv_tokens": own.kv_tokens,
        "stranded_bytes": own.stranded_bytes,
    }


def _first_of_alike(ranks: Sequence[RankEstimate]) -> list[RankEstimate]:
    """Return the ranks without those that hold as much as an earlier rank of their stage."""
    seen: set[tuple[int, int, int]] = set()
    kept = []
    for rank in ranks:
        key = (rank.stage, rank.weight_bytes, rank.kv_tokens)
        if key not in seen:
            seen.add(key)
            kept.append(rank)
    return kept


def _sums_line(rank: RankEstimate) -> str:
    return (
        f"stage {rank.stage} sums {_size(rank.all_reduce_bytes_per_step)} a step over its ranks: "
        f"{1e3 * rank.all_reduce_s:.3g} ms, and {1e3 * rank.all_reduce_latency_s:.3g} ms of latency"
    )


def _rank_row(rank: RankEstimate) -> tuple[str, ...]:
    end = rank.start_layer + rank.layers - 1
    return (
        str(rank.stage),
        str(rank.tp_rank),
        f"{rank.host} {rank.device}",
        f"{rank.start_layer}-{end}",
        _count(rank.parameters),
        _size(rank.weight_bytes),
        f"{rank.kv_bytes_per_token / 1024:.4g} KiB",
        str(rank.kv_tokens),
        _size(rank.activation_bytes),
        _size(rank.stranded_bytes),
    )


def _devices(devices: DeviceSet) -> str:
    """Return text such as "2 hosts, each 8 x h100"."""
    if devices.is_uniform and len(devices.hosts) > 1:
        first = devices.hosts[0]
        return f"{len(devices.hosts)} hosts, each {_of_host([device.kind for device in first.devices])}"
    return "; ".join(
        f"{host.name}: {_of_host([device.kind for device in host.devices])}" for host in devices.hosts
    )


def _split(layers: Sequence[int]) -> str:
    """Return text such as "80 layers a stage"."""
    return f"{layers[0]} layers a stage" if len(set(layers)) == 1 else f"{','.join(map(str, layers))} layers"


def _of_host(kinds: Sequence[str]) -> str:
    return ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=indent, subsequent_indent=f"{indent}  ", break_on_hyphens=False
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4g} ms" if seconds < 10.0 else f"{seconds:.4g} s"


def _count(number: int) -> str:
    for scale, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= scale:
            return f"{number / scale:.2f} {unit}"
    return str(number)


def _size(num_bytes: int) -> str:
    if not num_bytes:
        return "0"
    if num_bytes >= GIB:
        return f"{num_bytes / GIB:.2f} GiB"
    return f"{num_bytes / _MIB:.1f} MiB" if num_bytes >= _MIB else f"{num_bytes / 1024:.4g} KiB"
