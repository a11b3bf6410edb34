"""Vocab: text to token ids and back, from any thread."""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from itertools import repeat
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from trioserve.errors import (
    InvalidRequestError,
    ModelLoadError,
)
from trioserve.llama.library import SharedHandle, lib, short
from trioserve.types import FimTokens, TokenId
from trioserve.whole_numbers import whole_number

#: A part with this many special tokens or characters ends at the next place where it may.
MAX_SPECIALS = 256
MAX_CHARS = 4096
#: Longer texts are cut.
CUT_FROM = MAX_CHARS

_BLANKS = " \t\n\r\f\v"  # as C's isspace


@attrs.frozen
class TextPart:
    """A part of a text. `follows_text`: no special token is beside the cut before it."""

    text: str
    follows_text: bool = False


class TextParts:
    """Knows where text can be cut, for one vocabulary.

    Args:
        specials: the special tokens that llama.cpp finds in text.
        only_first: finds a character that no token has after its first; None if text between
            special tokens must not be cut.
        strips_left: whether a special token takes away the blanks before it.
        strips_right: whether one takes away those after it.

    Raises:
        RecursionError: the names are too much alike to be made into a pattern.
    """

    def __init__(
        self,
        specials: Collection[str],
        *,
        only_first: re.Pattern[str] | None = None,
        strips_left: bool = False,
        strips_right: bool = False,
    ) -> None:
        self._pattern = _longest_of(specials)
        self._only_first = only_first
        self._strips_left, self._strips_right = strips_left, strips_right
        prefixes = {name[:n] for name in specials for n in range(1, len(name))}
        #: Names that may overlap with the beginning of another one.
        self._open = {
            name for name in specials if any(name[n:] in prefixes for n in range(1, len(name)))
        }

    def split(self, text: str) -> Iterator[TextPart]:
        """Yield the parts of a text, in order."""
        start = n_specials = 0
        follows_text = False
        for place, n_found, in_text in self._places(text):
            n_specials += n_found
            is_due = n_specials >= MAX_SPECIALS or place - start >= MAX_CHARS
            if is_due and place > start and (in_text or self._is_safe(text, place)):
                yield TextPart(text[start:place], follows_text)
                start, n_specials, follows_text = place, 0, in_text
        if start < len(text):
            yield TextPart(text[start:], follows_text)

    def _places(self, text: str) -> Iterator[tuple[int, int, bool]]:
        """Yield where a text may be cut, the special tokens passed, and if that is within text."""
        end = 0
        while (found := self._pattern.search(text, end)) is not None:
            start, stop = found.span()
            for place in self._places_in_text(text, end, start):
                yield place, 0, True
            longest = found[0]
            if found[0] in self._open:
                stop, longest = self._row(text, start, stop)
            if stop == found.end():
                yield start, 0, False
                yield stop, 1, False
            elif longest and not self._strips_in(text[start:stop]):
                place = text.find(longest, start, stop)
                while place >= 0:
                    yield place, 1, False
                    place = text.find(longest, place + len(longest), stop)
            end = stop
        for place in self._places_in_text(text, end, len(text)):
            yield place, 0, True

    def _row(self, text: str, start: int, stop: int) -> tuple[int, str]:
        """Follow special tokens that overlap.

        Returns where the last one ends, and the longest one; this is empty if there are several.
        """
        longest = {text[start:stop]}
        place = start
        while (place := place + 1) < stop:
            if (found := self._pattern.match(text, place)) is not None:
                stop = max(stop, found.end())
                size = len(next(iter(longest)))
                if len(found[0]) > size:
                    longest = {found[0]}
                elif len(found[0]) == size:
                    longest.add(found[0])
        return stop, longest.pop() if len(longest) == 1 else ""

    def _places_in_text(self, text: str, start: int, stop: int) -> Iterator[int]:
        """Yield some places where text without special tokens can be cut."""
        if self._only_first is None or stop - start < 2:
            return
        if self._strips_right and start > 0:
            start += len(text[start:stop]) - len(text[start:stop].lstrip(_BLANKS))
        if self._strips_left and stop < len(text):
            stop -= len(text[start:stop]) - len(text[start:stop].rstrip(_BLANKS))
        while (found := self._only_first.search(text, start + 1, stop)) is not None:
            yield found.start()
            start = found.start() + MAX_CHARS // 4

    def _strips_in(self, row: str) -> bool:
        return (self._strips_left or self._strips_right) and not set(_BLANKS).isdisjoint(row)

    def _is_safe(self, text: str, place: int) -> bool:
        """Return True if no special token takes away blanks on both sides of a place."""
        return not (
            (self._strips_left and place > 0 and text[place - 1] in _BLANKS)
            or (self._strips_right and place < len(text) and text[place] in _BLANKS)
        )


def _longest_of(names: Collection[str]) -> re.Pattern[str]:
    """Make a pattern that matches the longest of the names that a text has at a place."""
    root: dict[str, Any] = {}
    for name in names:
        node = root
        for letter in name:
            node = node.setdefault(letter, {})
        node[""] = {}
    return re.compile(_alternatives(root) if root else "(?!)")


def _alternatives(node: dict[str, Any]) -> str:
    """Write what may follow in a tree of letters; an empty one ends a name."""
    choices = []
    for letter, after in node.items():
        if not letter:
            continue
        letters = [letter]
        while len(after) == 1 and "" not in after:
            [(letter, after)] = after.items()
            letters.append(letter)
        choices.append(re.escape("".join(letters)) + _alternatives(after))
    if not choices:
        return ""
    return f"(?:{'|'.join(choices)})" + "?" * ("" in node)


_SENTENCE_PIECE = 1
_BPE = 2
_WORD_PIECE = 3
_UNIGRAM = 4
#: llama.cpp's attributes of a token.
_UNKNOWN, _NORMAL, _CONTROL, _USER_DEFINED, _BYTE, _LSTRIP, _RSTRIP = 1, 4, 8, 16, 32, 128, 256
_MAX_SPECIALS = 100_000
_SLICE = 2**16
_MOST = 64  # bytes of a name that are read at once
_MAX_TEXT = 2**31 - 64  # bytes; lengths are 32-bit in C

# For these values of ``tokenizer.ggml.pre``, llama.cpp splits text into words with its own code.
# For all others it uses std::regex, which recurses for each character, so that a long word overruns
# the stack of the thread.
# fmt: off
_OWN_SPLITTERS = frozenset(
    {
        "a.x-4.0", "chatglm-bpe", "codeshell", "command-r", "dbrx", "deepseek-r1-qwen", "exaone",
        "exaone4", "f2llmv2", "falcon-h1", "falcon3", "gemma4", "gigachat", "glm4", "glm5",
        "gpt-2", "granite-docling", "granite-embed-multi-311m", "grok-2", "hunyuan", "jais",
        "jina-de", "jina-es", "jina-v1-en", "jina-v2-code", "jina-v2-de", "jina-v2-es",
        "jina-v5-nano", "kimi-k2", "kormo", "laguna", "lfm2", "llama-bpe", "llama-v3", "llama3",
        "megrez", "mellum", "mellum2", "midm-2.0", "minerva-7b", "modern-bert", "mpt", "olmo",
        "phi-2", "pixtral", "qwen2", "qwen35", "refact", "roberta-bpe", "sarvam-moe", "smaug-bpe",
        "smollm", "solar-open", "stablelm2", "starcoder", "trillion",
    }
)
# fmt: on


class LlamaVocab:
    """The vocabulary of a model. It belongs to its `Model`, which closes it.

    All methods may be called from any thread. Closing waits for running calls; a later one raises
    `ServerClosingError`.
    """

    def __init__(self, handle: Any, metadata: Mapping[str, str]) -> None:
        self.handle: Any = handle
        self._shared = SharedHandle(handle)
        self._type: int = lib.llama_vocab_type(handle)
        self.n_tokens: int = lib.llama_vocab_n_tokens(handle)
        self.bos: TokenId = lib.llama_vocab_bos(handle)
        self.eos: TokenId = lib.llama_vocab_eos(handle)
        self.eot: TokenId = lib.llama_vocab_eot(handle)
        self.fim = FimTokens(
            prefix=lib.llama_vocab_fim_pre(handle),
            suffix=lib.llama_vocab_fim_suf(handle),
            middle=lib.llama_vocab_fim_mid(handle),
            repository=lib.llama_vocab_fim_rep(handle),
            file=lib.llama_vocab_fim_sep(handle),
        )
        self._check_specials()
        #: The bytes each token adds to the output; empty for control tokens.
        self.pieces = _TokenTexts(self._shared, self.n_tokens, special=False)
        #: The same for text, and the names of control tokens.
        self.names = _TokenTexts(self._shared, self.n_tokens, special=True)
        #: Requests want candidates, whose bytes may be read after the model is closed.
        self.is_read_later = False
        self._kinds: NDArray[np.uint16] = np.empty(self.n_tokens, np.uint16)
        for start in range(0, self.n_tokens, _SLICE):  # the GIL is free for others in between
            part = range(start, min(start + _SLICE, self.n_tokens))
            kinds = map(short.llama_vocab_get_attr, repeat(handle), part)
            self._kinds[part.start : part.stop] = np.fromiter(kinds, np.uint16, len(part))
        self.end_of_generation: frozenset[TokenId] = frozenset(
            token for token in self._may_end(metadata) if short.llama_vocab_is_eog(handle, token)
        )
        #: Tokens that must never be chosen, according to the model file.
        self.suppressed: tuple[TokenId, ...] = self._suppressed()
        self._check_bytes()
        #: The tokens that a text gets before it and after it, with `add_special`.
        self.added = self._find_added()
        self._n_prefix = self._find_prefix()
        self._too_long = _word_limit(self._type, metadata)

    @cached_property
    def control(self) -> tuple[TokenId, ...]:
        """The tokens whose names are not text of the output."""
        return tuple(token for token in self._of_kind(_CONTROL | _UNKNOWN) if self.names[token])

    @cached_property
    def unknown(self) -> frozenset[TokenId]:
        """The tokens that stand for text that the others cannot write."""
        return frozenset(self._of_kind(_UNKNOWN))

    @cached_property
    def max_token_bytes(self) -> int:
        """The length of the longest name: no token stands for more bytes of a text."""
        to_piece = short.llama_token_to_piece
        with self.in_use() as handle:
            sizes = (to_piece(handle, token, None, 0, 0, True) for token in range(self.n_tokens))
            return -min(sizes, default=0)  # of a name without room for it, it is negative

    def tokenize(
        self,
        text: str,
        *,
        add_special: bool = False,
        parse_special: bool = True,
        is_fragment: bool = False,
        check: Callable[[int], object] = lambda _n: None,
    ) -> tuple[TokenId, ...]:
        """Turn text into token ids. NUL characters are treated like any others.

        The time is linear in the length of any text: 0.2 to 10 MB a second. Long text is cut into
        parts where that does not change the tokens, for example at special tokens.

        Args:
            text: Unicode text, at most 2 GiB; half of a surrogate pair is not.
            add_special: add BOS and EOS if the model uses them.
            parse_special: read names of control tokens in the text as those tokens.
            is_fragment: the text follows other text, so it does not get the space that some
                vocabularies put before a text. Not together with `add_special`.
            check: called between two parts, in this thread, with the number of tokens so far. What
                it raises ends the work.

        Raises:
            InvalidRequestError: the text is not Unicode, too long, or holds a word so long that
                llama.cpp's tokenizer for this model cannot take it.
            ServerClosingError: the vocabulary is closed.
        """
        if is_fragment and self._n_prefix > 0:
            return self._tokenize_fragment(text, parse_special, check)
        data = _encode(text)
        if self._too_long is not None and (match := self._too_long.search(text)):
            raise InvalidRequestError(
                f"The text has {len(match[0])} or more characters in a row, from character "
                f"{match.start()} on, that are all blanks or without a blank: "
                "more than the tokenizer of this model can take."
            )
        parts = self._parts[parse_special] if len(text) > CUT_FROM else None
        if parts is None:
            with self.in_use() as handle:
                return tuple(_tokenize(handle, data, add_special, parse_special))
        del data
        before, after = self.added if add_special else ((), ())
        tokens = list(before)
        for part in parts.split(text):
            check(len(tokens))
            with self.in_use() as handle:
                found = _tokenize(handle, part.text.encode(), False, parse_special)
                tokens.extend(found[self._n_prefix :] if part.follows_text else found)
        return (*tokens, *after)

    def _tokenize_fragment(
        self, text: str, parse_special: bool, check: Callable[[int], object]
    ) -> tuple[TokenId, ...]:
        """Tokenize text without the spaces that SentencePiece puts before it.

        There is one at the beginning, which a NUL character keeps off the text, and one after each
        special token.
        """
        marked = self.tokenize("\0" + text, parse_special=parse_special, check=check)
        tokens = marked[self._n_prefix + 1 :]
        data, place, found = text.encode(), 0, list[TokenId]()
        for token in tokens:
            name = self.names[token]
            if name.startswith(b" ") and not data.startswith(name, place):
                name = name[1:]
                rest = self.tokenize("\0" + name.decode(errors="replace"), parse_special=False)
                found += rest[self._n_prefix + 1 :]
            else:
                found.append(token)
            if not data.startswith(name, place):
                return tokens  # a special token took blanks away
            place += len(name)
        return tuple(found)

    def detokenize(self, tokens: Sequence[TokenId]) -> bytes:
        """Join the names of tokens.

        Raises:
            InvalidRequestError: something in `tokens` is not the id of a token.
        """
        self.check(tokens, param="tokens")
        return b"".join(map(self.names.__getitem__, tokens))

    def check(self, tokens: Sequence[TokenId], *, param: str) -> None:
        """Check that these are token ids.

        Raises:
            InvalidRequestError: one is not; the error names `param`.
        """
        count = self.n_tokens
        for token in tokens:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < count:
                raise InvalidRequestError.at(
                    param, f"holds {token!r:.40}; token ids are integers from 0 to {count - 1}."
                )

    def name_of(self, token: TokenId) -> str:
        """Return a token as text, or the name of a control token; empty if it does not exist."""
        return self.names[token].decode(errors="replace") if token >= 0 else ""

    def close(self) -> None:
        """Wait for running calls, and refuse later ones. Closing twice is fine."""
        if self.is_read_later and self.handle is not None:
            self.pieces.read_all()
            self.names.read_all()
        self.handle = None
        self._shared.close()

    def in_use(self) -> AbstractContextManager[Any]:
        """Keep the vocabulary open while a thread uses it in C."""
        return self._shared.in_use()

    @cached_property
    def _parts(self) -> tuple[TextParts | None, TextParts | None]:
        """Cutters of text: without and with control tokens; None if it must not be cut."""
        with self.in_use() as handle:
            first = self._only_first(handle) if self._n_prefix >= 0 else None
        users, others = self._of_kind(_USER_DEFINED), self._of_kind(_CONTROL | _UNKNOWN)
        without = sorted(set(users).difference(others))
        return self._text_parts(without, first), self._text_parts([*without, *others], first)

    def _text_parts(
        self, specials: Sequence[TokenId], first: re.Pattern[str] | None
    ) -> TextParts | None:
        if not _SENTENCE_PIECE <= self._type <= _UNIGRAM or len(specials) > _MAX_SPECIALS:
            return None
        try:
            return TextParts(
                {self.names[token].decode() for token in specials},
                only_first=first,
                strips_left=any(self._kinds[token] & _LSTRIP for token in specials),
                strips_right=any(self._kinds[token] & _RSTRIP for token in specials),
            )
        except (UnicodeDecodeError, RecursionError):  # no vocabulary that makes sense
            return None

    def _only_first(self, handle: Any) -> re.Pattern[str] | None:
        """Find the characters that no token has after its first."""
        later = set(" \u25810123456789ABCDEFx>")  # of spaces and of the names of bytes
        for token, name in enumerate(self.names):
            data = name or lib.llama_vocab_get_text(handle, token) or b""
            if len(data) > 1:
                later.update(data.decode(errors="ignore")[1:])
        pattern = re.compile(f"[^{''.join(map(re.escape, sorted(later)))}]")
        return pattern if pattern.match("\0") else None

    def _check_specials(self) -> None:
        """Refuse missing tokens that llama.cpp would add: it aborts the process then."""
        is_word_piece = self._type == _WORD_PIECE
        sep = lib.llama_vocab_sep(self.handle)
        for name, is_added, token in (
            ("BOS", lib.llama_vocab_get_add_bos(self.handle) or is_word_piece, self.bos),
            ("EOS", lib.llama_vocab_get_add_eos(self.handle) and not is_word_piece, self.eos),
            ("SEP", is_word_piece, sep),
        ):
            if is_added and not 0 <= token < self.n_tokens:
                raise ModelLoadError(f"The vocabulary adds a {name} token to texts, but has none.")

    def _of_kind(self, kinds: int) -> list[TokenId]:
        """Find the tokens with one of these attributes."""
        found: list[TokenId] = np.flatnonzero(self._kinds & kinds).tolist()
        return found

    def _may_end(self, metadata: Mapping[str, str]) -> set[TokenId]:
        """Find the tokens that may end the output: none that is plain text, unless it is named."""
        named = (value for key, value in metadata.items() if key.endswith("_token_id"))
        found = {whole_number(value) for value in named}
        found.update((self.bos, self.eos, self.eot, *attrs.astuple(self.fim)))
        found.update(np.flatnonzero(self._kinds != _NORMAL).tolist())
        return {token for token in found if token is not None and 0 <= token < self.n_tokens}

    def _check_bytes(self) -> None:
        """Refuse SentencePiece without a token for each byte: llama.cpp aborts at such text."""
        if self._type != _SENTENCE_PIECE:
            return
        found = {self.names[token] for token in self._of_kind(_BYTE)}
        in_utf8 = [*range(0xC0), *range(0xC2, 0xF5)]
        missing = [byte for byte in in_utf8 if bytes([byte]) not in found]
        names = frozenset(self.names) if missing else frozenset()
        for byte in missing:
            if not {bytes([byte]), b"<0x%02X>" % byte} & names:
                raise ModelLoadError(f"The vocabulary has no token for the byte 0x{byte:02X}.")

    def _find_added(self) -> tuple[tuple[TokenId, ...], tuple[TokenId, ...]]:
        added = tuple(_tokenize(self.handle, b"", True, False))
        n_before = int(lib.llama_vocab_get_add_bos(self.handle) or self._type == _WORD_PIECE)
        return added[:n_before], added[n_before:]

    def _find_prefix(self) -> int:
        """Return the number of tokens that SentencePiece puts before any text; -1: unknown."""
        if self._type != _SENTENCE_PIECE:
            return -1
        return {1: 0, 2: 1}.get(len(_tokenize(self.handle, b"\0", False, False)), -1)

    def _suppressed(self) -> tuple[TokenId, ...]:
        count = ctypes.c_int32(0)
        tokens = lib.llama_vocab_get_suppress_tokens(self.handle, ctypes.byref(count))
        return tuple(t for t in tokens[: count.value] if 0 <= t < self.n_tokens) if tokens else ()


class _TokenTexts(Sequence[bytes]):
    """The bytes of each token, read when they are first needed.

    A large vocabulary has a quarter of a million tokens; most outputs need some hundreds.
    """

    def __init__(self, vocab: SharedHandle, n_tokens: int, *, special: bool) -> None:
        self._vocab = vocab
        self._n_tokens = n_tokens
        self._special = special
        self._known: dict[TokenId, bytes] = {}

    def __len__(self) -> int:
        return self._n_tokens

    def __getitem__(self, token: Any) -> Any:
        if (known := self._known.get(token)) is None:
            known = self._known[token] = self._read([range(self._n_tokens)[token]])[0]
        return known

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._read(range(self._n_tokens)))

    def read_all(self) -> None:
        """Read what is still missing: the model is about to be closed."""
        missing = [token for token in range(self._n_tokens) if token not in self._known]
        self._known.update(zip(missing, self._read(missing), strict=True))

    def _read(self, tokens: Sequence[TokenId]) -> list[bytes]:
        to_piece, special = short.llama_token_to_piece, self._special
        buffer = ctypes.create_string_buffer(_MOST)
        view = memoryview(buffer).cast("B")
        found = []
        with self._vocab.in_use() as handle:
            for token in tokens:
                size = to_piece(handle, token, buffer, _MOST, 0, special)
                if size < 0:  # does not fit
                    large = ctypes.create_string_buffer(-size)
                    to_piece(handle, token, large, -size, 0, special)
                    found.append(large.raw)
                else:
                    found.append(bytes(view[:size]))
        return found


def _encode(text: str) -> bytes:
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"The text has half of a surrogate pair at character {error.start}, "
            "which is not Unicode."
        ) from error
    if len(data) > _MAX_TEXT:
        raise InvalidRequestError(f"The text has {len(data)} bytes, more than {_MAX_TEXT}.")
    return data


def _tokenize(handle: Any, data: bytes, special: bool, parse: bool) -> list[TokenId]:
    room = len(data) + 16  # enough, except where a normalizer makes text longer
    while True:
        tokens = np.empty(room, dtype=np.int32)
        target = tokens.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        count = lib.llama_tokenize(handle, data, len(data), target, room, special, parse)
        if count >= 0:
            found: list[TokenId] = []
            for start in range(0, count, _SLICE):  # the GIL is free for others in between
                found += tokens[start : min(start + _SLICE, count)].tolist()
            return found
        if count == -(2**31):
            raise InvalidRequestError("The text has more than 2147483647 tokens.")
        room = -count


def _word_limit(vocab_type: int, metadata: Mapping[str, str]) -> re.Pattern[str] | None:
    """Return a pattern of words that overrun the stack; None if the tokenizer does not recurse.

    A character takes 250 to 350 bytes of stack (measured with GCC's std::regex). One match can span
    two words, and the limit leaves room for both.
    """
    pre = metadata.get("tokenizer.ggml.pre", "")
    if vocab_type != _BPE or pre in _OWN_SPLITTERS or sys.platform == "darwin":
        return None
    limit = _stack_size() // 1024
    # Both classes are at least as wide as C++'s, so that no character ends a run too early.
    return re.compile(rf"(?<![^ \t\n\r\f\v])[^ \t\n\r\f\v]{{{limit}}}|(?<!\s)\s{{{limit}}}")


def _stack_size() -> int:
    """Return the bytes of stack that a new thread gets."""
    try:
        import resource
    except ImportError:  # Windows
        return 2**20
    soft, _hard = resource.getrlimit(resource.RLIMIT_STACK)
    unlimited = soft in (resource.RLIM_INFINITY, -1)
    return 2 * 2**20 if unlimited else min(soft, 8 * 2**20)  # glibc: 2 MiB if there is no limit
