"""Build `tokenizer.json` and `tokenizer_config.json` from the vocabulary of a GGUF file.

A GGUF file names the rules by which text is split before merges (`tokenizer.ggml.pre`) but does not hold them; they are
rebuilt here as the model's authors published them. An unknown name is refused, since a wrong split gives wrong tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import CorruptWeights, UnsupportedModel
from penstock.model.sources.gguf_config import Metadata

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_MODERN = (  # Llama 3 and Qwen 2 differ only in how many digits stay together
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class _Split:
    """How a family splits text: regular expressions applied one after the other, and related options."""

    patterns: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False


_DIGITS_THEN_GPT2 = _Split((r"\p{N}", _GPT2))
_LLAMA3 = _Split((_MODERN % "{1,3}",), ignore_merges=True, adds_bos=True)
_SPLITS = {
    "smollm": _DIGITS_THEN_GPT2,
    "starcoder": _DIGITS_THEN_GPT2,
    "refact": _DIGITS_THEN_GPT2,
    "gpt-2": _Split((_GPT2,)),
    "default": _Split((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "qwen2": _Split((_MODERN % "",), nfc=True),
    "deepseek-r1-qwen": _Split((_MODERN % "",)),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "tekken": _Split((_TEKKEN,), ignore_merges=True, adds_bos=True),
}


def build_tokenizer(path: Path, meta: Metadata) -> str:
    """Build the content of `tokenizer.json`."""
    kind = meta.text("tokenizer.ggml.model")
    builders: dict[str, Callable[[Path, Metadata], Tokenizer]] = {"gpt2": _byte_level, "llama": _sentencepiece}
    if kind not in builders:
        raise UnsupportedModel(f"{path} has the unsupported tokenizer '{kind}'.", hint=f"Supported: {', '.join(builders)}.")
    tokenizer = builders[kind](path, meta)
    tokenizer.add_tokens(_added_tokens(meta))
    tokenizer.post_processor = _post_processor(meta)
    return str(tokenizer.to_str(pretty=False))


def build_tokenizer_config(meta: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """Build the content of `tokenizer_config.json`."""
    tokens = meta.strings("tokenizer.ggml.tokens")
    named = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: meta.token_id(f"tokenizer.ggml.{key}_token_id") for name, key in named.items()}
    content: dict[str, Any] = {name: tokens[found] for name, found in ids.items() if found is not None}
    content |= {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": _adds_bos(meta),
        "add_eos_token": meta.flag("tokenizer.ggml.add_eos_token", False),
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
    }
    if meta.get("tokenizer.chat_template") is not None:
        content["chat_template"] = meta.text("tokenizer.chat_template")
    return content


def _byte_level(path: Path, meta: Metadata) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    split = _split_of(meta)
    merges = [_pair(merge, path) for merge in meta.strings("tokenizer.ggml.merges")]
    try:
        model = models.BPE(_vocabulary(meta), merges, ignore_merges=split.ignore_merges)
    except Exception as error:  # the library raises bare exceptions, such as for merges of unknown tokens
        raise CorruptWeights(f"{path}: its vocabulary and merges do not match ({error}).") from error
    tokenizer = Tokenizer(model)
    if split.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(split)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pair(merge: str, path: Path) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not space:
        raise CorruptWeights(f"{path}: '{merge}' is not a merge of two tokens.")
    return left, right


def _pre_tokenizer(split: _Split) -> PreTokenizer:
    from tokenizers import Regex, pre_tokenizers

    cuts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in split.patterns]
    return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _split_of(meta: Metadata) -> _Split:
    name = meta.text("tokenizer.ggml.pre", "default")
    if name not in _SPLITS:
        hint = f"Supported: {', '.join(_SPLITS)}."
        raise UnsupportedModel(f"The tokenizer splits text by the unsupported rules '{name}'.", hint=hint)
    return _SPLITS[name]


def _sentencepiece(path: Path, meta: Metadata) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocabulary = _vocabulary(meta)
    unknown = meta.token_id("tokenizer.ggml.unknown_token_id")
    model = models.BPE(
        vocabulary,
        _merges_from_scores(vocabulary, meta),
        unk_token=None if unknown is None else meta.strings("tokenizer.ggml.tokens")[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    spaces: list[Any] = [normalizers.Replace(" ", "▁")]
    decode: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if meta.flag("tokenizer.ggml.add_space_prefix", True):
        # As a normalizer and not as Metaspace: SentencePiece puts the space before every text between special tokens.
        spaces.insert(0, normalizers.Prepend("▁"))
        decode.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(spaces)
    tokenizer.decoder = decoders.Sequence(decode)
    return tokenizer


def _merges_from_scores(vocabulary: dict[str, int], meta: Metadata) -> list[tuple[str, str]]:
    """Derive merges: SentencePiece joins the pair with the best-scored result, so every split of a piece is a merge."""
    tokens, scores = meta.strings("tokenizer.ggml.tokens"), meta.numbers("tokenizer.ggml.scores")
    normal = {token for token, kind in zip(tokens, _token_types(meta), strict=True) if kind == _NORMAL}
    if len(scores) < len(tokens):
        raise CorruptWeights("The file's vocabulary has fewer scores than tokens.")
    found = [
        (
            -scores[vocabulary[piece]],
            vocabulary[piece],
            vocabulary[piece[:cut]],
            vocabulary[piece[cut:]],
            piece[:cut],
            piece[cut:],
        )
        for piece in normal
        for cut in range(1, len(piece))
        if piece[:cut] in normal and piece[cut:] in normal
    ]
    return [(left, right) for *_, left, right in sorted(found)]


def _vocabulary(meta: Metadata) -> dict[str, int]:
    vocabulary: dict[str, int] = {}
    for index, token in enumerate(meta.strings("tokenizer.ggml.tokens")):
        vocabulary.setdefault(token, index)
    return vocabulary


def _token_types(meta: Metadata) -> list[int]:
    count = len(meta.strings("tokenizer.ggml.tokens"))
    if not meta.get("tokenizer.ggml.token_type"):
        return [_NORMAL] * count
    types = [int(kind) for kind in meta.numbers("tokenizer.ggml.token_type")]
    if len(types) != count:
        raise CorruptWeights(f"The file's vocabulary has {count} tokens, but {len(types)} token types.")
    return types


def _added_tokens(meta: Metadata) -> list[AddedToken]:
    """List tokens that are matched in a text before it is split: control tokens and those added by the model's authors."""
    from tokenizers import AddedToken

    special = {_CONTROL, _UNKNOWN}
    return [
        AddedToken(token, special=kind in special, normalized=False)
        for token, kind in zip(meta.strings("tokenizer.ggml.tokens"), _token_types(meta), strict=True)
        if token and (kind in special or kind == _USER_DEFINED)
    ]


def _adds_bos(meta: Metadata) -> bool:
    default = meta.text("tokenizer.ggml.model") == "llama" or _split_of(meta).adds_bos
    return meta.flag("tokenizer.ggml.add_bos_token", default) and meta.token_id("tokenizer.ggml.bos_token_id") is not None


def _post_processor(meta: Metadata) -> Any:
    from tokenizers import processors

    tokens = meta.strings("tokenizer.ggml.tokens")
    bos, eos = (meta.token_id(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos"))
    before = [bos] if _adds_bos(meta) and bos is not None else []
    after = [eos] if meta.flag("tokenizer.ggml.add_eos_token", False) and eos is not None else []
    if not before and not after:
        return processors.ByteLevel(trim_offsets=True)

    def around(text: str, kind: int) -> list[str]:
        return [f"{tokens[i]}:{kind}" for i in before] + [f"{text}:{kind}"] + [f"{tokens[i]}:{kind}" for i in after]

    return processors.TemplateProcessing(
        single=around("$A", 0), pair=around("$A", 0) + around("$B", 1), special_tokens=[(tokens[i], i) for i in {*before, *after}]
    )
