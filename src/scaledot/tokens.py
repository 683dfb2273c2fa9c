"""Readable token labels in any script, and text that is safe to print.

A vocabulary stores bytes and spaces in disguise: ``Ġç`` is a space and one third of 猫 (byte-level
BPE), ``▁The`` is " The" (SentencePiece), ``<0xE7>`` a single byte (byte fallback). Labels are built
from those token strings, not from ``decode()``, which loses bytes and drops spaces. WordPiece's
``##`` stays: there a space is never part of a token.
"""

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

__all__ = ["Token", "label_pieces", "labels", "languages", "read_pieces", "safe", "tokens_of"]

# Cc and Cf control, Cs lone surrogates, Co private use, Zl and Zp line ends: none has a glyph.
_NO_GLYPH = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}
_SHOWN = {"\n": "↵", "\t": "⇥"}
_JOINERS = "\u200c\u200d"  # needed inside Persian and Indic words, invisible everywhere else
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def safe(text: str) -> str:
    """The text on one line with nothing invisible left: newline ``↵``, tab ``⇥``, other control
    and bidi characters and lone surrogates as ``⟨U+202E⟩``. Ordinary spaces stay.

    >>> safe("a\\u202eb\\n")
    'a⟨U+202E⟩b↵'
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(_glyph(text, i) for i in range(len(text)))


def _glyph(text: str, i: int) -> str:
    char = text[i]
    if char in _SHOWN:
        return _SHOWN[char]
    if unicodedata.category(char) not in _NO_GLYPH:
        return char
    if char in _JOINERS and _in_word(text[i - 1 : i]) and _in_word(text[i + 1 : i + 2]):
        return char
    return f"⟨U+{ord(char):04X}⟩"


def _in_word(char: str) -> bool:
    return bool(char) and unicodedata.category(char)[0] in "LM"


def _label(text: str) -> str:
    """A token's text: as :func:`safe`, and every space is seen."""
    shown = "".join(
        f"⟨U+{ord(char):04X}⟩" if char != " " and unicodedata.category(char) == "Zs" else char
        for char in safe(text).replace(" ", "␣")
    )
    if not shown:
        return "⟨⟩"
    first = shown[0]
    if "\ufe00" <= first <= "\ufe0f":  # a variation selector alone draws nothing
        return f"⟨U+{ord(first):04X}⟩{shown[1:]}"
    # A mark alone would sit on whatever stands to its left.
    return "◌" + shown if unicodedata.category(first)[0] == "M" else shown


def label_pieces(pieces: Sequence[bytes | str]) -> list[str]:
    """One label a token, from what each token stands for: its bytes, or its text where the
    vocabulary holds text. A character spread over tokens is named in each with its part.

    Bytes that form no character are shown as ``⟨E7⟩``.

    >>> label_pieces([b"The", b" \\xe7", b"\\x8c", b"\\xab", b"\\xff", "[SEP]"])
    ['The', '␣猫 1/3', '猫 2/3', '猫 3/3', '⟨FF⟩', '[SEP]']
    """
    return [token.label for token in read_pieces(pieces)]


@dataclass(frozen=True)
class Token:
    """One token as a page shows it.

    label: as `label_pieces` gives it. text: what it stands for; a character spread over tokens
    stands in its first, so that the texts of all tokens are the whole text, but for bytes that form
    no character. part: (1, 3) for the first third of `char`, None for whole characters.
    """

    label: str
    text: str
    part: tuple[int, int] | None = None
    char: str | None = None


def read_pieces(pieces: Sequence[bytes | str]) -> list[Token]:
    """What `label_pieces` names, in parts.

    >>> read_pieces([b" \\xe7", b"\\x8c", b"\\xab"])[1]
    Token(label='猫 2/3', text='', part=(2, 3), char='猫')
    """
    result: list[Token] = []
    run: list[bytes] = []
    for piece in pieces:
        if isinstance(piece, bytes):
            run.append(piece)
            continue
        result += _read_bytes(run)
        result.append(Token(_label(piece), piece))
        run = []
    return result + _read_bytes(run)


def _read_bytes(run: list[bytes]) -> list[Token]:
    data = b"".join(run)
    owner = [token for token, piece in enumerate(run) for _ in piece]
    shown: list[list[tuple[str, str]]] = [[] for _ in run]  # for each token: (kind, text)
    texts = [""] * len(run)
    parts: list[tuple[tuple[int, int], str] | None] = [None] * len(run)
    start = 0
    while start < len(data):
        char = _character(data, start)
        end = start + len(char.encode() if char else b"?")
        tokens = sorted(set(owner[start:end]))
        texts[tokens[0]] += char
        if not char:
            shown[tokens[0]].append(("byte", f"⟨{data[start]:02X}⟩"))
        elif len(tokens) == 1:
            shown[tokens[0]].append(("text", char))
        else:
            for part, token in enumerate(tokens, 1):
                shown[token].append(("part", f"{_label(char)} {part}/{len(tokens)}"))
                parts[token] = parts[token] or ((part, len(tokens)), char)
        start = end
    return [
        Token(_joined(pieces), text, *(part or (None, None)))
        for pieces, text, part in zip(shown, texts, parts, strict=True)
    ]


def _character(data: bytes, start: int) -> str:
    """The UTF-8 character that starts there, or nothing."""
    lead = data[start]
    length = 1 + (lead >= 0xC2) + (lead >= 0xE0) + (lead >= 0xF0)
    try:
        return data[start : start + length].decode()
    except UnicodeDecodeError:
        return ""


def _joined(pieces: list[tuple[str, str]]) -> str:
    label, before = "", ""
    for kind, group in groupby(pieces, itemgetter(0)):
        texts = [text for _, text in group]
        for text in [_label("".join(texts))] if kind == "text" else texts:
            # "猫 3/3 犬 1/2": without the space the digits would run into what follows.
            label += " " + text if before == "part" else text
            before = kind
    return label or "⟨⟩"


def labels(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """One display label for each id, for any transformers tokenizer, fast or slow.

    Special tokens stay as they are (``[CLS]``, ``<s>``); an id that the vocabulary lacks is
    ``⟨id:N⟩``.
    """
    return [token.label for token in tokens_of(tokenizer, ids)]


def tokens_of(tokenizer: Any, ids: Sequence[int]) -> list[Token]:
    """What `labels` names, in parts."""
    ids = [int(i) for i in ids]
    tokens = tokenizer.convert_ids_to_tokens(ids)
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = set(tokenizer.all_special_ids) | {i for i, token in added.items() if token.special}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    scheme = f"{getattr(backend, 'decoder', '')} {getattr(backend, 'pre_tokenizer', '')}"
    byte_level = "ByteLevel" in scheme or hasattr(tokenizer, "byte_decoder")
    suffix = getattr(getattr(backend, "model", None), "end_of_word_suffix", None)
    bare_bytes = hasattr(tokenizer, "_utf_vocab_size")  # ByT5, Perceiver: a token is chr(byte)

    def piece(i: int, token: str | bytes | None) -> bytes | str:
        if token is None:
            return f"⟨id:{i}⟩"
        if isinstance(token, bytes) or i in special:
            return token
        if bare_bytes:
            return token.encode("latin-1", "replace")
        space = ""
        if suffix and token.endswith(suffix):
            token, space = token[: -len(suffix)], " "
        if byte_level:
            return token + space if i in added else _from_byte_level(token) + space.encode()
        if found := _BYTE.fullmatch(token):
            return bytes.fromhex(found[1])
        return (token if "WordPiece" in scheme else token.replace("▁", " ")) + space

    return read_pieces([piece(i, token) for i, token in zip(ids, tokens, strict=True)])


_KANA = re.compile("[\u3041-\u30ff\uff66-\uff9f]")
_HANGUL = re.compile("[\u1100-\u11ff\uac00-\ud7a3]")
_HAN = re.compile("[\u3005\u3007\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]|[\U00020000-\U0003ffff]")


def languages(texts: Sequence[str]) -> list[str | None]:
    """The language of each token of one text, where its script says it: "ja", "zh" or "ko".

    These share characters that are drawn differently. Han is Japanese in a text with kana, Korean
    in one with Hangul only, else Chinese.
    """
    whole = "".join(texts)
    han = "ja" if _KANA.search(whole) else "ko" if _HANGUL.search(whole) else "zh"
    return [
        "ja" if _KANA.search(x) else "ko" if _HANGUL.search(x) else han if _HAN.search(x) else None
        for x in texts
    ]


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte, inverted."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(b): b for b in plain} | {chr(256 + n): b for n, b in enumerate(others)}


_ALPHABET = _byte_level_alphabet()


def _from_byte_level(token: str) -> bytes:
    if all(char in _ALPHABET for char in token):
        return bytes(_ALPHABET[char] for char in token)
    return token.encode("utf-8", "surrogatepass")  # not of that alphabet: stored as text
