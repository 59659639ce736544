"""Load the teacher of a distillation and check that it fits the student."""

import dataclasses
import hashlib
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from thinker.data.corpus.corpus import Corpus
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.features.distillation.keys import DistillConfig
from thinker.features.distillation.teacher_logits import TeacherLogits
from thinker.interop import load
from thinker.model import Thinker, ThinkerConfig
from thinker.runtime.errors import UserError
from thinker.runtime.ranks import DistContext
from thinker.training.config.config import Config

# Keys of the architecture that a hash of weights counts only if they are set.
NEWER_KEYS = (
    "activation",
    "attention_out_bias",
    "attention_scale",
    "attention_temperature",
    "bigram_rows",
    "block",
    "embedding_scale",
    "head_bias",
    "logit_scale",
    "logit_softcap",
    "mlp",
    "mlp_bias",
    "norm",
    "position_offset",
    "qk_norm_type",
    "residual_scale",
    "rope_dim",
    "value_embeddings",
    "window_rope_theta",
)


@dataclass
class Teacher:
    """A teacher, and where its largest logits are kept with train.distill.cached_logits."""

    model: Thinker
    options: DistillConfig
    fingerprint: str  # sha256 of its weights
    logits: TeacherLogits | None = None

    def create_files(
        self, run: Path, n_windows: int, seq_len: int, corpus: Corpus, dist: DistContext
    ) -> None:
        """Create the files for its logits in a run directory. All ranks must call this."""
        k = self.options.cached_logits
        if k is None:
            return
        vocab_size = self.model.config.vocab_size
        self.logits = TeacherLogits(run / "teacher", n_windows, seq_len, vocab_size, k)
        if dist.is_main:
            self.logits.create(f"{self.fingerprint} {corpus.sha256}")
        dist.broadcast_object(None)  # the other ranks wait for the files

    def describe(self) -> str:
        """One line for users."""
        n = sum(parameter.numel() for parameter in self.model.parameters())
        parts = [f"{self.options.weight:.0%} of the loss of logits"]
        if self.options.attention:
            parts.append(f"attention weighs {self.options.attention:g}")
        if self.options.hidden:
            parts.append(f"hidden weighs {self.options.hidden:g}")
        return f"teacher: {self.options.teacher}, {n / 1e6:.1f}M parameters; {', '.join(parts)}"


def load_teacher(
    config: Config, student: ThinkerConfig, tokenizer: Tokenizer, device: torch.device
) -> Teacher:
    """The model in train.distill.teacher. Prints a line about it to stderr.

    Raises UserError if it does not fit the student.
    """
    path = config.train.distill.teacher
    name = f"train.distill.teacher={path}"
    model, own_tokenizer = load(path, device)
    if own_tokenizer is None or own_tokenizer.content_hash != tokenizer.content_hash:
        has = "no tokenizer" if own_tokenizer is None else "another tokenizer"
        raise UserError(
            f"{name} has {has}; teacher and student need the same one (data.tokenizer={path})"
        )
    _check_fit(name, model.config, student, config)
    teacher = Teacher(model, config.train.distill, hash_weights(model))
    print(teacher.describe(), file=sys.stderr)
    return teacher


def _check_fit(name: str, teacher: ThinkerConfig, student: ThinkerConfig, config: Config) -> None:
    """Raise UserError if the two models cannot be compared."""
    if teacher.vocab_size != student.vocab_size:
        sizes = f"{teacher.vocab_size} token ids, the student {student.vocab_size}"
        raise UserError(f"{name} has {sizes}; set model.vocab_size={teacher.vocab_size}")
    if teacher.max_seq_len < config.data.seq_len:
        context = (
            f"a context of {teacher.max_seq_len} tokens, and data.seq_len is {config.data.seq_len}"
        )
        raise UserError(f"{name} has {context}; lower data.seq_len")
    k = config.train.distill.cached_logits
    if k is not None and k >= teacher.vocab_size:
        sizes = (
            f"train.distill.cached_logits is {k}, but the vocabulary has "
            f"{teacher.vocab_size} tokens"
        )
        raise UserError(f"{sizes}; use at most {teacher.vocab_size - 1}")
    if teacher.prefix > student.prefix:
        raise UserError(
            f"{name} attends to its targets in a prefix of {teacher.prefix}; use a causal teacher"
        )
    if config.train.distill.attention:
        _check_heads(name, teacher, student)


def _check_heads(name: str, teacher: ThinkerConfig, student: ThinkerConfig) -> None:
    """Raise UserError if the attention weights of the two models cannot be compared."""
    for kind, shape in (("the teacher", teacher), ("the student", student)):
        is_linear = any(pattern.n_features for pattern in shape.patterns)
        if shape.attention_sinks or is_linear:
            raise UserError(
                f"train.distill.attention cannot compare sinks or linear attention, which "
                f"{kind} has"
            )
    for layer in range(student.n_layers):
        n_student, _ = student.head_counts(layer)
        n_teacher, _ = teacher.head_counts(paired_layer(layer, student.n_layers, teacher.n_layers))
        if n_teacher % n_student:
            sizes = f"{n_teacher} heads per layer and the student {n_student}"
            raise UserError(f"{name} has {sizes}; train.distill.attention needs a multiple")


def hash_weights(model: Thinker) -> str:
    """The sha256 of all weights and the architecture."""
    config = model.config.to_dict()
    for field in dataclasses.fields(ThinkerConfig):
        # As before the key existed, so that older runs resume.
        if field.name in NEWER_KEYS and config[field.name] == field.default:
            del config[field.name]
    digest = hashlib.sha256(repr(sorted(config.items())).encode())
    for _, tensor in sorted(model.state_dict().items()):
        digest.update(tensor.detach().cpu().contiguous().numpy().data)
    return digest.hexdigest()


def paired_layer(layer: int, n_student: int, n_teacher: int) -> int:
    """The layer of a teacher whose attention a layer of the student imitates: at the same share of
    the depth."""
    return (layer + 1) * n_teacher // n_student - 1
