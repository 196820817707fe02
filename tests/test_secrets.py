"""Keys: found without a question, within seconds, and never told."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
import time
import types

import pytest
from steps import open_fake

import artnb as nb
from artnb import secrets
from artnb.secrets import how_to_set, redact, secret

NAME, VALUE = "EXAMPLE_API_KEY", "sk-0123456789abcdef"


def hangs(name):
    while True:  # as google.colab does where no page answers
        time.sleep(0.01)


def raises(name):
    raise LookupError(f"the service says: no {name}, not even {VALUE}")


def answers(name):
    assert name == NAME
    return VALUE


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    monkeypatch.setattr(secrets, "_found", {})
    for name in (NAME, "KAGGLE_KERNEL_RUN_TYPE", "COLAB_RELEASE_TAG"):
        monkeypatch.delenv(name, raising=False)


def on_colab(monkeypatch, get):
    monkeypatch.setenv("COLAB_RELEASE_TAG", "release")
    userdata = types.ModuleType("google.colab.userdata")
    userdata.get = get
    for name in ("google", "google.colab"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "google.colab.userdata", userdata)


def on_kaggle(monkeypatch, get):
    on_colab(monkeypatch, lambda name: pytest.fail("Kaggle's image is made from Colab's, and is not Colab"))
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Batch")
    module = types.ModuleType("kaggle_secrets")

    class UserSecretsClient:
        def get_secret(self, label):
            return get(label)

    module.UserSecretsClient = UserSecretsClient
    monkeypatch.setitem(sys.modules, "kaggle_secrets", module)


PLACES = [on_colab, on_kaggle]


@pytest.mark.parametrize("place", PLACES)
def test_it_asks_the_service_that_this_runs_on(place, monkeypatch):
    place(monkeypatch, answers)
    assert secret(NAME) == VALUE
    place(monkeypatch, raises)
    assert secret(NAME) == VALUE, "once is enough"


@pytest.mark.parametrize("place", PLACES)
def test_the_environment_comes_first(place, monkeypatch):
    place(monkeypatch, lambda name: pytest.fail("nobody needed to be asked"))
    monkeypatch.setenv(NAME, "from the environment")
    assert secret(NAME) == "from the environment"


@pytest.mark.parametrize("place", PLACES)
def test_a_service_that_does_not_answer_is_left_and_its_thread_ends(place, monkeypatch, caplog):
    place(monkeypatch, hangs)
    monkeypatch.setattr(secrets, "_SECONDS", 0.1)
    started = time.monotonic()
    with caplog.at_level(logging.INFO):
        assert secret(NAME) is None
        assert time.monotonic() - started < 3
        while any(NAME in thread.name for thread in threading.enumerate()):
            assert time.monotonic() - started < 20, "it would swallow what is typed into input()"
            time.sleep(0.01)
    assert "did not answer within 0.1 s" in caplog.text
    place(monkeypatch, answers)
    assert secret(NAME) == VALUE, "it may be asked again: perhaps the user has allowed it now"


@pytest.mark.parametrize("place", PLACES)
def test_a_service_that_fails_is_no_error_and_its_words_are_not_repeated(place, monkeypatch, caplog, capsys):
    place(monkeypatch, raises)
    with caplog.at_level(logging.DEBUG):
        assert secret(NAME) is None
    assert "LookupError" in caplog.text
    assert VALUE not in caplog.text + "".join(capsys.readouterr())


def test_elsewhere_nobody_is_asked_and_nothing_is_read_from_the_keyboard(monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a prompt"))
    monkeypatch.setattr("getpass.getpass", lambda *_: pytest.fail("a prompt"))
    assert secret(NAME) is None
    monkeypatch.setenv(NAME, "")
    assert secret(NAME) is None


def test_it_tells_how_to_set_one(monkeypatch):
    assert how_to_set(NAME) == f"set the environment variable {NAME}"
    on_colab(monkeypatch, answers)
    assert "under Secrets" in how_to_set(NAME)
    on_kaggle(monkeypatch, answers)
    assert "Add-ons > Secrets" in how_to_set(NAME)


def test_values_of_known_keys_are_taken_out_of_a_text(monkeypatch):
    on_colab(monkeypatch, answers)
    secret(NAME)
    kept = {"TOKENIZERS_PARALLELISM": "falsefalse", "MAX_TOKENS": "1234567890", "SHORT_TOKEN": "user"}
    hidden = {
        "HF_TOKEN": "hf_1234567",
        "HF_TOKEN_2": "hf_123456789",
        "db_password": "correct horse",
        "APIKEY": "k" * 9,
    }
    for name, value in {**kept, **hidden}.items():
        monkeypatch.setenv(name, value)
    text = redact(" ".join([VALUE, *kept.values(), *hidden.values()]))
    assert text == " ".join([f"[{NAME}]", *kept.values(), *(f"[{name}]" for name in hidden)])


async def test_a_failed_rollout_does_not_write_a_key_to_disk(tmp_path, monkeypatch):
    monkeypatch.setenv(NAME, VALUE)

    async def rollout(model, scenario):
        raise ConnectionError(f"GET https://api.invalid/v1?key={VALUE} was refused")

    with open_fake(tmp_path) as model:
        groups = await nb.gather(rollout, ["a"], model=model, group_size=1, max_failures=1, progress=False)
        error = groups.trajectories[0].error
        assert f"[{NAME}] was refused" in error.message and f"[{NAME}]" in error.traceback
        files = [path.read_bytes() for path in model.run.path.rglob("*") if path.is_file()]
    assert any(b"was refused" in content for content in files)
    assert VALUE not in repr(groups) + groups._repr_html_()
    assert not [content for content in files if VALUE.encode() in content]


async def test_an_error_of_a_request_does_not_tell_a_key(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv(NAME, VALUE)
    with open_fake(tmp_path) as model:

        async def fail(*_, **__):
            raise RuntimeError(f"refused: {VALUE}")

        monkeypatch.setattr(model.backend, "sample", fail)
        with pytest.raises(Exception, match="refused") as caught:
            await model.client.chat.completions.create(
                model=model.name, messages=[{"role": "user", "content": "a"}], max_tokens=2
            )
        await asyncio.sleep(0)
    assert f"[{NAME}]" in str(caught.value) and VALUE not in str(caught.value)
    assert VALUE not in caplog.text


def test_wandb_and_other_trackers_are_not_imported_unless_asked():
    work = """
import asyncio, sys, tempfile
import artnb as nb

async def rollout(model, scenario):
    return 1.0

async def main():
    root = tempfile.mkdtemp()
    with nb.Model(run="a", root=root, backend=nb.FakeBackend()) as model:
        groups = await nb.gather(rollout, ["a"], model=model, progress=False)
        await nb.evaluate(rollout, ["a"], model=model, progress=False)
        nb.RewardTable(model.run).show()

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("wandb", "weave", "mlflow", "trackio", "tensorboard"):
            raise SystemExit(f"{name} was imported")

sys.meta_path.insert(0, Refuse())
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", work], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
