"""Trees of classes from files: every form says the same tree, and what is no tree is told."""

import json

import numpy as np
import pytest

from topk_registry.data.labels import superclasses_of
from topk_registry.folders.trees import read_tree, tree_of

CLASSES = ["crow", "rook", "robin", "fox"]
PAIRS = [("crow", "Corvus"), ("rook", "Corvus"), ("Corvus", "birds"), ("robin", "birds"), ("fox", "mammals")]


@pytest.fixture
def written(tmp_path):
    def write(text, name="tree.csv"):
        file = tmp_path / name
        file.write_text(text, encoding="utf-8")
        return file

    return write


def test_every_form_gives_the_same_tree(written):
    pairs = "note,parent,child\n" + "".join(f"x,{parent},{child}\n" for child, parent in PAIRS)
    paths = "class,genus,species\nbirds,Corvus,crow\nbirds,Corvus,rook\nbirds,,robin\n\nmammals,mammals,fox\n"
    found = [
        read_tree(written(pairs), CLASSES),
        read_tree(written(paths), CLASSES),
        read_tree(written(json.dumps(dict(PAIRS)), "tree.json"), CLASSES),
    ]
    for tree in found:
        assert tree.names[:4] == tuple(CLASSES)
        assert tree.names[-1] == "all"
        below = {name: sorted(np.array(CLASSES)[row]) for name, row in zip(tree.names, tree.members, strict=True)}
        assert below == {
            **{name: [name] for name in CLASSES},
            "Corvus": ["crow", "rook"],
            "birds": ["crow", "robin", "rook"],
            "mammals": ["fox"],
            "all": sorted(CLASSES),
        }
        assert [tree.names[i] for i in tree.above(0)] == ["crow", "Corvus", "birds", "all"]
        assert tree.num_classes == 4


def test_superclasses_are_a_tree_of_two_levels(written):
    tree = read_tree(written("[0, 0, 1, 1]", "s.json"), CLASSES)
    assert tree.names[4:] == ("superclass 0", "superclass 1", "all")
    assert tree.parents == (4, 4, 5, 5, 6, 6, -1)


def test_the_trainer_reads_a_tree_as_superclasses(written):
    class Data:
        classes = CLASSES

    file = written("child,parent\n" + "".join(f"{child},{parent}\n" for child, parent in PAIRS))
    assert superclasses_of(Data(), file) == [0, 0, 1, 2]


def test_one_class_and_a_single_chain():
    assert tree_of([], ["a"]).parents == (-1,)
    chain = tree_of([("a", "b"), ("b", "c")], ["a"])
    assert chain.names == ("a", "b", "c")
    assert chain.parents == (1, 2, -1)
    assert tree_of([("x", "all"), ("y", "z")], ["x", "y"]).names[-1] == "(all)"


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([*PAIRS, ("crow", "birds")], "'crow' has two parents, 'Corvus' and 'birds'"),
        ([*PAIRS, ("birds", "Corvus")], r"cycle: '(birds|Corvus)' < '(birds|Corvus)' < '(birds|Corvus)'"),
        (PAIRS[:-1], "1 of 4 classes are missing: fox"),
        ([*PAIRS, ("wren", "birds")], "1 leaves are no classes: wren; the classes are crow, rook"),
        ([*PAIRS, ("hooded crow", "crow")], "classes are the leaves of the tree, but crow have nodes below"),
    ],
)
def test_what_is_no_tree_of_the_classes_is_told(pairs, message):
    with pytest.raises(ValueError, match=message):
        tree_of(pairs, CLASSES)


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("", "t.csv", "got an empty file"),
        ("species\ncrow\n", "t.csv", "got the column 'species' alone"),
        ("child,parent\ncrow\n", "t.csv", "a child and a parent in every row, got 'crow'"),
        ("[1, 2]", "t.json", "a parent for each of the 4 classes, got 2"),
        ("3", "t.json", "got a JSON int"),
    ],
)
def test_files_of_another_form_are_told(written, text, name, message):
    with pytest.raises(ValueError, match=rf"{name}: .*{message}"):
        read_tree(written(text, name), CLASSES)
