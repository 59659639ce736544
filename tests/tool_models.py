"""Small models that call tools, or that can be made to."""

import torch

from thinker import Thinker, ThinkerConfig
from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.interop import save
from thinker.serving.chat_prompts import encode_chat
from thinker.serving.protocol import ChatRequest

# One that renders tools, calls and results, and one that knows nothing of them.
WITH_TOOLS = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}</tools>\n"
    "{% endif %}{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>"
    '{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}'
    '</tool_call>{% endfor %}{{ eos_token if message.role == "assistant" else "" }}\n{% endfor %}'
    "{% if add_generation_prompt %}assistant:{% if shout %}!{% endif %}{% endif %}"
)
WITHOUT_TOOLS = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    '{{ eos_token if message.role == "assistant" else "" }}\n{% endfor %}'
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
# Templates of some well-known models reject system messages, and others drop them.
NO_SYSTEM = (
    '{% if messages[0].role == "system" %}{{ raise_exception("no system role") }}{% endif %}'
    + WITHOUT_TOOLS
)
DROPS_SYSTEM = WITHOUT_TOOLS.replace(
    "{{ message.role }}: {{ message.content }}",
    '{% if message.role != "system" %}{{ message.role }}: {{ message.content }}{% endif %}',
)

BRIEF = {"34": 100, "125": 80}  # biases for " and }, so that strings and objects are short
CITY = {  # as pydantic-ai writes it
    "additionalProperties": False,
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "type": "object",
}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather.", "parameters": CITY},
}
CALL = '{"name": "weather", "arguments": {"city": "Rome"}}'
ASKED = [{"role": "user", "content": "Weather in Rome?"}]
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "call12345",
            "type": "function",
            "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
        }
    ],
}
RESULT = {"role": "tool", "tool_call_id": "call12345", "content": "sunny"}
GREETED = [{"role": "user", "content": "Hi"}]
KNOWN = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": CITY | {"properties": {"city": {"enum": ["Rome", "Oslo"]}}},
    },
}
# What they call wrongly, with KNOWN, unless the server prevents it.
WRONG = {
    "arguments": (
        [{"role": "user", "content": "Weather in Oz?"}],
        '{"name": "weather", "arguments": {"town": 7}}',
    ),
    "tool": (
        [{"role": "user", "content": "Snow in Rome?"}],
        '{"name": "snow", "arguments": {"city": "Rome"}}',
    ),
}
# What they say before a call.
SAID = {"knows": "Let me see.\n", "plain": ""}


def examples_of(name):
    """What a model learns by heart: messages, the tool, and the answer."""
    called = {**CALLED, "content": SAID[name]}
    yield ASKED, WEATHER, SAID[name] + _tagged(name, CALL)
    yield [*ASKED, called, RESULT], WEATHER, "It is sunny."
    yield GREETED, WEATHER, "Hello!"
    for messages, call in WRONG.values():
        yield messages, KNOWN, SAID[name] + _tagged(name, call)


def _tagged(name, call):
    return f"<tool_call>{call}</tool_call>" if name == "knows" else call


def write_models(folder):
    """Save one model as "knows", whose template renders tools, and as "plain"; returns their
    paths."""
    tokenizers = {}
    examples = []
    for name, template in (("knows", WITH_TOOLS), ("plain", WITHOUT_TOOLS)):
        tokenizer = make_tokenizer("byte", []).with_chat_template(template)
        tokenizers[name] = tokenizer
        for messages, tool, text in examples_of(name):
            body = ChatRequest(model=name, messages=messages, tools=[tool])
            answer = [*tokenizer.encode(text), tokenizer.eos_id]
            examples.append((encode_chat(tokenizer, body), answer))
    model = memorize(examples)
    for name, tokenizer in tokenizers.items():
        save(model, tokenizer, folder / name)
    return [folder / name for name in tokenizers]


def memorize(examples):
    """A model that continues each prompt with its answer."""
    torch.manual_seed(0)
    shape = {"d_model": 32, "n_layers": 2, "n_heads": 2, "n_kv_heads": 2}
    model = Thinker(ThinkerConfig(vocab_size=257, max_seq_len=2048, **shape))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95))
    length = max(len(prompt) + len(answer) for prompt, answer in examples)
    tokens = torch.zeros(len(examples), length, dtype=torch.long)
    targets = torch.full((len(examples), length), -1)
    for row, (prompt, answer) in enumerate(examples):
        end = len(prompt) + len(answer)
        tokens[row, :end] = torch.tensor(prompt + answer)
        targets[row, len(prompt) - 1 : end - 1] = torch.tensor(answer)
    for _ in range(300):
        loss, count = model(tokens, targets=targets)
        mean = loss / count
        mean.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if mean.item() < 0.01:
            return model.eval()
    raise AssertionError(f"the model did not learn: {mean.item()}")
