"""What does a notebook hold? A model: a backend, a run on disk, and a client that reaches the engine."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import time
import warnings
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from artnb.bundled import BUNDLED, bundled_model
from artnb.client import async_client, sync_client
from artnb.completions import ChatApp
from artnb.config import LoraConfig, SamplingConfig
from artnb.errors import CheckpointError, ConfigurationError, RunMismatch, require
from artnb.guard import Guard, Guarding
from artnb.interrupts import uninterrupted
from artnb.rendering import make_renderer
from artnb.store import Run
from artnb.store.folder import RunFolder, differences, run_path
from artnb.store.owner import refuse_if_in_use
from artnb.store.random_sources import load_random_sources
from artnb.trackers.base import Tracker
from artnb.trackers.following import Trackers
from artnb.types import TrajectoryGroup
from artnb.ui.display import Live
from artnb.ui.html import esc, facts_html, visible
from artnb.ui.snapshot import seconds_text
from artnb.undo import go_back, policy_version_of

if TYPE_CHECKING:
    import openai

    from artnb.measure import Comparison
    from artnb.serve import Server

T = TypeVar("T")

_live: dict[Path, Model] = {}
"""Open models of this process by run folder: a cell that is run again finds its model here."""
_NOT_THE_MODEL = ("self", "__class__", "trackers", "guard")
"""Arguments that may differ when the cell of a live model is run again."""


class Model:
    """A language model in this kernel that can be sampled and trained.

    base: a Hugging Face id, a local folder, or None for what suits this machine: on a CPU the bundled
    SmolLM2-135M-Instruct, on a GPU the Qwen2.5-Instruct that ``artnb doctor`` names.
    run, root: name and parent folder of the run, None for ``run_root()``; a run that exists is resumed at
    its latest checkpoint. Making the same model again returns the live one; with another configuration the
    old one is closed first. init_from: name of a run under ``root``, or a checkpoint folder, whose
    adapter a new run starts from. dtype: ``bfloat16``, ``float16``, ``float32``, or None for what is
    native here. engine: ``torch`` or ``vllm``; trainer: ``peft`` or ``unsloth``; None takes the first of
    each on a CPU, the second on a GPU. engine_kwargs: passed on to the engine, for example
    ``{"max_running": 64}``. trainer_kwargs: ``gradient_checkpointing``, ``optimizer`` ("adamw" or
    "adamw_8bit"), ``full_finetuning`` (no adapter: the weights of all layers learn, for small models and
    with about a tenth of an adapter's learning rate), and for Unsloth what its ``from_pretrained`` takes,
    such as ``load_in_4bit``. template_kwargs: variables of the chat template, for example
    ``{"enable_thinking": False}``. backend: any ``Backend`` instead of the one in this kernel, for example
    ``FakeBackend()``. keep_checkpoints: how many of the latest checkpoints stay on disk;
    beside them the best one by ``best_metric`` (see ``Run.best_checkpoint``) and every ``keep_every``-th
    step's. trackers: who else
    hears of this run, for example ``[WeaveTracker("my-team/my-project")]``; one that cannot start stops this
    cell before anything is loaded, one that fails later is switched off with a warning and the run goes on.
    guard: what is done when training collapses, see ``Guard``; None does nothing.

    Raises RunInUse, RunMismatch, CheckpointError, MissingDependency, ConfigurationError.
    """

    _load_seconds: float | None = None
    trackers: Trackers
    """Who else hears of this run, and how much they have heard."""
    guarding: Guarding
    """The guard at work on this run."""
    _given: dict[str, Any] | None = None
    """What this model was made with; None before and after it is open."""

    def __new__(cls, *args: Any, **options: Any) -> Model:
        given = _given(args, options)
        live = _live.get(run_path(given["run"], given["root"]))
        if live is not None:
            if live._given == given:
                return live
            live.close()
        return super().__new__(cls)

    @uninterrupted("loading a model")
    def __init__(
        self,
        base: str | Path | None = None,
        run: str = "default",
        *,
        root: str | Path | None = None,
        lora: LoraConfig | None = None,
        sampling: SamplingConfig | None = None,
        dtype: str | None = None,
        engine: str | None = None,
        trainer: str | None = None,
        engine_kwargs: Mapping[str, Any] | None = None,
        trainer_kwargs: Mapping[str, Any] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        init_from: str | Path | None = None,
        backend: Any = None,
        takeover: bool = False,
        keep_checkpoints: int = 5,
        keep_every: int | None = None,
        best_metric: str = "reward_mean",
        seed: int = 0,
        trackers: Sequence[Tracker] = (),
        guard: Guard | None = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in _NOT_THE_MODEL}
        if self._given == given:  # __new__ found the live model
            self.trackers.replace(trackers)
            self.guarding.guard = guard or Guard("off")
            return
        if keep_checkpoints < 1:
            raise ConfigurationError(f"keep_checkpoints must be >= 1, got {keep_checkpoints}")
        if keep_every is not None and keep_every < 1:
            raise ConfigurationError(f"keep_every must be >= 1 or None, got {keep_every}")
        self.sampling = sampling or SamplingConfig()
        self.keep_checkpoints, self.keep_every, self._seed = keep_checkpoints, keep_every, seed
        self._servers: list[Server] = []
        if backend is None and not takeover:
            refuse_if_in_use(run_path(run, root))  # before anything slow starts
        self.trackers = Trackers(trackers, name=run, path=run_path(run, root))
        if backend is None:
            stack = {"dtype": dtype, "engine": engine, "trainer": trainer}
            kwargs = {"engine_kwargs": engine_kwargs, "trainer_kwargs": trainer_kwargs}
            try:
                backend = self._load(base, lora or LoraConfig(), seed=seed, **stack, **kwargs)
            except BaseException:
                self.trackers.finish()
                raise
        self.backend = backend
        opened: Run | None = None
        try:
            identity = self.backend.describe()["identity"]
            source = self._initialise(init_from, run_path(run, root), identity)
            self.run = opened = Run.open(run, root, identity=identity, takeover=takeover)
            self.name = self.run.name
            self.run.rank_by(best_metric)
            self.guarding = Guarding(guard, self.run)
            self._resume()
            self.trackers.follow(self.run)
            self.run.on_roll_back = self.rollback
            if source is not None:
                self.run.record_event("initialised", source=str(source))
            self._record_model()
            renderer = make_renderer(
                self.backend.tokenizer, self.backend.base_model, template_kwargs=template_kwargs
            )
            self.app = ChatApp(self.backend, renderer, model_name=self.name, sampling=self.sampling)
        except BaseException:
            self.trackers.finish()
            if opened is not None:
                opened.close()
            _blocking(self.backend.close())
            raise
        self._given = given
        _live[self.run.path] = self

    def _load(self, base: str | Path | None, lora: LoraConfig, **options: Any) -> Any:
        require("torch", extra="cpu", why="to run a model in this kernel")
        from artnb.backends.local import LocalBackend
        from artnb.backends.stack import choose, prepare
        from artnb.devices import base_for, busy_card
        from artnb.memory import machine

        trainer_kwargs = dict(options.pop("trainer_kwargs") or {})
        stack = choose(options["trainer"], options["engine"])
        if stack.device == "cuda" and (message := busy_card()):
            warnings.warn(message, stacklevel=3)
        if base is None:
            base, chosen = base_for(stack.device, stack.trainer)
            trainer_kwargs = chosen | trainer_kwargs
        name, started, live = str(base), time.monotonic(), Live()
        live.update(f"Loading {esc(name)} ...", f"Loading {name} ...")
        full = trainer_kwargs.get("full_finetuning")
        prepare(stack)  # before the bundled model imports transformers
        loaded = LocalBackend(
            bundled_model() if name == BUNDLED else base,
            lora,
            base_name=name,
            checkpoint=self._checkpoint_folder,
            memory_bytes=machine()[1] if full else None,
            trainer_kwargs=trainer_kwargs,
            **options,
        )
        self._load_seconds = time.monotonic() - started
        done = f"Loaded {name} in {seconds_text(self._load_seconds)}"
        live.finish(esc(done), done)
        return loaded

    def _record_model(self) -> None:
        """What samples and learns in this session, for whoever reads the run later."""
        about = {name: value for name, value in self.backend.describe().items() if name != "identity"}
        sampling = dataclasses.asdict(self.sampling)
        self.run.record_event("model", load_seconds=self._load_seconds, about=about, sampling=sampling)

    def _checkpoint_folder(self, name: str) -> Path:
        start = self.run.path / "start" / name
        return start if start.is_dir() else self.run.path / "checkpoints" / name

    def _initialise(
        self, init_from: str | Path | None, path: Path, identity: Mapping[str, Any]
    ) -> Path | None:
        """Take over another run's adapter, unless this run has a checkpoint of its own to go on from."""
        if init_from is None or RunFolder(path).latest_checkpoint() is not None:
            return None
        folder = _adapter_folder(init_from, path.parent, identity)
        _blocking(self.backend.load_adapter(folder))
        return folder

    def _resume(self) -> None:
        latest = self.run.latest_checkpoint()
        if latest is None:
            return
        latest.verify()
        _blocking(self.backend.load(latest.path, policy_version=policy_version_of(latest)))
        load_random_sources(latest.path)
        self.run.recall_learned(latest.state.get("trained_on", {}))

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
        """Open the same API on 127.0.0.1 with a generated token, for programs outside this kernel.

        port: None for a free one. A server of this model that is still open there is returned again. Raises
        ArtnbError once the model is closed.
        """
        from artnb.serve import serve

        self.run.check_writable()
        self._servers = [server for server in self._servers if server.is_open]
        for server in self._servers:
            if port in (None, server.port):
                return server
        server = serve(self.app, port)
        self._servers.append(server)
        return server

    @uninterrupted("going back to a checkpoint")
    def rollback(self, to: int | Literal["best"]) -> int:
        """Go back to the checkpoint after ``to`` steps, 0 for the policy that the run began with; returns the
        step the run stands at then.

        "best" is the checkpoint whose policy earned the highest mean reward when a step sampled from it, or
        what else ``best_metric`` says; it is kept beside the latest ones. Weights, optimizer, engine, random
        states and ``run.cursor`` are those of the checkpoint, later records stay in the run and do not count
        any more. All of it happens or nothing. Between two steps only; inside a loop over ``run.steps``,
        ``run.ask("roll_back", to)`` does it after the step under way. Raises CheckpointError, naming the
        checkpoints there are, and RunInUse while a step is under way.
        """
        self.run.check_writable()
        checkpoint = self.run.checkpoint(to)
        _blocking(go_back(self.backend, self.run, checkpoint))
        return self.run.step

    def seeds(self, groups: Sequence[TrajectoryGroup]) -> dict[str, Any]:
        """What the rollouts of these groups were drawn with, for the checkpoint: this model's seed, and the
        scenarios, each of which is its environment's seed."""
        return {"seed": self._seed, "scenarios": list(dict.fromkeys(group.scenario_id for group in groups))}

    def plan(self, **options: Any) -> Comparison:
        """What this model was planned to hold, beside what it holds; options as for ``artnb.plan``."""
        from artnb.measure import plan_model

        return plan_model(self, **options)

    def describe(self) -> dict[str, Any]:
        """Facts about the model and where it runs."""
        return {**self.backend.describe(), "run": str(self.run.path), "policy_version": self.policy_version}

    @uninterrupted("closing a model")
    def close(self) -> None:
        """Stop the engine, free memory, give the run back. May be called again."""
        for server in self._servers:
            server.close()
        self._servers.clear()
        if "sync_client" in self.__dict__:
            self.sync_client.close()  # its thread ends
        self._given = None
        if _live.get(self.run.path) is self:
            del _live[self.run.path]
        _blocking(self.backend.close())
        self.trackers.finish()
        self.run.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _facts(self) -> dict[str, Any]:
        if self._given is None:
            return {"run": str(self.run.path), "status": "closed"}
        about = self.backend.describe()
        facts = {
            "model": self.backend.base_model,
            "run": str(self.run.path),
            "step": self.run.step,
            "policy version": self.policy_version,
        }
        if "trainable_parameters" in about:
            adapter = about["identity"]["adapter"]
            kind = "all weights" if adapter is None else f"LoRA rank {adapter['rank']}"
            sizes = f"{about['trainable_parameters'] / 1e6:.1f} M of {about['parameters'] / 1e6:.0f} M"
            facts["adapter" if adapter else "trains"] = f"{kind}, {sizes} parameters"
            facts["runs on"] = f"{about['device']}, {about['dtype']}, {about['threads']} threads"
            facts["stack"] = f"{about['trainer']} trains, {about['engine']} samples"
        facts["context"] = f"{self.backend.max_context} tokens"
        if len(self.trackers):
            facts["trackers"] = repr(self.trackers)
        if unsure := self.app.renderer.not_guaranteed:
            facts["not guaranteed by this chat template"] = "; ".join(unsure)
        return facts

    def __repr__(self) -> str:
        return visible(f"Model({', '.join(f'{name}: {value}' for name, value in self._facts().items())})")

    def _repr_html_(self) -> str:
        return facts_html(self._facts())


def _given(args: tuple[Any, ...], options: Mapping[str, Any]) -> dict[str, Any]:
    """Every argument that makes the model what it is, by name, defaults included."""
    bound = inspect.signature(Model.__init__).bind(None, *args, **options)
    bound.apply_defaults()
    return {name: value for name, value in bound.arguments.items() if name not in _NOT_THE_MODEL}


def _adapter_folder(source: str | Path, root: Path, identity: Mapping[str, Any]) -> Path:
    """The checkpoint folder that ``init_from`` means: a folder, or a run's latest checkpoint."""
    folder = Path(source)
    if any((folder / name).is_file() for name in ("adapter_model.safetensors", "optimizer.safetensors")):
        return folder
    for path in (folder, root / folder):
        if (path / "run.json").is_file():
            other = Run.read(path.name, path.parent)
            latest = other.latest_checkpoint()
            if latest is None:
                raise CheckpointError(f"init_from: run {path} has no checkpoint yet")
            changed = differences(other.description().get("identity") or identity, identity)
            if changed:
                raise RunMismatch(f"init_from: run {path} was made with {'; '.join(changed)}")
            return latest.path
    raise CheckpointError(f"init_from: {source} is neither a run under {root} nor a checkpoint folder")


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
