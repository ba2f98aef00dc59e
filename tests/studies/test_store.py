"""The cache of runs."""

import json

import pytest

from topk_studies.engine.store import Store, key_of

from .conftest import CONFIGURATION, RECORD


def test_a_record_comes_back_as_it_was(store):
    assert store.get("train", 1, CONFIGURATION) is None
    store.put(RECORD)
    assert store.get("train", 1, CONFIGURATION) == RECORD
    assert Store(store.root).get("train", 1, CONFIGURATION) == RECORD
    assert not list(store.root.rglob("*.tmp"))


def test_the_key_is_of_what_was_asked_and_of_the_version():
    turned = {"device": "cpu", "flags": {"lr": 0.1, "loss": "ce"}}
    assert key_of(1, turned) == key_of(1, CONFIGURATION)
    assert key_of(2, CONFIGURATION) != key_of(1, CONFIGURATION)
    assert key_of(1, {**CONFIGURATION, "device": "cuda"}) != key_of(1, CONFIGURATION)


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"kind": "train"}'])
def test_a_file_that_is_no_record_counts_for_nothing(store, damage):
    store.put(RECORD)
    (path,) = store.root.rglob("runs/train/*.json")
    path.write_text(damage)
    with pytest.warns(UserWarning, match="no record of a run"):
        assert store.get("train", 1, CONFIGURATION) is None
    store.put(RECORD)
    assert store.get("train", 1, CONFIGURATION) == RECORD


def test_a_study_is_its_records(store):
    store.put(RECORD)
    store.write_study("noise", [RECORD], {"command": "topk-registry study noise"})
    records, about = store.read_study("noise")
    assert records == [RECORD]
    assert about["command"] == "topk-registry study noise"
    assert store.read_study("margin") is None


def test_a_damaged_list_of_a_study_is_as_none(store):
    store.put(RECORD)
    store.write_study("noise", [RECORD], {})
    path = store.root / "studies" / "noise.json"
    path.write_text(json.dumps({"command": "?"}))
    with pytest.warns(UserWarning, match="cannot be read"):
        assert store.read_study("noise") is None
