"""`penstock doctor` checks whether this machine is fit to serve a model; `penstock version` prints versions.

Called by `cli.program`. Each check is a function that returns a `Finding` or several, and raises only a
`PenstockError`. It gets what it looks at as an argument if a test needs other values. This module never
imports torch: it reads versions from the metadata of installed packages.
"""

from __future__ import annotations

import math
import mmap
import os
import platform
import resource
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from penstock import __version__
from penstock.cli.doctor_join import NO_JOIN, JoinSettings, check_join
from penstock.cli.findings import Finding, Level
from penstock.cli.flags import flag, with_settings
from penstock.cli.terminal import Invocation, one_line, remedy_of
from penstock.config.declared import ENGINE, configured_engine
from penstock.config.engine import EngineConfig, ParallelConfig
from penstock.config.server import ServerConfig
from penstock.engine.supervisor.launch import resolve_replicas
from penstock.errors import PenstockError
from penstock.families.quantization_spec import BlockQuantization, QuantizationSpec
from penstock.families.registry import load_spec, resolve_model_directory
from penstock.families.spec import ITEM_SIZES, ModelSpec
from penstock.hosts.resources import HostResources
from penstock.kernels.cpu.library import LoadedKernels, load
from penstock.pipeline.partition import AUTO_POLICY
from penstock.process.config import RankConfig
from penstock.process.listening import listen
from penstock.tokenizer.sources.model_files import tokenizer_content, vocabulary_file
from penstock.told_text import printable
from penstock.weights.checkpoint import Checkpoint, TensorEntry

OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 11)
TESTED_TORCH = "2.13.0"
NEEDED_PACKAGES = ("numpy", "tokenizers", "msgspec", "pyzmq", "starlette", "uvicorn", "minijinja")
NEEDED_DESCRIPTORS = 1024
LOW_MEMORY_BYTES = 1 << 30
FLOAT_BYTES = 4
_PACKED = ("qweight", "weight_packed")  # tensors of words, of gptq and awq, and of compressed-tensors
WITHOUT_KERNELS = "plain torch is used, which is slower"

_COLOURS: dict[Level, str] = {"ok": "green", "warn": "yellow", "fail": "red"}


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorSettings:
    """The things that are checked beside the engine's own settings."""

    host: Annotated[str, flag("address that will be used", "--host", group="doctor")] = "127.0.0.1"
    port: Annotated[int, flag("port that will be used", "--port", group="doctor")] = 8000


_SETTINGS = DoctorSettings()


@with_settings(*ENGINE)
def doctor(
    model: Annotated[str | None, flag("model to check", "--model", group="doctor")] = None,
    *,
    settings: DoctorSettings = _SETTINGS,
    joining: JoinSettings = NO_JOIN,
    invocation: Annotated[Invocation, Parameter(parse=False)],
    **given: Any,
) -> int:
    """Run the command. Returns 1 if anything fails, else 0. Raises `UsageError` for impossible settings."""
    config = configured_engine(given, model or "")
    findings = [*check_machine(settings, config.parallel), *(check_model(config) if model else ())]
    if joining.join:  # a worker needs no port for clients
        findings = [finding for finding in findings if finding.subject != "port"]
    findings += check_join(joining)
    show(findings, invocation)
    return 1 if any(finding.level == "fail" for finding in findings) else 0


def version(*, invocation: Annotated[Invocation, Parameter(parse=False)]) -> int:
    """Run the command `version`: ours, Python's and torch's."""
    torch = installed_version("torch") or "not installed"
    invocation.say(f"penstock {__version__}   python {platform.python_version()}   torch {torch}")
    return 0


def show(findings: Iterable[Finding], invocation: Invocation) -> None:
    """Print a line for each finding, and below it the remedy."""
    style = invocation.style
    for finding in findings:
        level = style.paint(f"{finding.level:<5}", _COLOURS[finding.level])
        invocation.say(f"{level} {finding.subject:<15} {one_line(finding.text)}")
        if finding.remedy:
            invocation.say(f"{'':<22}{one_line(finding.remedy)}")


def check_machine(settings: DoctorSettings, parallel: ParallelConfig) -> list[Finding]:
    """Run all checks that need no model."""
    host = HostResources.detect()
    return [
        check_python(sys.version_info[:3]),
        check_cores(host.num_cpus, sum(parallel.tp_sizes) * parallel.data_parallel_size),
        check_memory(host.free_bytes),
        check_torch(installed_version("torch")),
        check_packages({name: installed_version(name) for name in NEEDED_PACKAGES}),
        check_kernel("shared memory", _try_memfd, "memfd_create with room for a ring"),
        check_kernel("eventfd", _try_eventfd, "eventfd"),
        check_kernel("pidfd", _try_pidfd, "pidfd_open"),
        check_descriptors(resource.getrlimit(resource.RLIMIT_NOFILE)),
        check_port(settings.host, settings.port),
        check_cpu_kernels(load()),
        Finding("ok", "gpu", f"{host.num_gpus} found" if host.num_gpus else "none; stages run on the CPU"),
    ]


def installed_version(package: str) -> str | None:
    """Return the version of a distribution, without importing it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def check_python(version_info: tuple[int, ...]) -> Finding:
    text = ".".join(map(str, version_info))
    if tuple(version_info[:2]) >= OLDEST_PYTHON:
        return Finding("ok", "python", text)
    return Finding("fail", "python", f"{text} is too old", "Install Python 3.11 or newer.")


def check_cores(count: int, ranks: int) -> Finding:
    text = f"{count} usable for {ranks} rank{'s' * (ranks > 1)}"
    if count >= ranks:
        return Finding("ok", "cores", text)
    return Finding("warn", "cores", text, "Stages will share cores; use a smaller --pp for speed.")


def check_memory(free_bytes: int) -> Finding:
    text = f"{free_bytes / 2**30:.1f} GiB free"
    if free_bytes >= LOW_MEMORY_BYTES:
        return Finding("ok", "memory", text)
    return Finding("warn", "memory", text, "Close other programs, or use a small model.")


def check_torch(torch_version: str | None) -> Finding:
    if torch_version is None:
        return Finding("fail", "torch", "not installed", f"pip install torch=={TESTED_TORCH}")
    numbers = tuple(int(part) for part in torch_version.split("+")[0].split(".")[:2] if part.isdigit())
    if numbers >= OLDEST_TORCH:
        return Finding("ok", "torch", torch_version)
    return Finding("fail", "torch", f"{torch_version} is too old", f"pip install torch=={TESTED_TORCH}")


def check_packages(versions: dict[str, str | None]) -> Finding:
    missing = [name for name, found_version in versions.items() if found_version is None]
    if not missing:
        return Finding("ok", "packages", f"{len(versions)} of {len(versions)}")
    return Finding("fail", "packages", f"not installed: {', '.join(missing)}", "pip install penstock")


def check_kernel(subject: str, attempt: Callable[[], None], what: str) -> Finding:
    """Return whether a call of the Linux kernel works here. An old kernel or a sandbox may refuse it."""
    try:
        attempt()
    except (OSError, AttributeError) as error:
        remedy = "Use Linux 5.4 or newer, and a sandbox that allows the call."
        return Finding("fail", subject, f"{what} does not work: {error}", remedy)
    return Finding("ok", subject, what)


def _try_memfd() -> None:
    fd = os.memfd_create("penstock-doctor")
    try:
        os.ftruncate(fd, 1 << 20)
        with mmap.mmap(fd, 1 << 20) as memory:
            memory[-1] = 1
    finally:
        os.close(fd)


def _try_eventfd() -> None:
    fd = os.eventfd(1, os.EFD_SEMAPHORE)
    try:
        os.eventfd_read(fd)
    finally:
        os.close(fd)


def _try_pidfd() -> None:
    os.close(os.pidfd_open(os.getpid()))


def check_cpu_kernels(loaded: LoadedKernels) -> Finding:
    """Return which CPU kernels of Penstock run here. If there are none, that is a warning: torch computes."""
    if loaded.library is None:
        return Finding("warn", "kernels", f"none: {loaded.reason}; {WITHOUT_KERNELS}", loaded.remedy)
    level: Level = "warn" if loaded.remedy else "ok"
    return Finding(level, "kernels", f"{loaded.isa}, {loaded.reason}", loaded.remedy)


def check_descriptors(limits: tuple[int, int]) -> Finding:
    soft, hard = limits
    unlimited = resource.RLIM_INFINITY
    text = (
        f"{soft if soft != unlimited else 'no limit'} (at most {hard if hard != unlimited else 'no limit'})"
    )
    if hard == unlimited or hard >= NEEDED_DESCRIPTORS:
        return Finding("ok", "open files", text)
    return Finding("warn", "open files", text, "Raise it with `ulimit -n 8192`; it bounds the connections.")


def check_port(host: str, port: int) -> Finding:
    """Return whether the server could listen at an address.

    The check is `insecure`, since it must not fail for a missing API key.
    """
    try:
        listen(ServerConfig(host=host, port=port, insecure=True)).close()
    except PenstockError as error:
        return Finding("fail", "port", error.message, remedy_of(error))
    return Finding("ok", "port", f"{host}:{port} is free")


def check_model(config: EngineConfig) -> list[Finding]:
    """Run all checks of a model and its layout, until one raises: the others need what it has found."""
    findings: list[Finding] = []
    try:
        directory = resolve_model_directory(config.model.model)
        findings.append(Finding("ok", "model", str(directory)))
        spec = load_spec(directory, config.model.model_impl, dequantize=config.model.gguf_dequantize)
        if directory.is_dir():
            findings.append(Finding("ok", "config.json", describe_spec(spec)))
        else:
            findings.append(Finding("ok", "metadata", f"{describe_file(directory)}; {describe_spec(spec)}"))
        findings += [check_vocabulary(directory), *check_template(directory, config.model.chat_template)]
        findings.append(check_weights(directory, spec))
        findings += check_stages(config)
    except PenstockError as error:
        findings.append(Finding("fail", "model", error.message, remedy_of(error)))
    return findings


def describe_spec(spec: ModelSpec) -> str:
    count = spec.stage_parameters(0, spec.num_layers)
    return (
        f"{spec.architecture}, {spec.num_layers} layers, {count / 1e6:.1f} M parameters, {spec.dtype}, "
        f"vocabulary {spec.vocab_size}, up to {spec.max_position_embeddings} tokens"
    )


def describe_file(path: Path) -> str:
    """Say what a GGUF file says of itself: the version of its format, its architecture and its name."""
    from penstock.gguf.file import GgufFile  # here: numpy is slow to import

    file = GgufFile.open(path)
    name = file.metadata.text("general.name", "")
    named = f" ({printable(name)})" if name else ""
    return f"GGUF {file.version} of {printable(file.metadata.text('general.architecture'))}{named}"


def check_vocabulary(model: Path) -> Finding:
    """Check the vocabulary. If it is not a `tokenizer.json`, it is translated to one, as for serving."""
    file = vocabulary_file(model)
    subject = "vocabulary" if model.is_file() else file.name if file is not None else "tokenizer.json"
    if file is None:
        return Finding("fail", subject, "missing", "Download it; without it the server takes only token ids.")
    if file.name == "tokenizer.json":
        return Finding("ok", subject, "there")
    try:
        content = tokenizer_content(model)
    except PenstockError as error:
        return Finding("fail", subject, error.message, remedy_of(error))
    if content is None:
        remedy = "Use a file with a tokenizer; without it the server takes only token ids."
        return Finding("fail", subject, "the file has none", remedy)
    return Finding("ok", subject, "in the file" if model.is_file() else "there")


def check_template(model: Path, given: str | None) -> list[Finding]:
    """Check that the chat template can be compiled.

    Args:
        given: file of `--chat-template`, which is used in place of the model's template.
    """
    from penstock.tokenizer.chat_template import AbsentChatTemplate  # here: tokenizers is slow to import
    from penstock.tokenizer.template_files import load_chat_template
    from penstock.tokenizer.tokenizer import AbsentTokenizer

    try:
        template = load_chat_template(model, AbsentTokenizer(), given)
    except PenstockError as error:
        return [Finding("fail", "chat template", error.message, remedy_of(error))]
    if not isinstance(template, AbsentChatTemplate):
        return []
    return [
        Finding("warn", "chat template", "none", "Use /v1/completions, or give one with --chat-template.")
    ]


def check_weights(model: Path, spec: ModelSpec) -> Finding:
    """Check the headers of all files with weights. Raises `CheckpointError`; reads no tensor data."""
    if not model.is_dir():
        from penstock.gguf.file import GgufFile  # here: numpy is slow to import

        file = GgufFile.open(model)
        tensors = file.tensors.values()
        counts, sizes = [math.prod(each.shape) for each in tensors], [each.num_bytes for each in tensors]
        num_files = len(file.parts)
    else:
        checkpoint = Checkpoint(model)
        entries = [checkpoint.entry(name) for name in checkpoint.names]
        counts = [_num_weights(entry, spec) for entry in entries]
        sizes = [entry.end - entry.begin for entry in entries]
        num_files = len({entry.path for entry in entries})
    text = f"{len(counts)} tensors, {sum(sizes) / 1e6:.1f} MB in {num_files} file{'s' * (num_files > 1)}"
    if spec.quantization is not None:
        text = f"{text}, {spec.quantization.describe()}"
    if spec.is_dequantized:
        text = f"{text}, dequantised at load"
    if sum(counts) >= spec.stage_parameters(0, spec.num_layers):
        return Finding("ok", "weights", text)
    return Finding("fail", "weights", f"{text}: fewer than config.json requires", "Download the model again.")


def _num_weights(entry: TensorEntry, spec: ModelSpec) -> int:
    """Return how many numbers a tensor holds; a word of a quantised projection holds several."""
    projection, _, part = entry.name.rpartition(".")
    if part in _PACKED and isinstance(spec.quantization, QuantizationSpec):
        scheme = spec.quantization.scheme(projection)
        if scheme is not None:
            return 8 * (entry.end - entry.begin) // scheme.bits
    return math.prod(entry.shape)


def check_stages(config: EngineConfig) -> list[Finding]:
    """Describe what each stage would hold, decided as `serve` decides it. Raises what `serve` would raise."""
    is_measured, host = config.parallel.partition == AUTO_POLICY, HostResources.detect()
    replicas = resolve_replicas(config.with_partition("even") if is_measured else config, [host])
    ranks = [rank for plan in replicas for rank in plan.ranks]
    missing = check_gpus([rank.device for rank in ranks], host.num_gpus)
    if is_measured:
        text = "chosen by measurement at start; `penstock plan` measures now"
        return [Finding("ok", "stages", text), *missing]
    plan = replicas[0]
    of_stages = [[rank for rank in plan.ranks if rank.stage == stage] for stage in range(plan.num_stages)]
    stages = [
        Finding("ok", f"stage {stage}", _describe_stage(ranks, plan.spec))
        for stage, ranks in enumerate(of_stages)
    ]
    has_kernels = config.parallel.kernels != "off" and load().library is not None
    held = sum(_held_bytes(rank, plan.spec, has_kernels=has_kernels) for rank in ranks)
    blocks = check_blocks(plan.spec, has_kernels=has_kernels)
    return [*stages, *blocks, *check_room(held, host.free_bytes), *missing]


def check_blocks(spec: ModelSpec, *, has_kernels: bool) -> list[Finding]:
    """Say in which form weights of a GGUF file are held for computing. Other weights have no finding."""
    if not isinstance(spec.quantization, BlockQuantization):
        return []
    if has_kernels:
        return [Finding("ok", "products", "our kernels compute with the blocks as they are in the file")]
    size = spec.stage_parameters(0, spec.num_layers) * FLOAT_BYTES
    text = f"weights are held as float32, {size / 1e6:.1f} MB in all, because our kernels do not run"
    return [Finding("warn", "products", text, "Install g++, or use a CPU with AVX2.")]


def check_room(num_bytes: float, free_bytes: int) -> list[Finding]:
    """Compare the weights of this machine's stages with free memory. If they fit, there is no finding."""
    if num_bytes <= free_bytes:
        return []
    text = f"weights of {num_bytes / 2**30:.1f} GiB, and {free_bytes / 2**30:.1f} GiB of memory are free"
    remedy = "Close other programs, use a checkpoint with fewer bits a weight, or stages on several machines."
    return [Finding("warn", "room", text, remedy)]


def check_gpus(devices: Iterable[str], num_gpus: int) -> list[Finding]:
    """Return a finding if ranks are to run on GPUs that this machine does not have: GPUs count from 0."""
    wanted = {device for device in devices if device.startswith("cuda")}
    missing = sorted(device for device in wanted if int(device.partition(":")[2] or 0) >= num_gpus)
    if not missing:
        return []
    text = f"{', '.join(missing)}: not among this machine's {num_gpus} GPUs"
    return [Finding("fail", "device", text, "Give --device GPUs of this machine, or cpu.")]


def _describe_stage(ranks: Sequence[RankConfig], spec: ModelSpec) -> str:
    first, devices = ranks[0], ", ".join(dict.fromkeys(rank.device for rank in ranks))
    size = _parameters(first, spec) * _stored_item_size(first, spec)
    quantised = "" if first.quantization == "none" else f" before they are {first.quantization}"
    shared = f" shared by {len(ranks)} ranks" if len(ranks) > 1 else ""
    layers = f"layers {first.start_layer}-{first.end_layer - 1}"
    return f"{layers}, {size / 1e6:.1f} MB of weights{quantised}{shared}, {devices}"


def _parameters(rank: RankConfig, spec: ModelSpec) -> int:
    """Return how many weights the stage of a rank has, in all its ranks together."""
    return spec.stage_parameters(rank.start_layer, rank.end_layer)


def _stored_item_size(rank: RankConfig, spec: ModelSpec) -> float:
    """Return the mean bytes of a weight after it is read, and before any quantisation at load."""
    return ITEM_SIZES[rank.dtype] if spec.quantization is None else spec.quantization.mean_bits / 8


def _held_bytes(rank: RankConfig, spec: ModelSpec, *, has_kernels: bool) -> float:
    """Return the least bytes of this machine's memory that a rank's weights take; 0 for a rank on a GPU."""
    if rank.device.startswith("cuda"):
        return 0.0
    size = {"int8": 1.0, "int4": 0.5}.get(rank.quantization) or _stored_item_size(rank, spec)
    if isinstance(spec.quantization, BlockQuantization) and not has_kernels:
        size = FLOAT_BYTES
    return _parameters(rank, spec) * size / rank.tp_size
