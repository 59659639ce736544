"""What Thinker does with models of each family, for docs/reference/families.md.

tests/interop/test_family_matrix.py tries every family with every ability and compares.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from thinker.interop.families.table import FAMILIES

YES = "yes"
PLAIN = "in torch"  # it works without kernels in C, and a line says why

PLAIN_LAYERS = "needs full attention and plain RoPE in all layers"
WITH_OTHER_LAYERS = (
    "gemma2",
    "gemma3_text",
    "gpt2",
    "gpt_neo",
    "mistral",
    "olmo3",
    "opt",
    "smollm3",
    "starcoder2",
)


@dataclass(frozen=True)
class Ability:
    """Something that users do with a model.

    what: a description for users. refused: by family, a part of the error message. plain: families
    without kernels in C.
    """

    name: str
    what: str
    refused: dict[str, str] = field(default_factory=dict)
    plain: tuple[str, ...] = ()

    def outcome(self, family: str) -> str:
        """YES, PLAIN, or "no: " and a part of the error message."""
        if family in self.refused:
            return f"no: {self.refused[family]}"
        if family in self.plain:
            return PLAIN
        return YES


def _all(families: tuple[str, ...], why: str) -> dict[str, str]:
    return dict.fromkeys(families, why)


ABILITIES = [
    Ability(
        "generate",
        "greedy text with a cache, in batches and with speculation equals that without a cache",
        plain=(
            "cohere",
            "gemma",
            "gemma2",
            "gemma3_text",
            "gpt2",
            "gpt_neo",
            "gpt_neox",
            "granite",
            "olmo",
            "olmo2",
            "olmo3",
            "opt",
            "phi",
            "stablelm",
            "starcoder2",
        ),
    ),
    Ability("bits", "weights in 8, 4 and mixed bits, with and without kernels; bf16"),
    Ability(
        "cache in 8 bits",
        "keys and values in 8 bits (`--cache-bits 8`)",
        refused=_all(("mistral", "starcoder2"), "no layer of this model keeps the keys"),
    ),
    Ability(
        "window",
        "endless texts with a window, sinks and retrieval",
        refused=_all(WITH_OTHER_LAYERS, PLAIN_LAYERS),
    ),
    Ability("slide", "texts longer than the context"),
    Ability(
        "early exit",
        "decoding that skips layers",
        refused=_all(("cohere", "phi", "stablelm"), "does not support model.block"),
    ),
    Ability("server", "several requests at once give the texts of `generate`"),
    Ability("inspect", "attribution that adds up, lens, patching, head scores, map, one row"),
    Ability(
        "prune heads",
        "a smaller model that equals the one without these heads",
        refused=_all(("olmo2", "olmo3"), "its norms of queries and keys read all heads"),
    ),
    Ability("prune neurons", "fewer neurons, and zeros in place of weights"),
    Ability(
        "prune layers",
        "fewer layers",
        refused=_all(
            ("gemma2", "gemma3_text", "gpt_neo", "olmo3", "smollm3"),
            "the layers of this model differ",
        ),
    ),
    Ability("teach", "teacher of a distillation"),
    Ability("train", "a step in full and with LoRA, with and without kernels"),
    Ability(
        "evaluate", "likelihoods of `--score` and the lm-eval harness are those of transformers"
    ),
]


def families_markdown(notice: str) -> str:
    """The page docs/reference/families.md. `notice`: a sentence for its beginning."""
    lines = [
        "# Families of models",
        "",
        "What works with a Hugging Face folder of each family. A test tries every cell with a",
        "small random model in the form that differs most from Thinker's own block: with windows,",
        "biases and norms of queries and keys where the family has them.",
        notice.strip(),
        "",
    ]
    for ability in ABILITIES:
        lines.append(f"- **{ability.name}**: {ability.what}")
    names = [ability.name for ability in ABILITIES]
    lines += ["", f"| family | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    reasons: list[str] = []
    for family in sorted(FAMILIES):
        cells = [f"`{family}`"]
        for ability in ABILITIES:
            outcome = ability.outcome(family)
            if outcome.startswith("no: "):
                reason = outcome.removeprefix("no: ")
                if reason not in reasons:
                    reasons.append(reason)
                outcome = f"no ({reasons.index(reason) + 1})"
            cells.append(outcome)
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "`in torch`: it works without kernels in C; a line names the part that they do not know.",
        "",
    ]
    for number, reason in enumerate(reasons, 1):
        lines.append(f"{number}. The error says: {reason}.")
    return "\n".join(lines) + "\n"
