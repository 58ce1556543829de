"""Strategies outside a run: `grpo_strategies.json` beside the weights, the model card's section, and the Hub."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from trl_grpo_ext._strategy import check_size
from trl_grpo_ext._suggest import shortened
from trl_grpo_ext._validate import check_number, plain
from trl_grpo_ext.errors import ConfigError, SpecError
from trl_grpo_ext.kl import resolve_weighting
from trl_grpo_ext.specs import LIST_FIELDS, SETTINGS, STRATEGY_FIELDS, build_field, is_of_the_script, to_spec

STRATEGIES_FILE = "grpo_strategies.json"
STATE_FILE = "grpo_strategy_state.json"

DEPENDENCIES = ("trl-grpo-ext", "trl", "transformers", "peft", "torch")
CARD_HEADING = "## Training strategies"
PACKAGE_LINK = "[trl-grpo-ext](https://pypi.org/project/trl-grpo-ext/)"

CURVES = {"reward": "reward", "KL to the reference": "kl", "completion length (tokens)": "completions/mean_length"}
"""Row of the card's table -> the name under which the trainer logs it."""


# Writing


def versions() -> dict[str, str]:
    """Return the installed versions that a run depends on."""
    found = {name: _version(name) for name in DEPENDENCIES}
    return {name: number for name, number in found.items() if number is not None}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def write_strategies(folder: str | Path, specs: Mapping[str, Any], **meta: Any) -> None:
    """Write `grpo_strategies.json` into `folder`: config field -> spec, and `_meta` with versions and `meta`."""
    write_json(Path(folder) / STRATEGIES_FILE, _content(specs, **meta))


def _content(specs: Mapping[str, Any], **meta: Any) -> dict[str, Any]:
    return {**specs, "_meta": {"versions": versions(), **meta}}


def write_json(path: Path, content: Any) -> None:
    """Write JSON so that a reader, or a crash half-way, never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(_writable(content), indent=2) + "\n", encoding="utf-8")
    part.replace(path)


def _writable(value: Any) -> Any:
    """Return `value` as JSON and YAML can write it, in the worst case its text: no checkpoint is lost to a number."""
    if isinstance(value, Mapping):
        return {str(key): _writable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_writable(item) for item in value]
    value = plain(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else shortened(value)


# Reading


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises `ConfigError` that names the file if it can't be read or holds none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold an object, got {type(content).__name__}")
    return content


def load_strategies(
    repo_or_path: str | Path,
    revision: str | None = None,
    trust_remote_code: bool = False,
    *,
    token: str | bool | None = None,
) -> dict[str, Any]:
    """Return the strategies saved in a folder, a file or a Hub repository: config field -> spec.

    `revision` is a branch, tag or commit of the repository. Every spec is built once, so that an unknown kind or a
    value out of range fails here. Nothing that comes from the Hub is executed: a spec that names an import path, or
    asks for a model's own code, is refused unless `trust_remote_code`. A folder or file is yours and may name both.

    Raises `ConfigError` if there is no such file, and `SpecError` for what is in it.

    Example::

        args = GRPOExtConfig(output_dir="out", beta=0.01, **load_strategies("user/model"))
    """
    return load_saved(repo_or_path, revision, trust_remote_code, token=token).specs


class Saved(NamedTuple):
    """What a run has saved: config field -> spec, and its beta if it had a KL."""

    specs: dict[str, Any]
    beta: float | None


def load_saved(
    repo_or_path: str | Path,
    revision: str | None = None,
    trust_remote_code: bool = False,
    *,
    token: str | bool | None = None,
    without: Collection[str] = (),
) -> Saved:
    """As `load_strategies`, with the run's beta, and but for the fields `without`, which are not looked at."""
    if not isinstance(repo_or_path, (str, Path)) or not str(repo_or_path).strip():
        raise ConfigError(f"expected a folder, a file or a Hub repository, got {shortened(repo_or_path)}")
    source = repr(str(repo_or_path))
    path = Path(repo_or_path)
    remote = not _exists(path)
    file = _downloaded(str(repo_or_path), revision, token) if remote else _local(path, revision)
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{STRATEGIES_FILE} of {source} is not valid JSON: {error}") from error
    except OSError as error:
        raise ConfigError(f"{STRATEGIES_FILE} of {source} can't be read: {error.strerror}") from error
    if not isinstance(content, dict):
        raise SpecError(f"{STRATEGIES_FILE} of {source} must hold an object, got {type(content).__name__}")
    meta = content.pop("_meta", None)
    specs = {name: spec for name, spec in content.items() if spec is not None and name not in without}
    try:
        check_size(specs)
        for name, spec in specs.items():
            build_field(name, spec, remote=remote, trust_remote_code=trust_remote_code)
        beta = meta.get("beta") if isinstance(meta, dict) else None
        check_number("_meta.beta", beta, at_least=0, optional=True)
    except ConfigError as error:
        raise type(error)(f"{source}: {error}") from error
    except RecursionError as error:  # JSON text in JSON text in JSON text
        raise SpecError(f"{source}: the specs nest too deep") from error
    return Saved(specs, beta)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # no name of a file: too long, or with a NUL in it
        return False


def _local(path: Path, revision: str | None) -> Path:
    if revision is not None:
        raise ConfigError(f"{str(path)!r} is a local path, which has no `revision`, got {revision!r}")
    file = path / STRATEGIES_FILE if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"{str(path)!r} holds no {STRATEGIES_FILE}: it was not saved by trl-grpo-ext")
    return file


def _downloaded(repo_id: str, revision: str | None, token: str | bool | None) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(repo_id, STRATEGIES_FILE, revision=revision, token=token))
    except Exception as error:  # the client's and its transport's errors share no root
        at = f" at revision {revision!r}" if revision else ""
        reason = " ".join(str(error).split())[:500] or type(error).__name__
        raise ConfigError(
            f"{shortened(repo_id)} is no local path, and its {STRATEGIES_FILE}{at} can't be fetched: {reason}"
        ) from error


# Publishing


def push_strategies(
    specs: Mapping[str, Any],
    repo_id: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    commit_message: str = "Training strategies",
    token: str | bool | None = None,
    api: Any = None,
) -> str:
    """Publish a set of strategies as its own small repository, with a card; return the address of the commit.

    `specs` maps config fields to specs or objects, as in `GRPOExtConfig`. They are checked first, and written with
    every field, so that they read back the same later. The repository is made if it is not there. `api` is a
    `huggingface_hub.HfApi` to go through, for an endpoint of your own.

    Raises `ConfigError` before anything is sent if a spec, a combination or the repository's name is wrong.

    Example::

        push_strategies({"advantage": "rank", "kl": K3()}, "user/rank-and-k3")
    """
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    full = _full_specs(specs)
    try:
        validate_repo_id(repo_id or "")
    except HFValidationError as error:
        raise ConfigError(f"`repo_id` must name a Hub repository, as 'user/name', got {shortened(repo_id)}") from error
    api = HfApi(token=token) if api is None else api
    api.create_repo(repo_id, private=private, exist_ok=True, token=token)
    content = json.dumps(_content(full), indent=2) + "\n"
    files = {STRATEGIES_FILE: content, "README.md": strategies_card(full, repo_id)}
    operations = [CommitOperationAdd(name, text.encode()) for name, text in files.items()]
    commit = api.create_commit(repo_id, operations, commit_message=commit_message, revision=revision, token=token)
    return str(commit.commit_url)


def _full_specs(specs: Mapping[str, Any]) -> dict[str, Any]:
    """Build the strategies and return their specs with every field written out."""
    if not isinstance(specs, Mapping):
        raise ConfigError(
            f"strategies must be given as a mapping of field to spec, such as {{'advantage': 'rank'}}; "
            f"got {shortened(specs)}"
        )
    built = {name: build_field(name, spec) for name, spec in specs.items() if spec is not None}
    empty = [name for name, strategy in built.items() if strategy == []]
    if empty or not built:
        what = f"`{empty[0]}` is an empty list" if empty else "there are no strategies to publish"
        raise ConfigError(f"{what}; fields: {', '.join(STRATEGY_FIELDS)}")
    resolve_weighting(built.get("kl"), built.get("kl_weighting", "auto"))  # raises: nobody could train with such a set
    full = {
        name: value if name in SETTINGS else [to_spec(s) for s in value] if name in LIST_FIELDS else to_spec(value)
        for name, value in built.items()
    }
    here = [name for name, spec in full.items() if is_of_the_script(spec)]
    if here:
        raise ConfigError(
            f"`{here[0]}` names something of the script that runs, which no other can import; use a module"
        )
    return full


def strategies_card(specs: Mapping[str, Any], repo_id: str) -> str:
    """Return the card of a repository that holds nothing but strategies."""
    front = yaml.safe_dump({"library_name": "trl", "tags": ["grpo", "trl-grpo-ext", "grpo-strategies"]}).strip()
    use = (
        f"```python\nfrom trl_grpo_ext import GRPOExtConfig, load_strategies\n\n"
        f'args = GRPOExtConfig(output_dir="out", beta=0.01, **load_strategies("{repo_id}"))\n```\n\n'
        f"```bash\ntrl-grpo-ext train --config your.yaml --strategies_from {repo_id}\n```\n"
    )
    title = repo_id.split("/")[-1]
    return f"---\n{front}\n---\n\n# {title}\n\nStrategies for GRPO, without weights.\n\n{use}\n{card_section(specs)}"


# The model card


def card_section(specs: Mapping[str, Any], history: Iterable[Mapping[str, Any]] = ()) -> str:
    """Return the "Training strategies" section: the resolved strategies as YAML, versions, and headline curves.

    `history` is the trainer's ``state.log_history``.
    """
    listed = ", ".join(f"{name} {number}" for name, number in versions().items())
    text = yaml.safe_dump(_writable(specs), sort_keys=False).strip()
    table = _curves(list(history))
    return f"{CARD_HEADING}\n\nMade with {PACKAGE_LINK} ({listed}).\n\n```yaml\n{text}\n```\n{table}"


def _curves(history: list[Mapping[str, Any]]) -> str:
    """Return the first and last logged value of each of `CURVES` as a Markdown table; "" if none was logged."""
    rows = []
    for label, name in CURVES.items():
        logged = [(entry.get("step"), entry[name]) for entry in history if isinstance(entry.get(name), (int, float))]
        if len(logged) > 1:
            rows.append(f"| {label} | {logged[0][1]:.4g} | {logged[-1][1]:.4g} |")
            ends = logged[0][0], logged[-1][0]
    if not rows:
        return ""
    header = f"| | step {ends[0]} | step {ends[1]} |\n|---|---:|---:|"
    return "\n".join(["", header, *rows, ""])


def add_card_section(path: Path, specs: Mapping[str, Any], history: Iterable[Mapping[str, Any]] = ()) -> None:
    """Put the section into the card at `path`, before its "Framework versions" if it has them. Nothing if no card."""
    if not path.exists():
        return
    card = path.read_text(encoding="utf-8")
    if CARD_HEADING in card:
        return
    before, marker, after = card.partition("### Framework versions")
    path.write_text(f"{before.rstrip()}\n\n{card_section(specs, history)}\n{marker}{after}", encoding="utf-8")
