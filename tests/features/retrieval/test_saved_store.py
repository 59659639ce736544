"""A conversation in a file: the next process goes on as one that was never interrupted, with the
stored blocks and without reading the text again."""

import json
import shutil

import pytest
import torch
from conftest import ROOT, random_model, run_script
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.generation import Generator, SamplingParams
from thinker.generation.chat.chat_conversation import ChatConversation
from thinker.generation.chat.conversation import Conversation
from thinker.generation.chat.saved_conversation import load_conversation, save_conversation
from thinker.runtime.errors import UserError

GENERATE = ROOT / "generate.py"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
OPTIONS = {"window": 16, "sinks": 2, "retrieve": 2, "retrieve_block": 4}
LINES = ["once upon a time there was", " a cat that slept all day", " and then it", " woke up"]
NO_END = {make_tokenizer("byte", []).eos_id: float("-inf")}


def tokenizer():
    return make_tokenizer("byte", []).with_chat_template(TEMPLATE)


def model(seed=0):
    return random_model(seed, 0.5, 0.3, vocab_size=264, max_seq_len=64)


def new(kind, seed=0, **options):
    return kind(Generator(model(seed), tokenizer(), **(OPTIONS | options)))


def say(conversation, line):
    params = SamplingParams(max_new_tokens=9, seed=len(conversation.turn_starts), logit_bias=NO_END)
    return "".join(conversation.reply(line, params))


def count_reads(conversation):
    """A list to which the conversation adds how many tokens each turn reads."""
    counts = []
    prefill = conversation.generator.prefill

    def counted(tokens, cache):
        counts.append(len(tokens[0]))
        return prefill(tokens, cache)

    conversation.generator.prefill = counted
    return counts


@pytest.mark.parametrize("kind", [Conversation, ChatConversation])
def test_a_later_session_goes_on_to_the_same_bits(tmp_path, kind):
    """After each turn; and it reads no more than one that was not interrupted."""
    path = tmp_path / "mine.conversation"
    whole = new(kind)
    reads = count_reads(whole)
    known = [say(whole, line) for line in LINES]
    if kind is Conversation:
        assert reads[1:] == [len(line.encode()) + 1 for line in LINES[1:]]
    for n_before in (1, 2, 3):
        first = new(kind)
        found = [say(first, line) for line in LINES[:n_before]]
        save_conversation(first, path)
        second = new(kind)
        load_conversation(second, path)
        assert second.text == first.text
        own_reads = count_reads(second)
        found += [say(second, line) for line in LINES[n_before:]]
        assert found == known
        assert own_reads == reads[n_before:]
        assert second.text == whole.text
        for ours, theirs in zip(second._cache.layers, whole._cache.layers):
            assert torch.equal(ours.store.keys, theirs.store.keys)
            assert torch.equal(ours.keys, theirs.keys)


def test_the_text_comes_from_the_stored_blocks(tmp_path):
    """Other blocks in the file change what is written."""
    path = tmp_path / "mine.conversation"
    first = new(Conversation)
    for line in LINES[:3]:
        say(first, line)
    known = new(Conversation)
    save_conversation(first, path)
    load_conversation(known, path)
    changed = new(Conversation)
    load_conversation(changed, path)
    for layer in changed._cache.layers:
        layer.store.values.neg_()
    assert say(changed, LINES[3]) != say(known, LINES[3])


def test_other_caches_are_filled_from_the_text(tmp_path):
    path = tmp_path / "mine.conversation"
    for options in ({}, {"window": 16, "sinks": 2}, {"cache_bits": 8}):
        whole = Conversation(Generator(model(), tokenizer(), **options))
        known = [say(whole, line) for line in LINES[:2]]
        first = Conversation(Generator(model(), tokenizer(), **options))
        found = [say(first, LINES[0])]
        save_conversation(first, path)
        assert load_file(path) == {}
        second = Conversation(Generator(model(), tokenizer(), **options))
        load_conversation(second, path)
        assert [*found, say(second, LINES[1])] == known


def test_undo_works_in_a_later_session(tmp_path):
    path = tmp_path / "mine.conversation"
    first = new(ChatConversation)
    known = [say(first, line) for line in LINES[:2]]
    save_conversation(first, path)
    second = new(ChatConversation)
    load_conversation(second, path)
    assert second.undo()
    assert say(second, LINES[1]) == known[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "another model"),
        ({"dtype": "bf16"}, "another model"),
        ({"retrieve": 1}, "was written with window=16, sinks=2, retrieve=2, retrieve_block=4"),
        ({"window": 20}, "use these options"),
        ({"retrieve": 0, "retrieve_block": 32}, "use these options"),
        ({"kind": ChatConversation}, "is a text, not a chat"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(tmp_path, change, message):
    path = tmp_path / "mine.conversation"
    first = new(Conversation)
    say(first, LINES[0])
    save_conversation(first, path)
    change = dict(change)
    second = new(change.pop("kind", Conversation), **change)
    with pytest.raises(UserError, match=message):
        load_conversation(second, path)


def test_a_damaged_file_is_refused(tmp_path):
    path = tmp_path / "mine.conversation"
    first = new(Conversation)
    say(first, LINES[0])
    save_conversation(first, path)
    content = path.read_bytes()
    for damaged in (
        b"",
        content[:100],
        content[:-8],
        b'{"a": 1}',
        content.replace(b"keys", b"kezs"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match="damaged"):
            load_conversation(new(Conversation), path)


@pytest.mark.parametrize("part", ["format", "kind", "model", "state", "cached"])
def test_a_file_that_lacks_a_part_is_refused(tmp_path, part):
    path = tmp_path / "mine.conversation"
    first = new(Conversation)
    say(first, LINES[0])
    save_conversation(first, path)
    with safe_open(path, framework="pt") as file:
        content = json.loads(file.metadata()["conversation"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    del content[part]
    save_file(tensors, path, metadata={"conversation": json.dumps(content)})
    with pytest.raises(UserError, match="damaged"):
        load_conversation(new(Conversation), path)


def test_two_processes_write_what_one_does(tiny_run, tmp_path):
    common = [GENERATE, tiny_run, "--interactive", "--max-new-tokens", "9", "--seed", "3"]
    common += ["--window", "8", "--sinks", "2", "--retrieve", "2", "--retrieve-block", "4"]
    lines = [f"{line}\n" for line in LINES]
    whole = run_script(*common, input="".join(lines))
    path = tmp_path / "mine.conversation"
    found = []
    for part in (lines[:2], lines[2:]):
        done = run_script(*common, "--conversation", path, input="".join(part))
        assert done.returncode == 0, done.stderr
        assert f"saved in {path}" in done.stderr
        found.append(done.stdout)
    assert f"going on with {path}, 2 turns" in done.stderr
    assert "".join(found) == whole.stdout
    other = tmp_path / "other"
    shutil.copytree(tiny_run, other)
    refused = run_script(*common, "--retrieve", "1", "--conversation", path, input="")
    assert refused.returncode == 2
    assert "use these options" in refused.stderr.splitlines()[-1]
    alone = run_script(GENERATE, tiny_run, "--conversation", path)
    assert alone.returncode == 2
    assert "--conversation needs --interactive" in alone.stderr


def test_the_file_says_what_it_is(tmp_path):
    from safetensors import safe_open

    path = tmp_path / "mine.conversation"
    first = new(ChatConversation)
    say(first, LINES[0])
    save_conversation(first, path)
    with safe_open(path, framework="pt") as file:
        content = json.loads(file.metadata()["conversation"])
    assert content["format"] == "thinker conversation 1"
    assert content["kind"] == "chat"
    assert [each["role"] for each in content["state"]["messages"]] == ["user", "assistant"]
