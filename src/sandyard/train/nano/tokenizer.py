"""A byte-level BPE tokenizer, trained locally on the nano policy's own text in under a second.

Byte-level: any text round-trips. Digits stand alone, so that a number is copied digit by digit and
an unseen number is no unseen token. The fixed frame of each tool call is one token: a rollout costs
what its code costs.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from sandyard.train.nano.template import CALL_CLOSE, CALL_OPEN, CHAT_TEMPLATE, IM_END, IM_START

VOCABULARY = 640
PAD = "<|pad|>"
SPECIAL_TOKENS = (PAD, IM_START, IM_END)
# An escaped newline with its indentation; a word with the space before it; one digit; a backslash;
# a run of punctuation; white space.
_PIECES = r"\\n *| ?\p{L}+|\p{N}|\\| ?[^\s\p{L}\p{N}\\]+|\s+"


def call_frame(tool: str, argument: str = "code") -> str:
    """The text of a tool call between its tag and its one string argument."""
    return f'{{"name": "{tool}", "arguments": {{"{argument}": "'


def build_tokenizer(corpus: Iterable[str], tools: Iterable[str], fixed: Iterable[str] = ()) -> PreTrainedTokenizerFast:
    """Train on `corpus`; `tools` are the names whose call frames become tokens, `fixed` further texts that
    do. Deterministic."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(_PIECES), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    frames = [CALL_OPEN, CALL_CLOSE, *(call_frame(tool) for tool in tools), '"}}', *fixed]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(frames),
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in frames])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=IM_END,
        pad_token=PAD,
        additional_special_tokens=[IM_START],
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
