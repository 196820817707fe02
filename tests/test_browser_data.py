"""Does the trajectory browser find, open and compare what was stored, and survive whatever was written?"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
import pytest

import artnb
from artnb.backends.fake import FakeBackend, FakeTokenizer
from artnb.browser.filters import parse_filter
from artnb.browser.search import Search
from artnb.browser.source import Source, source_of
from artnb.browser.tokens import token_texts
from artnb.errors import ConfigurationError
from artnb.store.folder import RunFolder
from artnb.store.run import Run
from artnb.store.token_records import TokenRecord, write_token_records
from artnb.types import Failure, Groups, History, Trajectory, TrajectoryGroup, Turn

CALL = {"id": "c1", "type": "function", "function": {"name": "search", "arguments": '{"q": "boat"}'}}
BAD = {"id": "c2", "type": "function", "function": {"name": "search", "arguments": '{"q": '}}


def turn(prompt: tuple[int, ...], said: str, ids: tuple[int, ...] = (7, 8, 9), **message: Any) -> Turn:
    logprobs = tuple(-0.1 * (k + 1) for k in range(len(ids)))
    timing = {"started": 0.0, "queued": 0.25, "seconds": 0.5}
    told = {"role": "assistant", "content": said, **message}
    return Turn(prompt, ids, logprobs, 1, "stop", told, {"temperature": 1.0, "seed": 3}, timing)


def attempt(name: str, reward: float | None, said: str = "the boat", scenario: str = "maze/1") -> Trajectory:
    first = turn((1, 2, 3), "", tool_calls=[CALL], reasoning_content="where is it?")
    items: list[Any] = [
        {"role": "user", "content": "find it"},
        first,
        {"role": "tool", "tool_call_id": "c1", "content": "at the pier"},
        turn((*first.ids, 4), said),
    ]
    metrics = {"reward/form": 1.0, "moves": float(len(said))}
    return Trajectory(items, reward, metrics, id=name, scenario_id=scenario, seconds=2.0)


def some_groups(step: int = 0) -> Groups:
    """Two groups: one teaches, in one all are equal; a failure and an unscored one among them."""
    failed = attempt(f"s{step}f", None)
    failed.error = Failure("ValueError", "no boat", "Traceback: no boat")
    teaches = [attempt(f"s{step}a", 0.25), attempt(f"s{step}b", 0.75, "it sank"), failed]
    equal = [attempt(f"s{step}{n}", 0.5, scenario="maze/2") for n in "cd"]
    equal.append(attempt(f"s{step}u", None, scenario="maze/2"))
    about = {"step": step, "split": "train", "gather_id": f"g{step}"}
    return Groups(
        [TrajectoryGroup(teaches, "maze/1", "", about), TrajectoryGroup(equal, "maze/2", "", dict(about))]
    )


def write_run(root: Path, steps: int = 2, name: str = "boats") -> Run:
    run = Run.open(name, root)
    for step in range(steps):
        for group in some_groups(step):
            for number, one in enumerate(group):
                kwargs = {"step": step, "split": "train", "gather_id": f"g{step}", "attempt": number}
                run.append_trajectory(one, **kwargs)
        run.append_metrics({"kind": "train", "step": step, "dropped": {"equal rewards": 1, "failed": 1}})
    return run


@pytest.fixture
def run(tmp_path: Path) -> Any:
    with write_run(tmp_path) as run:
        yield run


@pytest.fixture(params=["run", "groups"])
def source(request: Any, run: Run) -> Source:
    """The same twelve trajectories, on disk and in memory."""
    return source_of(run if request.param == "run" else Groups([*some_groups(0), *some_groups(1)]))


def ids(source: Source, filter: str = "", sort: Any = ()) -> list[str]:
    asked = source.query(filter, sort)
    assert "error" not in asked, asked
    while source.progress(asked["query"])["searching"] is not None:
        time.sleep(0.01)
    return [row["id"] for row in source.page(asked["query"], 0, 500)["rows"]]


# ---- the table --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("filter", "found"),
    [
        ("step:1 reward<0.5", {"s1a"}),
        ("reward:0.25,0.75 step:0", {"s0a", "s0b"}),
        ("reward:0.3.. -step:1", {"s0b", "s0c", "s0d"}),
        ("error", {"s0f", "s1f"}),
        ("error:value", {"s0f", "s1f"}),
        ("-error reward:none step:0", {"s0u"}),
        ("unscored step:1", {"s1u"}),
        ("status:failed step:1", {"s1f"}),
        ("scenario=maze/2 step<1", {"s0c", "s0d", "s0u"}),
        ("scenario!=maze/2 step<1 scored", {"s0a", "s0b"}),
        ("tool:search,other step:1 moves<8", {"s1b"}),
        ("metric/moves<8 step:1", {"s1b"}),
        ('"metric/moves"<8 step:1', {"s1b"}),
        ("maze/1 step:0", {"s0a", "s0b", "s0f"}),
        ('"s1a"', {"s1a"}),
        ("tool:nothing", set()),
        ('text:"it SANK"', {"s0b", "s1b"}),
        ('text:"it sank" step:1', {"s1b"}),
        ("-text:sank step:1 scored scenario:maze/1", {"s1a"}),
        ('text:"where is" text:"no boat"', {"s0f", "s1f"}),
        ("text:seconds", set()),  # in every line, and said by nobody
    ],
)
def test_a_filter_keeps_what_it_says(source: Source, filter: str, found: set[str]) -> None:
    assert set(ids(source, filter)) == found


@pytest.mark.parametrize(
    ("filter", "words", "at"),
    [
        ("step:1 rewrd<3", "did you mean 'reward'", 7),
        ("reward<much", "'much' is none", 0),
        ('step:1 "open', "not closed", 7),
        ("scenario<3", "is text", 0),
        ("reward:", "needs a value", 0),
        (":3", "no column before", 0),
        ("rolled_back:maybe", "yes or no", 0),
        ('text:""', "write text:", 0),
        ("x" * 3000, "longer than", 2000),
    ],
)
def test_a_wrong_filter_says_what_is_wrong_and_where(
    source: Source, filter: str, words: str, at: int
) -> None:
    answer = source.query(filter)
    assert words in answer["error"] and answer["at"] == at


def test_a_metric_s_short_name_must_be_the_only_one(tmp_path: Path) -> None:
    one = attempt("a", 1.0)
    one.metrics |= {"form": 2.0}
    answer = source_of([one]).query("form>1")
    assert "reward/form or metric/form" in answer["error"]


def test_any_column_sorts_and_missing_values_come_last(source: Source) -> None:
    for column in source.facts()["columns"]:
        for way in ("asc", "desc"):
            found = source.page(source.query("", [[column["key"], way]])["query"])["rows"]
            values = [row[column["key"]] for row in found]
            there = [value for value in values if value is not None]
            assert values == there + [None] * (len(values) - len(there))
            if column["key"] not in ("status", "note"):
                assert there == sorted(there, reverse=way == "desc"), column["key"]
    assert ids(source, "scored", [["reward", "desc"], ["id", "desc"]])[:3] == ["s1b", "s0b", "s1d"]
    assert "no column" in source.query("", [["height", "asc"]])["error"]


def test_the_tree_folds_steps_and_groups(source: Source) -> None:
    def lines(expanded: list[str], **asked: Any) -> list[dict[str, Any]]:
        return source.page(source.query(tree=True, expanded=expanded, **asked)["query"])["rows"]

    folded = lines([])
    assert [(line["kind"], line["title"], line["trajectories"]) for line in folded] == [
        ("step", "step 0", 6),
        ("step", "step 1", 6),
    ]
    assert folded[0]["reward"] == pytest.approx(0.5)
    opened = lines(["step:1"])
    assert [line["level"] for line in opened] == [0, 0, 1, 1]
    group = opened[2]
    assert group["title"] == "maze/1" and group["skipped"] is None and group["error"] is None
    assert "equal rewards" in opened[3]["skipped"]
    members = lines(["step:1", group["key"]], sort=[["reward", "desc"]])
    assert [line["id"] for line in members if line["kind"] == "row"] == ["s1b", "s1a", "s1f"]
    assert {line["group"] for line in members if line["kind"] == "row"} == {group["key"]}
    assert len(lines(["*"])) == 2 + 4 + 12
    assert [line["title"] for line in lines(["*"], filter="error") if line["kind"] == "group"] == [
        "maze/1"
    ] * 2


def test_rolled_back_trajectories_stay_and_are_marked(run: Run) -> None:
    source = source_of(run)
    run.roll_back(1)
    assert source.refresh()
    assert len(ids(source)) == 12
    assert set(ids(source, "rolled_back")) == {f"s1{n}" for n in "abfcdu"}
    assert set(ids(source, "status:rolled")) == set(ids(source, "rolled_back:yes"))
    assert source.trajectory("s1a")["rolled_back"] and not source.trajectory("s0a")["rolled_back"]
    run.append_trajectory(attempt("again", 0.5), step=1, split="train", gather_id="h", attempt=0)
    source.refresh()
    assert ids(source, "step:1 -rolled_back") == ["again"]
    kept = {one.id for one in run.trajectories()}
    assert kept == set(ids(source, "-rolled_back"))


def test_a_trajectory_that_was_written_twice_is_shown_twice(run: Run) -> None:
    run.append_trajectory(attempt("s1a", 1.0), step=1, split="train", gather_id="g", attempt=0)
    source = source_of(run)
    both = ids(source, "id:s1a")
    assert len(set(both)) == 2
    assert {source.trajectory(name)["reward"] for name in both} == {0.25, 1.0}


def test_pages_are_limited_and_old_queries_forgotten(source: Source) -> None:
    first = source.query()["query"]
    assert source.page(first, 10, 10_000)["rows"][0]["kind"] == "row"
    assert len(source.page(first, 10, 10_000)["rows"]) == 2
    assert source.page(first, -5, 3)["start"] == 0
    for _ in range(64):
        source.query()
    assert "forgotten" in source.page(first)["error"] and "forgotten" in source.progress(first)["error"]


def test_every_answer_is_json(source: Source) -> None:
    shown = source.query("text:boat", tree=True, expanded=["*"])
    answers = [source.facts(), shown, source.page(shown["query"]), source.trajectory("s0a")]
    answers += [source.tokens("s0a"), source.compare(["s0a", "s0b"]), source.same_scenario("s0a")]
    answers += [source.extremes(), source.trajectory("nobody"), source.trajectory("s0f")]
    json.dumps(answers, allow_nan=False, ensure_ascii=False).encode()


# ---- one trajectory ---------------------------------------------------------------------------------


def test_calls_are_paired_with_their_results(source: Source) -> None:
    shown = source.trajectory("s1b")
    (history,) = shown["histories"]
    user, first, result, last = history["entries"]
    assert (user["role"], user["text"], user["sampled"]) == ("user", "find it", False)
    assert first["reasoning"] == "where is it?" and first["turn"] == 0
    (call,) = first["calls"]
    assert call["name"] == "search" and call["arguments"] == '{\n  "q": "boat"\n}' and call["parsed"]
    assert call["result"] == result["index"] == 2 and result["result_of"] == "c1"
    assert last["turn"] == 1 and last["tokens"] == 3 and last["mean_logprob"] == pytest.approx(-0.2)
    assert last["sampling"] == {"temperature": 1.0, "seed": 3}
    assert shown["parts"] == {"form": 1.0} and shown["metrics"] == {"moves": 7.0}
    assert shown["timings"]["queued"] == 0.5 and shown["timings"]["elsewhere"] == 1.0
    assert [one["id"] for one in shown["siblings"]] == ["s1a", "s1b", "s1f"]


def test_calls_that_cannot_be_read_are_shown_as_they_were_written() -> None:
    one = attempt("a", 1.0)
    problem = "the tool call is not closed by </tool_call>"
    one.messages_and_choices += [
        turn((1,), "<tool_call>{", tool_call_error=problem),
        {"role": "assistant", "content": None, "tool_calls": [BAD, {"id": 3}, "call"]},
    ]
    entries = source_of([one]).trajectory("a")["histories"][0]["entries"]
    assert entries[4]["unparsed"] == problem and entries[4]["text"] == "<tool_call>{"
    calls = entries[5]["calls"]
    assert not any(call["parsed"] for call in calls)
    assert calls[0]["raw"] == '{"q": ' and "not JSON" in calls[0]["error"]


def test_pictures_are_shown_when_they_are_pictures() -> None:
    png = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk"
    parts = [
        {"type": "text", "text": "look"},
        {"type": "image_url", "image_url": {"url": png}},
        {"type": "image_url", "image_url": {"url": "data:image/svg+xml;base64,PHN2Zz4="}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,PHNjcmlwdD4="}},
        {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
        {"type": "image_url", "image_url": {"url": png + "A" * 3_000_000}},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
    ]
    one = Trajectory([{"role": "user", "content": parts}], id="a")
    entry = source_of([one]).trajectory("a")["histories"][0]["entries"][0]
    assert entry["text"] == "look"
    kinds = [(image["kind"], image["shown"]) for image in entry["images"]]
    assert kinds == [
        *[("data", True), ("data", False), ("data", False), ("url", False), ("data", False)],
        ("audio", False),
    ]
    assert [image["source"][:5] for image in entry["images"]] == ["data:", "", "", "https", "", ""]


def test_other_histories_parents_and_children_are_linked() -> None:
    parent, child = attempt("parent", 1.0), attempt("child", 0.5)
    parent.additional_histories.append(History([{"role": "user", "content": "b"}, turn((5,), "side")]))
    child.parent_id = "parent"
    source = source_of([parent, child])
    shown = source.trajectory("parent")
    assert [history["kind"] for history in shown["histories"]] == ["main", "additional"]
    assert shown["histories"][1]["entries"][1]["turn"] == 2
    assert [one["id"] for one in shown["children"]] == ["child"]
    assert source.trajectory("child")["parent"] == {"id": "parent", "known": True}
    child.parent_id = "lost"
    assert source_of([child]).trajectory("child")["parent"] == {"id": "lost", "known": False}


def test_a_failure_and_a_judge_are_told() -> None:
    failed = some_groups()[0][2]
    failed.metadata["judge"] = {"score": 0.5, "explanation": "it sank", "judges": ["me"], "x": [1]}
    group = TrajectoryGroup([failed], "maze/1", "", {"judge": {"opinions": [{"raw": "{raw answer}"}]}})
    shown = source_of([group]).trajectory(failed.id)
    assert shown["judge"]["raw"] == "{raw answer}"
    assert shown["error"]["traceback"] == "Traceback: no boat"
    assert shown["judge"]["explanation"] == "it sank" and shown["judge"]["score"] == 0.5
    assert '"x"' in shown["judge"]["more"]


def test_the_environment_draws_its_own() -> None:
    env = artnb.load_environment("game_2048")
    played = env.play(next(iter(env.baselines)), env.scenarios("train", 1)[0])
    source = source_of([played])
    assert "<table" in source.trajectory(played.id)["rendered"]
    played.metadata["boards"] = [7]
    shown = source.trajectory(played.id)
    assert shown["rendered"] is None and "TypeError" in shown["render_error"]


# ---- tokens -----------------------------------------------------------------------------------------


def test_tokens_are_rows_with_what_training_recorded(run: Run) -> None:
    recorded = TokenRecord(
        trainer_logprobs=np.array([-0.1, -0.2, -0.4, -0.1, np.nan, -0.3]),
        advantages=np.full(6, 0.5),
        weights=np.array([1, 1, 0, 1, 1, 1]),
    )
    write_token_records(run.path, 1, {"s1a": recorded})
    source = source_of(run)
    shown = source.tokens("s1a")
    assert shown["ids"] == [1, 2, 3, 7, 8, 9, 4, 7, 8, 9] and shown["rows"] == [0]
    assert shown["sampled"] == [0, 0, 0, 1, 1, 1, 0, 1, 1, 1]
    assert shown["turn"] == [-1, -1, -1, 0, 0, 0, -1, 1, 1, 1]
    values = shown["values"]
    assert values["logprob"][3:6] == [-0.1, -0.2, pytest.approx(-0.3)] and values["logprob"][6] is None
    assert values["ratio"][5] == pytest.approx(math.exp(-0.1), abs=1e-4) and values["ratio"][8] is None
    assert values["weight"][5] == 0 and values["advantage"][7] == 0.5
    assert shown["missing"].keys() == {"entropy", "text"}
    assert source.trajectory("s1a")["facts"]["advantage"] == 0.5
    assert ids(source, "advantage>0.4") == ["s1a"]
    assert "did not train" in source.tokens("s1b")["missing"]["weight"]
    assert "equal rewards" in source.tokens("s1c")["missing"]["weight"]
    assert "no training step" in source.tokens("s0a")["missing"]["ratio"]


def test_a_history_that_splits_gives_rows_and_a_part_may_be_asked_for() -> None:
    one = Trajectory(id="a", reward=1.0)
    one.messages_and_choices = [turn((1, 2), "a", (3,)), turn((1, 9), "b", (4, 5)), turn((1, 2, 3, 6), "c")]
    one.additional_histories = [History([turn((1,), "d", (2,))])]
    source = source_of([one])
    shown = source.tokens("a")
    assert shown["ids"] == [1, 2, 3, 6, 7, 8, 9, 1, 9, 4, 5] and shown["rows"] == [0, 7]
    assert shown["turn"][9:] == [1, 1]
    assert shown["values"]["logprob"][9:] == [-0.1, -0.2]
    part = source.tokens("a", start=8, count=2)
    assert part["ids"] == [9, 4] and part["hidden"] == 9 and part["total"] == 11
    assert part["values"]["logprob"] == [None, -0.1]
    assert source.tokens("a", history=1)["turn"] == [-1, 3]
    assert "no number 2" in source.tokens("a", history=2)["missing"]


def test_texts_of_tokens_come_from_the_tokenizer(tiny_tokenizer: Any) -> None:
    names = tiny_tokenizer.encode("a é\n<|im_end|>", add_special_tokens=False)
    assert token_texts(tiny_tokenizer, names) == ["a", " ", "⟨c3⟩", "⟨a9⟩", "\n", "<|im_end|>"]
    assert token_texts(tiny_tokenizer, [10**9]) == [f"⟨id {10**9}⟩"]
    fake = FakeTokenizer()
    assert token_texts(fake, [*fake.encode("hi<|im_end|>"), 0xC3]) == ["h", "i", "<|im_end|>", "⟨id 195⟩"]


def test_the_run_s_own_tokenizer_is_found_offline(tiny_model: Path, tmp_path: Path) -> None:
    import transformers

    from artnb.browser.texts import digest

    with write_run(tmp_path / "a") as run:
        assert source_of(run).tokens("s0a")["texts"] is None
    loaded = transformers.AutoTokenizer.from_pretrained(tiny_model)
    for name, known in (("b", digest(loaded)), ("c", "another")):
        identity = {"base_model": str(tiny_model), "tokenizer": known}
        with Run.open(name, tmp_path, identity=identity) as run:
            run.append_trajectory(attempt("t", 1.0), step=0, split="train", gather_id="g", attempt=0)
            shown = source_of(run).tokens("t")
            assert (shown["texts"] is None) == (name == "c")
            assert name == "b" or "not the one of the run" in shown["missing"]["text"]


# ---- several ----------------------------------------------------------------------------------------


def test_the_first_divergence_is_found(source: Source) -> None:
    shown = source.compare(["s0a", "s0b"])
    assert shown["common_prefix_entries"] == 3
    assert shown["first_divergence"] == [{"entry": 3, "at": 0, "in": "text"}] * 2
    assert shown["common_prefix_tokens"] == 10
    differs = {one["column"]: one["values"] for one in shown["outcome"]}
    assert differs["reward"] == [0.25, 0.75] and "scenario" not in differs
    with pytest.raises(ConfigurationError, match="two to 4"):
        source.compare(["s0a"])
    assert "nobody" in source.compare(["s0a", "nobody"])["missing"]


def test_the_place_in_a_text_where_attempts_part() -> None:
    short = attempt("a", 1.0, "the boat")
    longer, other = attempt("b", 1.0, "the bottle"), attempt("c", 1.0)
    other.messages_and_choices.pop()
    shown = source_of([short, longer, other]).compare(["a", "b", "c"])
    assert shown["first_divergence"] == [
        {"entry": 3, "at": 6, "in": "text"},
        {"entry": 3, "at": 6, "in": "text"},
        {"entry": None, "at": 6, "in": "text"},
    ]


def test_a_scenario_is_followed_from_the_first_step_to_the_last(source: Source) -> None:
    shown = source.same_scenario("s1b")
    assert (shown["first"], shown["last"]) == ("s0a", "s1a")
    assert [(one["step"], one["count"], one["mean"]) for one in shown["steps"]] == [(0, 3, 0.5), (1, 3, 0.5)]


def test_best_and_worst_of_a_group_and_why_it_was_skipped(source: Source) -> None:
    first, second = sorted(source.extremes(1), key=lambda one: one["scenario"])
    assert (first["best"], first["worst"], first["skipped"]) == ("s1b", "s1a", None)
    assert second["skipped"].startswith("equal rewards") and second["scored"] == 2
    assert source.extremes() == source.extremes(1)


def test_a_reason_that_the_step_did_not_count_was_none(tmp_path: Path) -> None:
    """With credits, equal rewards teach: the rows do not know it, the step's metrics do."""
    with write_run(tmp_path) as run:
        run.append_metrics({"kind": "train", "step": 2, "dropped": {}})
        one = attempt("x", 0.5)
        for k in range(2):
            one.id = f"x{k}"
            run.append_trajectory(one, step=2, split="train", gather_id="g2", attempt=k)
        assert source_of(run).trajectory("x0")["skipped"] is None
        assert "equal" in source_of(run).trajectory("s1c")["skipped"]


# ---- actions ----------------------------------------------------------------------------------------


def test_messages_json_and_curl_are_whole(source: Source) -> None:
    messages = json.loads(source.as_messages("s0a"))
    assert [m["role"] for m in messages] == ["user", "assistant", "tool", "assistant"]
    assert Trajectory.from_json(json.loads(source.as_json("s0a"))) == Trajectory.from_json(
        json.loads(source.as_json("s0a"))
    )
    assert Trajectory.from_json(json.loads(source.as_json("s0a"))).turns[1].prompt_ids == (
        1,
        2,
        3,
        7,
        8,
        9,
        4,
    )
    with pytest.raises(ConfigurationError, match="nobody"):
        source.as_json("nobody")
    with pytest.raises(ConfigurationError, match="no turn 7"):
        source.as_curl("s0a", 7)


def test_a_curl_command_is_safe_to_paste(tmp_path: Path) -> None:
    harmful = "'; touch harm; echo '$(touch harm)`touch harm`"
    one = Trajectory([{"role": "user", "content": harmful}, turn((1,), "x")], id="a")
    command = source_of([one]).as_curl("a", 0, "http://127.0.0.1:9/v1")
    assert "$OPENAI_API_KEY" in command
    script = 'curl() { printf "%s" "${@: -1}" > body; }\n' + command
    subprocess.run(["bash", "-c", script], cwd=tmp_path, check=True, env={"OPENAI_API_KEY": "k"})
    assert [path.name for path in tmp_path.iterdir()] == ["body"]
    body = json.loads((tmp_path / "body").read_text())
    assert body["messages"] == [{"role": "user", "content": harmful}] and body["temperature"] == 1.0


def test_a_selection_is_exported(source: Source, tmp_path: Path) -> None:
    query = source.query("step:0")["query"]
    told = source.export(query, "jsonl", tmp_path / "a.jsonl")
    assert told["count"] == 6
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert [Trajectory.from_json(line["trajectory"]).id for line in lines] == ids(source, "step:0")
    told = source.export(query, "sft", tmp_path / "new" / "a.jsonl")
    assert (told["count"], told["left_out"]) == (5, {"failed, or without a reply": 1})
    example = json.loads((tmp_path / "new" / "a.jsonl").read_text().splitlines()[0])
    assert example["messages"][1]["tool_calls"] == [CALL]
    assert source.export(["s0a", "nobody"], "parquet", tmp_path / "a.parquet")["left_out"] == {
        "no longer there": 1
    }
    table = parquet.read_table(tmp_path / "a.parquet").to_pylist()
    assert [(row["id"], row["reward"]) for row in table] == [("s0a", 0.25)]
    with pytest.raises(ConfigurationError, match="kind must be"):
        source.export(query, "csv", tmp_path / "a.csv")
    assert {path.name for path in tmp_path.iterdir()} >= {"a.jsonl", "a.parquet"}
    assert not list(tmp_path.glob(".*"))


def test_an_override_is_kept_and_taken_back(run: Run, tmp_path: Path) -> None:
    source = source_of(run)
    assert source.override("s1a", 0.875, "it did float")["kept"] == "run"
    run.close()
    again = source_of(tmp_path / "boats")
    for one in (source, again):
        shown = one.trajectory("s1a")
        assert shown["reward"] == 0.875 and shown["override"]["reason"] == "it did float"
        assert shown["override"]["was"] == 0.25
        assert ids(one, "override") == ["s1a"] and ids(one, "reward:0.875") == ["s1a"]
    folder = RunFolder(tmp_path / "boats")
    (kept,) = [one for one in folder.trajectories() if one.id == "s1a"]
    assert kept.reward == 0.875 and kept.metadata["reward_before_override"] == 0.25
    assert again.override("s1a", 0.5, "half")["kept"] == "run"  # nobody holds the run now
    assert not (tmp_path / "boats" / "owner.json").exists()
    assert again.override("s1a", None, "as it was")["override"] is None
    assert source_of(tmp_path / "boats").trajectory("s1a")["reward"] == 0.25
    with pytest.raises(ConfigurationError, match="say why"):
        again.override("s1a", 1.0, " ")
    with pytest.raises(ConfigurationError, match="finite"):
        again.override("s1a", math.nan, "x")


def test_an_override_of_groups_changes_the_trajectory() -> None:
    groups = some_groups()
    source = source_of(groups)
    assert source.override("s0a", 1.0, "good")["kept"] == "memory"
    source.override("s0a", 0.5, "less good")
    assert groups[0][0].reward == 0.5 and groups[0][0].metadata["reward_before_override"] == 0.25
    assert source.trajectory("s0a")["override"]["was"] == 0.25
    source.override("s0a", None, "as it was")
    assert groups[0][0].reward == 0.25 and "reward_before_override" not in groups[0][0].metadata


def test_bookmarks_have_notes(source: Source) -> None:
    source.bookmark("s0b", "look at this")
    source.bookmark("s0c")
    assert ids(source, "bookmark") == ["s0b", "s0c"]
    assert ids(source, "note:look") == ["s0b"]
    assert source.trajectory("s0b")["bookmark"]["note"] == "look at this"
    source.bookmark("s0b", None)
    assert ids(source, "bookmark") == ["s0c"]


def test_a_run_of_another_process_is_read_and_not_written(tmp_path: Path) -> None:
    write_run(tmp_path).close()
    holder = (
        "import sys, time; from artnb.store.run import Run; "
        f"run = Run.open('boats', {str(tmp_path)!r}); print('open', flush=True); "
        "sys.stdin.read(); run.close()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", holder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "open\n"
        path = tmp_path / "boats"
        (path / "trajectories" / "index" / "steps_000000.v1.jsonl").unlink()
        source = source_of("boats", root=tmp_path)
        assert source.facts()["is_growing"] and source.facts()["count"] == 12
        assert not source.facts()["can_write"]
        assert not list((path / "trajectories" / "index").iterdir())
        events = (path / "events.jsonl").read_bytes()
        assert source.override("s1a", 1.0, "x")["kept"] == "memory"
        assert "this notebook only" in source.facts()["problems"][0]
        assert ids(source, "override") == ["s1a"]
        assert (path / "events.jsonl").read_bytes() == events
    finally:
        process.communicate(timeout=30)
    assert process.returncode == 0


def test_scores_of_a_judge_are_read_from_the_journal(run: Run) -> None:
    source = source_of(run)
    metrics = {"judge/style": 0.5, "reward/judge": 0.625}
    told = {"reward": 0.625, "metrics": metrics, "judge": {"score": 0.625, "explanation": "so so"}}
    unscored = [{"scenario_id": "maze/2", "why": "no answer"}]
    run.record_event("judged", step=1, scores={"s1u": told}, unscored=unscored)
    source.refresh()
    assert ids(source, "reward:0.625 style:0.5 step:1 scored") == ["s1u"]
    shown = source.trajectory("s1u")
    assert shown["judge"]["explanation"] == "so so" and shown["parts"]["judge"] == 0.625
    source.override("s1u", 0.0, "no")
    assert source.trajectory("s1u")["override"]["was"] == 0.625
    (kept,) = [one for one in run.trajectories() if one.id == "s1u"]
    assert (kept.reward, kept.metrics["judge/style"]) == (0.0, 0.5)


async def test_a_turn_is_replayed_and_never_trained_on(tmp_path: Path) -> None:
    backend = FakeBackend(script=["first", "second", "third"])
    model = artnb.Model(run="replay", root=tmp_path, backend=backend)

    async def rollout(model: Any, scenario: Any) -> Trajectory:
        messages: list[Any] = [{"role": "user", "content": "go"}]
        for _ in range(2):
            answer = await model.client.chat.completions.create(model=model.name, messages=messages)
            messages += [{"role": "assistant", "content": answer.choices[0].message.content}]
            messages += [{"role": "user", "content": "on"}]
        return Trajectory(reward=1.0)

    groups = await artnb.gather(rollout, [artnb.Scenario("s/1")], model=model, group_size=1, progress=False)
    (one,) = groups.trajectories
    source = source_of(model)
    answer = await source.replay(one.id, 1)
    assert [e["text"] for e in answer["entries"]] == ["go", "first", "on", "third"]
    assert backend.requests[-1].prompt_ids == one.turns[1].prompt_ids
    assert backend.requests[-1].sampling.seed is not None  # the engine's random state is left alone
    source.refresh()
    assert source.facts()["splits"] == ["replay", "train"]
    shown = source.trajectory(answer["id"])
    assert shown["parent"] == {"id": one.id, "known": True}
    assert [child["id"] for child in source.trajectory(one.id)["children"]] == [answer["id"]]
    assert [t.id for t in model.run.trajectories(split="train")] == [one.id]
    with pytest.raises(ConfigurationError, match="no turn 5"):
        await source.replay(one.id, 5)
    model.close()
    with pytest.raises(ConfigurationError, match="needs a model"):
        await source_of(groups).replay(one.id)


# ---- what was written by others ---------------------------------------------------------------------


def hostile() -> Trajectory:
    """Everything that a model, a tool or a user may have left in a trajectory."""
    items: list[Any] = [
        {"role": "user", "content": "x" * 10_000_000},
        {"role": "\ud800", "content": {"a": [math.nan, "\udfff"]}, "tool_calls": "none"},
        {"content": [None, 3, {"type": "image_url", "image_url": 5}, {"text": "\ud83d lone"}]},
        {
            "role": "assistant",
            "tool_calls": [{"function": {"name": None, "arguments": {"\udc00": math.inf}}}],
        },
        {"role": "tool", "content": "<img src=x onerror=alert(1)>\u202e\x1b[31m", "tool_call_id": 7},
        Turn((1,), (2,), (math.nan,), 0, "stop", {"role": "assistant", "content": None}),
    ]
    return Trajectory(
        items,
        math.nan,
        {"reward/\ud800": 1.0, "bad": math.inf, "text": "no number"},  # type: ignore[dict-item]
        {"deep": {"a": ["\ud800"] * 3}, "judge": "\udcff"},
        tools=[{"function": {"name": "\ud800", "parameters": {"x": math.nan}}}, "tool"],  # type: ignore[list-item]
        logs=["\ud800" * 10, *(["line"] * 2000)],
        id="\ud800bad",
        scenario_id="a\ud800" * 100,
    )


@pytest.mark.parametrize("kind", ["run", "groups"])
def test_hostile_trajectories_are_shown_and_cut(kind: str, tmp_path: Path) -> None:
    with write_run(tmp_path) as run:
        run.append_trajectory(hostile(), step=1, split="tr\ud800", gather_id="g", attempt=0)
        source = source_of(run if kind == "run" else [attempt("s1a", 0.5), hostile()])
        (name,) = ids(source, "bad")
        shown = source.query(tree=True, expanded=["*"], sort=[["scenario", "asc"]])
        answers = [source.facts(), source.page(shown["query"]), source.trajectory(name), source.tokens(name)]
        answers += [source.compare([name, "s1a"]), source.same_scenario(name), source.extremes()]
        written = json.dumps(answers, allow_nan=False, ensure_ascii=False)
        written.encode()  # no lone surrogate is left
        assert len(written) < 2_000_000
        detail = answers[2]
        assert detail["reward"] is None and detail["reward_text"] == "nan"
        assert detail["histories"][0]["entries"][0]["cut"] > 9_000_000 and detail["cut"] > 9_000_000
        assert "‹U+D800›" in detail["histories"][0]["entries"][1]["role"]
        assert len(source.as_messages(name)) > 10_000_000
        assert set(ids(source, "reward:none bad")) == {name}
        source.override(name, 1.0, "\ud800")
        assert source.trajectory(name)["reward"] == 1.0
        assert source.export([name], "sft", tmp_path / "x.jsonl")["count"] == 1


def test_lines_of_other_shapes_are_shown_as_far_as_they_go(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    run.close()
    lines = [
        {"trajectory": {}},
        {
            "trajectory": {
                "id": "few",
                "messages_and_choices": [{"turn": {}}, {"turn": 3}, {"message": None}, 4],
            }
        },
        {"split": "train", "trajectory": {"id": "odd", "messages_and_choices": "text", "metrics": []}},
        {"split": "train", "trajectory": {"id": "err", "error": "text", "reward": "high"}},
        {"no": "trajectory"},
    ]
    path = tmp_path / "boats" / "trajectories" / "step_000001.jsonl"
    with open(path, "ab") as file:
        for line in lines:
            file.write(json.dumps(line).encode() + b"\n")
        file.write(b'{"trajectory": {"id": "torn"')
    source = source_of(tmp_path / "boats")
    assert source.facts()["count"] == 16 and source.facts()["indexing"] is None
    for name in ("few", "odd", "err", ""):
        json.dumps([source.trajectory(name), source.tokens(name)], allow_nan=False)
    assert ids(source, "error=Error") == ["err"]
    told = source.export(["few", "odd", "s1a"], "parquet", tmp_path / "x.parquet")
    assert (told["count"], told["left_out"]) == (1, {"not readable": 2})


def test_a_line_that_changed_behind_the_index_is_read_again(run: Run) -> None:
    source = source_of(run)
    path = run.path / "trajectories" / "step_000000.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"s0a"', b'"s0z"'))
    assert "changed" in source.trajectory("s0a")["missing"]
    assert source.refresh()
    assert "no trajectory" in source.trajectory("s0a")["missing"]
    assert source.trajectory("s0z")["reward"] == 0.25


def test_a_query_survives_what_moves_its_rows(run: Run) -> None:
    source = source_of(run)
    query = source.query("step:1", [["id", "asc"]])["query"]
    path = run.path / "trajectories" / "step_000000.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"s0a"', b'"s0z"'))
    source.trajectory("s0a")
    source.refresh()
    names = [row["id"] for row in source.page(query)["rows"]]
    assert names == ["s1a", "s1b", "s1c", "s1d", "s1f", "s1u"]
    assert [source.trajectory(name)["id"] for name in names] == names


def test_a_run_that_grows_is_seen_to_grow(run: Run) -> None:
    source = source_of(run)
    query = source.query("step:2")
    assert query["count"] == 0
    run.append_trajectory(attempt("new", 1.0), step=2, split="train", gather_id="g2", attempt=0)
    assert source.refresh() and not source.refresh()
    assert source.page(query["query"])["count"] == 0  # as it was asked
    assert ids(source, "step:2") == ["new"]


def test_a_search_is_cancelled_by_the_next(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    fits = Search._fits

    def slowly(self: Search, row: int, read: Any) -> bool:
        time.sleep(0.03)
        return fits(self, row, read)

    monkeypatch.setattr(Search, "_fits", slowly)
    source = source_of(run)
    for number in range(40):
        one = attempt(f"n{number}", 1.0, said="word")
        run.append_trajectory(one, step=1, split="train", gather_id="g", attempt=number)
    source.refresh()
    asked = source.query("text:word")
    assert asked["searching"] is not None and 0 <= asked["searching"] < 1
    source.query("text:sank")
    assert source.progress(asked["query"])["searching"] is None
    found = len(source.page(asked["query"], 0, 500)["rows"])
    assert found < 40
    monkeypatch.undo()
    assert len(ids(source, "text:word")) == 40


def test_what_cannot_be_browsed_is_refused(tmp_path: Path) -> None:
    for what in (3, {"a": 1}, [3], None):
        with pytest.raises(ConfigurationError, match="cannot browse"):
            source_of(what)
    with pytest.raises(ConfigurationError, match="no run"):
        source_of("nothing", root=tmp_path)
    empty = source_of(Groups())
    assert empty.facts()["count"] == 0 and empty.query("reward<1", tree=True)["count"] == 0
    assert empty.extremes() == []


def test_the_help_is_about_filters_that_work(source: Source) -> None:
    """Each example of the grammar is understood."""
    for line in source.facts()["help"].splitlines():
        if line.startswith("    "):
            for example in line.split("     ")[0].strip().split("  "):
                if example.strip():
                    parse_filter(example.strip(), source.table)
