"""Chat templates in the shapes of well-known models, and tokenizers that have their special tokens.

They are written for the tests. `end` is what a template writes behind an answer, as far as it is
learned; "" if it writes nothing special.
"""

import json
from dataclasses import dataclass

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from thinker.data.text.tales import generate_story
from thinker.data.tokenizers import tokenizer_conversion
from thinker.data.tokenizers.saved_tokenizer import load_tokenizer
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.data.tokenizers.tokenizer_factory import make_tokenizer

SPECIAL = (
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>",
)  # fmt: skip


@dataclass(frozen=True)
class Template:
    """A template, and what it can do."""

    source: str
    end: str
    has_tools: bool = False
    has_system: bool = True
    trims: bool = False


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MARKED_CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}"
    "{% endif %}{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
TOOLS = (
    "{% if tools %}<|im_start|>system\nTools:{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}<|im_end|>\n"
    "{% endif %}{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>{{ m.content }}"
    "</tool_response><|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    '{% for call in m.tool_calls or [] %}<tool_call>{"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments | tojson }}}</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Only answers after the last question of the user keep what the model thought.
THINKING = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and m.reasoning_content and loop.index0 > ns.last %}"
    "<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SMOLLM = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}"
    "<|im_start|>system\nYou are a small model.<|im_end|>\n{% endif %}"
    "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content | trim }}{{ eos_token }}{% endif %}{% endfor %}"
)
ZEPHYR = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content + eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
# A special token touches what the model writes.
PHI = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
INSTRUCTION = (
    "{% for m in messages %}{% if m.role == 'user' %}### Instruction:\n{{ m.content | trim }}\n\n"
    "{% else %}### Response:\n{{ m.content | trim }}{{ eos_token }}\n\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}### Response:\n{% endif %}"
)
OPEN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

TEMPLATES = {
    "chatml": Template(CHATML, "<|im_end|>"),
    "chatml-marked": Template(MARKED_CHATML, "<|im_end|>"),
    "llama3": Template(LLAMA3, "<|eot_id|>", trims=True),
    "tools": Template(TOOLS, "<|im_end|>", has_tools=True),
    "thinking": Template(THINKING, "<|im_end|>"),
    "smollm": Template(SMOLLM, "<|im_end|>"),
    "gemma": Template(GEMMA, "<end_of_turn>", trims=True),
    "mistral": Template(MISTRAL, "</s>", has_system=False, trims=True),
    "zephyr": Template(ZEPHYR, "</s>"),
    "phi": Template(PHI, "<|end|>"),
    "instruction": Template(INSTRUCTION, "</s>", has_system=False, trims=True),
    "open": Template(OPEN, ""),
}


def byte_tokenizer(folder):
    """Bytes, in our own format."""
    ids = {name: 256 + i for i, name in enumerate(SPECIAL)}
    tokens = [bytes([i]) for i in range(256)] + [None] * len(SPECIAL)
    return Tokenizer("byte", tokens, ids, "<s>", eos_ids=[ids["</s>"]])


def bpe_tokenizer(folder):
    """A byte-level BPE with the patterns of our own, in our own format."""
    base = make_tokenizer("bpe:600", [generate_story(0, i).text for i in range(300)])
    tokens = [base.token_bytes(i) for i in range(599)]
    ids = {name: 599 + i for i, name in enumerate(SPECIAL)}
    tokens += [None] * len(SPECIAL)
    return Tokenizer("bpe", tokens, ids, "<s>", base.pattern, eos_ids=[ids["</s>"]])


def imported_bpe_tokenizer(folder):
    """The same from a Hugging Face folder, which starts prompts with no BOS token."""
    own = bpe_tokenizer(folder)
    own.bos_prefix = []
    tokenizer_conversion.write(own, folder, 128)
    return load_tokenizer(folder)


def _sentencepiece(folder, normalizer, pre_tokenizer, decoder):
    pieces = [("<unk>", 0.0), ("▁", -2.0), ("\n", -3.0)]
    pieces += [(chr(code), -4.0) for code in range(33, 127)]
    words = "the ▁the boy ▁boy ▁A ▁is Yes ▁Yes user assistant ▁assistant : \n\n"
    pieces += [(piece, -2.5) for piece in words.split(" ") if len(piece) > 1]
    pieces += [(f"<0x{byte:02X}>", -9.0) for byte in range(256)]
    library = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    library.normalizer = normalizer
    library.pre_tokenizer = pre_tokenizer
    library.decoder = decoder
    library.add_special_tokens(["<unk>", *SPECIAL])
    bos = library.token_to_id("<s>")
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", bos)]
    )
    library.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(folder)


def prepend_tokenizer(folder):
    """SentencePiece as in Llama 2: a normalizer begins each stretch of text with a space."""
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    decoder = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    decoder.append(decoders.Strip(" ", 1, 0))
    return _sentencepiece(folder, normalizers.Sequence(steps), None, decoders.Sequence(decoder))


def metaspace_tokenizer(folder):
    """SentencePiece with Metaspace, which begins the first stretch of text with a space."""
    first = "first"
    return _sentencepiece(
        folder,
        None,
        pre_tokenizers.Metaspace(prepend_scheme=first, split=False),
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=first)]),
    )


TOKENIZERS = {
    "byte": byte_tokenizer,
    "bpe": bpe_tokenizer,
    "imported-bpe": imported_bpe_tokenizer,
    "prepend": prepend_tokenizer,
    "metaspace": metaspace_tokenizer,
}
