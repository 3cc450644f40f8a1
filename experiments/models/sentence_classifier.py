"""A classifier of sentences and pairs on top of a sentence encoder, for the batches that a BERT classifier takes."""

from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.datasets.sentences import COLUMNS
from experiments.models.minilm import minilm_encoder

LARGEST_SCORE = 5.0  # of STS-B


class SentenceClassifier(nn.Module):
    """Each sentence is the mean of the encoder's outputs; a row with a pair is split by its token types.

    Classes come from a linear layer on u, or (u, v, |u - v|) of a pair; with one label the output is the cosine of a
    pair, from 0 to 5 as in STS-B.
    """

    def __init__(self, encoder: nn.Module, width: int, labels: int, pairs: bool):
        super().__init__()
        self.encoder, self.pairs, self.labels = encoder, pairs, labels
        self.classifier = nn.Linear(3 * width if pairs else width, labels) if labels > 1 else None

    def forward(
        self, input_ids: Tensor, token_type_ids: Tensor, attention_mask: Tensor, labels: Tensor
    ) -> SimpleNamespace:
        """`loss` and `logits`, as Hugging Face's models return them."""
        if self.pairs:
            second = token_type_ids.bool()
            u = self._embed(input_ids, attention_mask.bool() & ~second)
            v = self._embed(*_second_sentences(input_ids, second))
            if self.classifier is None:
                cosines = LARGEST_SCORE * F.cosine_similarity(u, v)
                return SimpleNamespace(loss=F.mse_loss(cosines, labels), logits=cosines[:, None])
            features = torch.cat([u, v, (u - v).abs()], 1)
        else:
            features = self._embed(input_ids, attention_mask.bool())
        logits = self.classifier(features)
        return SimpleNamespace(loss=F.cross_entropy(logits, labels), logits=logits)

    def _embed(self, ids: Tensor, mask: Tensor) -> Tensor:
        """The mean of the encoder's outputs: one vector per sentence; columns that no row uses are left out."""
        width = int(mask.sum(1).max())
        mask = mask[:, :width].long()
        hidden = self.encoder(input_ids=ids[:, :width], attention_mask=mask).last_hidden_state
        weights = mask[..., None].to(hidden.dtype)
        return (hidden * weights).sum(1) / weights.sum(1)


def _second_sentences(ids: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """The second sentences after a [CLS], and their mask."""
    lengths = second.sum(1)
    places = torch.arange(int(lengths.max()), device=ids.device)
    starts = second.long().argmax(1)
    columns = (starts[:, None] + places).clamp(max=ids.shape[1] - 1)
    mask = places < lengths[:, None]
    sentences = torch.where(mask, ids.gather(1, columns), 0)
    return torch.cat([ids[:, :1], sentences], 1), torch.cat([torch.ones_like(mask[:, :1]), mask], 1)


def minilm_sentences(task: str) -> SentenceClassifier:
    """MiniLM-L3 for a task of GLUE, embeddings frozen, in eval mode; the classifier is random."""
    encoder, columns = minilm_encoder(), COLUMNS[task]
    width: int = encoder.config.hidden_size  # type: ignore[union-attr,assignment]
    return SentenceClassifier(encoder, width, len(columns.classes) or 1, columns.second is not None).eval()
