"""What the lesson on the cache trains: a model of stories, and networks for the recall task."""

import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinker.data.text.tales import generate_story
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.lessons.materials.practice import is_fast, take_steps, train_on_task
from thinker.lessons.materials.recall import N_KEYS, make_recall
from thinker.model import KVCache, Thinker, ThinkerConfig

V = 2 * N_KEYS  # keys and values


def train_on_stories(n_tokens: int = 96) -> tuple[Thinker, Tokenizer, Tensor]:
    """Train a model on short stories for about a minute, in windows of `n_tokens`.

    Returns it, its tokenizer, and the beginnings of 20 stories (2 if is_fast()) that it has not
    seen, (20, n_tokens).
    """
    stories = [generate_story(0, i).text for i in range(60 if is_fast() else 3000)]
    tokenizer = make_tokenizer("bpe:512", stories)
    ids = torch.tensor(
        [i for story in stories for i in (tokenizer.bos_id, *tokenizer.encode(story))]
    )

    def make_batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(ids) - n_tokens, (16, 1), generator=generator)
        windows = ids[starts + torch.arange(n_tokens + 1)]
        return windows[:, :-1], windows[:, 1:]

    config = ThinkerConfig(tokenizer.vocab_size, d_model=96, n_layers=2, n_heads=4, max_seq_len=128)
    model, _ = train_on_task(config, make_batch, n_steps=600)
    unseen = [[tokenizer.bos_id, *tokenizer.encode(generate_story(1, i).text)] for i in range(60)]
    beginnings = [tokens[:n_tokens] for tokens in unseen if len(tokens) >= n_tokens]
    return model, tokenizer, torch.tensor(beginnings[: 2 if is_fast() else 20])


@torch.no_grad()
def write(model: Thinker, tokenizer: Tokenizer, cache: KVCache, prompt: str, n_new: int) -> str:
    """Continue a prompt with the likeliest tokens, in one line."""
    tokens = [tokenizer.bos_id, *tokenizer.encode(prompt)]
    logits = model(torch.tensor([tokens]), cache=cache)
    for _ in range(n_new):
        tokens.append(int(logits[0, -1].argmax()))
        logits = model(torch.tensor([tokens[-1:]]), cache=cache)
    return " ".join(tokenizer.decode(tokens).split())


@torch.no_grad()
def seconds_to_write(model: Thinker, T: int, has_cache: bool) -> float:
    """How long T passes take: each over its newest token and a cache, or each over the whole text
    so far."""
    tokens = torch.randint(
        model.config.vocab_size, (1, T), generator=torch.Generator().manual_seed(0)
    )
    cache, start = model.new_cache(1, T), time.perf_counter()
    for t in range(T):
        if has_cache:
            model(tokens[:, t : t + 1], cache=cache)
        else:
            model(tokens[:, : t + 1], last_logits_only=True)
    return time.perf_counter() - start


class GRU(nn.Module):
    """A recurrent network: reads one token after the other and keeps `width` numbers."""

    def __init__(self, width: int = 104) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(V, width), nn.Linear(width, V)
        self.gru = nn.GRU(width, width, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T) -> (B, T, V)."""
        return self.head(self.gru(self.embedding(tokens))[0])


class Convolution(nn.Module):
    """Three causal convolutions; each output sees the token itself and three earlier ones, d
    apart."""

    def __init__(self, width: int = 80) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(V, width), nn.Linear(width, V)
        self.layers = nn.ModuleList(nn.Conv1d(width, width, 4, dilation=d) for d in (1, 4, 16))

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T) -> (B, T, V)."""
        x = self.embedding(tokens).transpose(1, 2)  # (B, width, T)
        for layer in self.layers:
            x = x + F.gelu(layer(F.pad(x, (3 * layer.dilation[0], 0))))
        return self.head(x.transpose(1, 2))


def train(model: nn.Module, n_steps: int) -> None:
    """Train a network on recall."""

    def mean_loss(tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=-1)

    take_steps(model, mean_loss, make_recall, n_steps)


@torch.no_grad()
def accuracy(model: nn.Module, n_pairs: int) -> float:
    """Share of right answers in 256 new texts of `n_pairs` pairs."""
    tokens, targets = make_recall(torch.Generator().manual_seed(1), n_pairs, 256)
    return float((model(tokens).argmax(-1) == targets)[targets >= 0].float().mean())
