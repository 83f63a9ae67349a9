"""From files to a `Config`: params.yaml, a profile over it, `--set section.key=value` over both.

`params.yaml` at the project root is the default profile (read by DVC too). Every unknown key, wrong type or value out
of bounds is a `ConfigError` with the file, the key and the closest valid key; nothing is started.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from eagle.config import Config
from eagle.errors import ConfigError, closest


def project_root(start: Path | None = None) -> Path:
    """Return the nearest folder at or above `start` (default: the working directory) that holds params.yaml.

    Raises ConfigError when there is none.
    """
    here = (start or Path.cwd()).resolve()
    for folder in (here, *here.parents):
        if (folder / "params.yaml").is_file():
            return folder
    raise ConfigError(f"no params.yaml in {here} or above it; run from the project's folder or give --root")


def load_config(root: Path, profile: str = "default", overrides: tuple[str, ...] | list[str] = ()) -> Config:
    """Read params.yaml, lay the profile and the `section.key=value` overrides over it, validate.

    `profile` is 'default', the name of a file in profiles/, or the path of a YAML file.
    Raises ConfigError (one line) for an unreadable file, an unknown key, a wrong type or a value out of bounds.
    """
    origin: dict[tuple[str, ...], str] = {}
    merged: dict[str, Any] = {}
    _overlay(merged, _read_yaml(root / "params.yaml"), "params.yaml", origin)
    if profile != "default":
        path = _profile_path(root, profile)
        name = str(path.relative_to(root)) if path.is_relative_to(root) else str(path)
        _overlay(merged, _read_yaml(path), name, origin)
    for item in overrides:
        _overlay(merged, _parse_override(item), f"--set {item}", origin)
    try:
        return Config.model_validate(merged)
    except ValidationError as error:
        raise ConfigError(_explain(error, origin)) from None


def _profile_path(root: Path, profile: str) -> Path:
    named = root / "profiles" / f"{profile}.yaml"
    if named.is_file():
        return named
    if profile.endswith((".yaml", ".yml")) and Path(profile).is_file():
        return Path(profile).resolve()
    names = ["default", *sorted(p.stem for p in (root / "profiles").glob("*.yaml"))]
    raise ConfigError(f"no profile '{profile}'{closest(profile, names)}; profiles here: {', '.join(names)}")


class _OneOfEach(yaml.SafeLoader):
    """YAML's safe loader, for which a key that stands twice in one mapping is an error: YAML itself keeps the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag != "tag:yaml.org,2002:merge" and isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(problem=f"'{key.value}' stands twice", problem_mark=key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _OneOfEach)  # noqa: S506 -- a safe loader
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 (byte {error.start})") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"{path}{where}: not valid YAML: {getattr(error, 'problem', error)}") from None
    except (ValueError, RecursionError) as error:  # a date that does not exist, a hexadecimal number without digits, nesting
        raise ConfigError(f"{path}: not valid YAML: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: the top level must be a mapping of sections, not a {type(content).__name__}")
    return content


def _parse_override(item: str) -> dict[str, Any]:
    key, sep, text = item.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not sep or not all(parts):
        raise ConfigError(f"--set {item}: must be section.key=value, for example --set distill.learning_rate=1e-3")
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        raise ConfigError(f"--set {item}: the value is not valid YAML") from None
    if isinstance(value, str):  # YAML 1.1 reads 1e-4 as a string
        with contextlib.suppress(ValueError):
            value = float(value)
    nested: Any = value
    for part in reversed(parts):
        nested = {part: nested}
    return dict(nested)


def _overlay(
    base: dict[str, Any], extra: dict[str, Any], name: str, origin: dict[tuple[str, ...], str], at: tuple[str, ...] = ()
) -> None:
    """Merge `extra` into `base` in place, mappings key by key, and remember which file each key came from."""
    if len(at) > 8:  # deeper than any section; an alias that holds itself has no end
        raise ConfigError(f"{name}: '{'.'.join(at[:3])}...' is nested too deep")
    for raw, value in extra.items():
        key = str(raw)
        path = (*at, key)
        origin[path] = name
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            _overlay(base[key], value, name, origin, path)
        elif isinstance(value, dict):
            base[key] = {}
            _overlay(base[key], value, name, origin, path)
        else:
            base[key] = value


def _explain(error: ValidationError, origin: dict[tuple[str, ...], str]) -> str:
    problems = error.errors(include_url=False)
    # a misspelt key also leaves the right one missing, which would be told first
    problem = next((found for found in problems if found["type"] == "extra_forbidden"), problems[0])
    loc = tuple(str(part) for part in problem["loc"])
    source = next((origin[loc[:n]] for n in range(len(loc), 0, -1) if loc[:n] in origin), "params.yaml")
    key = ".".join(loc) or "(top level)"
    more = f"; {error.error_count() - 1} more" if error.error_count() > 1 else ""
    if problem["type"] == "extra_forbidden":
        valid = _keys_at(loc[:-1])
        parent = ".".join(loc[:-1])
        near = closest(loc[-1], valid) or f" (valid: {', '.join(sorted(valid))})"
        near = near.replace("closest: '", f"closest: '{parent}." if parent else "closest: '")
        return f"{source}: unknown key '{key}'{near}{more}"
    text = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "literal_error":
        text += closest(str(problem.get("input")), re.findall(r"'([^']*)'", str(problem.get("ctx", {}).get("expected"))))
    shown = "" if isinstance(problem.get("input"), dict | BaseModel) else f", got {problem.get('input')!r}"
    return f"{source}: {key}: {text[0].lower()}{text[1:]}{shown}{more}"


def _keys_at(path: tuple[str, ...]) -> list[str]:
    model: Any = Config
    for part in path:
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            break
        fields = {(f.alias or n): f for n, f in model.model_fields.items()}
        if part not in fields:
            continue  # a list index
        annotation = fields[part].annotation
        args = getattr(annotation, "__args__", ())
        candidates = [annotation, *args]
        model = next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), model)
    return [f.alias or n for n, f in model.model_fields.items()]
