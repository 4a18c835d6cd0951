"""Where settings come from: arguments over environment over file over defaults. Nothing else reads the environment."""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, BeforeValidator, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from kvtier.config.settings import Settings
from kvtier.errors import ConfigError

__all__ = ["LoadedSettings", "load_settings", "load_settings_with_sources", "setting_fields", "variable_name"]

PREFIX = "KVTIER_"
FILE_VARIABLE = "KVTIER_CONFIG"
_OTHER_FILE = f"name a readable TOML file, or none (unset {FILE_VARIABLE})"
_MAX_SHOWN = 200
_CREDENTIALS = re.compile(r".*@", re.DOTALL)
_PASSWORD = re.compile(r"(passw[a-z]*=)[^&'\"]*", re.IGNORECASE)
_SECRETS = frozenset({"redis.password"})
_URLS = frozenset({"redis.url", "server.url"})


@dataclass(frozen=True, slots=True)
class LoadedSettings:
    """Settings together with the place each one came from."""

    settings: Settings
    sources: Mapping[str, str]
    """Setting to its source, for every setting: 'default', a file and its key, a variable, or an argument."""


@dataclass(frozen=True, slots=True)
class _Value:
    value: object
    source: str


def load_settings(
    path: str | Path | None = None, env: Mapping[str, str] | None = None, overrides: Mapping[str, Any] | None = None
) -> Settings:
    """Settings from `overrides`, then `env` (the process's own when None), then the file, then defaults.

    `path` wins over the variable KVTIER_CONFIG. Overrides are nested (`{"host": {"size": "8GiB"}}`) or dotted
    (`{"host.size": "8GiB"}`). An unknown, malformed or contradictory setting in any source raises ConfigError.
    """
    return load_settings_with_sources(path, env, overrides).settings


def load_settings_with_sources(
    path: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    texts: Mapping[str, str] | None = None,
) -> LoadedSettings:
    """As `load_settings`, and says where each value came from. texts: of a command line, setting to what the
    environment would say; only overrides win over them."""
    environment = os.environ if env is None else env
    values: dict[str, _Value] = {}
    file_path = Path(path) if path is not None else _path_from(environment)
    if file_path is not None:
        values |= _from_file(file_path, "the configuration file" if path is not None else FILE_VARIABLE)
    values |= _from_environment(environment)
    values |= _from_texts(texts or {})
    values |= _flatten(overrides or {}, "argument {}")
    settings = _validate(values)
    return LoadedSettings(settings, {name: values[name].source if name in values else "default" for name in _FIELDS})


def setting_fields() -> dict[str, FieldInfo]:
    """Every setting by its dotted name, in the order of the models."""
    return {f"{section}.{name}": field for section, model in _sections() for name, field in model.model_fields.items()}


def variable_name(setting: str) -> str:
    """The environment variable of a setting: `host.size` is `KVTIER_HOST__SIZE`."""
    return PREFIX + setting.upper().replace(".", "__")


def _sections() -> Iterator[tuple[str, type[BaseModel]]]:
    for section, field in Settings.model_fields.items():
        assert isinstance(field.annotation, type)
        yield section, field.annotation


_FIELDS = setting_fields()
_SECTIONS = tuple(section for section, _ in _sections())
_VARIABLES = {variable_name(name): name for name in _FIELDS}


# What Kubernetes puts into every container beside a Service named kvtier or kvtier-something.
_KUBERNETES = re.compile(
    r"KVTIER(_[A-Z0-9]+)*?_(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT(_\d+_(TCP|UDP|SCTP)(_[A-Z]+)?)?)"
)


def _path_from(env: Mapping[str, str]) -> Path | None:
    if FILE_VARIABLE not in env:
        return None
    if not env[FILE_VARIABLE]:
        raise ConfigError(f"{FILE_VARIABLE} is empty: name a TOML file, or unset it")
    return Path(env[FILE_VARIABLE])


def _from_file(path: Path, named_by: str) -> dict[str, _Value]:
    named = f"{named_by} = {str(path)!r}"
    try:
        content = path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: no name that a file can have
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(f"{named} cannot be read: {reason}; {_OTHER_FILE}") from error
    try:
        tree = tomllib.loads(content.decode())
    except UnicodeDecodeError as error:
        raise ConfigError(f"{named} is not TOML: {error}; save it as UTF-8, or {_OTHER_FILE}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{named} is not TOML: {error}; correct it, or {_OTHER_FILE}") from error
    except RecursionError as error:
        raise ConfigError(f"{named} cannot be read: its values are nested too deeply; {_OTHER_FILE}") from error
    except ValueError as error:
        raise ConfigError(f"{named} cannot be read: a number in it has too many digits; {_OTHER_FILE}") from error
    return _flatten(tree, f"{path}: {{}}")


def _from_environment(env: Mapping[str, str]) -> dict[str, _Value]:
    values = {}
    for variable in sorted(env):
        if not variable.upper().startswith(PREFIX) or variable == FILE_VARIABLE or _KUBERNETES.fullmatch(variable):
            continue
        name = _VARIABLES.get(variable)
        if name is None:
            known = [known.removeprefix(PREFIX) for known in (*_VARIABLES, FILE_VARIABLE)]
            hint = _hint(variable[len(PREFIX) :].upper(), known, PREFIX)
            raise ConfigError(f"environment variable {variable} is no setting{hint}")
        source = f"environment variable {variable}"
        values[name] = _Value(_from_text(name, source, env[variable]), source)
    return values


def _from_texts(texts: Mapping[str, str]) -> dict[str, _Value]:
    values = {}
    for name, text in texts.items():
        source = f"--set {name}"
        if name not in _FIELDS:
            raise ConfigError(f"{source} is no setting{_hint(name, tuple(_FIELDS))}")
        values[name] = _Value(_from_text(name, source, text), source)
    return values


def _from_text(name: str, source: str, text: str) -> object:
    field = _FIELDS[name]
    annotation: Any = field.annotation
    if any(isinstance(item, BeforeValidator) for item in field.metadata):
        return text  # it reads text itself
    try:
        return TypeAdapter(annotation).validate_strings(text.strip())
    except ValidationError as error:
        reason = error.errors()[0]["msg"]
        raise ConfigError(_complaint(name, source, text, reason)) from error


def _flatten(tree: Mapping[str, Any], source: str) -> dict[str, _Value]:
    values: dict[str, _Value] = {}
    for key, value in _leaves(tree, "", source):
        if key in values:
            both = f"{_shown(key, values[key].value)} and {_shown(key, value)}"
            raise ConfigError(f"{key} is set twice, as {both} ({source.format(key)})")
        values[key] = _Value(value, source.format(key))
    return values


def _leaves(tree: Mapping[str, Any], prefix: str, source: str) -> Iterator[tuple[str, object]]:
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if name in _FIELDS:
            yield name, value
        elif name in _SECTIONS:
            if not isinstance(value, Mapping):
                settings = ", ".join(field for field in _FIELDS if field.startswith(f"{name}."))
                raise ConfigError(
                    f"{name} = {_shown(name, value)} ({source.format(name)}) is a group: set one of {settings}"
                )
            yield from _leaves(value, f"{name}.", source)
        else:
            hint = _hint(name, (*_FIELDS, *_SECTIONS))
            raise ConfigError(f"{name} ({source.format(name)}) is no setting{hint}")


def _hint(name: str, known: Sequence[str], prefix: str = "") -> str:
    nearest = difflib.get_close_matches(name, known, 1)
    guess = f": did you mean {prefix}{nearest[0]}?" if nearest else ";"
    return f"{guess} `kvtier config --defaults` lists all settings"


def _validate(values: Mapping[str, _Value]) -> Settings:
    tree: dict[str, dict[str, object]] = {section: {} for section in _SECTIONS}
    for name, value in values.items():
        section, _, leaf = name.partition(".")
        tree[section][leaf] = value.value
    try:
        return Settings.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("; ".join(dict.fromkeys(_explain(error, values)))) from error


def _explain(error: ValidationError, values: Mapping[str, _Value]) -> Iterator[str]:
    for detail in error.errors():
        name = ".".join(str(part) for part in detail["loc"][:2])
        reason = detail["msg"].removeprefix("Value error, ")
        if name in values:
            yield _complaint(name, values[name].source, values[name].value, reason)
        else:  # settings that contradict each other; the message names them
            given = [f"{key} from {value.source}" for key, value in values.items() if key in reason]
            yield f"{reason} ({', '.join(given)})"


def _complaint(name: str, source: str, value: object, reason: str) -> str:
    return f"{name} = {_shown(name, value)} ({source}): {reason[:1].lower()}{reason[1:]}"


def _shown(name: str, value: object) -> str:
    """A setting's value, cut to a line's length; of a secret nothing, and of a URL no user and password."""
    if name in _SECRETS:
        return "***"
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested, or of more digits, than Python prints
        text = f"<{type(value).__name__}>"
    if name in _URLS:  # whatever may be a user or a password, in a URL that may be none
        text = _CREDENTIALS.sub("***@", text)
        text = _PASSWORD.sub(r"\1***", text)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
