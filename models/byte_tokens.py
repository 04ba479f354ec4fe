"""The tiny model's tokens: one for each byte, and a few that mark the turns of a conversation."""

from __future__ import annotations

from collections.abc import Sequence

from corpus import Message
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

BOS, EOS, USER, ASSISTANT, PAD = 256, 257, 258, 259, 260
VOCABULARY_SIZE = 320
SPECIAL_TOKENS = (
    "<|bos|>",
    "<|eos|>",
    "<|user|>",
    "<|assistant|>",
    "<|pad|>",
    *(f"<|reserved_{number}|>" for number in range(VOCABULARY_SIZE - 261)),
)

CHAT_TEMPLATE = (
    "{{ '<|bos|>' }}"
    "{% set ns = namespace(note='') %}"
    "{% for message in messages %}"
    "{% if message['content'] is string %}{% set text = message['content'] %}"
    "{% else %}{% set text = message['content'] | map(attribute='text') | join %}{% endif %}"
    "{% if message['role'] == 'system' %}{% set ns.note = text + '\\n\\n' %}"
    "{% elif message['role'] == 'user' %}"
    "{{ '<|user|>' + ns.note + text }}{% set ns.note = '' %}"
    "{% elif message['role'] == 'assistant' %}{{ '<|assistant|>' + text + '<|eos|>' }}"
    "{% else %}{{ raise_exception('role must be system, user or assistant') }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def build_tokenizer() -> Tokenizer:
    """Return a tokenizer in which the tokens of a text are the bytes of its UTF-8 form."""
    tokenizer = Tokenizer(BPE(vocab=_byte_vocabulary(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    return tokenizer


def encode_conversation(messages: Sequence[Message]) -> list[int]:
    """Return the tokens that ``CHAT_TEMPLATE`` gives for a conversation."""
    tokens, note = [BOS], ""
    for message in messages:
        if message.role == "system":
            note = f"{message.content}\n\n"
        elif message.role == "user":
            tokens += [USER, *f"{note}{message.content}".encode()]
            note = ""
        else:
            tokens += [ASSISTANT, *message.content.encode(), EOS]
    return tokens


def _byte_vocabulary() -> dict[str, int]:
    """Map the printable stand-in that ByteLevel uses for each byte to the byte's value."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    stand_ins = {byte: chr(byte) for byte in printable}
    stand_ins.update({byte: chr(256 + position) for position, byte in enumerate(others)})
    return {stand_ins[byte]: byte for byte in range(256)}
