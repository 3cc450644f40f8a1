"""Every example runs as its command would, learns, and ends with the same weights when it is resumed half-way."""

import importlib
from pathlib import Path

import pytest
import torch
from states import same, weights

from experiments.data import data_folder
from mfac import MFAC

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def example(monkeypatch):
    """Imports an example by its name; its folder is on the path, as when it is run."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module


def fell(losses, share):
    """Whether the mean of the last losses is below that share of the first ones."""
    few = max(1, len(losses) // 8)
    return sum(losses[-few:]) < share * sum(losses[:few])


def test_the_plain_loop_learns_and_resumes_bit_for_bit(example, tmp_path):
    main = example("train_plain").main
    model, losses = main(["--epochs", "4", "--folder", str(tmp_path)])
    assert fell(losses, 0.3)
    resumed, rest = main(["--epochs", "4", "--folder", str(tmp_path), "--resume", str(tmp_path / "epoch-2.pt")])
    assert rest == losses[-len(rest) :]
    assert len(rest) == len(losses) // 2
    assert same(weights(model), weights(resumed))


def test_one_learning_rate_serves_every_window(example, tmp_path):
    main = example("train_plain").main
    for num_grads in (16, 256):
        _, losses = main(["--epochs", "4", "--num-grads", str(num_grads), "--folder", str(tmp_path)])
        assert fell(losses, 0.3)


# aot_eager traces and differentiates as inductor does, without the half minute that a C++ compiler takes.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_compiled_model_trains_as_the_plain_one(example, tmp_path):
    main = example("train_plain").main
    model, losses = main(["--epochs", "1", "--folder", str(tmp_path)])
    compiled, same = main(["--epochs", "1", "--folder", str(tmp_path), "--compile", "aot_eager"])
    torch.testing.assert_close(torch.tensor(same), torch.tensor(losses), rtol=1e-3, atol=1e-4)
    assert set(torch.load(tmp_path / "epoch-1.pt", weights_only=True)["model"]) == set(model.state_dict())
    assert all(parameter.grad is not None for parameter in compiled.parameters())


@pytest.mark.parametrize("optimizer", ["mfac", "full_matrix_adam"])
def test_accelerate_accumulates_and_resumes_in_mid_epoch(example, tmp_path, optimizer):
    main, options = example("train_accelerate").main, ["--epochs", "4", "--optimizer", optimizer]
    model, losses = main([*options, "--folder", str(tmp_path)])
    assert fell(losses, 0.3)
    resumed, rest = main([*options, "--folder", str(tmp_path), "--resume", str(tmp_path / "step-50")])
    assert rest == losses[2 * 50 :]  # two batches a step; an epoch has 24 steps
    assert same(weights(model), weights(resumed))


@pytest.mark.parametrize(("optimizer", "manual"), [("mfac", False), ("mfac", True), ("full_matrix_adam", False)])
def test_lightning_learns_and_resumes_bit_for_bit(example, tmp_path, optimizer, manual):
    main = example("train_lightning").main
    options = ["--epochs", "4", "--optimizer", optimizer, "--folder", str(tmp_path)]
    model, losses = main([*options, *["--manual"] * manual])
    assert fell(losses, 0.3)
    # Saved by hand or not: both ways give the same steps.
    resumed, rest = main([*options, "--resume", str(tmp_path / "digits-step=46.ckpt")])
    assert rest == losses[46:]
    assert same(weights(model), weights(resumed))


@pytest.mark.parametrize("options", [[], ["--by-name", "mfac"], ["--by-name", "full_matrix_adam"]], ids=str)
def test_transformers_learns_and_resumes_bit_for_bit(example, tmp_path, options):
    main = example("train_transformers").main
    options = ["--steps", "60", *options]
    model, losses, figures = main([*options, "--folder", str(tmp_path)])
    assert fell(losses, 0.8)
    assert figures["eval_accuracy"] > 0.8
    saved = tmp_path / "checkpoint-30"
    resumed, rest, again = main([*options, "--folder", str(tmp_path / "again"), "--resume", str(saved)])
    assert rest == losses  # the first half is from the log that the checkpoint holds
    assert again["eval_loss"] == figures["eval_loss"]
    assert same(weights(model), weights(resumed))


@pytest.mark.parametrize(("arguments", "message"), [(("adam", {}), "choose from full_matrix_adam, mfac"),
                                                    (("mfac", {"betas": 1}), "MFAC has no option betas")])  # fmt: skip
def test_names_that_do_not_exist_are_refused(arguments, message):
    from mfac.integrations.transformers import optimizer_by_name

    with pytest.raises(ValueError, match=message):
        optimizer_by_name(arguments[0], **arguments[1])


def test_the_preconditioner_helps_sgd_and_lets_the_others_learn(example):
    results = example("precondition").main(["--epochs", "3"])
    assert all(last < 0.5 * first for first, last, _ in results.values())
    assert results["SGD", True][1] < results["SGD", False][1]


def test_mrpc_without_data_says_where_it_belongs(example, tmp_path, monkeypatch):
    monkeypatch.setenv("MFAC_DATA", str(tmp_path))
    with pytest.raises(SystemExit, match="set MFAC_DATA"):
        example("train_transformers").main(["--glue", "MRPC"])


@pytest.mark.skipif(not (data_folder() / "minilm-l3").exists(), reason="no MiniLM under MFAC_DATA")
def test_mrpc_is_read_whole_and_a_step_on_it_lowers_the_loss(example):
    from transformers import DataCollatorWithPadding

    tokenizer, train, dev, model = example("sentences").load_mrpc()
    assert (len(train), len(dev)) == (3668, 408)
    assert sum(line["labels"] for line in dev) == 279
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    size = sum(parameter.numel() for parameter in trained)
    assert size == 3 * 1_774_464 + 147_840 + 770  # layers, pooler, classifier
    batch = DataCollatorWithPadding(tokenizer)(train[:8])
    optimizer = MFAC(model.named_parameters(), lr=0.1, num_grads=2, damping=1e-3, normalize="sum")
    model.eval()
    before = model(**batch).loss
    before.backward()
    optimizer.step()
    assert model(**batch).loss < before


def test_the_list_of_examples_is_complete():
    text = (EXAMPLES / "README.md").read_text()
    for path in EXAMPLES.glob("*.py"):
        assert f"({path.name})" in text, f"examples/README.md does not mention {path.name}"
