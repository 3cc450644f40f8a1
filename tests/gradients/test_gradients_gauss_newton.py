"""Rows by random signs against the dense Gauss-Newton matrix in float64, and the models whose outputs are known."""

import itertools

import pytest
import torch
from models import CASES, bert, cross_entropy, mlp
from torch import nn
from torch.func import functional_call, jacrev
from torch.nn import functional as F

from mfac.gradients import accumulate_fisher, collect_gradients, criterion_loss, model_loss
from mfac.gradients.gauss_newton import GaussNewtonLoss, has_output, output_seed, random_signs
from mfac.gradients.losses import sampled_loss

CLASS_WEIGHTS = torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64)
CLASSES, SHARES = torch.tensor([2, 0, -100]), torch.tensor([[0.2, 0.3, 0.5], [1, 0, 0], [0.5, 0, 1]]).double()
CRITERIA = {
    "softmax": (nn.CrossEntropyLoss(), CLASSES),
    "softmax, sum": (nn.CrossEntropyLoss(reduction="sum", ignore_index=0), CLASSES.clamp_min(0)),
    "softmax, weights, smoothing": (nn.CrossEntropyLoss(CLASS_WEIGHTS, label_smoothing=0.1), CLASSES),
    "softmax, shares": (nn.CrossEntropyLoss(CLASS_WEIGHTS), SHARES),
    "sigmoid": (F.binary_cross_entropy_with_logits, SHARES.round()),
    "sigmoid, weights": (nn.BCEWithLogitsLoss(CLASS_WEIGHTS, pos_weight=1 + CLASS_WEIGHTS), SHARES),
    "squared error": (nn.MSELoss(), SHARES),
    "squared error, sum": (nn.MSELoss(reduction="sum"), SHARES),
}


@pytest.mark.parametrize("name", CRITERIA)
def test_the_mean_over_all_signs_is_the_hessian_of_the_loss(name):
    criterion, targets = CRITERIA[name]
    z = torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    signs = torch.tensor(list(itertools.product([-1.0, 1.0], repeat=9)), dtype=torch.float64).view(-1, 3, 3)
    seeds = torch.stack([output_seed(criterion, z, targets, each) for each in signs]).flatten(1)
    hessian = torch.autograd.functional.hessian(lambda z: criterion(z, targets), z).view(9, 9)
    torch.testing.assert_close(seeds.T @ seeds / len(seeds), hessian, rtol=1e-10, atol=1e-12)


def test_log_probabilities_of_nll_are_logits():
    z, signs = torch.randn(3, 3).double(), torch.ones(3, 3).double()
    of_log = output_seed(nn.NLLLoss(), z.log_softmax(1), CLASSES, signs)
    torch.testing.assert_close(of_log, output_seed(nn.CrossEntropyLoss(), z, CLASSES, signs))


def gauss_newton(model, output, loss):
    """Jᵀ H J of loss(output(model)), dense in float64."""
    weights = {name: p.detach() for name, p in model.named_parameters()}
    jacobian = jacrev(lambda values: output(lambda *x: functional_call(model, values, x)))(weights)
    z = output(model).detach()
    J = torch.cat([part.reshape(z.numel(), -1) for part in jacobian.values()], 1)
    return J.T @ torch.autograd.functional.hessian(loss, z).reshape(z.numel(), -1) @ J


FISHERS = [("gauss-newton", how) for how in ("softmax", "squared error", "output_fn", "one batch")]
FISHERS += [("sampled", how) for how in ("softmax", "output_fn", "sample_fn")]


@pytest.mark.parametrize(("fisher", "how"), FISHERS)
def test_the_mean_of_outer_products_is_the_gauss_newton_matrix(fisher, how):
    """Which is the true Fisher matrix of labels that are drawn from the model's own output."""
    model, x = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 4)).double(), torch.randn(2, 3).double()
    y = torch.randn(2, 4).double() if how == "squared error" else torch.tensor([1, 3])
    criterion = nn.MSELoss() if how == "squared error" else nn.CrossEntropyLoss()
    options = {
        "output_fn": {"output_fn": lambda m, b: m(b[0])},
        "sample_fn": {"sample_fn": lambda m, b: (b[0], torch.multinomial(m(b[0]).softmax(1), 1)[:, 0])},
    }.get(how, {})
    loss_fn = cross_entropy if how in ("output_fn", "sample_fn") else criterion_loss(criterion)
    x, y = (x, y) if how == "one batch" else (x[:1], y[:1])
    many = 1500 if how == "one batch" else 6000 if fisher == "gauss-newton" else 20_000
    batches = [(x, y)] * many if how == "one batch" else [(x.repeat(many, 1), y.repeat(many, *[1] * (y.ndim - 1)))]
    options |= {"per_sample": how != "one batch", "fisher": fisher}
    rows = collect_gradients(model, loss_fn, batches, many, **options)
    expected = gauss_newton(model, lambda m: m(x), lambda z: criterion(z, y))
    near = 0.05 if fisher == "gauss-newton" else 0.03
    torch.testing.assert_close(rows.T @ rows / many, expected, rtol=0.1, atol=near * expected.max().item())
    assert rows.mean(0).norm() < 0.05 * rows.norm(dim=1).mean()
    if how == "sample_fn":
        return
    blocks = accumulate_fisher(model, loss_fn, batches, 40, rows.shape[1], **options)
    sums = torch.block_diag(*[block for run in blocks.sums for block in run])
    parts = rows[:40].split([p.numel() for p in model.parameters()], 1)
    torch.testing.assert_close(sums, torch.block_diag(*[part.T @ part for part in parts]))


TAKEN = [("gauss-newton", nn.CrossEntropyLoss(), name) for name in ("mlp", "cnn", "embedding")]
TAKEN += [("sampled", criterion, "mlp") for criterion in (nn.CrossEntropyLoss(), nn.MSELoss(), nn.BCEWithLogitsLoss())]


@pytest.mark.parametrize(("fisher", "criterion", "name"), TAKEN)
@pytest.mark.parametrize("other", [{"method": "loop"}, {"chunk_size": 3}, {"cut": 2}, {"chunk_size": 7, "cut": 6}])
def test_rows_do_not_depend_on_how_samples_are_taken(fisher, criterion, name, other):
    case, other = CASES[name](40), dict(other)
    inputs, targets = case.batch
    targets = targets if isinstance(criterion, nn.CrossEntropyLoss) else torch.randn(40, 3)
    length = other.pop("cut", 40)
    batches = case._replace(batch=(inputs, targets)).batches(length)
    options, loss_fn = {"per_sample": True, "fisher": fisher}, criterion_loss(criterion)
    rows = collect_gradients(case.model, loss_fn, [(inputs, targets)], 40, method="vmap", **options)
    assert rows.abs().sum(1).min() > 0
    torch.testing.assert_close(collect_gradients(case.model, loss_fn, batches, 40, **options, **other), rows)
    assert not torch.allclose(collect_gradients(case.model, loss_fn, batches, 40, seed=1, **options), rows)
    first, again, other = (collect_gradients(case.model, loss_fn, batches, 1, fisher=fisher, seed=n) for n in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def language_model(kind: str, n: int = 6):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    sizes = {"vocab_size": 12, "num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2}
    if kind == "translation":
        config = transformers.T5Config(vocab_size=12, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2,
                                       decoder_start_token_id=0, initializer_factor=3.0)  # fmt: skip
        model, classes = transformers.T5ForConditionalGeneration(config), 12
    elif kind == "tagging":
        config = transformers.BertConfig(**sizes, intermediate_size=8, num_labels=3)
        model, classes = transformers.BertForTokenClassification(config), 3
    else:
        config = transformers.LlamaConfig(**sizes, intermediate_size=8)
        model, classes = transformers.LlamaForCausalLM(config), 12
    batch = {"input_ids": torch.randint(12, (n, 5)), "labels": torch.randint(classes, (n, 5))}
    batch["labels"][:, 3] = -100
    return model.eval(), batch


@pytest.mark.parametrize("kind", ["causal", "tagging"])
def test_language_models_by_token(kind):
    """The mean over draws is the Gauss-Newton matrix of the model's own loss: shifted, and without ignored labels."""
    model, batch = language_model(kind, 1)
    model, params = model.double(), "lm_head.weight" if kind == "causal" else "classifier.weight"
    many = {key: value.repeat(4000, 1) for key, value in batch.items()}
    options = {"per_sample": True, "fisher": "gauss-newton", "params": params}
    rows = collect_gradients(model, model_loss, [many], 4000, **options)
    labels = batch["labels"][0, 1:] if kind == "causal" else batch["labels"][0]
    seen, head = [], model.get_output_embeddings() or model.classifier
    handle = head.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        z, (hidden,) = model(**batch).logits[0], seen[0]
        z = z[:-1] if kind == "causal" else z
    handle.remove()
    assert torch.allclose(F.cross_entropy(z, labels), model_loss(model, batch).double())
    p, kept = z.softmax(1), (labels != -100).double()
    hessians = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)
    expected = torch.einsum("t,tij,ta,tb->iajb", kept / kept.sum(), hessians, *[hidden[: len(z)]] * 2)
    found = (rows.T @ rows / 4000).view(expected.shape)
    torch.testing.assert_close(found, expected, rtol=0.1, atol=0.04 * expected.max().item())
    torch.testing.assert_close(collect_gradients(model, model_loss, [many], 6, method="loop", **options), rows[:6])


@pytest.mark.parametrize("kind", ["causal", "tagging", "translation"])
def test_labels_of_tokens_are_drawn_where_they_are_predicted(kind):
    model, batch = language_model(kind, 1)
    loss, draw = sampled_loss(model_loss, None, None)
    many = {key: x.repeat(4000, 1) for key, x in batch.items()}
    kept, drawn = draw(model, many, range(4000))
    first = int(kind == "causal")  # position that has a label
    assert drawn.shape == (4000, 5 - first)
    assert (drawn[:, 3 - first] == -100).all()
    with torch.no_grad():
        p = model(**batch).logits[0].softmax(1)
        given = {**many, "labels": torch.cat([many["labels"][:, :first], drawn], 1)}
        if kind == "translation":  # the decoder's inputs are made of the labels, and not of those that were drawn
            given["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(many["labels"])
        torch.testing.assert_close(loss(model, (kept, drawn)), model_loss(model, given))
    for position in (1, 2, 4):
        found = drawn[:, position - first].bincount(minlength=p.shape[1]) / 4000
        torch.testing.assert_close(found, p[position - first], rtol=0, atol=0.04)


def test_one_backward_pass_and_hooks_give_the_rows_of_all_samples():
    """The pruner's way: the seeded loss of a batch, whose signs differ from sample to sample."""
    case = mlp(8)
    loss = GaussNewtonLoss(criterion_loss(nn.CrossEntropyLoss(reduction="sum")))
    pair = loss.draw(case.model, case.batch, [3])
    z = case.model(case.batch[0])
    v = output_seed(nn.CrossEntropyLoss(reduction="sum"), z, case.batch[1], random_signs(pair[1][0], z))
    assert torch.autograd.grad(loss(case.model, pair), case.model[2].bias)[0].allclose(v.sum(0))
    assert len(v.sign().unique(dim=0)) > 2


def test_signs_are_fair_and_those_of_other_seeds_and_places_are_independent():
    signs = torch.stack([random_signs(torch.tensor(seed), torch.zeros(1000, 100)) for seed in range(4)]).flatten(1)
    assert signs.abs().eq(1).all()
    assert signs.mean(1).abs().max() < 0.013  # four standard errors
    shifted = torch.cat([signs, signs.roll(1, 1), signs.roll(32, 1)])
    assert (shifted @ shifted.T / signs.shape[1] - torch.eye(12)).abs().max() < 0.013
    first = torch.func.vmap(lambda seed: random_signs(seed, torch.zeros(())))(torch.arange(20_000))
    assert abs(first.mean()) < 0.03
    assert abs((first[1:] * first[:-1]).mean()) < 0.03


@pytest.mark.parametrize("fisher", ["sampled", "gauss-newton"])
def test_hugging_face_regression_and_several_labels(fisher):
    case = bert(4)
    for labels in (torch.randn(4, 2), torch.randint(2, (4, 2)).float()):
        case.model.config.problem_type = "regression" if labels.min() < 0 else "multi_label_classification"
        batch = dict(case.batch) | {"labels": labels}
        rows = collect_gradients(case.model, model_loss, [batch], 4, per_sample=True, fisher=fisher)
        assert rows.abs().sum() > 0
    drawn = sampled_loss(model_loss, None, None)[1](case.model, batch, [0])[1]
    assert set(drawn.flatten().tolist()) <= {0.0, 1.0}


class Doubled(nn.CrossEntropyLoss):
    def forward(self, z, y):
        return 2 * super().forward(z, y)


def test_whether_an_output_can_be_had_and_a_model_whose_loss_is_another_is_refused():
    case, entropy = mlp(), criterion_loss(nn.CrossEntropyLoss())
    for loss_fn, output_fn in ((entropy, None), (cross_entropy, lambda m, b: m(b[0]))):
        assert has_output(loss_fn, output_fn, case.model, case.batch)
    for loss_fn in (cross_entropy, criterion_loss(nn.L1Loss()), criterion_loss(Doubled()), model_loss):
        assert not has_output(loss_fn, None, case.model, case.batch)
    model, batch = language_model("causal")
    assert has_output(model_loss, None, model, batch)
    model.register_forward_hook(lambda module, inputs, output: setattr(output, "loss", 2 * output.loss))
    with pytest.raises(ValueError, match="needs a loss that is the cross-entropy or the squared error of logits"):
        collect_gradients(model, model_loss, [batch], 1, fisher="gauss-newton")
