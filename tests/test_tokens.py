"""Token labels: every script readable, nothing invisible, nothing lost."""

import unicodedata
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scaledot.tokens import label_pieces, labels, safe

SAMPLE = Path(__file__).parents[1] / "src" / "scaledot" / "sample"


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([b"The", b" sat", b"."], ["The", "␣sat", "."]),
        ([b" \xe7", b"\x8c", b"\xab"], ["␣猫 1/3", "猫 2/3", "猫 3/3"]),
        ([b"\xe7\x8c", b"\xab"], ["猫 1/2", "猫 2/2"]),
        ([b" \xe7\x8c\xab"], ["␣猫"]),
        # A token may end one character and begin the next, or hold whole ones beside a part.
        ([b"\xe7\x8c", b"\xab\xe7", b"\x8a\xac"], ["猫 1/2", "猫 2/2 犬 1/2", "犬 2/2"]),
        ([b"ab\xe7\x8c", b"\xabcd"], ["ab猫 1/2", "猫 2/2 cd"]),
        ([b"\xe7", b"x", b"\xab"], ["⟨E7⟩", "x", "⟨AB⟩"]),
        ([b"\xff\xfe"], ["⟨FF⟩⟨FE⟩"]),
        ([b"\xed\xa0\x80"], ["⟨ED⟩⟨A0⟩⟨80⟩"]),  # a surrogate in UTF-8 is no character
        ([b"\xc0\x80"], ["⟨C0⟩⟨80⟩"]),  # nor is an overlong form
        ([b"\n", b"\t", b"\r", b" "], ["↵", "⇥", "⟨U+000D⟩", "␣"]),
        ([b"", ""], ["⟨⟩", "⟨⟩"]),
        # Text pieces end a character: bytes on both sides of one do not join.
        ([b"\xe7\x8c", "[SEP]", b"\xab"], ["⟨E7⟩⟨8C⟩", "[SEP]", "⟨AB⟩"]),
        (["\u202eabc", "\ud83d", "\ue000"], ["⟨U+202E⟩abc", "⟨U+D83D⟩", "⟨U+E000⟩"]),
        (["\u00a0", "\u3000x"], ["⟨U+00A0⟩", "⟨U+3000⟩x"]),
        (["\u0301", "e\u0301", "\ufe0f"], ["◌\u0301", "e\u0301", "⟨U+FE0F⟩"]),
        (["می\u200cخ", "\u200d"], ["می\u200cخ", "⟨U+200D⟩"]),
        ([b"\xf0\x9f", b"\x91", b"\xa9"], ["👩 1/3", "👩 2/3", "👩 3/3"]),
        (["[bold]", "</script>"], ["[bold]", "</script>"]),
        ([], []),
    ],
)
def test_label_pieces(pieces: list[bytes | str], expected: list[str]) -> None:
    assert label_pieces(pieces) == expected


def test_safe_keeps_spaces_and_one_line() -> None:
    assert safe("a b\r\nc\x1b[31m\u2028\u202e") == ("a b⟨U+000D⟩↵c⟨U+001B⟩[31m⟨U+2028⟩⟨U+202E⟩")
    assert safe("") == ""


@given(st.text(st.characters(), max_size=30))
def test_safe_leaves_nothing_invisible_and_repeats(text: str) -> None:
    shown = safe(text)
    joiners = "\u200c\u200d"
    assert all(unicodedata.category(c)[0] not in "C" or c in joiners for c in _known(shown))
    assert not set(shown) & set(
        "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f"
    )
    assert safe(shown) == shown


def _known(text: str) -> list[str]:
    """Without unassigned code points: newer Unicode than this Python's may draw them."""
    return [c for c in text if unicodedata.category(c) != "Cn"]


@given(st.text(max_size=12), st.data())
def test_bytes_split_anywhere_still_name_every_character(text: str, data: st.DataObject) -> None:
    raw = text.encode("utf-8", "replace")
    cuts = sorted(data.draw(st.sets(st.integers(0, len(raw)), max_size=6)) | {0, len(raw)})
    pieces = [raw[a:b] for a, b in pairwise(cuts)]
    result = label_pieces(pieces)
    assert len(result) == len(pieces)
    if len(pieces) == 1 and raw:
        assert result == label_pieces([raw.decode()])
    for char in raw.decode():
        if char.isalnum():
            assert any(char in label for label in result)


# Real tokenizers, built small


def test_byte_level() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)} | {"<|end|>": 256, "  ": 257}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")
    tokenizer.add_tokens(["Ġraw"])  # an added token is stored as text, not as disguised bytes
    ids = [*tokenizer("a 猫", add_special_tokens=False).input_ids, 256]
    assert labels(tokenizer, ids) == ["a", "␣", "猫 1/3", "猫 2/3", "猫 3/3", "<|end|>"]
    assert labels(tokenizer, [tokenizer.convert_tokens_to_ids("Ġraw")]) == ["Ġraw"]
    assert labels(tokenizer, [99_999]) == ["⟨id:99999⟩"]
    assert labels(tokenizer, []) == []


def test_sentencepiece_with_byte_fallback() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    vocab = {"<unk>": 0, "<s>": 1} | {f"<0x{byte:02X}>": 2 + byte for byte in range(256)}
    for token in ("▁", "T", "▁T", "h", "▁Th"):
        vocab[token] = len(vocab)
    merges = [("▁", "T"), ("▁T", "h")]
    model = tokenizers.models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>")
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(split=False)
    decoders = tokenizers.decoders
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")
    ids = [1, *tokenizer("Th 猫\n", add_special_tokens=False).input_ids]
    assert labels(tokenizer, ids) == ["<s>", "␣Th", "␣", "猫 1/3", "猫 2/3", "猫 3/3", "↵"]


def test_wordpiece_keeps_its_marks() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    words = ["[UNK]", "[CLS]", "[SEP]", "inter", "##nation", "▁", "東"]
    model = tokenizers.models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]")
    backend = tokenizers.Tokenizer(model)
    backend.decoder = tokenizers.decoders.WordPiece()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )
    assert labels(tokenizer, [1, 3, 4, 5, 6, 0, 2]) == [
        "[CLS]", "inter", "##nation", "▁", "東", "[UNK]", "[SEP]",
    ]  # fmt: skip


def test_word_end_marks_are_spaces() -> None:
    """GPT-1 and CLIP mark a word's end: ``sat</w>``."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    vocab = {"<unk>": 0, "s": 1, "at</w>": 2}
    model = tokenizers.models.BPE(vocab, [], unk_token="<unk>", end_of_word_suffix="</w>")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(model), unk_token="<unk>"
    )
    assert labels(tokenizer, [1, 2, 0]) == ["s", "at␣", "<unk>"]


def test_slow_tokenizers() -> None:
    transformers = pytest.importorskip("transformers")
    by_byte = transformers.ByT5Tokenizer()
    assert labels(by_byte, by_byte("a 猫").input_ids) == [
        "a", "␣", "猫 1/3", "猫 2/3", "猫 3/3", "</s>",
    ]  # fmt: skip
    by_character = transformers.CanineTokenizer()
    assert labels(by_character, by_character("猫!", add_special_tokens=False).input_ids) == [
        "猫", "!",
    ]  # fmt: skip


class _Tiktoken:
    """Remote code's tokenizers hand out the bytes themselves."""

    all_special_ids = (2,)

    def convert_ids_to_tokens(self, ids: list[int]) -> list[bytes | str]:
        return [[b" \xe7\x8c", b"\xab", "<|end|>"][i] for i in ids]


def test_tokens_that_are_bytes() -> None:
    assert labels(_Tiktoken(), [0, 1, 2]) == ["␣猫 1/2", "猫 2/2", "<|end|>"]


@pytest.mark.skipif(
    not (SAMPLE / "tokenizer.json").exists(), reason="the embedded sample is not built"
)
def test_embedded_sample() -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(SAMPLE)
    text = "And the 猫\nsat."
    found = labels(tokenizer, tokenizer(text, add_special_tokens=False).input_ids)
    assert found[-1].endswith(".")
    assert any(label.endswith("猫 1/3") for label in found)
    assert any("↵" in label for label in found)
