"""Where a reward model is loaded from: what can be seen beforehand, and errors that say which reward failed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trl_grpo_ext.errors import ConfigError, GRPOExtError
from trl_grpo_ext.rewards.packing import is_out_of_memory


@contextmanager
def load_errors(name: str, what: str, remedy: str) -> Iterator[None]:
    """While active, an error becomes a `ConfigError` that says that `name` can't load `what`, why, and the remedy.

    Not so for what may work another time, which `RetryReward` tries again: a lack of memory is raised as it is, a Hub
    out of reach as a `ConnectionError`.
    """
    try:
        yield
    except GRPOExtError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(".")
        if _is_outage(error):
            raise ConnectionError(f"{name} can't load {what}: the Hub is out of reach ({reason})") from error
        raise ConfigError(f"{name} can't load {what}: {reason}; {remedy}") from error


def _is_outage(error: BaseException | None) -> bool:
    """Whether an error comes from a network that fails, not from one that is switched off."""
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

    outage = False
    while error is not None:
        if isinstance(error, OfflineModeIsEnabled):
            return False
        outage = outage or isinstance(error, (LocalEntryNotFoundError, ConnectionError, TimeoutError))
        error = error.__cause__ or error.__context__
    return outage


def is_hub_id(source: str) -> bool:
    """Whether `source` is to be looked for on the Hub: it is nothing here, and looks like an id."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id  # type: ignore[attr-defined]  # its public place

    try:
        validate_repo_id(source)
    except HFValidationError:
        return False
    return not Path(source).exists()


def check_folder(source: str, needed: str = "") -> None:
    """Raise unless `source` is a Hub id, or a folder with the file `needed`."""
    if is_hub_id(source):
        return
    if not Path(source).is_dir():
        raise FileNotFoundError("there is no such folder, and it can't be a Hub id")
    if not Path(source, needed).exists():
        adapter = Path(source, "adapter_config.json").exists()
        hint = "; it holds an adapter, which `AdapterRewardModel` loads" if adapter else ""
        raise FileNotFoundError(f"there is no {needed} in it{hint}")


def check_weights(source: str) -> None:
    """Raise if the folder `source` holds no weights, or half a file of them. Reads no more than the files' headers."""
    from safetensors import safe_open

    files = list(Path(source).glob("*.safetensors"))
    for file in files:
        with safe_open(file, framework="pt"):  # compares the file's length with what its header says
            pass
    if not files and not any(Path(source).glob("*model*.bin")):
        raise FileNotFoundError("there are no weights in it, in *.safetensors or *model*.bin")
