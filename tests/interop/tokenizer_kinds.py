"""Hugging Face folders with tokenizers of well-known model families, trained on local text.

Each has the parts of the published one: model, normalizer, pre-tokenizer, post-processor, decoder,
added tokens with their flags, tokenizer_config.json and chat template. Only its vocabulary is small.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
from chat_templates import CHATML, LLAMA3
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer

from thinker.interop.verify_export import adversarial_texts

# The merges of hard texts would show a split at another place.
SAMPLE = Path(__file__).read_text(encoding="utf-8") + "\n".join(
    islice(adversarial_texts([], seed=1), 500)
)
GPT2_END = "<|endoftext|>"
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = CL100K.replace("{1,3}", "")

GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}"
    "{% endif %}{% if message['role'] == 'assistant' %}{% set role = 'model' %}"
    "{% else %}{% set role = message['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)
PHI3 = (
    "{% for message in messages %}{% if message['role'] == 'system' %}"
    "{{'<|system|>\n' + message['content'] + '<|end|>\n'}}{% elif message['role'] == 'user' %}"
    "{{'<|user|>\n' + message['content'] + '<|end|>\n'}}{% elif message['role'] == 'assistant' %}"
    "{{'<|assistant|>\n' + message['content'] + '<|end|>\n'}}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
COHERE = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{{ '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>' + messages[0]['content'] + '<|END_OF_TURN_TOKEN|>' }}"
    "{% else %}{% set loop_messages = messages %}{% endif %}{% for message in loop_messages %}"
    "{% set content = message['content'] %}{% if message['role'] == 'user' %}"
    "{{ '<|START_OF_TURN_TOKEN|><|USER_TOKEN|>' + content.strip() + '<|END_OF_TURN_TOKEN|>' }}"
    "{% elif message['role'] == 'assistant' %}"
    "{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>'  + content.strip() + '<|END_OF_TURN_TOKEN|>' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}"
)
GRANITE = (
    "{%- for message in messages %}"
    "{{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' + message['content'] + "
    "'<|end_of_text|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}"
)
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system = '<<SYS>>\n' + messages[0]['content'] + '\n<</SYS>>\n\n' %}"
    "{% else %}{% set loop_messages = messages %}{% set system = '' %}{% endif %}"
    "{% for message in loop_messages %}{% if message['role'] == 'user' %}"
    "{% set first = system if loop.first else '' %}"
    "{{ bos_token + '[INST] ' + first + message['content'] | trim + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}"
    "{{ ' ' + message['content'] | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)


@dataclass(frozen=True)
class Kind:
    """A tokenizer as a family publishes it.

    make() -> tokenizer.json. config: tokenizer_config.json. bos, eos: as in config.json; None if
    the family has none. follows_file: whether AutoTokenizer of transformers 5 does what
    tokenizer.json says; for some classes it has steps of its own instead.
    """

    model_type: str
    make: Callable[[], dict[str, Any]]
    config: dict[str, Any]
    bos: str | None = GPT2_END
    eos: str = GPT2_END
    template: Any = None
    has_system: bool = True
    follows_file: bool = True


def added(name: str, **flags: bool) -> AddedToken:
    """An added token whose flags are those of most published files."""
    return AddedToken(name, **{"normalized": False, "special": True} | flags)


def byte_level(**options: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(**{"add_prefix_space": False, "trim_offsets": True} | options)


def split(pattern: str, is_inverted: bool = False) -> pre_tokenizers.PreTokenizer:
    """Both ways in which published files split a text by a regular expression."""
    behavior = "removed" if is_inverted else "isolated"
    step = pre_tokenizers.Split(Regex(pattern), behavior, invert=is_inverted)
    return pre_tokenizers.Sequence([step, byte_level(use_regex=False)])


def digits() -> pre_tokenizers.PreTokenizer:
    step = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([step, byte_level(use_regex=True)])


def begins_with(name: str, number: int) -> processors.PostProcessor:
    return processors.TemplateProcessing(
        f"{name} $A", f"{name} $A {name} $B", special_tokens=[(name, number)]
    )


def _byte_level_bpe(
    pre_tokenizer: pre_tokenizers.PreTokenizer,
    first: list[AddedToken],
    last: list[AddedToken],
    normalizer: normalizers.Normalizer | None = None,
    in_vocab: bool = True,
    **model: Any,
) -> tokenizers.Tokenizer:
    """A byte-level BPE whose added tokens are before or behind the others.

    in_vocab: the last ones are in the vocabulary of the model too, as <|endoftext|> in GPT-2's.
    """
    library = tokenizers.Tokenizer(models.BPE(**model))
    library.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        library.normalizer = normalizer
    library.decoder = decoders.ByteLevel(add_prefix_space=True, trim_offsets=True, use_regex=True)
    trainer = BpeTrainer(
        vocab_size=1000 + len(first),
        special_tokens=first,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator([SAMPLE], trainer)
    if in_vocab:
        content = json.loads(library.to_str())
        vocab = content["model"]["vocab"]
        for token in last:
            vocab[token.content] = len(vocab)
        library = tokenizers.Tokenizer.from_str(json.dumps(content))
    for token in last:
        if token.special:
            library.add_special_tokens([token])
        else:
            library.add_tokens([token])
    library.post_processor = processors.ByteLevel(trim_offsets=False)
    return library


@cache
def gpt2() -> tokenizers.Tokenizer:
    return _byte_level_bpe(byte_level(), [], [added(GPT2_END)])


def gpt2_json() -> dict[str, Any]:
    content = json.loads(gpt2().to_str())
    content["model"] |= {"continuing_subword_prefix": "", "end_of_word_suffix": ""}
    return content


def gpt_neo_json() -> dict[str, Any]:
    """With <|endoftext|> as it was written by older versions."""
    content = gpt2_json()
    content["added_tokens"][0]["normalized"] = True
    return content


def phi_json() -> dict[str, Any]:
    """Runs of spaces and tabs behind GPT-2's vocabulary."""
    library = tokenizers.Tokenizer.from_str(gpt2().to_str())
    for n_spaces in range(31, 1, -1):
        library.add_tokens([added(" " * n_spaces, special=False, normalized=True)])
    for n_tabs in range(9, 1, -1):
        library.add_tokens([added("\t" * n_tabs, special=False, normalized=True)])
    return json.loads(library.to_str())


def neox_json(last_spaces: int = 24, n_others: int = 0) -> dict[str, Any]:
    first = [added(GPT2_END), added("<|padding|>")]
    last = []
    for n_spaces in range(last_spaces, 1, -1):
        last.append(added(" " * n_spaces, special=False, normalized=True))
    for name in ("|||EMAIL_ADDRESS|||", "|||PHONE_NUMBER|||", "|||IP_ADDRESS|||")[:n_others]:
        last.append(added(name, special=False))
    library = _byte_level_bpe(byte_level(), first, last, normalizers.NFC(), in_vocab=False)
    return json.loads(library.to_str())


def opt_json() -> dict[str, Any]:
    first = [added("<s>"), added("<pad>"), added("</s>", normalized=True), added("<unk>")]
    library = _byte_level_bpe(byte_level(), first, [])
    library.post_processor = begins_with("</s>", 2)
    return json.loads(library.to_str())


def starcoder2_json() -> dict[str, Any]:
    names = [GPT2_END, "<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>", "<repo_name>"]
    names += ["<file_sep>", "<issue_start>", "<jupyter_text>", "<empty_output>"]
    return json.loads(_byte_level_bpe(digits(), [added(name) for name in names], []).to_str())


def granite_json() -> dict[str, Any]:
    names = ["<|end_of_text|>", "<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>"]
    last = ["<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>"]
    library = _byte_level_bpe(
        digits(), [added(name) for name in names], [added(name) for name in last], in_vocab=False
    )
    return json.loads(library.to_str())


def smollm_json() -> dict[str, Any]:
    names = [GPT2_END, "<|im_start|>", "<|im_end|>", "<repo_name>", "<file_sep>"]
    return json.loads(_byte_level_bpe(digits(), [added(name) for name in names], []).to_str())


def cohere_json() -> dict[str, Any]:
    names = ["<PAD>", "<UNK>", "<CLS>", "<SEP>", "<MASK_TOKEN>", "<BOS_TOKEN>", "<EOS_TOKEN>"]
    last = [added("<|START_OF_TURN_TOKEN|>", special=False)]
    last.append(added("<|END_OF_TURN_TOKEN|>"))
    for name in ("YES", "GOOD", "USER", "CHATBOT", "SYSTEM"):
        last.append(added(f"<|{name}_TOKEN|>", special=False))
    library = _byte_level_bpe(
        digits(), [added(name) for name in [*names, "<EOP_TOKEN>"]], last, normalizers.NFC()
    )
    library.post_processor = begins_with("<BOS_TOKEN>", 5)
    return json.loads(library.to_str())


def llama3_json() -> dict[str, Any]:
    last = ["<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>"]
    last += ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    library = _byte_level_bpe(
        split(CL100K), [], [added(name) for name in last], in_vocab=False, ignore_merges=True
    )
    bos = begins_with("<|begin_of_text|>", library.token_to_id("<|begin_of_text|>"))
    library.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), bos])
    return json.loads(library.to_str())


def smollm3_json() -> dict[str, Any]:
    """Llama 3's, with marks of thoughts that are no special tokens."""
    library = tokenizers.Tokenizer.from_str(json.dumps(llama3_json()))
    library.add_special_tokens([added("<|im_start|>"), added("<|im_end|>")])
    for name in ("<think>", "</think>", "<tool_call>"):
        library.add_tokens([added(name, special=False)])
    library.post_processor = processors.ByteLevel(trim_offsets=False)
    return json.loads(library.to_str())


def qwen_json() -> dict[str, Any]:
    last = [added(GPT2_END), added("<|im_start|>"), added("<|im_end|>")]
    for name in ("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<think>", "</think>"):
        last.append(added(name, special=False))
    library = _byte_level_bpe(split(QWEN), [], last, normalizers.NFC(), in_vocab=False)
    return json.loads(library.to_str())


def dolma2_json() -> dict[str, Any]:
    """As converted from cl100k_base."""
    last = [added("<|extra_id_0|>", special=False), added(GPT2_END)]
    for name in ("<|fim_prefix|>", "<|fim_middle|>", "|||PHONE_NUMBER|||", "<|im_start|>"):
        last.append(added(name, special=name.startswith("<|im")))
    last += [added("<|im_end|>"), added("<|endofprompt|>"), added("<|pad|>")]
    library = _byte_level_bpe(split(CL100K, is_inverted=True), [], last, in_vocab=False)
    return json.loads(library.to_str())


def arcade100k_json() -> dict[str, Any]:
    """StableLM 2's, which extends cl100k_base."""
    names = [GPT2_END, "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_pad|>", "<gh_stars>"]
    names += ["<filename>", "<|im_start|>", "<|im_end|>", "<|reg_extra|>", "<|reg0|>"]
    last = [added(name) for name in names]
    library = _byte_level_bpe(split(CL100K), [], last, normalizers.NFC(), in_vocab=False)
    return json.loads(library.to_str())


def _sentencepiece(first: list[AddedToken], last: list[AddedToken]) -> dict[str, Any]:
    """A BPE as converted from SentencePiece: what its pieces do not spell becomes bytes."""
    library = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    library.normalizer = normalizers.Replace(" ", "▁")
    library.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")  # only for training
    pieces = [*(token.content for token in first), *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = BpeTrainer(
        vocab_size=len(pieces) + 3000,  # 1,700 characters, and merges
        special_tokens=pieces,
        initial_alphabet=["▁", "\n"],
        show_progress=False,
    )
    library.train_from_iterator([SAMPLE.replace("\0", "")], trainer)  # which no piece has
    content = json.loads(library.to_str())
    content["added_tokens"] = []
    content["pre_tokenizer"] = None
    content["model"]["merges"] = _all_merges(content["model"])
    library = tokenizers.Tokenizer.from_str(json.dumps(content))
    for token in [*first, *last]:
        if token.special:
            library.add_special_tokens([token])
        else:
            library.add_tokens([token])
    return json.loads(library.to_str())


def _all_merges(model: dict[str, Any]) -> list[list[str]]:
    """All pairs of pieces that make a piece, as a converter writes them: first those of runs, which
    users define, the longest first, and then in the order in which the pieces were learned."""
    vocab = model["vocab"]
    runs = [char * length for char in "\n▁" for length in range(31, 1, -1)]
    learned = ["".join(pair) for pair in model["merges"]]
    merges = []
    for piece in [*runs, *learned]:
        for place in range(1, len(piece)):
            pair = [piece[:place], piece[place:]]
            if piece in vocab and set(pair) <= vocab.keys():
                merges.append(pair)
    return merges


REPLACE = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
DECODER = {"type": "Sequence", "decoders": [REPLACE, {"type": "ByteFallback"}, {"type": "Fuse"}]}
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def gemma_json(splits: bool) -> dict[str, Any]:
    first = [added(name) for name in ("<pad>", "<eos>", "<bos>", "<unk>")]
    first += [added("<mask>", special=False), added("<2mass>", special=False)]
    for number in range(20):
        first.append(added(f"<unused{number}>", special=False))
    first += [added("<start_of_turn>"), added("<end_of_turn>")]
    for length in range(1, 32):
        first.append(added("\n" * length, special=False))
    for length in range(2, 32):
        first.append(added("▁" * length, special=False))
    for name in ("<table>", "<strong>", "</strong>", "\t\t", "\t\t\t"):
        first.append(added(name, special=False))
    content = _sentencepiece(first, [])
    content["decoder"] = DECODER
    if splits:
        content["pre_tokenizer"] = {
            "type": "Split",
            "pattern": {"String": " "},
            "behavior": "MergedWithPrevious",
            "invert": False,
        }
    library = tokenizers.Tokenizer.from_str(json.dumps(content))
    library.post_processor = begins_with("<bos>", 2)
    return json.loads(library.to_str())


def prepend_json(first: list[AddedToken], last: list[AddedToken], adds_bos: bool) -> dict[str, Any]:
    """Llama 2's kind: a space begins each stretch of text."""
    content = _sentencepiece(first, last)
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    steps = [{"type": "Prepend", "prepend": "▁"}, replace]
    content["normalizer"] = {"type": "Sequence", "normalizers": steps}
    content["decoder"] = DECODER | {"decoders": [*DECODER["decoders"], STRIP]}
    library = tokenizers.Tokenizer.from_str(json.dumps(content))
    if adds_bos:
        library.post_processor = begins_with("<s>", 1)
    return json.loads(library.to_str())


def llama2_json() -> dict[str, Any]:
    return prepend_json([added("<unk>"), added("<s>"), added("</s>")], [], adds_bos=True)


def phi3_json() -> dict[str, Any]:
    """Its added tokens take the spaces and line ends behind them."""
    first = [added("<unk>"), added("<s>"), added("</s>", rstrip=True, special=False)]
    last = [added(GPT2_END)]
    for name in ("assistant", "placeholder1", "placeholder2", "system", "end", "user"):
        last.append(added(f"<|{name}|>", rstrip=True))
    content = prepend_json(first, last, adds_bos=False)
    everything = [{"Sequence": {"id": "A", "type_id": 0}}]
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": everything,
        "pair": [*everything, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {},
    }
    return content


def declared(name: str) -> dict[str, Any]:
    """An added token in older files."""
    flags = {"lstrip": False, "normalized": True, "rstrip": False, "single_word": False}
    return {"__type": "AddedToken", "content": name} | flags


GPT2_CONFIG = {
    "bos_token": GPT2_END,
    "eos_token": GPT2_END,
    "unk_token": GPT2_END,
    "add_prefix_space": False,
    "tokenizer_class": "GPT2Tokenizer",
}
NEOX_CONFIG = GPT2_CONFIG | {"tokenizer_class": "GPTNeoXTokenizer"}
OPT_CONFIG = {
    "errors": "replace",
    "unk_token": declared("</s>"),
    "bos_token": declared("</s>"),
    "eos_token": declared("</s>"),
    "pad_token": "<pad>",
    "add_prefix_space": False,
    "add_bos_token": True,
    "special_tokens_map_file": None,
    "tokenizer_class": "GPT2Tokenizer",
}
GEMMA_CONFIG = {
    "add_bos_token": True,
    "add_eos_token": False,
    "bos_token": "<bos>",
    "eos_token": "<eos>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
    "additional_special_tokens": ["<start_of_turn>", "<end_of_turn>"],
    "clean_up_tokenization_spaces": False,
    "legacy": None,
    "sp_model_kwargs": {},
    "spaces_between_special_tokens": False,
    "tokenizer_class": "GemmaTokenizer",
    "use_default_system_prompt": False,
}
LLAMA_CONFIG = {
    "add_bos_token": True,
    "add_eos_token": False,
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "pad_token": None,
    "legacy": False,
    "sp_model_kwargs": {},
    "tokenizer_class": "LlamaTokenizer",
}
PHI3_CONFIG = LLAMA_CONFIG | {
    "add_bos_token": False,
    "eos_token": GPT2_END,
    "pad_token": GPT2_END,
    "padding_side": "left",
}
COHERE_CONFIG = {
    "add_bos_token": True,
    "add_eos_token": False,
    "add_prefix_space": False,
    "bos_token": "<BOS_TOKEN>",
    "eos_token": "<|END_OF_TURN_TOKEN|>",
    "pad_token": "<PAD>",
    "unk_token": None,
    "legacy": True,
    "merges_file": None,
    "vocab_file": None,
    "sp_model_kwargs": {},
    "tokenizer_class": "CohereTokenizer",
    "use_default_system_prompt": False,
}
GRANITE_CONFIG = GPT2_CONFIG | {
    "add_bos_token": False,
    "bos_token": "<|end_of_text|>",
    "eos_token": "<|end_of_text|>",
    "unk_token": "<|end_of_text|>",
    "pad_token": "<|end_of_text|>",
    "additional_special_tokens": ["<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>"],
    "errors": "replace",
    "padding_side": "left",
    "vocab_size": 49152,
}
FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}
LLAMA3_CONFIG = FAST | {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
SMOLLM3_CONFIG = FAST | {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
QWEN_CONFIG = {
    "add_bos_token": False,
    "add_prefix_space": False,
    "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
    "bos_token": None,
    "eos_token": "<|im_end|>",
    "pad_token": GPT2_END,
    "unk_token": None,
    "errors": "replace",
    "split_special_tokens": False,
    "tokenizer_class": "Qwen2Tokenizer",
}
DOLMA2_CONFIG = GPT2_CONFIG | {"pad_token": "<|pad|>", "bos_token": None}
STABLELM_CONFIG = FAST | {"bos_token": GPT2_END, "eos_token": GPT2_END, "pad_token": GPT2_END}

COHERE_TEMPLATES = [
    {"name": "default", "template": COHERE},
    {"name": "rag", "template": "{{ bos_token }}{{ documents }}"},
]
BEFORE_THE_TEXT = {"bos": "<bos>", "eos": "<eos>", "template": GEMMA, "has_system": False}

KINDS = {
    "gpt2": Kind("gpt2", gpt2_json, {"model_max_length": 1024}),
    "gpt_neo": Kind("gpt_neo", gpt_neo_json, GPT2_CONFIG),
    "phi": Kind("phi", phi_json, GPT2_CONFIG | {"tokenizer_class": "CodeGenTokenizer"}),
    "gpt_neox": Kind("gpt_neox", neox_json, NEOX_CONFIG),
    "olmo": Kind(
        "olmo",
        lambda: neox_json(n_others=3),
        NEOX_CONFIG | {"pad_token": "<|padding|>", "bos_token": None, "add_eos_token": False},
    ),
    "opt": Kind("opt", opt_json, OPT_CONFIG, bos="</s>", eos="</s>"),
    "starcoder2": Kind("starcoder2", starcoder2_json, GPT2_CONFIG, follows_file=False),
    "granite": Kind(
        "granite",
        granite_json,
        GRANITE_CONFIG,
        bos="<|end_of_text|>",
        eos="<|end_of_text|>",
        template=GRANITE,
    ),
    "smollm": Kind("llama", smollm_json, GPT2_CONFIG, template=CHATML, follows_file=False),
    "cohere": Kind(
        "cohere",
        cohere_json,
        COHERE_CONFIG,
        bos="<BOS_TOKEN>",
        eos="<|END_OF_TURN_TOKEN|>",
        template=COHERE_TEMPLATES,
    ),
    "llama3": Kind(
        "llama",
        llama3_json,
        LLAMA3_CONFIG,
        bos="<|begin_of_text|>",
        eos="<|eot_id|>",
        template=LLAMA3,
    ),
    "smollm3": Kind("smollm3", smollm3_json, SMOLLM3_CONFIG, None, "<|im_end|>", CHATML),
    "qwen2": Kind("qwen2", qwen_json, QWEN_CONFIG, template=CHATML),
    "qwen3": Kind("qwen3", qwen_json, QWEN_CONFIG, template=CHATML),
    "olmo2": Kind("olmo2", dolma2_json, DOLMA2_CONFIG, None, template=CHATML),
    "olmo3": Kind("olmo3", dolma2_json, DOLMA2_CONFIG, None, template=CHATML),
    "stablelm": Kind("stablelm", arcade100k_json, STABLELM_CONFIG, template=CHATML),
    "gemma": Kind("gemma", lambda: gemma_json(False), GEMMA_CONFIG, **BEFORE_THE_TEXT),
    "gemma2": Kind("gemma2", lambda: gemma_json(True), GEMMA_CONFIG, **BEFORE_THE_TEXT),
    "gemma3_text": Kind("gemma3_text", lambda: gemma_json(True), GEMMA_CONFIG, **BEFORE_THE_TEXT),
    "mistral": Kind("mistral", llama2_json, LLAMA_CONFIG, "<s>", "</s>"),
    "llama": Kind("llama", llama2_json, LLAMA_CONFIG, "<s>", "</s>", LLAMA2, True, False),
    "phi3": Kind("phi3", phi3_json, PHI3_CONFIG, "<s>", GPT2_END, PHI3),
}


@cache
def _content(name: str) -> dict[str, Any]:
    return KINDS[name].make()


def build(name: str, folder: Path) -> Kind:
    """Write the tokenizer of a kind, and a config.json if there is none. Returns the kind."""
    kind = KINDS[name]
    content = _content(name)
    config = dict(kind.config)
    if kind.template is not None:
        config["chat_template"] = kind.template
    ids = {token["content"]: token["id"] for token in content["added_tokens"]}
    _write(folder / "tokenizer.json", content)
    _write(folder / "tokenizer_config.json", config)
    if not (folder / "config.json").exists():
        model = {"model_type": kind.model_type, "eos_token_id": ids[kind.eos]}
        if kind.bos is not None:
            model["bos_token_id"] = ids[kind.bos]
        _write(folder / "config.json", model)
    return kind


def build_older_files(name: str, folder: Path) -> Kind:
    """The same in vocab.json and merges.txt, as GPT-2 and OPT were published."""
    kind = build(name, folder)
    model = _content(name)["model"]
    lines = ["#version: 0.2", *(" ".join(pair) for pair in model["merges"])]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    _write(folder / "vocab.json", model["vocab"])
    (folder / "tokenizer.json").unlink()
    return kind


def build_sentencepiece(name: str, folder: Path) -> Kind:
    """The same kind of tokenizer in tokenizer.model, without tokenizer.json."""
    kind = KINDS[name]
    options: dict[str, Any] = {}
    if name.startswith("gemma"):
        options |= {"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3, "pad_piece": "<pad>"}
        options |= {"bos_piece": "<bos>", "eos_piece": "<eos>", "add_dummy_prefix": False}
        runs = ["\n" * length for length in range(1, 32)]
        runs += ["▁" * length for length in range(2, 32)]
        options["user_defined_symbols"] = ["<mask>", "<unused0>", "<table>", *runs]
        options["control_symbols"] = ["<start_of_turn>", "<end_of_turn>"]
    (folder / "sample.txt").write_text(SAMPLE, encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "sample.txt"),
        model_prefix=str(folder / "tokenizer"),
        model_type="bpe",
        vocab_size=2500,
        byte_fallback=True,
        character_coverage=0.98,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        max_sentence_length=1 << 20,
        minloglevel=2,
        **options,
    )
    for name_of_file in ("sample.txt", "tokenizer.vocab"):
        (folder / name_of_file).unlink()
    pieces = sentencepiece.SentencePieceProcessor(str(folder / "tokenizer.model"))
    config = dict(kind.config)
    if kind.template is not None:
        config["chat_template"] = kind.template
    eos = pieces.piece_to_id(kind.eos)
    if name == "phi3":  # tokens behind those of the model, which only tokenizer_config.json has
        eos = pieces.get_piece_size()
        names = [GPT2_END, "<|assistant|>", "<|system|>", "<|end|>", "<|user|>"]
        flags = {"lstrip": False, "normalized": False, "single_word": False, "special": True}
        tokens = {}
        for number, token in enumerate(names):
            is_of_chat = token != GPT2_END
            tokens[str(eos + number)] = {"content": token, "rstrip": is_of_chat} | flags
        config["added_tokens_decoder"] = tokens
    _write(folder / "tokenizer_config.json", config)
    ids = {"bos_token_id": pieces.piece_to_id(kind.bos), "eos_token_id": eos}
    _write(folder / "config.json", {"model_type": kind.model_type} | ids)
    return kind


def _write(path: Path, values: Any) -> None:
    path.write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")
