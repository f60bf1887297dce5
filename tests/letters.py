"""Tokenizer of 96 short pieces for the tiny random models, to test stop strings."""

from __future__ import annotations

from itertools import product

from architectures import VOCABULARY

SPECIAL = ["<pad>", "<s>", "</s>"]


def letters():
    """Return a fast tokenizer with a vocabulary of 96; ids 0, 1, 2 are pad, BOS and EOS."""
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
