"""Is every stored trajectory found without reading it, whatever happened to the index?"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from artnb.store.index import FIELDS, WIDTH, index_row
from artnb.store.index_reader import Index
from artnb.store.trajectories import Stored, TrajectoryFolder
from artnb.types import Failure, Trajectory, Turn

ID, REWARD = FIELDS.index("id"), FIELDS.index("reward")


def trajectory(number: int, **fields: Any) -> Trajectory:
    turn = Turn((1, 2), (3, 4, 5), (-0.1, -0.2, -0.3), 2, "stop", {"role": "assistant", "content": "x" * 40})
    told = {"reward": number / 8, "metrics": {"reward/form": 1.0, "moves": float(number)}, "seconds": 1.25}
    items = [{"role": "user", "content": f"question {number}"}, turn]
    return Trajectory(items, scenario_id=f"maze/train/{number}", id=f"t{number:015}", **{**told, **fields})


def stored(number: int, step: int = 0, **fields: Any) -> Stored:
    return Stored(step, "train", f"gather{step:06}", number % 4, trajectory(number, **fields))


def write(folder: Path, numbers: range, step: int = 0) -> None:
    writer = TrajectoryFolder(folder)
    for number in numbers:
        writer.append([stored(number, step)], session=1)
    writer.close()


def everything(index: Index, looks: int = 1, slice_seconds: float = 10) -> dict[str, list[Any]]:
    """All rows by id after so many looks and all filling."""
    rows: dict[str, list[Any]] = {}

    def take(news: Any) -> None:
        for name in [name for name, row in rows.items() if row[0] in news.void]:
            del rows[name]
        rows.update((row[ID], row) for row in news.rows)

    for _ in range(looks):
        take(index.look())
        while index.share is not None:
            take(index.fill(slice_seconds))
    return rows


def body(folder: Path, row: list[Any]) -> dict[str, Any]:
    step, offset, length = row[:3]
    line = (folder / f"step_{step:06}.jsonl").read_bytes()[offset : offset + length]
    return json.loads(line)["trajectory"]


def index_file(folder: Path) -> Path:
    return folder / "index" / "steps_000000.v1.jsonl"


def test_the_writer_leaves_rows_that_need_no_reading(tmp_path: Path) -> None:
    write(tmp_path, range(20))
    write(tmp_path, range(20, 24), step=3)
    index = Index(tmp_path)
    news = index.look()
    assert len(news.rows) == 24 and not news.void
    assert index.share is None
    assert all(body(tmp_path, row)["id"] == row[ID] for row in news.rows)
    assert index_file(tmp_path).stat().st_size / 24 < 200


def test_a_row_says_what_its_trajectory_says(tmp_path: Path) -> None:
    writer = TrajectoryFolder(tmp_path)
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    one = trajectory(5, parent_id="t0", seat="white", error=Failure("ValueError", "m"), reward=math.nan)
    one.messages_and_choices.append({"role": "assistant", "content": None, "tool_calls": [call]})
    writer.append([Stored(7, "test", "g", 3, one)], session=4)
    writer.close()
    index = Index(tmp_path)
    (row,) = index.look().rows
    told = dict(zip(FIELDS, row, strict=False))
    assert (
        told
        | {
            **{"step": 7, "split": "test", "gather": "g", "attempt": 3, "session": 4, "seat": "white"},
            **{"scenario": "maze/train/5", "reward": "nan", "error": "ValueError", "turns": 1, "tokens": 3},
            **{
                "version": 2,
                "version_min": 2,
                "seconds": 1.25,
                "tools": "look",
                "histories": 1,
                "parent": "t0",
            },
        }
        == told
    )
    assert dict(zip(index.schemas[told["schema"]], row[WIDTH:], strict=True)) == {
        "reward/form": 1.0,
        "moves": 5.0,
    }


def test_a_lost_index_is_made_again_in_slices_and_kept(tmp_path: Path) -> None:
    write(tmp_path, range(30))
    index_file(tmp_path).unlink()
    index = Index(tmp_path, may_write=lambda: True)
    assert index.look().rows == []
    assert index.share == 0.0
    first = index.fill(0.0)
    assert 0 <= len(first.rows) < 30
    shares = [index.share]
    while index.share is not None:
        index.fill(0.0001)
        shares.append(index.share)
    assert shares[:-1] == sorted(shares[:-1], key=lambda share: share or 0.0)
    again = Index(tmp_path)
    assert len(again.look().rows) == 30 and again.share is None


def test_only_what_a_torn_row_stood_for_is_read_again(tmp_path: Path) -> None:
    write(tmp_path, range(10))
    text = index_file(tmp_path).read_bytes()
    index_file(tmp_path).write_bytes(text[:-30])
    write(tmp_path, range(10, 12))  # a later process goes on behind the torn row
    fresh = index_file(tmp_path).read_bytes().splitlines()[-3:]
    assert [json.loads(line)[0] for line in fresh] == ["metrics", 0, 0]
    index = Index(tmp_path, may_write=lambda: True)
    known = [row[ID] for row in index.look().rows]
    assert known == [f"t{n:015}" for n in range(9)]
    assert sorted(row[ID] for row in index.fill(10).rows) == [f"t{n:015}" for n in (9, 10, 11)]
    assert len(Index(tmp_path).look().rows) == 12


@pytest.mark.parametrize("damage", ["garbage", "empty", "wrong types", "nested"])
def test_a_spoilt_index_is_no_harm(tmp_path: Path, damage: str) -> None:
    write(tmp_path, range(6))
    lines = index_file(tmp_path).read_bytes().splitlines(keepends=True)
    spoilt = {
        "garbage": b"\x00\xff{[\n",
        "empty": b"[]\n",
        "wrong types": b'[0,"a",null]\n',
        "nested": b"[" * 100_000 + b"\n",
    }[damage]
    index_file(tmp_path).write_bytes(b"".join([*lines[:3], spoilt, *lines[4:]]))
    assert set(everything(Index(tmp_path))) == {f"t{n:015}" for n in range(6)}


def test_rows_that_contradict_the_file_are_made_anew_for_good(tmp_path: Path) -> None:
    write(tmp_path, range(6))
    rows = [json.loads(line) for line in index_file(tmp_path).read_bytes().splitlines()]
    rows[2][2] += 40  # longer than its line: it reaches into the next one
    index_file(tmp_path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    index = Index(tmp_path, may_write=lambda: True)
    found = everything(index, slice_seconds=0.0001)
    assert all(body(tmp_path, row)["id"] == name for name, row in found.items()) and len(found) == 6
    clean = Index(tmp_path)
    news = clean.look()
    assert len(news.rows) == 6 and clean.share is None
    assert all(body(tmp_path, row)["id"] == row[ID] for row in news.rows)


def test_a_file_that_shrank_or_went_away_takes_its_rows_with_it(tmp_path: Path) -> None:
    write(tmp_path, range(6))
    write(tmp_path, range(6, 9), step=1)
    path = tmp_path / "step_000000.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2]))
    (tmp_path / "step_000001.jsonl").unlink()
    assert set(everything(Index(tmp_path))) == {f"t{n:015}" for n in range(2)}


def test_a_spoilt_line_is_passed_over_once_and_for_all(tmp_path: Path) -> None:
    write(tmp_path, range(3))
    path = tmp_path / "step_000000.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], b"\x00not json\n", lines[1], lines[2]]))
    index_file(tmp_path).unlink()
    index = Index(tmp_path, may_write=lambda: True)
    assert len(everything(index)) == 3
    again = Index(tmp_path)
    assert len(again.look().rows) == 3 and again.share is None


def test_a_line_without_its_end_waits(tmp_path: Path) -> None:
    write(tmp_path, range(3))
    path = tmp_path / "step_000000.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    index_file(tmp_path).unlink()
    index = Index(tmp_path)
    assert len(everything(index)) == 2
    assert index.share is None  # nothing to do until somebody goes on writing
    path.write_bytes(whole)
    assert len(everything(index, looks=2)) == 1


def test_it_follows_another_writer_through_its_rows(tmp_path: Path) -> None:
    write(tmp_path, range(2))
    index = Index(tmp_path)
    index.look()
    write(tmp_path, range(2, 5))
    write(tmp_path, range(5, 7), step=1)
    assert len(index.look().rows) == 5
    assert index.share is None
    assert index.look().rows == []


def test_it_follows_a_writer_that_keeps_no_index(tmp_path: Path) -> None:
    write(tmp_path, range(2))
    index = Index(tmp_path)
    everything(index)
    writer = TrajectoryFolder(tmp_path)
    writer._journal(0).append({**stored(2).to_json(), "session": 1})
    assert index.look().rows == []
    assert index.share is None  # the row may come in a moment
    assert set(everything(index)) == {"t000000000000002"}


def test_a_folder_that_cannot_be_written_is_indexed_in_memory(tmp_path: Path) -> None:
    (tmp_path / "index").write_text("a file where the folder should be")
    write(tmp_path, range(4))  # training goes on
    index = Index(tmp_path, may_write=lambda: True)
    assert len(everything(index)) == 4
    assert index.look().rows == [] and index.share is None


def test_nothing_is_written_without_permission(tmp_path: Path) -> None:
    write(tmp_path, range(4))
    index_file(tmp_path).unlink()
    assert len(everything(Index(tmp_path))) == 4
    assert not index_file(tmp_path).exists()


def test_a_step_that_is_forgotten_is_read_again(tmp_path: Path) -> None:
    write(tmp_path, range(4))
    index = Index(tmp_path, may_write=lambda: True)
    index.look()
    path = tmp_path / "step_000000.jsonl"
    path.write_bytes(path.read_bytes().replace(b"t000000000000001", b"s000000000000001"))
    index.forget(0)
    assert {row[ID] for row in index.fill(10).rows} >= {"s000000000000001", "t000000000000002"}
    assert "s000000000000001" in {row[ID] for row in Index(tmp_path).look().rows}


def test_two_readers_that_index_at_once_agree(tmp_path: Path) -> None:
    write(tmp_path, range(8))
    index_file(tmp_path).unlink()
    one, other = (Index(tmp_path, may_write=lambda: True) for _ in range(2))
    found: list[Any] = []
    one.look()
    other.look()
    while one.share is not None or other.share is not None:
        found += one.fill(0.0).rows + one.fill(0.0001).rows
        other.fill(0.0001)
        found += one.look().rows
        other.look()
    third = Index(tmp_path)
    assert sorted(row[ID] for row in third.look().rows) == [f"t{n:015}" for n in range(8)]
    assert sorted(row[ID] for row in found) == [f"t{n:015}" for n in range(8)]


def test_many_and_long_names_stay_short(tmp_path: Path) -> None:
    one = trajectory(1, metrics={f"{n}{'m' * 200}": n for n in range(200)})
    one.id, one.scenario_id = "i" * 10_000, "\ud800" * 5_000
    writer = TrajectoryFolder(tmp_path)
    writer.append([Stored(0, "train", "g" * 999, 0, one)], session=1)
    writer.close()
    (row,) = Index(tmp_path).look().rows
    assert len(row) == WIDTH + 40
    assert all(len(value) <= 160 for value in row if isinstance(value, str))


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
names = [
    *("messages_and_choices", "reward", "metrics", "metadata", "additional_histories", "error"),
    *("scenario_id", "seat", "parent_id", "id", "seconds"),
]


@given(st.dictionaries(st.sampled_from(names), values), values, values)
def test_any_record_has_a_row(found: dict[str, Any], item: Any, split: Any) -> None:
    record = {"split": split, "trajectory": {"messages_and_choices": [item, {"turn": item}], **found}}
    row, metrics = index_row(record, 1, 2, 3)
    json.dumps(row, allow_nan=False)
    assert len(row) == WIDTH - 1 + len(metrics) and row[:3] == [1, 2, 3]
