from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from backend.core.sampling_params import InvalidRequestError
from components.text import TextProcessor, TextStream

END = "<|end|>"
WORDS = "one two three four stone river".split()
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)


def byte_fallback() -> Tokenizer:
    """Whole words, and single bytes for all else, as the demonstration model has it."""
    vocab = [("<unk>", 0.0), *((f"<0x{byte:02X}>", -20.0) for byte in range(256)), ("▁", -9.0)]
    vocab += [(f"▁{word}", -1.0) for word in WORDS]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(END, normalized=False)])
    return tokenizer


def byte_level() -> Tokenizer:
    """Every byte a token, as in LLaDA's and GPT-2's vocabularies when nothing longer fits."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, normalized=False)])
    return tokenizer


both = pytest.mark.parametrize("tokenizer", [byte_fallback(), byte_level()], ids=["byte fallback", "byte level"])


def push_all(stream: TextStream, tokens: list[int], size: int) -> tuple[list[int], list[str]]:
    kept: list[int] = []
    pieces: list[str] = []
    for start in range(0, len(tokens), size):
        some, piece = stream.push(tokens[start : start + size])
        kept += some
        pieces.append(piece)
    return kept, pieces


def test_a_space_at_the_start_and_ids_without_text_change_nothing() -> None:
    """A decoder strips one space from the start: a token that is a space shows only with the next."""
    tokenizer = byte_fallback()
    space, one, unknown = tokenizer.token_to_id("▁"), tokenizer.token_to_id("▁one"), 5000
    for tokens in (
        [space, one, space, one],
        [one, unknown, one],
        [unknown, one, unknown, unknown, one],
        [space, space],
    ):
        stream = TextStream(tokenizer, ())
        text = push_all(stream, tokens, 1)[1]
        assert "".join(text) + stream.finish() == tokenizer.decode(tokens)


@both
@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize("text", ["one two three", "one  two", "é", "one é two", "🪨🏞", "ab\ncd", "naïve 河 stone 🪨"])
def test_text_is_the_same_however_tokens_come_together(tokenizer: Tokenizer, size: int, text: str) -> None:
    tokens = tokenizer.encode(text).ids
    stream = TextStream(tokenizer, ())
    kept, pieces = push_all(stream, tokens, size)
    assert kept == tokens
    assert "".join(pieces) + stream.finish() == tokenizer.decode(tokens) == text
    assert not any("\ufffd" in piece for piece in pieces), "half a character was shown"


@both
def test_half_a_character_is_held_back_and_dropped_at_the_end(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("one 河").ids
    stream = TextStream(tokenizer, ())
    _, piece = stream.push(tokens[:-1])
    assert piece.strip() == "one"
    assert stream.finish() == ""


@both
def test_bytes_that_are_no_character_fail_nothing(tokenizer: Tokenizer) -> None:
    """Sampling makes such: `DecodeStream` raises on them."""
    one = tokenizer.encode("one").ids
    half = tokenizer.encode("河").ids[-3:-1]
    for tokens in (half + one, one + half * 5 + one, half * 40, one + half):
        whole = TextStream(tokenizer, ())
        _, pieces = push_all(whole, tokens, 1)
        text = "".join(pieces) + whole.finish()
        assert text.count("one") == tokens.count(one[0]) if len(one) == 1 else "one" in text or one[0] not in tokens
        at_once = TextStream(tokenizer, ())
        assert at_once.push(tokens)[1] + at_once.finish() == text


@both
def test_random_tokens_give_one_text_in_any_grouping(tokenizer: Tokenizer) -> None:
    rng = random.Random(0)
    for _ in range(50):
        tokens = [rng.randrange(tokenizer.get_vocab_size()) for _ in range(40)]
        texts = set()
        for size in (1, 7, 40):
            stream = TextStream(tokenizer, ())
            _, pieces = push_all(stream, tokens, size)
            texts.add("".join(pieces) + stream.finish())
        assert len(texts) == 1


@both
def test_special_tokens_have_no_text(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(f"one{END}{END}").ids
    stream = TextStream(tokenizer, ())
    assert stream.push(tokens) == (tokens, "one")


@both
@pytest.mark.parametrize("size", [1, 2, 100])
@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (["two"], "one "),
        (["two three"], "one "),
        (["e t"], "on"),
        (["three", "two"], "one "),
        (["stone", "one two three f"], ""),
        (["on"], ""),
        (["river"], "one two three four"),
        (["four!"], "one two three four"),
        (["", "three"], "one two "),
        ([], "one two three four"),
    ],
)
def test_stop_strings_are_cut_and_nothing_of_them_leaks(
    tokenizer: Tokenizer, size: int, stop: list[str], expected: str
) -> None:
    tokens = tokenizer.encode("one two three four").ids
    stream = TextStream(tokenizer, stop)
    kept, pieces = push_all(stream, tokens, size)
    shown = ""
    for piece in pieces:
        shown += piece
        assert expected.startswith(shown), f"leaked: {shown!r}"
    assert shown + stream.finish() == expected
    assert stream.is_stopped == (expected != "one two three four")
    assert kept == tokens[: len(kept)]
    if stream.is_stopped:
        assert any(text in tokenizer.decode(kept) for text in stop if text)
        assert not any(text in tokenizer.decode(kept[:-1]) for text in stop if text), "tokens after the stop string"


@both
def test_after_a_stop_nothing_more_comes(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("one two three").ids
    stream = TextStream(tokenizer, ["two"])
    stream.push(tokens)
    assert stream.push(tokens) == ([], "")
    assert stream.finish() == ""


def checkpoint(directory: Path, config: Mapping[str, object] | None = None, file: str = "") -> Path:
    byte_level().save(str(directory / "tokenizer.json"))
    if config is not None:
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
    if file:
        (directory / "chat_template.jinja").write_text(file)
    return directory


def test_a_chat_is_rendered_by_the_checkpoints_template(tmp_path: Path) -> None:
    text = TextProcessor(checkpoint(tmp_path, {"chat_template": TEMPLATE}))
    assert text.tokenizer.decode(text.encode_chat("hi")) == "<user>hi>"
    assert text.tokenizer.decode(text.encode("hi")) == "hi"


def test_a_template_of_its_own_file_wins(tmp_path: Path) -> None:
    text = TextProcessor(checkpoint(tmp_path, {"chat_template": "old"}, TEMPLATE))
    assert text.tokenizer.decode(text.encode_chat("hi")) == "<user>hi>"


@pytest.mark.parametrize("bos", ["<s>", {"content": "<s>", "special": True}])
def test_a_template_may_name_the_tokenizers_own_tokens(tmp_path: Path, bos: object) -> None:
    config = {"chat_template": "{{ bos_token }}|{{ eos_token }}|{{ messages[1].content }}", "bos_token": bos}
    text = TextProcessor(checkpoint(tmp_path, config))
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert text.tokenizer.decode(text.encode_messages(messages)) == "<s>||hi"


def test_a_template_may_refuse_messages(tmp_path: Path) -> None:
    text = TextProcessor(checkpoint(tmp_path, {"chat_template": "{{ raise_exception('users only') }}"}))
    with pytest.raises(InvalidRequestError, match="chat template refuses them: users only"):
        text.encode_messages([{"role": "system", "content": "be brief"}])


@pytest.mark.parametrize("config", [None, {}])
def test_without_a_template_a_chat_is_refused(tmp_path: Path, config: dict[str, str] | None) -> None:
    text = TextProcessor(checkpoint(tmp_path, config))
    with pytest.raises(InvalidRequestError, match="no chat template; send the parameter chat_template=false"):
        text.encode_chat("hi")


@both
def test_before_min_tokens_no_stop_string_counts(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("one two one two").ids
    for min_tokens, expected in ((0, 1), (1, 1), (len(tokens) // 2 + 1, 2)):
        stream = TextStream(tokenizer, ["one"], min_tokens)
        kept, pieces = push_all(stream, tokens, 2)
        assert stream.is_stopped and len(kept) >= min_tokens
        assert "".join(pieces).count("one") == expected - 1
        assert tokenizer.decode(kept).count("one") == expected
