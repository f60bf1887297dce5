"""A tokenizer for the tiny random models: 96 short pieces, so that stop strings can be tried."""

from __future__ import annotations

from itertools import product

from architectures import VOCABULARY

SPECIAL = ["<pad>", "<s>", "</s>"]


def letters():
    """A fast tokenizer with a vocabulary of 96; ids 0, 1, 2 are padding, begin and end."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = [a + b for a, b in product("abcdefgh", "aeiou.,x n")] + list("abcdefgh.,x n")
    vocabulary = {piece: index for index, piece in enumerate([*SPECIAL, *pieces])}
    assert len(vocabulary) == VOCABULARY
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        padding_side="left",
    )
