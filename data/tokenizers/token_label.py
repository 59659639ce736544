"""A token as a short text that shows what it holds."""

from thinker.data.tokenizers.tokenizer import Tokenizer


def token_label(tokenizer: Tokenizer, token: int) -> str:
    """Return a readable label.

    Special tokens have their names, whitespace is visible, incomplete characters are in hex.
    """
    names = {number: name for name, number in tokenizer.special_tokens.items()}
    if token in names:
        return names[token]
    if token >= tokenizer.vocab_size:  # the model's vocabulary is padded
        return f"<{token}>"
    data = tokenizer.token_bytes(token)
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return "".join(f"\\x{byte:02x}" for byte in data)
    label = "".join(map(_visible, text))
    if not label:
        return f"<{token}>"
    return label


def _visible(character: str) -> str:
    if character == " ":
        return "·"
    if character.isprintable():
        return character
    return repr(character)[1:-1]  # such as \n
