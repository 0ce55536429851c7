"""The demo pipeline's tokenizers (fitted on the prompts) and its frozen text encoders."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Sequence

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)

_WIDTH = 32
_WORD_END = "</w>"  # CLIP's mark
_SPACE = "▁"  # T5's mark


def make_clip_tokenizer(prompts: Sequence[str], merges: int = 200) -> CLIPTokenizer:
    """A byte-level BPE tokenizer in CLIP's form, fitted on prompts.

    Args:
        prompts: Texts to fit on.
        merges: Most merges to learn.

    Returns:
        The tokenizer; any byte can be encoded, in the middle or at the end of a word.
    """
    form = CLIPTokenizer().backend_tokenizer
    fitted = Tokenizer(models.BPE(end_of_word_suffix=_WORD_END))
    fitted.normalizer, fitted.pre_tokenizer = form.normalizer, form.pre_tokenizer
    # The trainer only knows bytes it saw, so take its merges and write the vocabulary out.
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    room = len(letters) * 2 + merges
    trainer = trainers.BpeTrainer(
        vocab_size=room, initial_alphabet=letters, end_of_word_suffix=_WORD_END, show_progress=False
    )
    fitted.train_from_iterator(sorted(prompts), trainer)
    pairs = [tuple(pair) for pair in json.loads(fitted.to_str())["model"]["merges"][:merges]]
    tokens = letters + [letter + _WORD_END for letter in letters]
    tokens += ["".join(pair) for pair in pairs]
    tokens += ["<|startoftext|>", "<|endoftext|>"]
    vocab = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    return CLIPTokenizer(vocab=vocab, merges=pairs, model_max_length=77)


def make_t5_tokenizer(prompts: Sequence[str]) -> T5TokenizerFast:
    """A Unigram tokenizer in T5's form, fitted on prompts; upper and lower case differ.

    Its pieces are the prompts' words, scored by how often they occur, and single characters.
    (The `tokenizers` trainer learns next to no whole words from so few distinct ones.)

    Args:
        prompts: Texts to fit on.

    Returns:
        The tokenizer, without sentinel tokens.
    """
    words = Counter(word for text in prompts for word in re.findall(r"[\w-]+", text))
    total = sum(words.values())
    pieces = {_SPACE + word: math.log(count / total) for word, count in sorted(words.items())}
    rare = min(pieces.values()) - 2
    letters = [_SPACE] + [chr(code) for code in range(33, 127)]
    pieces = dict.fromkeys(letters, rare) | pieces
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    return T5TokenizerFast(vocab=[*special, *pieces.items()], extra_ids=0, model_max_length=512)


def make_clip_encoder(tokenizer: CLIPTokenizer) -> CLIPTextModel:
    """A frozen CLIP text encoder with random weights: pooled output (batch, 32)."""
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=_WIDTH,
        intermediate_size=2 * _WIDTH,
        projection_dim=_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=tokenizer.model_max_length,
        bos_token_id=tokenizer.bos_token_id,
        # The pooled output is read at this token: with another id all prompts look the same.
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return CLIPTextModel(config).requires_grad_(False).eval()


def make_t5_encoder(tokenizer: T5TokenizerFast) -> T5EncoderModel:
    """A frozen T5 encoder with random weights: output (batch, tokens, 32)."""
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=_WIDTH,
        d_kv=_WIDTH // 4,
        d_ff=2 * _WIDTH,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.pad_token_id,
    )
    return T5EncoderModel(config).requires_grad_(False).eval()


@torch.no_grad()
def pooled_embeddings(
    tokenizer: CLIPTokenizer, encoder: CLIPTextModel, prompts: Sequence[str]
) -> torch.Tensor:
    """What FluxPipeline feeds as `pooled_projections`: (len(prompts), 32)."""
    ids = tokenizer(
        list(prompts),
        padding="max_length",
        max_length=tokenizer.model_max_length,
        truncation=True,
        return_tensors="pt",
    ).input_ids
    return torch.cat([encoder(part).pooler_output for part in ids.split(256)])


@torch.no_grad()
def token_embeddings(
    tokenizer: T5TokenizerFast, encoder: T5EncoderModel, prompts: Sequence[str], length: int
) -> torch.Tensor:
    """What FluxPipeline feeds as `encoder_hidden_states`: (len(prompts), length, 32)."""
    ids = tokenizer(
        list(prompts),
        padding="max_length",
        max_length=length,
        truncation=True,
        return_tensors="pt",
    ).input_ids
    return torch.cat([encoder(part)[0] for part in ids.split(256)])
