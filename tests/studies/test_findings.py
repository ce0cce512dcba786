"""Sentences about the results agree with the stored figures.

They stand in the catalogue and in other documents.
"""

import re
import sys
from dataclasses import replace
from statistics import mean

import numpy as np
import pytest
from common import ROOT
from PIL import Image
from scipy.optimize import brentq
from scipy.stats import chi2, f, levene, norm, t, ttest_1samp, ttest_ind
from tiny_study import DENSE, EWA, small_study

from studies import overview, page, summary
from studies.__main__ import main
from studies.catalogue import STUDIES, adamw, twenty
from studies.catalogue.ensembles import PBE, RIVALS
from studies.catalogue.recipe import FUSED, RECIPES, to_dense
from studies.catalogue.routers import BELOW, EQUAL
from studies.catalogue.students import DISTILLED, LONG
from studies.findings import NUMBER, problems
from studies.measure import Evaluation
from studies.operations import operations
from studies.outcome import Outcome, holm
from studies.results import read
from studies.study import Arm, Compared, Finding, compare
from timm_moe.analysis.info import byte_text, model_info
from timm_moe.analysis.paired import BETTER, TOO_FEW, UNCLEAR, WORSE

RESULTS = ROOT / "studies" / "results"
HALF = "dense, initial weights / 2 in the converted networks"
HALF_AND_DROPOUT = "dense, initial weights / 2, dropout 0.1"
LINEAR = compare(["linear"], BETTER, ["dense"])
STUDENTS = compare(DISTILLED.values(), WORSE, [LONG])
EWA_WORSE = compare(["EWA, linear"], WORSE, ["dense"])
STRONGER = compare(["dense, strong"], BETTER, ["dense, weak"])
AS_DENSE = compare(["naive MoE", "MoE, Early EWA"], UNCLEAR, ["dense"])
V_MOE = (
    *to_dense("V-MoE, top-2", WORSE, "weak", "medium"),
    *to_dense("V-MoE, top-2", UNCLEAR, "strong"),
)
V_MOE_STRONG = (
    *to_dense("V-MoE, top-2", BETTER, "strong", figure="ece"),
    *to_dense("V-MoE, top-2", WORSE, "strong", figure="nll"),
    *to_dense("V-MoE, top-2", WORSE, "strong", figure="corrupted_top1"),
)
V_MOE_WEAK = (
    *to_dense("V-MoE, top-2", WORSE, "weak", "medium", figure="nll"),
    *to_dense("V-MoE, top-2", WORSE, "weak", "medium", figure="ece"),
)
ECE = (
    *to_dense("EWA, linear", BETTER, "weak", "medium", figure="ece"),
    *to_dense("EWA, linear", WORSE, "strong", figure="ece"),
)
AS_A_VIT = tuple(Compared(PBE, UNCLEAR, "ViT", figure) for figure in ("top1", "nll", "ece"))

EWA_TWENTY = compare(["EWA, linear"], WORSE, ["dense"])
NLL_TWENTY = compare(["EWA, linear"], WORSE, ["dense"], "nll")
ECE_TWENTY = compare(["EWA, linear"], WORSE, ["dense"], "ece")

LONG_AND_FEW = (
    *LINEAR,
    *compare([HALF_AND_DROPOUT], BETTER, ["dense"]),
    *compare(["linear"], UNCLEAR, [HALF_AND_DROPOUT]),
)
DIFFERING = compare([twenty.RARE], UNCLEAR, ["dense"])
LONGER = compare(["dense, 160 epochs"], BETTER, ["dense"])

EWA_ADAMW = compare(["EWA, linear"], UNCLEAR, ["dense"])
STRONG_ADAMW = compare(["dense, strong recipe"], WORSE, ["dense"], "nll")

#: Sentences about the results outside studies/catalogue, with their comparisons, by file and study.
SAID = {
    ("docs/results.md", "twenty"): {
        "EWA is 0.37 points worse than dense training in the largest study, of twenty seeds,": (
            EWA_TWENTY
        ),
        "over twenty seeds its NLL is 0.0105 worse there and its ECE 0.0038.": (
            *NLL_TWENTY,
            *ECE_TWENTY,
        ),
    },
    ("README.md", "adamw"): {
        "its NLL was 0.1760 worse,": STRONG_ADAMW,
        "fine-tuning by AdamW, a primary comparison too, shows no clear difference, +0.02 "
        "(-0.54 to +0.58).": EWA_ADAMW,
    },
    ("docs/ewa.md", "adamw"): {
        "nor with AdamW (-0.54 to +0.58).": EWA_ADAMW,
    },
    ("docs/pays.md", "adamw"): {
        "the strong recipe had a likelihood that was 0.1760 worse.": STRONG_ADAMW,
    },
    ("docs/vmoe.md", "adamw"): {
        "the NLL with `renorm` was 0.0132 better than with the default;": compare(
            ["V-MoE, gates renormalised"], BETTER, ["V-MoE, gates as they are"], "nll"
        ),
    },
    ("docs/results.md", "recipe"): {
        "EWA's ECE is 0.0227 and 0.0246 better there, and 0.0075 worse under the strong one;": ECE,
        "V-MoE under the strong one: the ECE is 0.0099 better, the NLL 0.0264 worse, and it is "
        "0.36 points worse on corrupted images.": V_MOE_STRONG,
        "Under the weak and the medium one its NLL is 0.5811 and 0.2005 worse, its ECE 0.0653 and "
        "0.0182.": V_MOE_WEAK,
    },
    ("docs/results.md", "routers"): {
        "Soft MoE is 1.93 points better than Expert Choice, over three seeds.": compare(
            ["Soft MoE of 8"], BETTER, ["Expert Choice of 8"]
        ),
    },
    ("docs/soft_moe.md", "routers"): {
        "over three seeds, it was 1.93 points of top-1 accuracy better than Expert Choice. Its "
        "1.63 points over top-1 routing are not clear after Holm's correction.": compare(
            ["Soft MoE of 8"], BETTER, ["Expert Choice of 8", "top-1 of 8"]
        ),
        "In the study it was 2.17 points worse than dense training, which is not clear after "
        "Holm's correction.": compare(["Expert Choice of 8"], WORSE, ["dense"]),
    },
    ("docs/vmoe.md", "routers"): {
        "with 8 experts was 1.86 points worse over three seeds, which is not clear after Holm's "
        "correction over six routers.": compare(["top-1 of 8"], WORSE, ["dense"]),
    },
    ("docs/gates.md", "routers"): {
        "Fine-grained experts were 1.39 to 2.25 points of top-1 accuracy worse than dense training "
        "over three seeds, which is not clear after Holm's correction.": compare(
            ["top-2 of 16 halves", "top-3 of 32 quarters and a shared one"], WORSE, ["dense"]
        ),
    },
    ("docs/pays.md", "routers"): {
        "Four of six were 1.39 to 2.25 points worse over three seeds, none clearly after Holm's "
        "correction.": (*compare(BELOW, WORSE, ["dense"]), *compare(EQUAL, UNCLEAR, ["dense"])),
    },
    ("docs/vimoe.md", "vimoe"): {
        "were 0.43 points of top-1 accuracy worse over three seeds, which is not clear after "
        "Holm's correction.": compare(
            ["no shared expert, in every block"], WORSE, ["dense, trained on"]
        ),
    },
    ("docs/ones.md", "students"): {
        "It was 0.71 to 2.64 points of top-1 accuracy better than the five distilled students that "
        "begin from the teacher. Over three seeds two of the five differences are clear after "
        "Holm's correction.": STUDENTS,
    },
    ("docs/pays.md", "recipe"): {
        "0.0774 better under the medium recipe; 0.1374 better under the weak one,": to_dense(
            "EWA, linear", BETTER, "weak", "medium", figure="nll"
        ),
        "Its ECE was 0.0075 worse there over five seeds,": to_dense(
            "EWA, linear", WORSE, "strong", figure="ece"
        ),
        "Fused experts (ExFusion) gained likelihood too, 0.0896 and 0.0462 under the weak and the "
        "medium recipe, and not clearly under the strong one.": (
            *to_dense(FUSED, BETTER, "weak", "medium", figure="nll"),
            *to_dense(FUSED, UNCLEAR, "strong", figure="nll"),
        ),
        "EWA showed no clear difference in likelihood from them.": tuple(
            Compared(f"EWA, linear, {recipe}", UNCLEAR, f"{FUSED}, {recipe}", "nll")
            for recipe in ("weak", "medium")
        ),
    },
    ("docs/pays.md", "confirmation"): {
        "gained 1.15 points over dense training and EWA gained 0.68, which is not clear after "
        "Holm's correction. Between the two there was no clear difference.": LONG_AND_FEW,
    },
    ("README.md", "twenty"): {
        "of 20 seeds, EWA was 0.37 points less accurate (95 % interval 0.09 to 0.65;": EWA_TWENTY,
        "over 20 seeds: 0.37 points worse than dense training": EWA_TWENTY,
        "experts that differ more, since they are averaged at every tenth step, show no clear "
        "difference, -0.26 (-0.60 to +0.09).": DIFFERING,
        "and a third more epochs of it 1.51 points, both from scratch.": LONGER,
    },
    ("README.md", "scratch"): {
        "EWA was 0.31 worse in one (30 epochs),": EWA_WORSE,
    },
    ("README.md", "confirmation"): {
        "0.68 better in one (long training on 20 classes),": LINEAR,
        "In the one study whose interval favoured EWA (+0.68, not clear after Holm's correction), "
        "there was no clear difference between EWA and dense training with this dropout.": (
            *LINEAR,
            *compare(["linear"], UNCLEAR, ["dense, dropout 0.1"]),
        ),
    },
    ("README.md", "finetuning"): {
        "four show no clear difference: three trainings of 120 epochs, and fine-tuning by SGD.": (
            compare(["EWA, linear"], UNCLEAR, ["dense"])
        ),
    },
    ("README.md", "recipe"): {
        "4.00 points over the weak one,": STRONGER,
        "four show no clear difference: three trainings of 120 epochs,": to_dense(
            "EWA, linear", UNCLEAR, *RECIPES
        ),
        "2.08 points worse under the weak recipe, 1.99 under the medium one, without a clear "
        "difference in accuracy under the strong one.": V_MOE,
        "Its likelihood (NLL) is worse under all three, by 0.0264 to 0.5811.": to_dense(
            "V-MoE, top-2", WORSE, *RECIPES, figure="nll"
        ),
    },
    ("README.md", "routers"): {
        "top-1 of 8, is 1.86 points worse than dense training, **Expert Choice** and "
        "**fine-grained experts** 1.39 to 2.25; after Holm's correction over the six none of this "
        "is clear. **Soft MoE** and **sigmoid gates** show no clear difference.": (
            *compare(EQUAL, UNCLEAR, ["dense"]),
            *compare(BELOW, WORSE, ["dense"]),
        ),
    },
    ("README.md", "routing"): {
        "Switch with 4 experts shows none after 30 epochs, with or without averaging.": AS_DENSE,
    },
    ("README.md", "vimoe"): {
        "experts in every block are 0.43 points worse without a shared expert, over three seeds, "
        "which is not clear after Holm's correction. With one they show no clear difference,": (
            *compare(["no shared expert, in every block"], WORSE, ["dense, trained on"]),
            *compare(["shared expert, in every block"], UNCLEAR, ["dense, trained on"]),
        ),
    },
    ("README.md", "ensembles"): {
        "over three seeds its ECE is 0.0233 to 0.0427 better than that of the V-MoE and of other "
        "ensembles made from it.": compare([PBE], BETTER, RIVALS, "ece"),
        "and shows no clear difference from a dense ViT.": AS_A_VIT,
    },
    ("README.md", "widenet"): {
        "**WideNet** shows no clear difference from a dense ViT, in a wide interval.": compare(
            ["WideNet, 2 of 4 experts"], UNCLEAR, ["dense, blocks of their own"]
        ),
    },
    ("README.md", "students"): {
        "over three seeds, the network trained alone is 0.71 to 2.64 points better than the five "
        "distilled students that begin from the teacher, after Holm's correction clearly than two "
        "of them.": STUDENTS,
    },
    ("docs/ewa.md", "recipe"): {
        "the NLL was 0.1374 better under a weak one (0.0218 to 0.2529),": to_dense(
            "EWA, linear", BETTER, "weak", figure="nll"
        ),
        "and the ECE 0.0227 (0.0096 to 0.0359).": to_dense(
            "EWA, linear", BETTER, "weak", figure="ece"
        ),
        "Over five seeds there was no clear difference under three recipes (-0.91 to +1.37 in "
        "all).": to_dense("EWA, linear", UNCLEAR, *RECIPES),
        "A stronger recipe gained 4.00 points (3.34 to 4.66).": STRONGER,
        "0.0075 over five (0.0029 to 0.0121),": to_dense(
            "EWA, linear", WORSE, "strong", figure="ece"
        ),
    },
    ("docs/ewa.md", "twenty"): {
        "in our largest test, of 20 seeds, EWA was 0.37 points worse than its dense twin;": (
            EWA_TWENTY
        ),
        "Experts that differ more, averaged at every tenth step, showed no clear difference over "
        "the 20 seeds, -0.26 (-0.60 to +0.09).": DIFFERING,
        "**Accuracy**: 0.37 points worse over 20 seeds (0.09 to 0.65;": EWA_TWENTY,
        "dense training for a third more epochs gained 1.51 points,": LONGER,
        "the ECE was 0.0038 worse over 20 seeds (0.0019 to 0.0057)": ECE_TWENTY,
        "the NLL 0.0105 worse over 20 (0.0045 to 0.0165).": NLL_TWENTY,
    },
    ("docs/pays.md", "twenty"): {
        "EWA was 0.37 points worse than dense training (0.09 to 0.65).": EWA_TWENTY,
        "averaged at every tenth step, showed no clear difference from dense training over the "
        "same twenty seeds, -0.26 (-0.60 to +0.09).": DIFFERING,
        "where it was 0.0105 worse over twenty seeds.": NLL_TWENTY,
        "and 0.0038 over twenty.": ECE_TWENTY,
        "SWA of the dense model had an NLL that was 0.0112 better than dense training's, and no "
        "clear difference in accuracy.": (
            *compare(("dense, SWA of the last 30 epochs",), BETTER, ("dense",), "nll"),
            *compare(("dense, SWA of the last 30 epochs",), UNCLEAR, ("dense",)),
        ),
        "dense training for 160 epochs in place of 120 gained 1.51 points (1.15 to 1.87), for a "
        "third more time.": LONGER,
    },
    ("docs/train.md", "twenty"): {
        "Over 20 seeds EWA was 0.37 points worse than dense training under a strong recipe (0.09 "
        "to 0.65;": EWA_TWENTY,
    },
    ("docs/ewa.md", "scratch"): {
        "0.31 points worse after 30 epochs (0.11 to 0.50).": EWA_WORSE,
    },
    ("docs/ewa.md", "finetuning"): {
        "**Fine-tuning**: no clear difference from dense training with SGD,": compare(
            ["EWA, linear"], UNCLEAR, ["dense"]
        ),
    },
    ("docs/ewa.md", "confirmation"): {
        "0.68 points better with 4,000 images of 20 classes (0.03 to 1.33). EWA's gain is not "
        "clear after Holm's correction. There dense training with dropout and smaller initial "
        "weights gave 1.15 (0.61 to 1.68), with no clear difference from EWA.": LONG_AND_FEW,
        "with dropout added, that training was 1.15 points better than plain dense training. EWA "
        "was 0.68 points better than plain dense training, not clearly after Holm's correction, "
        "with no clear difference from the one with dropout": LONG_AND_FEW,
    },
}

#: Numbers of the README that are no results.
NO_RESULTS = (
    r"version 0\.1\.0",
    r"Apache-2\.0",
    r"Python 3\.10, timm 1\.0\.28, torch 2\.10 or newer \(macOS: 2\.14\)",
    r"of timm 1\.0\.31",
    r"torch 2\.11",
    r"quartiles 1\.12 to 1\.36 and 1\.46 to 1\.84",
    r"-0\.23 \(-0\.50 to \+0\.04\)",  # test_with_the_five_earlier_pairs_...
    r"0\.98 to 1\.08",  # test_what_a_step_with_ewa_costs_...
    r"1\.37 GB",
    r"1\.94 GB",
    r"EWA fine-tuned \+0\.45",
    r"took 17\.8 ms instead of 27\.9, those of EWA 19\.9 instead of 36\.2",  # tests/benchmarks
)
#: The papers' gains in the README's table, by model: the row of the overview that has them, or the
#: figures of another model than the study's.
PAPERS = {
    "vit_small_ewa_moe": 74.33 - 72.61,  # EWA, table 2, ViT-S on CIFAR-100
    "vit_small_moe": ("routing", "naive MoE"),
    "vmoe_b16": 83.24 - 81.35,  # pBE, table 6, B/32 on ImageNet with K = 2, as the model
    "vimoe_s14_shared": ("vimoe", "shared expert, in the last two blocks"),
    "vmoe_pbe_b32": ("ensembles", PBE),
}


def stored(name):
    return Outcome(STUDIES[name], "small", read(RESULTS / f"{name}-small.json"))


@pytest.mark.parametrize("outcome", page.stored(RESULTS), ids=lambda outcome: outcome.study.name)
def test_findings_are_what_the_results_say(outcome):
    for finding in outcome.size.findings:
        assert problems(finding, outcome) == []


@pytest.mark.parametrize(("file", "name"), SAID)
def test_what_other_documents_say_is_what_the_results_say(file, name):
    document = in_one_line(file)
    for text, compared in SAID[file, name].items():
        assert text in document
        assert problems(Finding(text, compared), stored(name)) == []


def findings_of(name):
    """Return the findings of a study in one line."""
    sizes = STUDIES[name].sizes.values()
    return " ".join(finding.text for size in sizes for finding in size.findings)


def in_one_line(file):
    """Return a document in one line, without the marks of a quotation."""
    return " ".join(re.sub(r"^> ?", "", (ROOT / file).read_text(), flags=re.MULTILINE).split())


def prose(file):
    """Return a document in one line, without code, tables and the addresses of its links."""
    text = re.sub(r"^```.*?^```", "", (ROOT / file).read_text(), flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^> ?|^\|.*|`[^`]*`|\]\([^)]*\)", "", text, flags=re.MULTILINE)
    return " ".join(text.split())


def test_every_figure_of_the_readme_is_one_of_the_results():
    """A number with decimals is in a sentence of SAID, or no result: a version, a size, a cost."""
    text = prose("README.md")
    for (file, _), sentences in SAID.items():
        for sentence in sentences if file == "README.md" else ():
            text = text.replace(sentence, "")
    for pattern in NO_RESULTS:
        text, number = re.subn(pattern, "", text)
        assert number, f"{pattern} is not in the README any more"
    assert NUMBER.findall(text) == []


def test_the_readme_names_each_method_that_is_better_or_worse_than_dense_training():
    """A row "no clear difference" of one study must not hide another study's verdict."""
    said = {
        (study, compared.first, compared.verdict)
        for (file, study), sentences in SAID.items()
        if file == "README.md"
        for comparisons in sentences.values()
        for compared in comparisons
        if compared.figure in ("", "top1")
    }
    clear = {
        (row.study, row.arm, verdict)
        for row in overview.ROWS
        if (verdict := row.difference(stored(row.study)).verdict(1)) != UNCLEAR
    }
    assert len(clear) > 5
    assert clear - said == set()


def test_no_method_is_clearly_better_than_dense_training():
    """The README says so: one is better before Holm's correction, and none after it."""
    better = [
        row for row in overview.ROWS if row.difference(stored(row.study)).verdict(1) == BETTER
    ]
    # It is one of EWA's six, of which no difference stays clear.
    assert [(row.study, row.arm) for row in better] == [("confirmation", "linear")]
    assert "no method was clearly more accurate than dense training." in in_one_line("README.md")


@pytest.mark.ci
def test_the_costs_and_the_papers_gains_in_the_readme_are_those_of_the_models():
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (ROOT / "README.md").read_text().splitlines()
        if re.match(r"\| [^|]+ \| `\w+` \| \d", line)
    ]
    assert len(rows) == 6
    gains = {(row.study, row.arm): row.paper() for row in overview.ROWS}
    for _, name, total, deployed, memory, _, _, paper in rows:
        info = model_info(name.strip("`"), num_classes=20)
        kept = info.total if info.exported is None else info.exported
        sizes = [f"{number / 1e6:.1f} M" for number in (info.total, kept)]
        assert [total, deployed, memory] == [*sizes, byte_text(16 * info.total)]
        place = PAPERS.get(name.strip("`"))
        assert (place is None) == (not paper)
        if place:
            gain = gains[place] if isinstance(place, tuple) else place
            assert float(paper.partition(";")[0]) == pytest.approx(gain, abs=0.006)
    text = in_one_line("README.md")
    assert f"fine-tuned {gains['finetuning', 'EWA, linear']:+.2f}" in text
    for name in ("vit_small_patch16_224", "vit_base_patch16_224"):
        assert byte_text(16 * model_info(name, num_classes=20).total) in text


def test_the_recipe_for_fine_tuning_is_one():
    """On all pages, in the README's trial, and in the study of it."""
    pages = [file.read_text() for file in (ROOT / "docs").glob("*.md")]
    stated = {found for page_ in pages for found in re.findall(r"^FINETUNE=\((.*)\)$", page_, re.M)}
    (recipe,) = stated
    assert recipe.split()[: len(adamw.RECIPE)] == list(adamw.RECIPE)
    assert recipe.split()[len(adamw.RECIPE) :] == ["--warmup-epochs", "2"]
    (ours,) = re.findall(r"^RECIPE=\((.*?)\)$", (ROOT / "README.md").read_text(), re.M | re.S)
    (strong,) = re.findall(r"^STRONG=\((.*?)\)$", (ROOT / "README.md").read_text(), re.M | re.S)
    for option in re.findall(r"-\S+ [^-]\S*", recipe):
        assert option in " ".join(ours.split())
    options = re.findall(r"--[a-z-]+(?: [^-]\S*)+", " ".join(RECIPES["strong"]))
    kept = [option for option in options if "color-jitter" not in option]
    assert sorted(kept) == sorted(re.findall(r"--[a-z-]+(?: [^-]\S*)+", " ".join(strong.split())))


def test_the_picture_of_all_methods(tmp_path):
    by_paper = {(row.study, row.arm): row.paper() for row in overview.ROWS}
    assert by_paper["scratch", "EWA, linear"] == pytest.approx(75.20 - 73.93)
    assert by_paper["vimoe", "shared expert, in the last two blocks"] == pytest.approx(0.3)
    assert by_paper["ensembles", PBE] == pytest.approx(83.30 - 81.35)
    assert by_paper["recipe", "EWA, linear, strong"] is None
    overview.draw([stored("scratch"), stored("routers")], tmp_path / "methods.png")
    assert Image.open(tmp_path / "methods.png").size[0] > 600


@pytest.mark.parametrize("name", ["twenty", "routers"])
def test_what_is_not_finished_is_in_no_picture_and_no_table(name, tmp_path):
    """A primary comparison without all its pairs, and arms that share no seed."""
    outcome = stored(name)
    for number, arm in enumerate(outcome.results["arms"].values()):
        kept = list(arm["figures"].items())
        arm["figures"] = dict(kept[:6] if name == "twenty" else [kept[min(number, 1)]])
    overview.draw([outcome], tmp_path / "methods.png")
    assert not (tmp_path / "methods.png").exists()
    assert summary.summary([outcome]) == []


def test_a_row_of_the_table_needs_two_pairs_for_each_comparison():
    """One pair has no p-value, and Holm's correction would not know what to do with it."""
    outcome = stored("routers")
    arm = outcome.results["arms"]["top-1 of 8"]
    arm["figures"] = dict(list(arm["figures"].items())[:1])
    assert summary.summary([outcome]) == []


def test_the_ema_of_dense_training_under_weak_recipes_is_past_its_best():
    """A finding of the study recipe says so in words; the EMA's curves are in its results."""
    size = STUDIES["recipe"].sizes["small"]
    assert all("--model-ema" in size.arm(f"dense, {name}").training.options for name in RECIPES)
    cost = read(RESULTS / "recipe-small.json")["cost"]
    for recipe in ("weak", "medium", "strong"):
        assert len(cost[f"{recipe}-dense"]) == 5
        curves = [
            {entry["epoch"] + 1: entry["eval_top1"] for entry in of_seed["curve"]}
            for of_seed in cost[f"{recipe}-dense"].values()
        ]
        lost = mean(curve[60] - curve[120] for curve in curves)
        assert lost < -2 if recipe == "strong" else 1 < lost < 2


def test_the_ema_at_half_of_the_epochs_is_better_than_ewa_at_the_end():
    """docs/pays.md and docs/ewa.md say so of the weak recipe."""
    results = read(RESULTS / "recipe-small.json")
    ewa = results["arms"]["EWA, linear, weak"]["figures"]
    better = []
    for seed, of_seed in results["cost"]["weak-dense"].items():
        (half,) = [entry for entry in of_seed["curve"] if entry["epoch"] == 59]
        assert half["eval_loss"] < ewa[seed]["nll"] - 0.5
        better.append(half["eval_top1"] - ewa[seed]["top1"])
    assert round(mean(better), 1) == 1.8


def test_no_difference_of_ewa_stays_clear_over_its_six_comparisons_with_dense_training():
    """README, docs/results.md and docs/ewa.md say so."""
    pairs = [
        ("scratch", "EWA, linear", "dense"),
        ("confirmation", "linear", "dense"),
        ("finetuning", "EWA, linear", "dense"),
        *(("recipe", f"EWA, linear, {recipe}", f"dense, {recipe}") for recipe in RECIPES),
    ]
    found = {
        pair: stored(pair[0]).difference(*pair[1:], stored(pair[0]).study.measure.figure("")).p
        for pair in pairs
    }
    assert sum(p < 0.05 for p in found.values()) == 2
    assert min(holm(found).values()) > 0.05


def test_few_pairs_of_twenty_favour_ewa():
    """A finding and docs/pays.md say so: 4 of 20."""
    outcome = stored("twenty")
    top1 = outcome.study.measure.figure("")
    ewa, dense = outcome.values("EWA, linear", top1), outcome.values("dense", top1)
    assert ewa.keys() == dense.keys()
    favourable = sum(ewa[seed] > dense[seed] for seed in ewa)
    assert f"{favourable} of the {len(ewa)} pairs favour EWA." in findings_of("twenty")
    assert f"Of the {len(ewa)} pairs, {favourable} favoured EWA." in in_one_line("docs/pays.md")


def test_the_pilot_chose_the_form_with_the_highest_mean():
    """A finding of the pilot says so, and study twenty trains this form."""
    means = {
        arm: by_seed("twenty-pilot", arm).mean() for arm in stored("twenty-pilot").results["arms"]
    }
    assert len(means) == 13
    chosen = max(means, key=means.get)
    said = findings_of("twenty-pilot")
    assert f"{means[chosen]:.2f} %, and dense training {means['dense']:.2f} %." in said
    lower = sum(top1 < means["dense"] for top1 in means.values())
    assert f"{lower} of the 12 forms have a lower mean" in said
    trainings = [
        stored(study).size.arm(arm).training
        for study, arm in (("twenty-pilot", chosen), ("twenty", twenty.RARE))
    ]
    assert trainings[0] == trainings[1]


def test_the_averaging_alone_decides_how_far_experts_are_apart():
    """A finding of the pilot says so, of the middle of the trainings and of their end."""
    apart, at_the_end = {}, []
    for training, seeds in stored("twenty-pilot").results["spread"].items():
        for epochs in seeds.values():
            apart.setdefault("0.3-linear" in training, []).append(epochs["60"])
            at_the_end.append(epochs["120"])
    (linear,) = {f"{distance:.2f}" for distance in apart[True]}
    assert (
        f"is {min(apart[False]):.2f} to {max(apart[False]):.2f} where they are averaged rarely or "
        f"a little, and {linear} at 0.3 linear."
    ) in findings_of("twenty-pilot")
    assert len(at_the_end) == 24
    assert max(at_the_end) < 0.001


def test_the_experts_of_the_chosen_form_differ_in_study_twenty_too():
    """Its finding says so, of the trainings whose experts.json was kept."""
    (seeds,) = stored("twenty").results["spread"].values()
    halfway = [epochs["60"] for epochs in seeds.values()]
    assert (
        f"distance from their mean is {np.mean(halfway):.2f} of it, over the {len(seeds)} trainings"
    ) in findings_of("twenty")
    assert all(epochs["120"] < 0.001 for epochs in seeds.values())


def by_seed(study, arm, figure="top1"):
    """The figure of an arm, a seed after the other."""
    figures = stored(study).results["arms"][arm]["figures"]
    return np.array([figures[seed][figure] for seed in sorted(figures, key=int)])


def test_with_the_five_earlier_pairs_the_primary_comparison_is_no_longer_clear():
    """A finding of study twenty says so, and how far the two studies lie apart."""
    late = by_seed("twenty", "EWA, linear") - by_seed("twenty", "dense")
    early = by_seed("recipe", "EWA, linear, strong") - by_seed("recipe", "dense, strong")
    assert STUDIES["twenty"].sizes["small"].images == STUDIES["recipe"].sizes["small"].images
    assert (len(late), len(early)) == (20, 5)
    alone, together = ttest_1samp(early, 0), ttest_1samp(np.concatenate([late, early]), 0)
    low, high = alone.confidence_interval(0.95)
    assert f"had {early.mean():+.2f} ({low:+.2f} to {high:+.2f})." in findings_of("twenty")
    low, high = together.confidence_interval(0.95)
    pooled = np.mean([*late, *early])
    student, welch = (ttest_ind(late, early, equal_var=equal).pvalue for equal in (True, False))
    assert (
        f"{pooled:+.2f} over 25 pairs ({low:+.2f} to {high:+.2f}; p = {together.pvalue:.2f})."
    ) in findings_of("twenty")
    assert (
        f"The two studies lie {early.mean() - late.mean():.1f} points apart (p = {student:.2f} by "
        f"Student's test, {welch:.2f} by Welch's)."
    ) in findings_of("twenty")
    text = f"{pooled:+.2f} ({low:+.2f} to {high:+.2f})"
    for file in ("README.md", "docs/pays.md", "docs/ewa.md"):
        assert text in in_one_line(file)
    assert f"| the same with the five earlier pairs | {text} | 25 | no |" in in_one_line(
        "docs/results.md"
    )


def test_the_seeds_of_ewa_spread_less_and_their_pairing_removed_no_noise():
    """A finding of study twenty says so."""
    ewa, dense = by_seed("twenty", "EWA, linear"), by_seed("twenty", "dense")
    by_f = 2 * f.sf(dense.var(ddof=1) / ewa.var(ddof=1), 19, 19)
    by_welch = ttest_ind(ewa, dense, equal_var=False).pvalue
    assert (
        f"EWA's top-1 has a standard deviation of {ewa.std(ddof=1):.2f} points, that of dense "
        f"training {dense.std(ddof=1):.2f} (p = {by_f:.3f} by the F test, "
        f"{levene(ewa, dense).pvalue:.2f} by Levene's). The pairs correlate by "
        f"{np.corrcoef(ewa, dense)[0, 1]:.2f}, so the pairing removed no noise: p is "
        f"{ttest_1samp(ewa - dense, 0).pvalue:.4f} paired, and {by_welch:.4f} by Welch's test."
    ) in findings_of("twenty")


def test_what_a_step_with_ewa_costs_is_what_was_measured():
    """A finding of study twenty, README, docs/pays.md and docs/ewa.md say so."""
    on_cpus = step_ratios("cpu-*", "steps float32 neutral")
    (eager,) = step_ratios("cuda-*", "modes", "ViT-S/16, bfloat16, eager")
    (graphs,) = step_ratios("cuda-*", "modes", "ViT-S/16, bfloat16, reduce-overhead")
    readme = in_one_line("README.md")
    assert f"[{min(on_cpus):.2f} to {max(on_cpus):.2f}](docs/generated/benchmarks.md" in readme
    assert f"{eager:.2f}, as graphs {graphs:.2f}" in readme
    most, more, more_in_graphs = (round(100 * (top - 1)) for top in (max(on_cpus), eager, graphs))
    for text in (findings_of("twenty"), in_one_line("docs/pays.md"), in_one_line("docs/ewa.md")):
        assert f"up to {most} % more than a dense one on CPUs in float32" in text
    for text in (findings_of("twenty"), in_one_line("docs/ewa.md")):
        assert f"{more_in_graphs} to {more} % more on an H100" in text
    assert f"{more} % more in eager mode and {more_in_graphs} % as CUDA graphs" in in_one_line(
        "docs/pays.md"
    )


def step_ratios(files, section, contest=""):
    """List the times of a step with EWA's 4 experts, divided by those of a dense one."""
    return [
        row["ratio"]
        for file in (ROOT / "benchmarks" / "results").glob(f"{files}.json")
        for row in read(file)[section]["rows"]
        if row["entry"] == "EWA, 4 experts every-2" and contest in row["contest"]
    ]


def test_two_draws_of_dense_training_lie_apart():
    """A finding of study finetuning says how far, in the mean over the seeds."""
    apart = by_seed("finetuning", "dense, another draw") - by_seed("finetuning", "dense")
    assert (
        f"lie {np.abs(apart).mean():.2f} points apart on average (standard deviation of the "
        f"difference: {apart.std(ddof=1):.2f})."
    ) in findings_of("finetuning")


def test_the_soup_gains_little_over_the_mean_of_two_draws():
    """A finding of study adamw says so."""
    soup, first, other = (
        by_seed("adamw", arm) for arm in ("dense, soup of 3", "dense", "dense, another draw")
    )
    gain = soup - (first + other) / 2
    low, high = ttest_1samp(gain, 0).confidence_interval(0.95)
    assert (
        f"ends at {first.mean():.2f} %, the other measured draw at {other.mean():.2f} and the soup "
        f"at {soup.mean():.2f}. From the mean of these two draws the soup differs by "
        f"{gain.mean():+.2f} ({low:+.2f} to {high:+.2f})."
    ) in findings_of("adamw")


def found_with_a_chance_of_80_percent(deviation, pairs, p=0.05):
    """The difference that Student's paired test finds so often, by its power."""
    least = t.ppf(1 - p / 2, pairs - 1)
    spread = np.sqrt(chi2.ppf((np.arange(20_000) + 0.5) / 20_000, pairs - 1) / (pairs - 1))

    def missing(difference):
        shift = difference * pairs**0.5 / deviation
        found = norm.sf(least * spread - shift) + norm.cdf(-least * spread - shift)
        return found.mean() - 0.8

    return brentq(missing, 0, 10 * deviation)


def test_the_power_that_the_studies_state():
    for deviation, pairs, half, least in (
        (0.60, 20, 0.28, 0.40),
        (0.60, 10, 0.43, 0.60),
        (0.90, 5, 1.12, 1.51),
    ):
        assert round(t.ppf(0.975, pairs - 1) * deviation / pairs**0.5, 2) == half
        assert round(found_with_a_chance_of_80_percent(deviation, pairs), 2) == least
    adamw_ = stored("adamw")
    secondary = len(adamw_._corrected)
    found = []
    for arm, baseline in (
        (adamw.RENORMALISED, "dense"),
        (adamw.AS_THEY_ARE, "dense"),
        (adamw.DENSE_SOUP, "dense"),
        (adamw.EWA_SOUP, "EWA, linear"),
    ):
        deviation = (by_seed("adamw", arm) - by_seed("adamw", baseline)).std(ddof=1)
        found.append(found_with_a_chance_of_80_percent(deviation, 5, 0.05 / secondary))
    of_moes, of_soups = ("{:.1f} and {:.1f}".format(*pair) for pair in (found[:2], found[2:]))
    assert (
        f"Of the {secondary} secondary comparisons the first to be clear needs a p below "
        f"{0.05 / secondary:.4f}. With the deviations seen here, a chance of 80 % for this needs "
        f"{of_moes} points of the V-MoEs, and {of_soups} of the soups."
    ) in findings_of("adamw")


def test_a_quarter_of_the_learning_rate_gains_nothing_clear_in_fine_tuning():
    """A finding of study finetuning says so, over the study's seven comparisons."""
    outcome = stored("finetuning")
    top1 = outcome.study.measure.figure("")
    found = {
        arm.name: outcome.to_baseline(arm.name, top1).p
        for arm in outcome.size.arms
        if arm.name != "dense"
    }
    assert len(found) == 7
    assert min(holm(found).values()) > 0.05


def test_the_words_about_operations():
    """Findings of studies ensembles, vimoe and widenet, README and docs/pbe.md have them."""

    def relative(study, arm, other):
        size = STUDIES[study].sizes["small"]
        return operations(size.arm(arm), size) / operations(size.arm(other), size)

    costs = {rival: relative("ensembles", rival, "V-MoE, K 1") for rival in (PBE, *RIVALS)}
    k2, tiling, two, dropout, mimo = (costs[rival] for rival in RIVALS)
    assert costs[PBE] == pytest.approx(1.5, abs=0.02)
    assert dropout == pytest.approx(costs[PBE], rel=1e-6)
    assert max(k2, mimo) < costs[PBE] < min(tiling, two)
    assert two == 2
    assert relative("ensembles", "ViT", PBE) == pytest.approx(2 / 3, abs=0.01)
    shared, dense = "shared expert, in every block", "dense, trained on"
    assert 1.4 < relative("vimoe", shared, dense) < 1.5
    vit, widenet = "dense, blocks of their own", "WideNet, 2 of 4 experts"
    assert relative("widenet", vit, widenet) == pytest.approx(0.75, abs=0.03)


def test_the_table_of_results_follows_from_the_results():
    """Computed again, by other code, from the files; the pooled row has a test of its own."""
    _, below = (ROOT / "docs" / "results.md").read_text().split("| clear after correction |", 1)
    lines = below.partition("\n\n")[0].splitlines()[2:]
    shown = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [cells[0] for cells in shown] == [row.question for row in summary.ROWS]
    for row, (_, text, seeds, told) in zip(summary.ROWS, shown, strict=True):
        if row.is_pooled:
            continue
        each = [(study, pair) for study, pairs in row.compared for pair in pairs]
        apart = [differences(study, pair) for study, pair in each]
        tests = [ttest_1samp(values, 0) for values in apart]
        intervals = [test.confidence_interval(0.95) for test in tests]
        ends = [min(low for low, _ in intervals), max(high for _, high in intervals)]
        means = sorted({min(map(np.mean, apart)), max(map(np.mean, apart))})
        decimals = 4 if each[0][1].figure == "nll" else 2
        numbers = [float(number) for number in NUMBER.findall(text)]
        assert numbers == pytest.approx([*means, *ends], rel=0, abs=0.5001 * 10**-decimals)
        assert {len(values) for values in apart} == {int(seeds)}
        p_values = holm({place: float(test.pvalue) for place, test in enumerate(tests)})
        for place, (study, pair) in enumerate(each):
            if STUDIES[study].primary not in (None, (pair.first, pair.second)) or pair.figure:
                outcome = stored(study)
                figure = outcome.study.measure.figure(pair.figure)
                corrected = outcome.corrected(pair.first, pair.second, figure)
                p_values[place] = p_values[place] if corrected is None else corrected
        clear = sum(p <= 0.05 for p in p_values.values())
        number = int(told.split()[0]) if told[0].isdigit() else told in (BETTER, WORSE)
        assert number == clear


def differences(study, pair):
    """The differences of two arms, over the seeds that both have."""
    arms = stored(study).results["arms"]
    first, second = (arms[name]["figures"] for name in (pair.first, pair.second))
    key = pair.figure or "top1"
    return np.array([first[seed][key] - second[seed][key] for seed in first if seed in second])


def test_the_strong_recipe_in_fine_tuning_is_not_clear_after_correction():
    """A finding of study adamw says so, with the corrected p-value."""
    outcome = stored("adamw")
    top1 = outcome.study.measure.figure("")
    p = outcome.corrected(adamw.DENSE_STRONG, "dense", top1)
    assert f"not clear after the correction (p = {p:.2f})." in findings_of("adamw")


def test_fine_tuning_by_sgd_ends_higher_than_by_adamw():
    """A finding of study adamw says so."""
    by_adamw, by_sgd = (by_seed(study, "dense").mean() for study in ("adamw", "finetuning"))
    assert (
        f"dense training ends at {by_adamw:.2f} %, by SGD (study finetuning) at {by_sgd:.2f} %"
    ) in findings_of("adamw")


def test_four_of_six_comparisons_of_likelihood_and_calibration_stay_clear():
    """docs/ewa.md says so, and names the two of the NLL that do not."""
    recipe = stored("recipe")
    found = {
        (figure, name): recipe.difference(
            f"EWA, linear, {name}", f"dense, {name}", recipe.study.measure.figure(figure)
        ).p
        for figure in ("nll", "ece")
        for name in RECIPES
    }
    clear = {key for key, p in holm(found).items() if p < 0.05}
    assert {*found} - clear == {("nll", "weak"), ("nll", "strong")}


def test_which_gains_of_likelihood_stay_clear_depends_on_the_comparisons():
    """A finding of study recipe says over which of them; docs/pays.md names its gains."""
    recipe = stored("recipe")
    nll = recipe.study.measure.figure("nll")
    found = {
        (method, name): recipe.difference(f"{method}, {name}", f"dense, {name}", nll).p
        for method in (FUSED, "EWA, constant")
        for name in RECIPES
    }
    of_each = {
        key: p
        for method in (FUSED, "EWA, constant")
        for key, p in holm({key: p for key, p in found.items() if key[0] == method}).items()
    }
    assert {key for key, p in of_each.items() if p >= 0.05} == {
        (FUSED, "strong"),
        ("EWA, constant", "strong"),
    }
    assert {key for key, p in holm(found).items() if p < 0.05} == {("EWA, constant", "weak")}


@pytest.mark.parametrize(
    ("study", "ewa", "p"), [("scratch", "EWA, linear", 0.24), ("confirmation", "linear", 0.18)]
)
def test_as_independent_samples_no_difference_of_ewa_is_clear(study, ewa, p):
    """docs/results.md says so, by Welch's test."""
    outcome = stored(study)
    arms = [
        list(outcome.values(arm, outcome.study.measure.figure("")).values())
        for arm in (ewa, "dense")
    ]
    assert round(float(ttest_ind(*arms, equal_var=False).pvalue), 2) == p


def test_an_ema_of_the_weights_changes_little():
    """docs/pays.md: 0.14 points at most, in eight settings; single seeds by up to 0.35."""
    settings = [
        *(
            (name, "dense, weight EMA", "dense")
            for name in ("scratch", "search", "confirmation", "finetuning", "twenty")
        ),
        *(("recipe", f"dense, weight EMA, {recipe}", f"dense, {recipe}") for recipe in RECIPES),
    ]
    means, singles = [], []
    for name, arm, baseline in settings:
        change = by_seed(name, arm) - by_seed(name, baseline)
        means.append(change.mean())
        singles += [*np.abs(change)]
        size = STUDIES[name].sizes["small"]
        given = [*size.options, *size.arm(arm).training.options]
        decay = given[len(given) - given[::-1].index("--model-ema-decay")]
        assert decay == ("0.98" if name == "finetuning" else "0.99")
    assert len(means) == 8
    assert round(max(means, key=abs), 2) == -0.14
    assert round(max(singles), 2) == 0.35


def test_the_last_seed_of_the_recipes_decides():
    """A finding says that EWA would be called better without it."""
    results = read(RESULTS / "recipe-small.json")
    for arm in results["arms"].values():
        arm["figures"].pop("304", None)
    four = Outcome(STUDIES["recipe"], "small", results)
    better = to_dense("EWA, linear", BETTER, "medium", "strong")
    assert problems(Finding("0.61 and 0.57, before Holm's correction", better), four) == []


def test_the_papers_recipe_hardly_trains_in_a_tenth_of_its_epochs():
    """A finding of the study nearest says so in words."""
    arms = read(RESULTS / "nearest-paper.json")["arms"].values()
    dense, ewa = ([figures["top1"] for figures in arm["figures"].values()] for arm in arms)
    assert len(dense) == len(ewa) == 3
    (reached,) = {int(mean(dense)), int(mean(ewa))}
    assert (
        f"to {reached} % top-1; seeds of EWA lie {max(ewa) - min(ewa):.0f} points apart."
    ) in findings_of("nearest")


def test_the_likelihood_and_calibration_of_pbe():
    for figure in ("nll", "ece"):
        compared = compare([PBE], BETTER, RIVALS, figure)
        numbers = "0.0812 to 0.0966" if figure == "nll" else "0.0233 to 0.0427"
        assert problems(Finding(numbers, compared), stored("ensembles")) == []


CASES = [
    ("1.00 points better", "EWA", BETTER, "dense", "", []),
    ("1.00 points (0.50 to 1.50)", "EWA", BETTER, "dense", "", []),
    ("+1.00 (+0.50 to +1.50)", "EWA", BETTER, "dense", "", []),
    ("1.00 worse", "dense", WORSE, "EWA", "", []),
    ("no difference", "again", UNCLEAR, "dense", "", []),
    ("no difference (-2.48 to +2.48)", "again", UNCLEAR, "dense", "", []),
    ("0.1000 worse", "EWA", WORSE, "dense", "nll", []),
    ("+3.00", "once", TOO_FEW, "dense", "", []),
    (
        "0.30, as in the paper; 1.00",
        "EWA",
        BETTER,
        "dense",
        "",
        ["0.30 is not a figure of these comparisons"],
    ),
    (
        "0.90 to 1.10",
        "EWA",
        BETTER,
        "dense",
        "",
        [f"{end} is not a figure of these comparisons" for end in ("0.90", "1.10")],
    ),
    ("better", "EWA", BETTER, "dense", "", ["EWA / dense, top-1 %: 1.00 is not in the text"]),
    ("-1.00", "EWA", BETTER, "dense", "", ["-1.00 is not a figure of these comparisons"]),
    ("", "EWA", WORSE, "dense", "", ["EWA / dense, top-1 %: better, not worse"]),
    ("", "EWA", UNCLEAR, "dense", "", ["EWA / dense, top-1 %: better, not no clear difference"]),
    ("", "again", BETTER, "dense", "", ["again / dense, top-1 %: no clear difference, not better"]),
    ("", "EWA", BETTER, "dense", "nll", ["EWA / dense, NLL: worse, not better"]),
    (
        "",
        "once",
        UNCLEAR,
        "dense",
        "",
        ["once / dense, top-1 %: no verdict from fewer than three pairs, not no clear difference"],
    ),
    ("", "ewa", BETTER, "dense", "", ["ewa / dense, top-1 %: not measured, not better"]),
]


@pytest.mark.parametrize(("text", "first", "verdict", "second", "figure", "wrong"), CASES)
def test_a_finding_that_disagrees_is_found(text, first, verdict, second, figure, wrong):
    to_dense = {
        "dense": [(0.0, 0.0)] * 3,
        "EWA": [(0.8, 0.09), (1.0, 0.10), (1.2, 0.11)],
        "again": [(-1.0, -0.1), (1.0, 0.1), (0.0, 0.0)],
        "once": [(3.0, 0.0)],
    }
    arms = {
        name: {
            "figures": {
                seed: {"top1": 20.0 + seed + top1, "nll": 3.0 - seed + nll}
                for seed, (top1, nll) in enumerate(of_arm)
            }
        }
        for name, of_arm in to_dense.items()
    }
    study = small_study(Arm("dense", DENSE), measure=Evaluation())
    finding = Finding(text, (Compared(first, verdict, second, figure),))
    assert problems(finding, Outcome(study, "small", {"arms": arms})) == wrong
    cited = replace(finding, quoted=("0.30",))
    assert "0.30" not in " ".join(problems(cited, Outcome(study, "small", {"arms": arms})))


def test_a_finding_says_what_is_not_clear_after_holms_correction():
    tops = {
        "dense": (20.0, 21.0, 22.0),
        "EWA": (20.8, 22.0, 23.4),  # p = 0.03
        "other": (20.1, 20.9, 22.2),
    }
    arms = {
        name: {"figures": {str(seed): {"top1": top1} for seed, top1 in enumerate(values)}}
        for name, values in tops.items()
    }
    study = small_study(Arm("dense", DENSE), Arm("EWA", EWA))
    outcome = Outcome(study, "small", {"arms": arms})
    one = compare(["EWA"], BETTER, ["dense"])
    two = (*one, *compare(["other"], UNCLEAR, ["dense"]))
    assert problems(Finding("1.07 points", one), outcome) == []
    p = 2 * outcome.difference("EWA", "dense", study.measure.figure("")).p
    assert problems(Finding("1.07 points", two), outcome) == [
        f"EWA / dense, top-1 %: not clear after Holm's correction, p = {p:.3f}"
    ]
    told = f"1.07 points, not clear after Holm's correction (p = {p:.2f})"
    assert problems(Finding(told, two), outcome) == []
    stated = Outcome(replace(study, primary=("EWA", "dense")), "small", {"arms": arms})
    assert problems(Finding("1.07 points", two), stated) == []


def test_numbers_of_several_comparisons_form_a_range():
    arms = {
        name: {"figures": {str(seed): {"top1": value + seed} for seed in range(3)}}
        for name, value in (("dense", 20.0), ("EWA", 21.0), ("late", 20.5), ("early", 20.75))
    }
    arms["EWA"]["figures"]["0"]["top1"] += 0.3
    study = small_study(Arm("dense", DENSE), Arm("EWA", EWA))
    compared = compare(["late", "early", "EWA"], BETTER, ["dense"])
    assert (
        problems(
            Finding("better by 0.50 to 1.10", compared), Outcome(study, "small", {"arms": arms})
        )
        == []
    )
    assert problems(
        Finding("better by 0.50 to 0.75", compared), Outcome(study, "small", {"arms": arms})
    ) == ["EWA / dense, top-1 %: 1.10 is not in the text"]


@pytest.mark.parametrize("verdict", [BETTER, WORSE])
def test_a_finding_that_disagrees_is_reported(verdict, folder, monkeypatch, capsys):
    for name in ("images", "generated"):
        (folder / "docs" / name).mkdir(parents=True)
    monkeypatch.setattr(page, "DOCS", folder / "docs")
    monkeypatch.setattr(page, "draw", lambda *_: None)
    monkeypatch.setattr(overview, "draw", lambda *_: None)
    finding = Finding("0.68 points", compare(["linear"], verdict, ["dense"]))
    study = STUDIES["confirmation"]
    sizes = {"small": replace(study.sizes["small"], findings=(finding,))}
    monkeypatch.setattr(page, "STUDIES", {"confirmation": replace(study, sizes=sizes)})
    monkeypatch.setattr(sys, "argv", ["studies", "--report"])
    main()
    told = capsys.readouterr().err
    assert ("confirmation: linear / dense, top-1 %: better, not worse" in told) == (
        verdict == WORSE
    )
    assert "0.68 points" in (folder / "docs" / "results.md").read_text()
