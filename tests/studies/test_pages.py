"""The pages of results: intervals, findings and charts follow from the stored figures."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from common import ROOT
from PIL import Image
from scipy.stats import ttest_rel
from tiny_study import DENSE, EWA, small_study

from studies import chart, images, page
from studies.catalogue import STUDIES
from studies.findings import problems
from studies.measure import TOP1, Evaluation
from studies.operations import routed_share
from studies.outcome import Outcome, costs_of_studies, holm, paired
from studies.runs import Place, Run
from studies.study import Arm, Finding, compare
from timm_moe.analysis.paired import BETTER, TOO_FEW, UNCLEAR, WORSE, half_width

RESULTS = ROOT / "studies" / "results"


def figures(**by_arm):
    """Results of arms, each a list of top-1 by seed."""
    return {
        "arms": {
            name: {"figures": {str(seed): {"top1": value} for seed, value in enumerate(values)}}
            for name, values in by_arm.items()
        },
        "cost": {},
    }


def rows_of(section):
    """The cells of each table row, by its first cell; of several tables the first row of a name."""
    rows = {}
    for line in section.splitlines():
        if line.startswith("| "):
            name, *cells = [cell.strip() for cell in line.strip("|").split("|")]
            rows.setdefault(name, cells)
    return rows


def test_the_page_says_what_the_intervals_allow():
    study = small_study(
        Arm("dense", DENSE), Arm("EWA", EWA), pairs=(("EWA", "dense"),), measure=Evaluation()
    )
    nll = {"dense": (2.0, 2.1, 2.2), "EWA": (1.8, 1.9, 2.01)}
    top1 = {"dense": (40.0, 41.0, 42.0), "EWA": (41.0, 40.0, 42.5)}
    arms = {
        arm: {
            "figures": {
                str(seed): {"nll": nll[arm][seed], "top1": top1[arm][seed]} for seed in range(3)
            }
        }
        for arm in ("dense", "EWA")
    }
    versions = {"device": "a chip", "torch": "2"}
    cost = {"dense": (1000.0, True), "ewa": (3000.0, False)}
    costs_of = {
        name: {"0": {"seconds": seconds, "whole": whole, "versions": versions}}
        for name, (seconds, whole) in cost.items()
    }
    results = {"arms": arms, "cost": costs_of}
    section = page.section(Outcome(study, "small", results))
    of_ewa = ["41.17", "+0.17 (-2.42 to +2.75)", "1.9033", "-0.1967 (-0.2110 to -0.1823), better"]
    assert rows_of(section)["EWA"][:4] == of_ewa
    assert (
        "| | top-1 % | top-1 %: difference from dense | NLL | NLL: difference from dense |"
        in section.replace("|  |", "| |")
    )
    detailed = page.detailed(Outcome(study, "small", results))
    assert (
        "| EWA | dense | +0.17 (-2.42 to +2.75) | -0.1967 (-0.2110 to -0.1823), better |"
        in detailed
    )
    assert "ECE" not in section + detailed
    assert [rows_of(detailed)[arm][-1] for arm in ("dense", "EWA")] == ["3", "3"]
    assert "a chip; torch 2." in detailed
    assert (
        "2 trainings, 1 of them resumed after a break; 1.1 hours, not counting what came before "
        "the break." in detailed
    )
    other = replace(study, name="other")  # of the same setting: the same trainings
    assert (
        len(costs_of_studies([Outcome(which, "small", results) for which in (study, other)])) == 2
    )
    recipe = (
        "| EWA | `--model vit_tiny_ewa_moe --model-kwargs share_rate=0.3` | `timm-moe export` |"
    )
    assert recipe in detailed
    assert "Seeds 0, 1, 2." in detailed
    assert recipe not in page.detailed(
        Outcome(study, "small", {"arms": {"dense": arms["dense"]}, "cost": costs_of})
    )
    assert "Half the width of an interval of top-1 %, in the median: 2.59." in detailed


@pytest.fixture
def two_recipes():
    """Two methods under two recipes, each compared with the dense network of its recipe."""
    arms = [
        Arm(
            f"{name} {recipe}",
            replace(training, name=f"{name}-{recipe}"),
            baseline=f"dense {recipe}",
        )
        for recipe in ("weak", "strong")
        for name, training in (("dense", DENSE), ("EWA", EWA))
    ]
    return small_study(*arms, interactions=(("EWA strong", "EWA weak"),))


def test_each_arm_is_compared_with_its_baseline(two_recipes, folder):
    results = figures(
        **{
            "dense weak": [20, 21, 23],
            "EWA weak": [22, 23, 24],
            "dense strong": [30, 33, 32],
            "EWA strong": [30, 32, 34],
        }
    )
    rows = rows_of(page.section(Outcome(two_recipes, "small", results)))
    assert rows[""] == ["compared with", "top-1 %", "difference", "seeds"]
    assert rows["dense strong"][:3] == ["", "31.67", ""]
    assert rows["EWA weak"][:3] == ["dense weak", "23.00", "+1.67 (+0.23 to +3.10), better"]
    assert rows["EWA strong"][:3] == ["dense strong", "32.00", "+0.33 (-3.46 to +4.13)"]
    assert chart.differences(Outcome(two_recipes, "small", results)).keys() == {
        "EWA weak",
        "EWA strong",
    }
    chart.draw(Outcome(two_recipes, "small", results), folder)
    assert (folder / "study-tiny-small.png").exists()


def test_an_interaction_is_a_difference_of_differences_paired_by_seed(two_recipes):
    by_arm = {
        "dense weak": [20, 21, 23],
        "EWA weak": [22, 23, 24],
        "dense strong": [30, 33, 32, 50],  # a seed that the others lack
        "EWA strong": [30, 32, 34, 10],
    }
    outcome = Outcome(two_recipes, "small", figures(**by_arm))
    found = outcome.interaction("EWA strong", "EWA weak", TOP1)
    weak, strong = (
        np.subtract(by_arm[f"EWA {recipe}"][:3], by_arm[f"dense {recipe}"][:3])
        for recipe in ("weak", "strong")
    )
    test = ttest_rel(strong, weak).confidence_interval(0.95)
    assert (found.low, found.mean, found.high) == pytest.approx(
        (test.low, np.mean(strong - weak), test.high)
    )
    assert found.pairs == 3
    cells = rows_of(page.section(outcome))["*EWA weak* to *EWA strong*"]
    assert cells[:3] == [
        "change of the difference",
        "",
        f"{found.mean:+.2f} ({found.low:+.2f} to {found.high:+.2f})",
    ]
    finding = f"The gain is {abs(found.mean):.2f} points smaller."
    compared = compare(["EWA strong"], UNCLEAR, ["EWA weak"])
    assert problems(Finding(finding, compared), outcome) == []
    by_arm.pop("dense weak")
    outcome = Outcome(two_recipes, "small", figures(**by_arm))
    assert outcome.interaction("EWA strong", "EWA weak", TOP1) is None
    assert "change of" not in page.section(outcome)


def test_a_baseline_that_is_not_an_arm_is_refused():
    with pytest.raises(ValueError, match=r"EWA .*dens, .*not an arm"):
        small_study(Arm("dense", DENSE), Arm("EWA", EWA, baseline="dens"))


def test_results_that_are_incomplete_are_shown_as_such(two_recipes):
    size = two_recipes.sizes["small"]
    size = replace(size, seeds=range(3))
    study = replace(two_recipes, sizes={"small": size})
    results = figures(**{"dense weak": [20, 21, 22], "EWA weak": [22, 23], "dense strong": [30]})
    lacking = (
        "**Incomplete:** *EWA weak* (2 of 3 seeds); *dense strong* (1 of 3 seeds); *EWA strong* "
        "(0 of 3 seeds)."
    )
    found = Finding("", compare(["EWA weak"], TOO_FEW, ["dense weak"]))
    told = replace(study, sizes={"small": replace(size, findings=(found,))})
    with_finding = page.section(Outcome(told, "small", results))
    assert rows_of(with_finding)["EWA weak"][-1] == "2"
    for section in (with_finding, page.detailed(Outcome(study, "small", results))):
        assert lacking in section
        assert "EWA strong" not in rows_of(section)
    section = page.section(Outcome(study, "small", results))  # without findings
    assert section.endswith("**Incomplete:** the full page has the figures so far.")
    assert "|" not in section
    whole = figures(**{arm.name: [20, 21, 22] for arm in size.arms})
    assert "Incomplete" not in page.section(Outcome(study, "small", whole))


def test_a_section_whose_findings_compare_no_arms_shows_all(two_recipes):
    size = two_recipes.sizes["small"]
    told = replace(two_recipes, sizes={"small": replace(size, findings=(Finding("So.", ()),))})
    whole = figures(**{arm.name: [20, 21, 22] for arm in size.arms})
    rows = rows_of(page.section(Outcome(told, "small", whole)))
    assert {arm.name for arm in size.arms} <= rows.keys()


def test_a_difference_is_the_paired_interval():
    first, second = {"0": 40.1, "1": 42.3, "2": 39.0}, {"0": 39.0, "1": 40.2, "2": 38.8, "3": 99.0}
    got = paired(first, second)
    test = ttest_rel(list(first.values()), [second[seed] for seed in first]).confidence_interval(
        0.95
    )
    assert (got.low, got.high) == pytest.approx((test.low, test.high))
    assert got.mean == pytest.approx((1.1 + 2.1 + 0.2) / 3)
    assert got.pairs == 3
    assert paired(first, {"9": 1.0}) is None
    assert paired({"0": 1.0}, {"0": 2.0}).verdict(1) == TOO_FEW
    # The same difference twice.
    assert paired({"0": 1.0, "1": 1.5}, {"0": 2.0, "1": 2.5}).verdict(1) == TOO_FEW
    assert paired(first, {"0": 40.0, "1": 42.4, "2": 39.0}).verdict(1) == UNCLEAR


def test_holms_correction_is_that_of_the_textbook():
    """Values of statsmodels' multipletests(..., method="holm")."""
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005}) == pytest.approx(
        {"a": 0.03, "b": 0.06, "c": 0.06, "d": 0.02}
    )
    assert holm({}) == {}


def test_only_secondary_comparisons_are_corrected():
    arms = (Arm("dense", DENSE), Arm("EWA", EWA), Arm("other", replace(EWA, name="other")))
    by_arm = {
        "dense": [40.0, 41.0, 40.5, 40.2],
        "EWA": [41.0, 41.9, 41.6, 41.0],
        "other": [40.3, 41.8, 40.9, 40.5],
    }
    results = figures(**by_arm)
    plain, stated = (
        Outcome(small_study(*arms, pairs=(("other", "EWA"),), primary=primary), "small", results)
        for primary in (None, ("EWA", "dense"))
    )
    top1 = plain.study.measure.figure("")
    assert plain.verdict("other", "dense", top1) == BETTER
    assert plain.corrected("other", "dense", top1) is None
    assert stated.corrected("EWA", "dense", top1) is None
    p = ttest_rel(by_arm["other"], by_arm["dense"]).pvalue
    assert 0.025 < p < 0.05
    for pair in (("other", "dense"), ("dense", "other")):
        assert stated.corrected(*pair, top1) == pytest.approx(2 * p)
        assert stated.verdict(*pair, top1) == UNCLEAR
    assert stated.verdict("EWA", "dense", top1) == BETTER
    assert stated.verdict("dense", "EWA", top1) == WORSE
    assert ", Holm's p = " in page.detailed(stated)
    half = (
        stated.difference("EWA", "dense", top1).high - stated.difference("EWA", "dense", top1).mean
    )
    told = f"Half the width of an interval of top-1 %, of the primary comparison: {half:.2f}."
    assert told in page.detailed(stated)


@pytest.mark.parametrize("measured", [0, 3, 4])
def test_a_comparison_counts_as_1_in_holms_correction_until_all_its_seeds_are_there(measured):
    arms = [Arm("dense", DENSE)]
    arms += [Arm(name, replace(EWA, name=name)) for name in ("EWA", "other", "third")]
    tiny = small_study(*arms, primary=("EWA", "dense"))
    study = replace(tiny, sizes={"small": replace(tiny.sizes["small"], seeds=range(4))})
    by_arm = {
        "dense": [40.0, 41.0, 40.5, 40.2],
        "EWA": [41.0, 41.9, 41.6, 41.0],
        "other": [40.3, 41.8, 40.9, 40.5],
        "third": [45.0, 46.1, 45.5, 45.2][:measured],
    }
    outcome = Outcome(study, "small", figures(**by_arm))
    p = ttest_rel(by_arm["other"], by_arm["dense"]).pvalue
    top1 = study.measure.figure("")
    # The third comparison's own p is the smaller one.
    assert outcome.corrected("other", "dense", top1) == pytest.approx(p if measured == 4 else 2 * p)
    assert (outcome.corrected("third", "dense", top1) < 0.001) == (measured == 4)


def test_no_difference_is_shown_before_all_pairs_of_the_primary_comparison(tmp_path):
    arms = (Arm("dense", DENSE), Arm("EWA", EWA))
    study = small_study(*arms, primary=("EWA", "dense"))
    wanted = len(study.sizes["small"].seeds)
    values = {"dense": 40.0, "EWA": 47.25}
    for number in (wanted - 1, wanted):
        results = figures(**{name: [value] * number for name, value in values.items()})
        outcome = Outcome(study, "small", results)
        texts = (page.section(outcome), page.detailed(outcome))
        assert all(("7.25" in text) == (number == wanted) for text in texts)
        told = f"{number} of {wanted} pairs are trained"
        assert all((told in text) == (number < wanted) for text in texts)


def _without_images(stated):
    """A statement without the images and the device that a run was made with."""
    if isinstance(stated, dict):
        return {
            name: _without_images(part)
            for name, part in stated.items()
            if name not in ("images", "device")
        }
    return (
        [_without_images(part) for part in stated] if isinstance(stated, (list, tuple)) else stated
    )


@pytest.mark.ci
def test_the_pages_follow_from_the_results():
    for outcome in page.stored(RESULTS):
        study, size, stored = outcome.study, outcome.size, outcome.results
        # Else the page would leave it out.
        assert set(stored["arms"]) <= {arm.name for arm in size.arms}
        place = Place(Path("scripts"), Path("runs"), dict.fromkeys(size.images, images.Part(0, "")))
        for training in size.trainings():
            for arm in (run := Run(study, size, training, 0, place)).arms():
                kept = stored["arms"].get(arm.name, {}).get("stated")
                assert kept is None or _without_images(kept) == _without_images(
                    run.statement(arm)
                ), arm.name
    for name, text in page.pages(RESULTS).items():
        assert (ROOT / "docs" / name).read_text() == text


def test_the_routed_share_counts_the_expert_layers_of_an_evaluation():
    size = STUDIES["widenet"].sizes["small"]
    shares = {arm.name: routed_share(arm, size) for arm in size.arms}
    shared_by_all_blocks = shares["WideNet, 2 of 4 experts"]
    assert 0.5 < shared_by_all_blocks < 0.9
    recipe = STUDIES["recipe"].sizes["small"]
    assert routed_share(recipe.arm("dense, strong"), recipe) is None
    ensembles = STUDIES["ensembles"].sizes["small"]
    dropout, pbe = (
        routed_share(ensembles.arm(name), ensembles)
        for name in ("V-MoE, K 1, MC dropout, M 2", "pBE, M 2, K 1")
    )
    assert dropout == pytest.approx(pbe)  # the measure repeats the blocks from the first expert on
    # One network is deployed.
    assert routed_share(recipe.arm("EWA, linear, strong"), recipe) is None
    top_2 = routed_share(recipe.arm("V-MoE, top-2, strong"), recipe)
    # 17 tokens, 6 blocks 96 wide, 2 of them with 8 experts 144 wide of which a token takes 2
    dense, experts, attention = (
        17 * 2 * 96 * 144,
        17 * (2 * 2 * 96 * 144 + 8 * 96),
        17 * 4 * 96**2 + 2 * 17 * 17 * 96,
    )
    patches, head = 16 * 3 * 64 * 96, 1000 * 96
    assert top_2 == pytest.approx(
        2 * experts / (6 * attention + 4 * dense + 2 * experts + patches + head), rel=1e-6
    )


@pytest.mark.parametrize(
    ("seeds", "label"), [(1, "top-1 %, difference from dense, one seed"), (3, "95 % interval")]
)
def test_each_study_with_a_difference_has_a_chart(folder, monkeypatch, seeds, label):
    from matplotlib import axes

    labels, bars = [], []
    monkeypatch.setattr(axes.Axes, "set_xlabel", lambda _, text: labels.append(text))
    errorbar = axes.Axes.errorbar
    monkeypatch.setattr(
        axes.Axes, "errorbar", lambda *a, **k: bars.append(k["xerr"]) or errorbar(*a, **k)
    )
    study = small_study(Arm("dense", DENSE), Arm("EWA", EWA), Arm("not measured", EWA))
    results = figures(dense=range(seeds), EWA=[2 * seed for seed in range(seeds)])
    chart.draw(
        Outcome(study, "small", {**results, "arms": {"dense": results["arms"]["dense"]}}), folder
    )
    assert not list(folder.glob("*.png"))
    chart.draw(Outcome(study, "small", results), folder)
    assert Image.open(folder / "study-tiny-small.png").size[0] > 300
    assert labels[0].endswith(label)
    assert bars == [
        [pytest.approx(half_width(range(seeds)) if seeds > 1 else float("nan"), nan_ok=True)]
    ]


def test_trainings_that_are_evaluated_on_their_way_have_curves(folder):
    study = small_study(Arm("dense", DENSE), Arm("dense, EMA", DENSE), Arm("EWA", EWA))
    results = figures(**{"dense": [20, 21], "dense, EMA": [20, 21], "EWA": [21, 22]})

    def cost(*top1):
        curve = [
            dict(epoch=10 * n + 9, train_loss=3.0 - n, eval_loss=2.0, eval_top1=top)
            for n, top in enumerate(top1)
        ]
        return {"curve": curve}

    results["cost"] = {
        "dense": {"0": cost(10, 20), "1": cost(14, 22, 25)},
        "ewa": {"0": cost(), "1": {}},
    }
    lines = chart.curves(Outcome(study, "small", results))
    assert list(lines) == ["dense"]  # not "dense, EMA", which comes from the same training
    with_ema = small_study(Arm("dense", replace(DENSE, options=("--model-ema",))))
    assert list(chart.curves(Outcome(with_ema, "small", results))) == ["dense, its EMA"]
    assert [(epoch, entry["eval_top1"]) for epoch, entry in lines["dense"].items()] == [
        (9, 12),
        (19, 21),
    ]
    chart.draw(Outcome(study, "small", results), folder)
    assert Image.open(folder / "study-tiny-small-curves.png").size[0] > 300
    assert "![Curves](images/study-tiny-small-curves.png)" in page.section(
        Outcome(study, "small", results)
    )
    results["cost"] = {}
    assert "Curves" not in page.section(Outcome(study, "small", results))


def is_rounded(cell, values, decimals):
    """Tell if a cell gives a difference and its interval.

    A value halfway between two may be rounded to either.
    """
    number = rf"([+-]\d+\.\d{{{decimals}}})"
    shown = re.match(rf"{number} \({number} to {number}\)", cell)
    return shown is not None and np.allclose(
        [*map(float, shown.groups())], values, rtol=0, atol=0.5 * 10**-decimals + 1e-9
    )


def test_the_intervals_of_the_pages_are_those_of_the_results():
    """Computed again, by other code, from the files."""
    compared = 0
    for outcome in page.stored(RESULTS):
        study, size, stored = outcome.study, outcome.size, outcome.results
        whole = (ROOT / "docs" / "generated" / "studies.md").read_text()
        (section,) = re.findall(
            rf"^## {re.escape(study.title)}$.*?(?=^## )", whole, re.DOTALL | re.MULTILINE
        )
        rows = rows_of(section)
        if outcome.is_primary_pending():
            assert rows == {}
            continue
        for name, arm in stored["arms"].items():
            baseline = stored["arms"][size.baseline_of(name)]["figures"]
            for figure in study.measure.figures:
                both = [
                    seed
                    for seed in arm["figures"]
                    if figure.key in arm["figures"][seed] and seed in baseline
                ]
                if (
                    len(both) < 2
                    or arm["figures"] is baseline
                    or any(figure.key not in baseline[s] for s in both)
                ):
                    continue
                mine, other = (
                    [of[seed][figure.key] for seed in both] for of in (arm["figures"], baseline)
                )
                test = ttest_rel(mine, other).confidence_interval(0.95)
                cells = (np.mean(mine) - np.mean(other), test.low, test.high)
                (cell,) = [cell for cell in rows[name] if is_rounded(cell, cells, figure.decimals)]
                verdict = re.search("(better|worse)?$", cell)[0]
                is_clear = len(both) > 2 and figure.sign and not test.low <= 0 <= test.high
                if (p := outcome.corrected(name, size.baseline_of(name), figure)) is not None:
                    is_clear = is_clear and p <= 0.05
                assert verdict == (
                    ("better" if cells[0] * figure.sign > 0 else "worse") if is_clear else ""
                )
                compared += 1
    assert compared > 70
