"""What does a notebook hold? A model: a backend, a run on disk, and a client that reaches the engine."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from artnb.chat import ChatApp
from artnb.client import async_client, sync_client
from artnb.config import LoraConfig, SamplingConfig
from artnb.errors import CheckpointError, ConfigurationError
from artnb.rendering import make_renderer
from artnb.store import Run

if TYPE_CHECKING:
    import openai

    from artnb.serve import Server

T = TypeVar("T")

_live: dict[Path, Model] = {}
"""Open models of this process by run folder: a cell that is run again finds its model here."""


class Model:
    """A language model in this kernel that can be sampled and trained.

    base: None for the bundled SmolLM2-135M-Instruct, a Hugging Face id, or a local folder.
    run, root: name and parent folder of the run; a run that exists is resumed at its latest
    checkpoint. Making the same model again returns the live one; with another configuration the
    old one is closed first. init_from: name of a run under ``root``, or a checkpoint folder, whose
    adapter a new run starts from. dtype: ``bfloat16``, ``float32``, or None for what is native here.
    engine_kwargs: passed on to the engine, for example ``{"max_running": 64}``. backend: any
    ``Backend`` instead of the one in this kernel, for example ``FakeBackend()``. keep_checkpoints:
    how many of the latest checkpoints stay on disk.

    Raises RunInUse, RunMismatch, CheckpointError, MissingDependency, ConfigurationError.
    """

    def __new__(cls, *args: Any, **options: Any) -> Model:
        given = _given(args, options)
        live = _live.get((Path(given["root"]) / given["run"]).absolute())
        if live is not None:
            if live._given == given:
                return live
            live.close()
        return super().__new__(cls)

    def __init__(
        self,
        base: str | Path | None = None,
        run: str = "default",
        *,
        root: str | Path = "runs",
        lora: LoraConfig | None = None,
        sampling: SamplingConfig | None = None,
        dtype: str | None = None,
        engine_kwargs: Mapping[str, Any] | None = None,
        init_from: str | Path | None = None,
        backend: Any = None,
        takeover: bool = False,
        keep_checkpoints: int = 5,
        seed: int = 0,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        if getattr(self, "_given", None) == given:
            return  # __new__ found the live model
        if keep_checkpoints < 1:
            raise ConfigurationError(f"keep_checkpoints must be >= 1, got {keep_checkpoints}")
        self.sampling = sampling or SamplingConfig()
        self.keep_checkpoints = keep_checkpoints
        self._servers: list[Server] = []
        self.backend = backend or self._load(base, lora or LoraConfig(), dtype, engine_kwargs, seed)
        opened: Run | None = None
        try:
            identity = self.backend.describe().get("identity")
            self.run = opened = Run.open(run, root, identity=identity, takeover=takeover)
            self.name = self.run.name
            self._resume(init_from, Path(root))
            renderer = make_renderer(self.backend.tokenizer, self.backend.base_model)
            self.app = ChatApp(self.backend, renderer, model_name=self.name, sampling=self.sampling)
        except BaseException:
            if opened is not None:
                opened.close()
            _blocking(self.backend.close())
            raise
        self._given = given
        _live[self.run.path.absolute()] = self

    def _load(
        self,
        base: str | Path | None,
        lora: LoraConfig,
        dtype: str | None,
        engine_kwargs: Mapping[str, Any] | None,
        seed: int,
    ) -> Any:
        from artnb.backends.local import LocalBackend
        from artnb.bundled import BUNDLED, bundled_model

        return LocalBackend(
            bundled_model() if base is None else base,
            lora,
            base_name=BUNDLED if base is None else str(base),
            dtype=dtype,
            engine_kwargs=engine_kwargs,
            checkpoint=self._checkpoint_folder,
            seed=seed,
        )

    def _checkpoint_folder(self, name: str) -> Path:
        return self.run.path / "checkpoints" / name

    def _resume(self, init_from: str | Path | None, root: Path) -> None:
        latest = self.run.latest_checkpoint()
        if latest is not None:
            latest.verify()
            _blocking(self.backend.load(latest.path, policy_version=latest.state["policy_version"]))
        elif init_from is not None:
            if not hasattr(self.backend, "load_adapter"):
                raise ConfigurationError(f"init_from: {type(self.backend).__name__} cannot load an adapter")
            folder = _adapter_folder(init_from, root)
            _blocking(self.backend.load_adapter(folder))
            self.run.record_event("initialised", source=str(folder))

    # ---- what a cell uses -----------------------------------------------------------------------

    @property
    def policy_version(self) -> int:
        """Version of the weights that are sampled from: the number of updates published so far."""
        return self.backend.policy_version

    @property
    def tokenizer(self) -> Any:
        return self.backend.tokenizer

    @cached_property
    def client(self) -> openai.AsyncOpenAI:
        """An OpenAI client whose calls reach the engine in this process; no socket, no key."""
        return async_client(self.app)

    @cached_property
    def sync_client(self) -> openai.OpenAI:
        """The synchronous twin of ``client``, for agent frameworks that run in threads."""
        return sync_client(self.app, lambda: None)

    def serve(self, port: int | None = None) -> Server:
        """Open the same API on 127.0.0.1 with a generated token, for programs outside this kernel."""
        from artnb.serve import serve

        server = serve(self.app, port)
        self._servers.append(server)
        return server

    def describe(self) -> dict[str, Any]:
        """Facts about the model and where it runs."""
        return {**self.backend.describe(), "run": str(self.run.path), "policy_version": self.policy_version}

    def close(self) -> None:
        """Stop the engine, free memory, give the run back. May be called again."""
        for server in self._servers:
            server.close()
        self._servers.clear()
        self._given = None
        if _live.get(self.run.path.absolute()) is self:
            del _live[self.run.path.absolute()]
        _blocking(self.backend.close())
        self.run.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _facts(self) -> dict[str, Any]:
        about = self.backend.describe()
        facts = {
            "model": self.backend.base_model,
            "run": str(self.run.path),
            "step": self.run.step,
            "policy version": self.policy_version,
        }
        if "trainable_parameters" in about:
            facts["adapter"] = (
                f"LoRA rank {about['identity']['adapter']['rank']}, "
                f"{about['trainable_parameters'] / 1e6:.1f} M of {about['parameters'] / 1e6:.0f} M parameters"
            )
            facts["runs on"] = f"{about['device']}, {about['dtype']}, {about['threads']} threads"
        facts["context"] = f"{self.backend.max_context} tokens"
        return facts

    def __repr__(self) -> str:
        return "Model(" + ", ".join(f"{name}: {value}" for name, value in self._facts().items()) + ")"

    def _repr_html_(self) -> str:
        from artnb.ui.html import table_html

        return table_html([{"": name, "value": str(value)} for name, value in self._facts().items()])


def _given(args: tuple[Any, ...], options: Mapping[str, Any]) -> dict[str, Any]:
    """Every argument of ``Model`` by name, defaults included."""
    bound = inspect.signature(Model.__init__).bind(None, *args, **options)
    bound.apply_defaults()
    return {name: value for name, value in bound.arguments.items() if name != "self"}


def _adapter_folder(source: str | Path, root: Path) -> Path:
    """The checkpoint folder that ``init_from`` means: a folder, or a run's latest checkpoint."""
    folder = Path(source)
    if (folder / "adapter_model.safetensors").is_file():
        return folder
    for path in (folder, root / folder):
        if (path / "run.json").is_file():
            latest = Run.read(path.name, path.parent).latest_checkpoint()
            if latest is None:
                raise CheckpointError(f"init_from: run {path} has no checkpoint yet")
            return latest.path
    raise CheckpointError(f"init_from: {source} is neither a run under {root} nor a folder with an adapter")


def _blocking(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end from synchronous code, also inside a notebook's running loop."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run an artnb primitive from a plain script: ``artnb.run(artnb.gather(...))``.

    In a notebook cell use ``await`` instead.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    work.close()
    raise ConfigurationError("an event loop is running here already: use `await` instead of artnb.run()")
