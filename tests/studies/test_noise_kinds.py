"""Kinds of label noise: which runs the study asks for, what it takes for one loss, and what it claims."""

from topk_registry.data.ambiguous import Ambiguous
from topk_registry.train.config.arguments import parse_args
from topk_registry.train.setup.datasets import open_data
from topk_studies.engine import training
from topk_studies.engine.catalogue import load_study
from topk_studies.engine.store import canonical
from topk_studies.engine.study import Options
from topk_studies.experiments.noise_kinds import BASELINE, EPSILON, EPSILON_K, KINDS, PEOPLE, SHARE, SMOOTH

from .conftest import trained

STUDY = load_study("noise-kinds")
OPTIONS = Options(flags={"dataset": "topk/ambiguous"}, max_seeds=5)


def asked(known=(), options=OPTIONS):
    return STUDY.configurations(options, list(known))


def scored(configuration, gain=0.0):
    """A record whose top-5 and top-1 depend on the loss, on k and a little on the seed."""
    flags = configuration["flags"]
    option = flags.get("loss_opt", {})
    value = 50.0 + 0.1 * flags["seed"] % 7 + (gain if flags["loss"] != BASELINE else 0.0)
    value += option.get("k", 0) + option.get("alpha", 0.0) - 10 * (flags["lr"] != 1e-3)
    row = {name: value for metric in ("top1", "top5") for name in (metric, f"test_{metric}")}
    return trained(configuration, [row])


def finished(gain):
    known = {}
    while new := [each for each in asked(known.values()) if canonical(each) not in known]:
        known |= {canonical(each): scored(each, gain) for each in new}
    return list(known.values())


def test_every_loss_has_four_trials_under_every_kind_of_noise():
    runs = {}
    for configuration in asked():
        flags = configuration["flags"]
        name = f"{flags['loss']} {flags.get('loss_opt', {}).get('k', '')}".strip()
        runs.setdefault((flags.get("label_noise_kind", "family"), name), []).append(configuration)
    assert {kind for kind, _ in runs} == set(KINDS)
    assert len({name for _, name in runs}) == 6
    assert len(runs) == 6 * len(KINDS)
    assert {len(each) for each in runs.values()} == {4}


def test_the_same_share_is_wrong_under_every_kind():
    seen = set()
    for configuration in asked():
        flags = configuration["flags"]
        kind = flags.get("label_noise_kind", "family")
        if kind in seen:
            continue
        seen.add(kind)
        config = parse_args([*training.arguments(configuration), "--dataset-opt", "size=1000"])
        clean = Ambiguous("train", size=1000).targets
        wrong = sum(a != b for a, b in zip(open_data(config).train.targets.tolist(), clean, strict=True)) / 1000
        # drawn within families, 800 of 1000 labels that change with a chance of a half: four standard deviations
        assert abs(wrong - SHARE) <= (0.065 if kind == "family" else 0.0)
    assert seen == set(KINDS)


def test_another_k_is_another_loss():
    choices = STUDY.choices(finished(2.0))
    by_kind = {kind: [STUDY.name(choice) for choice in here] for kind, here in STUDY.by_key(choices)}
    assert set(by_kind) == set(KINDS)
    for names in by_kind.values():
        assert sorted(names) == sorted(set(names))
        assert {BASELINE, SMOOTH, EPSILON, EPSILON_K} < set(names)
    (one,) = {choice.trial["loss_opt"]["alpha"] for choice in choices if STUDY.name(choice) == EPSILON_K}
    assert one == 0.3  # the better trial of its grid
    assert all(len(choice.runs) == 5 for choice in choices)


def test_claims_are_of_the_mean_over_kinds_and_of_people():
    claims = STUDY.claims(STUDY.choices(finished(2.0)))
    evidence = [claim.of for claim in claims]
    kinds = ", ".join(KINDS)
    assert f"mean over {kinds}, top-1 of {EPSILON} less ce" in evidence
    assert f"mean over {kinds}, top-5 of {EPSILON_K} less ce" in evidence
    assert [words for words in evidence if not words.startswith("mean")] == [
        f"{kind}, top-5 of {SMOOTH} less ce" for kind in PEOPLE
    ]
    by_words = dict(zip(evidence, claims, strict=True))
    differences = by_words[f"mean over {kinds}, top-5 of {EPSILON_K} less ce"].differences
    assert set(differences) == set(range(5))
    assert all(abs(each - (2.0 + 5 + 0.3)) < 1e-9 for each in differences.values())
    assert {note.verdict for note in STUDY.settle(claims)} == {"agrees"}
