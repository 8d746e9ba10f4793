"""Gathers the settings that the configs declare, and turns the values that a user gives into configs.

The command line, the settings file, the table in the docs and the arguments of `LLM` are derived from these
lists. A struct lists its settings in the order in which `--help` shows them. A field without a `Setting`
cannot be set from outside. A class variable with a `Setting` is a setting without a field, whose value goes
into other fields: `topology`, `speculative_config`, and the two files of keys.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from penstock.config.checks import sendable
from penstock.config.engine import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from penstock.config.hosts import HostsConfig
from penstock.config.limits import ConnectionLimits, GrammarLimits, Limits
from penstock.config.server import ServerConfig
from penstock.config.setting import Setting, environment_names_of
from penstock.config.speculation import SpeculationConfig, with_speculative_config
from penstock.config.topology import with_topology

Config = type[msgspec.Struct]
AnyStruct = TypeVar("AnyStruct", bound=msgspec.Struct)

ENGINE: tuple[Config, ...] = (
    ModelConfig,
    EngineConfig,
    ParallelConfig,
    CacheConfig,
    SchedulerConfig,
    SpeculationConfig,
)
SERVER: tuple[Config, ...] = (HostsConfig, ServerConfig, Limits, GrammarLimits, ConnectionLimits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """One setting of a config.

    Attributes:
        name: field or class variable of the config; functions get what a user has given by these names.
        text_type: type that the command line reads.
        default: value if the setting is not given.
        setting: the description of the flag.
    """

    name: str
    text_type: Any
    default: Any
    setting: Setting

    @property
    def flags(self) -> tuple[str, ...]:
        """The names of the setting's flag; the first one, without dashes, is the key in a settings file."""
        return self.setting.names(self.name)

    @property
    def key(self) -> str:
        return self.flags[0].lstrip("-")

    @property
    def environment_names(self) -> list[str]:
        return [self.setting.env] if self.setting.env else environment_names_of(self.flags)


@functools.cache
def declared_by(config: Config) -> tuple[Declared, ...]:
    """Return the settings that one config declares."""
    settings = []
    defaults = {field.name: _default(field) for field in msgspec.structs.fields(config)}
    for name, hint in get_type_hints(config, include_extras=True).items():
        if get_origin(hint) is ClassVar:
            (hint,) = get_args(hint)
        kind, *notes = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        for setting in notes:
            if isinstance(setting, Setting):
                default = defaults[name] if name in defaults else getattr(config, name)
                text_type = kind if setting.text_type is None else setting.text_type
                settings.append(Declared(name=name, text_type=text_type, default=default, setting=setting))
    return tuple(settings)


def _default(field: msgspec.structs.FieldInfo) -> Any:
    return field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()


def declared(*configs: Config) -> list[Declared]:
    """Return the settings that several configs declare, in their order."""
    return [setting for config in configs for setting in declared_by(config)]


@functools.cache
def flags_of_fields() -> Mapping[str, str]:
    """Return the flag of each field of a config that has one."""
    return {each.name: each.flags[0] for each in declared(*ENGINE, *SERVER)}


def configured(config: type[AnyStruct], given: Mapping[str, Any], **parts: Any) -> AnyStruct:
    """Return a config with the given settings; all others keep their defaults.

    Args:
        given: what the command line has read, by the names of fields; settings of other configs are ignored.
        parts: values of fields that are not settings, or that are made of several settings.

    Raises:
        UsageError: a setting is out of range.
    """
    values = {
        each.name: each.setting.read(given[each.name])
        for each in declared_by(config)
        if each.name in given and each.name in config.__struct_fields__
    }
    for name, value in values.items():
        sendable(name, value)
    return config(**(values | parts))


def configured_engine(given: Mapping[str, Any], model: str) -> EngineConfig:
    """Return the config of an engine.

    Args:
        given: what the command line has read, by the names of fields.
        model: the model, as the user names it.

    Raises:
        UsageError: a setting is out of range, or the topology file or `speculative_config` cannot be used.
    """
    parallel = configured(ParallelConfig, given)
    if given.get("topology") is not None:
        parallel = with_topology(parallel, given["topology"])
    return configured(
        EngineConfig,
        given,
        model=configured(ModelConfig, given, model=model),
        parallel=parallel,
        cache=configured(CacheConfig, given),
        scheduler=configured(SchedulerConfig, given),
        speculation=with_speculative_config(
            configured(SpeculationConfig, given), given.get("speculative_config")
        ),
        cluster=configured(HostsConfig, given),
    )
