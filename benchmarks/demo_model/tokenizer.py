"""The demonstration model's own tokenizer: whole words and numbers, bytes for everything else."""

from __future__ import annotations

import json
import string
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from benchmarks.demo_model.tasks import MAX_NUMBER_IN_WORDS, ONES, TENS, WORDS, Example

END, MASK, USER, ASSISTANT, SYSTEM = "<|endoftext|>", "<|mask|>", "<|user|>", "<|assistant|>", "<|system|>"
SPECIALS = (END, MASK, USER, ASSISTANT, SYSTEM)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
PROMPT_WORDS = "count from to prices what is the price of spell write in words sort plus repeat hundred".split()


def _build() -> Tokenizer:
    """A Unigram vocabulary given outright: nothing is learned, any UTF-8 text is representable."""
    words = [*ONES, *filter(None, TENS), *PROMPT_WORDS, *WORDS, *string.ascii_lowercase]
    words += [str(n) for n in range(MAX_NUMBER_IN_WORDS + 1)]
    vocab = [(token, 0.0) for token in ("<unk>", *SPECIALS)]
    vocab += [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
    vocab += [("▁", -9.0), *((mark, -8.0) for mark in ":.?,!")]
    vocab += [(f"▁{word}", -1.0) for word in dict.fromkeys([*words, "first"])]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIALS])
    return tokenizer


class WordTokenizer:
    """The tokenizer as training and evaluation use it: a prompt is a chat of one user message."""

    def __init__(self) -> None:
        self._tokenizer = _build()
        self.end = SPECIALS.index(END) + 1
        self.mask = SPECIALS.index(MASK) + 1
        self.vocab_size = -(-self._tokenizer.get_vocab_size() // 8) * 8

    def prompt(self, example: Example) -> list[int]:
        return list(self._tokenizer.encode(f"{USER}{example.prompt}{ASSISTANT}").ids)

    def answer(self, example: Example) -> list[int]:
        return list(self._tokenizer.encode(example.answer).ids)

    def text(self, canvas: list[int]) -> str:
        """The answer in a denoised canvas: everything before the end of text."""
        kept = canvas[: canvas.index(self.end)] if self.end in canvas else canvas
        return str(self._tokenizer.decode(kept))

    def save(self, directory: Path, context_length: int) -> None:
        """Writes tokenizer.json and tokenizer_config.json (with the chat template)."""
        self._tokenizer.save(str(directory / "tokenizer.json"))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END,
            "pad_token": END,
            "mask_token": MASK,
            "unk_token": "<unk>",
            "model_max_length": context_length,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        }
        (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
