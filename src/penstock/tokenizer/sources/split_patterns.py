r"""The rules by which byte-level vocabularies cut a text into words, by the names that GGUF files give them.

A rule is a list of patterns, in the order in which they are applied. Each cuts every piece that the ones
before it left: what the pattern matches is a piece, and so is what lies between two matches. The last pieces
are the words. No token reaches over the border of two words. The models' own tokenizers were published with
these patterns. `\p{L}` are letters, `\p{M}` marks, `\p{N}` numbers, `\p{P}` punctuation, `\p{S}` symbols.
"""

from __future__ import annotations

from dataclasses import dataclass

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_ASCII_MARKS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_HAN_AND_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_EAST_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{_ENDINGS}|{_WORD}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
QWEN2 = rf"{_ENDINGS}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
QWEN35 = (
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_NO_ENDINGS = rf"{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_MINICPM5 = rf"{_ENDINGS}|{_WORD}|\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_DEEPSEEK_V3 = (
    rf"{_ASCII_MARKS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_ENDINGS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_ENDINGS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
KIMI = (
    rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}&&[^\p{{Han}}]]*[{_LOWER}&&[^\p{{Han}}]]+{_ENDINGS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}&&[^\p{{Han}}]]+[{_LOWER}&&[^\p{{Han}}]]*{_ENDINGS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
_SEED = rf"{_ENDINGS}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
_EXAONE_MOE = (
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_LINES = r"[^\n]+|[\n]+"
# The letters with two cases, of the Unicode version that DeepSeek LLM was made with.
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d"
    "\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)
_DEEPSEEK_LLM = (
    "[\r\n]",
    rf"\s?[{_CASED}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _EAST_ASIAN,
    r"\p{N}+",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRule:
    """The rule by which one kind of vocabulary cuts a text into words.

    Attributes:
        patterns: each cuts what the ones before it left.
        whole_words: a word that is a token is that token, whatever merges would make of it.
        add_bos: a text begins with the beginning-of-sequence id, unless the file says otherwise.
        composed: text is brought into Unicode's form NFC first.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    add_bos: bool = False
    composed: bool = False


def _named(rule: SplitRule, names: str) -> dict[str, SplitRule]:
    return dict.fromkeys(names.split(), rule)


_BY_DIGIT = SplitRule(patterns=(r"\p{N}", GPT2))
_LLAMA3_RULE = SplitRule(patterns=(LLAMA3,), whole_words=True, add_bos=True)
_COHERE = r"\d{1,3}(?=(?:\d{3})*\b)"

SPLIT_RULES: dict[str, SplitRule] = {
    **_named(_LLAMA3_RULE, "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano"),
    **_named(SplitRule(patterns=(LLAMA3,)), "dbrx smaug-bpe glm4 chatglm-bpe"),
    **_named(SplitRule(patterns=(QWEN2,), composed=True), "qwen2"),
    **_named(
        SplitRule(patterns=(QWEN2,)),
        "deepseek-r1-qwen megrez stablelm2 hunyuan solar-open grok-2 kormo f2llmv2",
    ),
    **_named(SplitRule(patterns=(QWEN35,), composed=True), "qwen35"),
    **_named(SplitRule(patterns=(_NO_ENDINGS,)), "ufakzeka"),
    **_named(SplitRule(patterns=(_LINES, QWEN2)), "laguna"),
    **_named(SplitRule(patterns=(r"\p{N}{1,3}", _MINICPM5), whole_words=True), "minicpm5"),
    **_named(SplitRule(patterns=_DEEPSEEK_LLM), "deepseek-llm"),
    **_named(
        SplitRule(patterns=("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}")), "deepseek-coder"
    ),
    **_named(
        SplitRule(patterns=(r"\p{N}{1,3}", _HAN_AND_KANA, _DEEPSEEK_V3)),
        "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
    ),
    **_named(SplitRule(patterns=(r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]")), "falcon"),
    **_named(_BY_DIGIT, "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2"),
    **_named(
        SplitRule(patterns=(GPT2,)),
        "gpt-2 phi-2 mpt olmo jais trillion granite-docling gigachat jina-es jina-de jina-v2-es jina-v2-de "
        "a.x-4.0 mellum modern-bert exaone4",
    ),
    **_named(SplitRule(patterns=(_EXAONE_MOE,)), "exaone-moe"),
    **_named(SplitRule(patterns=(_TEKKEN,), whole_words=True, add_bos=True), "tekken"),
    **_named(SplitRule(patterns=(_GPT4O,)), "gpt-4o llama4 kanana2 talkie minimax-m2"),
    **_named(SplitRule(patterns=(_COHERE, _GPT4O)), "tiny_aya cohere2moe"),
    **_named(SplitRule(patterns=(KIMI,)), "kimi-k2"),
    **_named(SplitRule(patterns=(_BAILING,)), "bailingmoe bailingmoe2 llada-moe"),
    **_named(SplitRule(patterns=(_SEED,)), "seed-coder"),
    **_named(SplitRule(patterns=(_BLOOM,)), "bloom poro-chat gpt3-finnish"),
    **_named(SplitRule(patterns=(_BLOOM, r"\p{N}")), "viking"),
    **_named(SplitRule(patterns=(r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")), "default"),
}
